"""A function under `@deadpool_plugin.step`: plain without the plugin, one call of kind STEP with it."""

import contextlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.stand_in import fake

import deadpool_plugin
from deadpool_plugin.errors import Unsupported
from deadpool_plugin.worker import codec
from deadpool_plugin.worker.calls import CallKind
from deadpool_plugin.worker.context import Context, WholeStep
from deadpool_plugin.worker.copies import COPIED_BYTES_MAX
from deadpool_plugin.worker.resumable import Tapes


class FakeAdapter:
    def __init__(self, used=True):
        self.used, self.depth, self.shown = used, 0, None

    def is_used(self):
        return self.used

    @contextlib.contextmanager
    def inside_step(self):
        self.depth += 1
        yield
        self.depth -= 1

    @property
    def state(self):
        return self

    def visible(self):
        return {"lr": 0.5}

    def show(self, visible):
        self.shown = visible


def fake_adapter(used=True) -> Any:
    return FakeAdapter(used)


def context_of(*adapters, call=lambda step: None):
    context = Context(fake(), fake(), adapters, local_rank=0)
    context.mode = fake(call=call)
    return context


@deadpool_plugin.step
def train_step(batch, adapter=None, scale=1):
    """Doubles."""
    assert adapter is None or adapter.depth == 1
    return {"loss": batch.sum() * scale, "rest": (batch.tolist(), None)}


def test_without_the_plugin_the_function_is_called_as_it_is(monkeypatch):
    monkeypatch.setattr(Context, "installed", None)
    assert train_step(torch.ones(3), scale=2)["loss"] == 6
    assert train_step.__name__ == "train_step" and train_step.__doc__ == "Doubles."


def test_with_it_the_function_is_one_call_of_the_framework_that_is_used(monkeypatch):
    made, adapter = [], fake_adapter()

    def call(step):
        made.append(step)
        return step()

    context = context_of(fake_adapter(used=False), adapter, call=call)
    monkeypatch.setattr(Context, "installed", context)
    value = train_step(torch.ones(3), adapter, scale=4)
    assert value["loss"] == 12 and adapter.depth == 0
    (step,) = made
    assert (step.name, step.kind) == ("step train_step", CallKind.STEP) and context.adapter is adapter


def test_it_is_redone_with_the_arguments_it_had():
    seen = []
    small, large, own = torch.ones(2), torch.zeros(COPIED_BYTES_MAX), torch.nn.Parameter(torch.zeros(2))
    holder = SimpleNamespace(count=0)
    step = WholeStep(fake_adapter(), lambda *given: seen.append(given), ([small, large], own, holder), {})
    step()
    assert seen[0][0][0] is small
    small.zero_()
    with torch.no_grad():
        own.add_(1)
    step()
    (again, its_large), its_own, its_holder = seen[1]
    assert again.tolist() == [1, 1] and its_large is large and its_own is own and its_holder is holder
    step.check()
    large.add_(1)
    with pytest.raises(Unsupported, match="changed in place after step"):
        step.check()
    with pytest.raises(Unsupported, match="changed in place after step"):
        step()


def test_a_follower_is_told_the_value_and_what_the_script_can_see():
    adapter = fake_adapter()
    step = WholeStep(adapter, lambda: pytest.fail("a follower runs nothing"), (), {})
    value = {"loss": torch.tensor(2.5, requires_grad=True) * 2, "norms": [1.0, (torch.arange(3), None)]}
    told = codec.decode(codec.encode(step.outcome(value)))
    heard = step.skipped(told)
    assert heard["loss"].item() == 5 and not heard["loss"].requires_grad
    assert heard["norms"][0] == 1 and heard["norms"][1][0].tolist() == [0, 1, 2] and heard["norms"][1][1] is None
    assert adapter.shown == {"lr": 0.5}


def test_an_iterator_is_no_argument_unless_it_is_rewound(tmp_path):
    """A redo would go on with the next batch, unnoticed."""
    with pytest.raises(Unsupported, match=r"given a generator to read data from.*deadpool_plugin\.data\.resumable"):
        WholeStep(fake_adapter(), train_step, ({"data": (one for one in [1, 2])},), {})
    tapes = Tapes()
    with (tmp_path / "log").open("w") as log:
        WholeStep(fake_adapter(), train_step, ([1, 2], iter(tapes.wrap([1, 2])), log), {})


@pytest.mark.parametrize(
    ("value", "loss"),
    [
        (2.5, 2.5), (torch.tensor([2.5]), 2.5), ({"loss": 2.5, "other": 1}, 2.5), ((2.5, 7), 2.5), (None, None),
        (torch.ones(2), None), ({"other": 1}, None), ([], None), ("2.5", None),
    ],
)  # fmt: skip
def test_the_loss_is_found_in_what_it_returns(value, loss):
    assert WholeStep(fake_adapter(), train_step, (), {}).loss(value, lambda value: value) == loss


def test_with_nothing_to_train_or_a_graph_from_outside_it_is_refused():
    with pytest.raises(Unsupported, match="train_step, which is under @deadpool_plugin.step, was called with nothing"):
        context_of(fake_adapter(used=False)).step(train_step, (), {})
    with pytest.raises(Unsupported, match="begins outside"):
        WholeStep(fake_adapter(), train_step, (torch.ones(2, requires_grad=True) * 2,), {})
