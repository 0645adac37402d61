"""Tests of what only jobs of Megatron-DeepSpeed's kind have: random generators of the model's own, a batch size that is
told before every step, a `megatron.core` from before there were adapters for it."""

import sys
from types import ModuleType
from typing import Any, cast

import pytest
import torch
from support.stand_in import fake

pytest.importorskip("deepspeed")

from deadpool_plugin.adapters.deepspeed.adapter import DeepSpeedAdapter, refuse_methods
from deadpool_plugin.adapters.megatron.adapter import MegatronAdapter
from deadpool_plugin.errors import Unsupported
from deadpool_plugin.worker import codec
from deadpool_plugin.worker.adapter import capture_rng, restore_rng
from deadpool_plugin.worker.context import available


class Tracker:
    """As megatron.core.tensor_parallel.random.CudaRNGStatesTracker: named states, one of them in use for a while."""

    def __init__(self) -> None:
        self._states = {"model-parallel-rng": torch.Generator().manual_seed(5).get_state()}

    def get_states(self):
        return dict(self._states)

    def set_states(self, states):
        self._states = states

    def draw(self):
        generator = torch.Generator()
        generator.set_state(self._states["model-parallel-rng"])
        drawn = torch.rand(3, generator=generator)
        self._states["model-parallel-rng"] = generator.get_state()
        return drawn.tolist()


@pytest.mark.parametrize("name", ["megatron.core.tensor_parallel.random", "megatron.mpu.random"])
def test_random_generators_of_the_models_own_are_states_too(monkeypatch, name):
    tracker, module = Tracker(), cast(Any, ModuleType(name))
    module.get_cuda_rng_tracker = lambda: tracker
    monkeypatch.setitem(sys.modules, name, module)
    adapter = DeepSpeedAdapter()
    tracker.draw()
    saved = codec.decode(codec.encode(capture_rng(adapter)))
    expected = [tracker.draw(), tracker.draw()]
    restore_rng(adapter, saved)
    assert [tracker.draw(), tracker.draw()] == expected


def test_a_module_that_came_later_is_left_as_it_is(monkeypatch):
    adapter = DeepSpeedAdapter()
    monkeypatch.delitem(sys.modules, "megatron.mpu.random", raising=False)
    saved = capture_rng(adapter)
    tracker, module = Tracker(), cast(Any, ModuleType("megatron.mpu.random"))
    module.get_cuda_rng_tracker = lambda: tracker
    monkeypatch.setitem(sys.modules, "megatron.mpu.random", module)
    before = tracker.get_states()
    restore_rng(adapter, saved)
    assert tracker.get_states() == before


class Engine:
    def train_batch_size(self):
        return 16

    def set_train_batch_size(self, train_batch_size):
        return "set"

    def set_train_micro_batch_size(self, micro_batch_size):
        return "set"

    def _do_optimizer_sanity_check(self, basic_optimizer):
        return "torch"


def test_the_batch_size_may_be_told_again_and_not_changed():
    refuse_methods(Engine, lambda: True)
    engine = Engine()
    assert engine.set_train_batch_size(16) == engine.set_train_batch_size(train_batch_size=16) == "set"
    for change in (lambda: engine.set_train_batch_size(32), lambda: engine.set_train_micro_batch_size(16)):
        with pytest.raises(Unsupported, match="keep the batch size"):
            change()


def test_a_megatron_core_of_another_kind_is_none(monkeypatch):
    for name in [name for name in sys.modules if name.split(".")[0] == "megatron"]:
        monkeypatch.delitem(sys.modules, name)
    for name in ("megatron", "megatron.core", "megatron.core.parallel_state"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    adapters: list[Any] = [MegatronAdapter(), fake(framework="deepspeed")]
    assert available(adapters) == adapters[1:]
