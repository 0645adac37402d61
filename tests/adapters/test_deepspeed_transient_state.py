"""Work under way in a ZeRO optimizer is put back as it was; what it remembers of an earlier trace is forgotten."""

import collections
import functools

import pytest
import torch

pytest.importorskip("deepspeed")

from deepspeed.runtime.zero.partitioned_param_coordinator import PartitionedParameterCoordinator
from deepspeed.utils.nvtx import instrument_w_nvtx

from deadpool_plugin.adapters.deepspeed.state import TransientState, _clear_caches


def runtime_class(name, **attributes):
    return type(name, (), {"__module__": "deepspeed.runtime.made_up", **attributes})


def test_attributes_and_containers_are_put_back_in_place():
    inner, outer = runtime_class("Inner")(), runtime_class("Outer")()
    tensor = torch.ones(2)
    inner.flag, inner.seen = False, {3}
    outer.inner, outer.buckets, outer.queue = inner, {"a": [1, [2]]}, collections.deque([5])
    outer.tensor, outer.module = tensor, torch.nn.Linear(1, 1)
    buckets, nested = outer.buckets, outer.buckets["a"][1]
    before = TransientState(outer)
    inner.flag, outer.tensor, outer.inner = True, None, None
    inner.seen.add(4)
    nested.append(9)
    buckets["b"] = 7
    outer.queue.clear()
    outer.module.bias = None
    before.restore()
    assert outer.inner is inner and not inner.flag and inner.seen == {3}
    assert outer.buckets is buckets == {"a": [1, [2]]} and buckets["a"][1] is nested
    assert outer.queue == collections.deque([5]) and outer.tensor is tensor
    assert outer.module.bias is None  # the model's own


def test_what_was_found_out_once_and_kept_is_found_out_again():
    """A newcomer, which has no such answer, would otherwise issue a collective that the others do not."""
    optimizer, asked = runtime_class("Optimizer")(), []

    def has_experts():
        if getattr(optimizer, "_has_experts", None) is None:
            asked.append("all_reduce")
            optimizer._has_experts, optimizer._of_groups = False, {"experts": False}
        return optimizer._has_experts

    optimizer.known = None
    before = TransientState(optimizer)
    has_experts(), has_experts()
    optimizer.buffer = torch.ones(2)
    before.restore()
    has_experts()
    assert asked == ["all_reduce"] * 2 and optimizer.buffer is not None


def test_only_the_named_attributes_are_put_back():
    owner = runtime_class("Engine")()
    owner.buffers, owner.mine = {"inputs": []}, 1
    before = TransientState()
    before.note_attributes([owner], ["buffers", "absent"])
    owner.buffers["inputs"].append(3)
    owner.mine, owner.absent = 2, 4
    before.restore()
    assert owner.buffers == {"inputs": []} and (owner.mine, owner.absent) == (2, 4)


def test_caches_are_found_under_deepspeeds_decorators():
    calls = []

    class Coordinator:
        @instrument_w_nvtx
        @functools.cache  # noqa: B019 - as DeepSpeed has it
        def answer(self, number):
            calls.append(number)
            return number

    coordinator = Coordinator()
    coordinator.answer(1), coordinator.answer(1)
    _clear_caches(Coordinator)
    coordinator.answer(1)
    assert calls == [1, 1]


def test_the_coordinator_has_such_a_cache():
    """If it has none any more, `_clear_caches` may go."""
    found = []
    for method in vars(PartitionedParameterCoordinator).values():
        cells = getattr(method, "__closure__", None) or ()
        found += [cell.cell_contents for cell in cells if hasattr(cell.cell_contents, "cache_clear")]
    assert found
