"""State of modules beside parameters: buffers are in the shard as they are at each cut, and come back, whatever the
forward puts in their place; plain values that change are told, caches and a framework's own are not."""

import numpy as np
import pytest
import torch

from deadpool_plugin.errors import Unsupported
from deadpool_plugin.worker import codec
from deadpool_plugin.worker.module_state import Buffers, Values


class Means(torch.nn.Module):
    """One running mean that each forward replaces, one that it changes in place."""

    replaced: torch.Tensor
    changed: torch.Tensor
    mask: torch.Tensor
    temperature: torch.Tensor

    def __init__(self):
        super().__init__()
        self.register_buffer("replaced", torch.zeros(3))
        self.register_buffer("changed", torch.zeros(3))

    def forward(self, batch):
        self.replaced = 0.5 * self.replaced + batch
        self.changed.mul_(0.5).add_(batch)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_what_a_forward_replaces_is_in_every_cut_and_comes_back(mode):
    model = Means()
    buffers = Buffers(model.modules())
    shard, cuts, held = list(buffers.tensors), [], []
    for step in range(3):
        with mode():
            model(torch.full((3,), float(step + 1)))
        held.append(model.replaced)
        buffers.follow()
        cuts.append([tensor.clone() for tensor in shard])
    stays, values = model.changed, [tensor.clone() for tensor in held]
    assert all(torch.equal(*cut) and cut[0].any() for cut in cuts)
    model(torch.full((3,), 9.0))  # interrupted
    buffers.put_back()
    for tensor, kept in zip(shard, cuts[1], strict=True):  # as Layout.load does
        tensor.copy_(kept)
    assert torch.equal(model.replaced, cuts[1][0]) and torch.equal(model.changed, cuts[1][0])
    assert model.changed is stays and not model.replaced.is_inference()
    model(torch.full((3,), 3.0))
    buffers.follow()
    assert all(map(torch.equal, shard, cuts[2]))
    assert all(map(torch.equal, held, values)), "what the script holds is its own"


def test_one_that_several_modules_share_is_in_the_shard_once_and_stays_shared():
    modules = [Means(), Means()]
    modules[1].changed = modules[0].changed
    buffers = Buffers(modules)
    assert len(buffers.tensors) == 3
    for module in modules:
        module.changed = torch.ones(3) if module is modules[0] else modules[0].changed
    buffers.follow()
    buffers.put_back()
    buffers.tensors[1].fill_(7)
    assert modules[1].changed is modules[0].changed and modules[0].changed.tolist() == [7.0] * 3
    modules[1].changed = torch.ones(3)
    with pytest.raises(Unsupported, match="the buffer 'changed' of Means became None"):
        buffers.follow()


@pytest.mark.parametrize("other", [torch.zeros(4), torch.zeros(3, dtype=torch.float64), None])
def test_one_of_another_form_is_refused_by_name(other):
    model = Means()
    buffers = Buffers(model.modules())
    model.replaced = other
    with pytest.raises(Unsupported, match=r"the buffer 'replaced' of Means became .*expected torch.float32 \[3\]"):
        buffers.follow()


def test_one_that_is_made_in_training_is_refused_unless_it_is_a_cache():
    model = Means()
    model.register_buffer("later", None)
    model.register_buffer("cache", None, persistent=False)
    buffers = Buffers(model.modules())
    model.cache = torch.ones(2)
    buffers.follow()
    model.later = torch.ones(2)
    with pytest.raises(Unsupported, match="the buffer 'later' of Means had no value before the first forward"):
        buffers.follow()


def test_so_is_one_that_is_registered_in_training():
    model = Means()
    buffers = Buffers(model.modules())
    model.register_buffer("cache", torch.ones(2), persistent=False)
    buffers.follow()
    model.register_buffer("late", torch.ones(2))
    with pytest.raises(Unsupported, match="the buffer 'late' of Means had no value before the first forward"):
        buffers.follow()


def test_what_the_script_writes_between_calls_is_there_again_in_a_redo():
    """A mask that it prunes by, a count: a survivor went on with those of the cut, a newcomer with the new ones."""
    model = Means()
    model.register_buffer("mask", torch.ones(3))
    buffers = Buffers(model.modules())
    model(torch.ones(3))
    buffers.left()
    assert not buffers.entry(), "what a call changes its redo changes again"
    before = [tensor.clone() for tensor in buffers.tensors]
    model.mask[0] = 0.0
    model.replaced = model.replaced + 7.0
    entry, mask, replaced = buffers.entry(), model.mask.clone(), model.replaced.clone()
    buffers.put_back()
    for tensor, value in zip(buffers.tensors, before, strict=True):
        tensor.copy_(value)
    assert model.mask.tolist() == [1.0] * 3
    buffers.load_entry(entry)
    assert torch.equal(model.mask, mask) and torch.equal(model.replaced, replaced)
    buffers.left()
    assert not buffers.entry()


def test_communicating_one_that_is_replaced_is_refused():
    model = Means()
    buffers = Buffers(model.modules())
    model(torch.ones(3))
    assert buffers.hold(model.changed[1:]) and not buffers.hold(torch.ones(3))
    with pytest.raises(Unsupported, match="the buffer 'replaced' of Means, which the model's forward replaces"):
        buffers.hold(model.replaced)


def test_one_that_the_script_replaces_again_and_again_is_seen_each_time():
    """A new value may lie where the one before it lay."""
    model = Means()
    model.register_buffer("temperature", torch.ones(1))
    buffers = Buffers(model.modules())
    for _ in range(20):
        buffers.left()
        for _ in range(2):
            model.temperature = model.temperature * 0.5
        assert [value.tolist() for value in buffers.entry().values()] == [model.temperature.tolist()]


def test_what_is_put_back_within_inference_mode_can_be_trained_with():
    model = Means()
    buffers = Buffers(model.modules())
    model.changed = torch.ones(7)
    entry = buffers.entry()
    model.changed = torch.ones(2)
    with torch.inference_mode():
        buffers.load_entry(entry)
    assert model.changed.tolist() == [1.0] * 7 and not model.changed.is_inference()


def test_caches_are_nobodys_business_and_buffers_of_their_name_are():
    model = Means()
    model.register_buffer("cos_cached", torch.zeros(4), persistent=False)
    model.register_buffer("sin_cached", torch.zeros(4))
    buffers = Buffers(model.modules(), ("cos_cached", "sin_cached"))
    assert len(buffers.tensors) == 3
    model.register_buffer("cos_cached", torch.zeros(8, dtype=torch.float64), persistent=False)
    buffers.follow()
    model.register_buffer("sin_cached", torch.zeros(8))
    with pytest.raises(Unsupported, match="the buffer 'sin_cached' of Means became"):
        buffers.follow()


# ---- plain values


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
