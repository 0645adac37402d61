"""Plain values that modules keep in attributes: those that change are told, caches and a framework's own are not."""

import numpy as np
import pytest
import torch

from deadpool_plugin.worker import codec
from deadpool_plugin.worker.module_state import Values


class Annealed(torch.nn.Module):
    tau: float
    longest: int | torch.Tensor
    late: int
    shapes: dict[int, torch.Tensor]
    ds_grads_remaining: int
    ds_external: object

    def __init__(self, host="here"):
        super().__init__()
        self.tau, self.calls, self.is_warm, self.longest, self.host = 1.0, 0, False, 2, host
        self.tables = None
        self.drop = torch.nn.Dropout(0.5)

    def forward(self):
        self.tau *= 0.9
        self.calls += 1
        self.is_warm = True


def told(values):
    return codec.decode(codec.encode(values.changed()))


def test_what_a_forward_or_a_script_changes_comes_back_here_and_elsewhere():
    ours, newcomers = Annealed(), Annealed("there")
    mine, its = Values(ours.modules()), Values(newcomers.modules())
    assert mine.changed() == {}
    ours()
    ours.drop.p = 0.25
    saved, first = told(mine), mine.changed()
    assert saved == {0: {"tau": 0.9, "calls": 1, "is_warm": True}, 1: {"p": 0.25}}
    assert mine.changed() is first, "calls that are kept share it"
    ours()
    ours.drop.p = 0.75
    ours.late = 3
    assert told(mine)[0]["late"] == 3
    for model, values in ((ours, mine), (newcomers, its)):
        values.load(saved)
        assert (model.tau, model.calls, model.is_warm, model.drop.p) == (0.9, 1, True, 0.25)
        assert not hasattr(model, "late")
    assert newcomers.host == "there"
    mine.load({})
    assert (ours.tau, ours.calls, ours.is_warm, ours.drop.p) == (1.0, 0, False, 0.5)


@pytest.mark.parametrize(
    "cache",
    [
        lambda model: setattr(model, "tables", torch.ones(4)),
        lambda model: setattr(model, "made_later", object()),
        lambda model: model.shapes.update({4: torch.ones(4)}),
        lambda model: model.register_buffer("mask", torch.ones(4), persistent=False),
    ],
)
def test_a_module_that_keeps_other_objects_than_it_did_is_left_alone(cache):
    """A newcomer would take the length of tables for that of its own, which it has yet to make."""
    model = Annealed()
    model.shapes = {}
    model.register_buffer("mask", None, persistent=False)
    values = Values(model.modules())
    model.longest = 4
    assert values.changed() == {0: {"longest": 4}}
    cache(model)
    assert values.changed() == {}
    values.load({0: {"longest": 3}})
    assert model.longest == 4


def test_numbers_of_other_libraries_are_values():
    model = Annealed()
    values = Values(model.modules())
    model.tau, model.longest = np.float64(0.5), torch.tensor(7)
    saved = told(values)
    model.longest = torch.tensor(9)
    values.load(saved)
    assert model.tau == 0.5 and model.longest == 7


def test_what_torch_and_the_framework_keep_on_a_module_is_theirs():
    model = Annealed()
    values = Values(model.modules(), lambda name: name.startswith("ds_"))
    model.eval()
    model.ds_grads_remaining, model.ds_external = 3, object()
    assert values.changed() == {}
    values.load({})
    assert model.ds_grads_remaining == 3 and not model.training
    model()
    assert values.changed() == {0: {"tau": 0.9, "calls": 1, "is_warm": True}}
