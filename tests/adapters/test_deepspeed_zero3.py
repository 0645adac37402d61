"""Parameters that a script gathers itself with ZeRO 3: there again after a swap, and what a follower has of them."""

import contextlib
from typing import Any

import pytest
import torch
from support.stand_in import fake

pytest.importorskip("deepspeed")

from deepspeed.runtime.zero.partition_parameters import GatheredParameters, ZeroParamStatus, free_param

from deadpool_plugin.adapters.deepspeed import zero3
from deadpool_plugin.adapters.deepspeed.calls import EngineCalls
from deadpool_plugin.worker import codec

CALLS = fake(inside=contextlib.nullcontext)


class Context:
    """As DeepSpeed's, of one parameter, for one rank."""

    def __init__(self, part, src_rank=None):
        parameter: Any = torch.nn.Parameter(torch.empty(0))
        parameter.ds_tensor, parameter.ds_shape = part, part.shape
        parameter.ds_active_sub_modules, parameter.ds_status = set(), ZeroParamStatus.NOT_AVAILABLE
        self.params, self.src_rank, self.enabled = [parameter], src_rank, True

    def enter(self):
        self.params[0].data = self.params[0].ds_tensor.clone()
        self.params[0].ds_status = ZeroParamStatus.AVAILABLE

    def exit(self, *exc):
        if self.src_rank is not None:
            self.params[0].ds_tensor.copy_(self.params[0].data)
        free_param(self.params[0])


@torch.no_grad()
def test_what_the_script_has_is_there_again_after_a_swap_and_partitioned_as_it_was_in_every_redo():
    part = torch.arange(4.0)
    context = Context(part, src_rank=0)
    (parameter,) = context.params
    enter = zero3.Enter(CALLS, "enter", Context.enter, context)
    enter.outcome(enter())
    parameter.mul_(2)
    free_param(parameter)  # a swap inside the body
    enter()
    assert torch.equal(parameter, torch.arange(4.0) * 2)
    leave = zero3.Exit(CALLS, "exit", Context.exit, context, None, None, None)
    leave()
    part.copy_(torch.arange(4.0))  # what it left is not believed
    enter(), leave()
    leave.outcome(None)
    assert torch.equal(part, torch.arange(4.0) * 2) and parameter.numel() == 0 and not enter.held
    part.copy_(torch.arange(4.0))  # a swap in a call behind it
    enter(), leave()
    assert torch.equal(part, torch.arange(4.0) * 2)


@pytest.mark.parametrize("size", [3, codec.TENSOR_LIMIT_BYTES])
def test_a_follower_has_small_parameters_and_nothing_like_numbers_of_large_ones(size):
    live, follower = Context(torch.ones(size)), Context(torch.zeros(size))
    enter, skipped = (zero3.Enter(CALLS, "enter", Context.enter, one) for one in (live, follower))
    skipped.skipped(codec.decode(codec.encode(enter.outcome(enter()))))
    (parameter,) = follower.params
    assert parameter.shape == (size,) and parameter.ds_status is ZeroParamStatus.AVAILABLE
    assert parameter.sum().item() == 3 if size == 3 else parameter.isnan().all()
    zero3.Exit(CALLS, "exit", Context.exit, follower).skipped(None)
    assert parameter.numel() == 0 and parameter.ds_status is ZeroParamStatus.NOT_AVAILABLE


def test_only_what_a_script_gathers_in_training_is_a_call(monkeypatch):
    entered, handled = [], []
    for name in ("__enter__", "__exit__"):
        monkeypatch.setattr(GatheredParameters, name, lambda context, *exc: entered.append(context))
    calls = EngineCalls(lambda call: handled.append(call.name))
    zero3.install(calls)
    context = GatheredParameters([], enabled=False)
    with context:
        pass
    context.enabled, context.params, context.src_rank = True, [], None
    with context:
        calls.is_training = calls.busy = True
    with context:
        calls.busy = False
    with context:
        pass
    assert handled == ["GatheredParameters.__exit__", "GatheredParameters.__enter__", "GatheredParameters.__exit__"]
    assert len(entered) == 5
