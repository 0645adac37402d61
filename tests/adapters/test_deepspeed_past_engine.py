"""A model called past its engine: a call with ZeRO 3, the script's own affair otherwise."""

import copy
import pickle
from types import SimpleNamespace

import pytest
import torch

from deadpool_plugin.adapters.deepspeed import zero3
from deadpool_plugin.adapters.deepspeed.calls import EngineCalls
from deadpool_plugin.errors import Unsupported


class Calls(EngineCalls):
    """Notes what becomes a call."""

    def __init__(self):
        super().__init__(self.note)
        self.made = []

    def note(self, call):
        self.made.append(call._inputs._given)
        return call()


def engine_of(stage):
    model = torch.nn.Sequential(torch.nn.Linear(2, 2))
    return SimpleNamespace(module=model, zero_optimization_stage=lambda: stage, global_steps=0)


def test_with_zero_3_the_model_is_called_as_the_engine_is():
    calls, engine, data = Calls(), engine_of(3), torch.ones(1, 2)
    hooked = []
    engine.module.register_forward_pre_hook(lambda *_: hooked.append(calls.busy))
    plain = engine.module(data)
    zero3.watch_model(calls, engine)
    zero3.watch_model(calls, engine)
    assert torch.equal(engine.module(data), plain) and torch.equal(engine.module(input=data), plain)
    assert calls.made == [((data,), {}), ((), {"input": data})] and hooked == [False, True, True]
    with calls.inside():  # the engine itself calls it
        engine.module(data)
    engine.module[0](data)
    assert len(calls.made) == 2


def test_a_copy_of_the_model_is_nobodys():
    calls, engine = Calls(), engine_of(3)
    zero3.watch_model(calls, engine)
    for other in (copy.deepcopy(engine.module), pickle.loads(pickle.dumps(engine.module))):
        other(torch.ones(1, 2))
    assert not calls.made


def test_a_compiled_model_is_watched_again():
    calls, engine = Calls(), engine_of(3)
    zero3.watch_model(calls, engine)
    engine.module._compiled_call_impl = lambda data: data + 1  # as Module.compile does
    zero3.watch_model(calls, engine)
    assert torch.equal(engine.module(torch.ones(1)), torch.full((1,), 2.0)) and len(calls.made) == 1


def test_with_other_stages_it_is_left_alone():
    calls, engine = Calls(), engine_of(2)
    zero3.watch_model(calls, engine)
    engine.module(torch.ones(1, 2))
    assert not calls.made


def test_parts_of_the_model_are_refused_in_training(monkeypatch):
    coordinators = pytest.importorskip("deepspeed.runtime.zero.partitioned_param_coordinator")
    coordinator, fetched = coordinators.PartitionedParameterCoordinator, []
    monkeypatch.setattr(coordinator, "fetch_sub_module", lambda self, module, forward: fetched.append(module))
    calls = Calls()
    zero3.refuse_parts(calls)
    one = coordinator.__new__(coordinator)
    one.fetch_sub_module("built", forward=True)
    calls.is_training = True
    with calls.inside():
        one.fetch_sub_module("called", forward=True)
    with pytest.raises(Unsupported, match=r"a part of the engine's model \(str\) .* with ZeRO 3"):
        one.fetch_sub_module("alone", forward=True)
    assert fetched == ["built", "called"]
