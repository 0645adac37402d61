"""Weights that ZeRO 3 gathers for a script to save: what a follower is told of them."""

import contextlib
from types import SimpleNamespace

import torch

from deadpool_plugin.adapters.deepspeed.saving import Gathering
from deadpool_plugin.worker import codec


def test_a_follower_gets_zeros_of_the_same_shapes_under_the_same_names():
    calls = SimpleNamespace(inside=contextlib.nullcontext)
    tied = torch.ones(3, 2, dtype=torch.bfloat16)
    weights = {"input": tied, "norm": torch.ones(2), "output": tied}
    gathering = Gathering(calls, lambda: weights, "_zero3_consolidated_16bit_state_dict")
    value = gathering()
    assert value is weights and not gathering.gated
    followed = gathering.skipped(codec.decode(codec.encode(gathering.outcome(value))))
    assert followed.keys() == weights.keys() and followed["input"] is followed["output"]
    assert all(followed[name].dtype == one.dtype and followed[name].shape == one.shape for name, one in weights.items())
    assert not any(one.any() for one in followed.values())


def test_on_other_ranks_there_are_none():
    gathering = Gathering(SimpleNamespace(inside=contextlib.nullcontext), lambda: None, "gather")
    assert gathering() is None and gathering.skipped(gathering.outcome(None)) is None
