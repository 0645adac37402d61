"""DeepSpeed as an `Adapter`: its engines, and the random generators of a model beside torch's.

Source: DeepSpeed 0.19.8.
"""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

from ...errors import Unsupported
from ...worker.adapter import Adapter
from ...worker.functions import CallHandler
from ...worker.saving import Saves
from ..common import REMEDY, after_init
from . import checkpoints, extensions, refusals, zero3
from .calls import EngineCalls
from .outputs import Guess
from .state import EngineState

RNG_TRACKERS = (
    "deepspeed.runtime.activation_checkpointing.checkpointing",
    "megatron.core.tensor_parallel.random",  # Megatron-DeepSpeed's own
    "megatron.mpu.random",  # that of older ones, and of GPT-NeoX
)
"""Modules that have a random generator of the model's beside torch's, if a script imports them."""
ONE_ENGINE = (
    "call deepspeed.initialize once: a teacher or a reference model, which is not trained, needs no engine (call it "
    f"under torch.no_grad()); models that are trained together can be parts of one; {REMEDY}"
)


class DeepSpeedAdapter(Adapter):
    """See `Adapter` for when each method runs."""

    framework = "deepspeed"
    calls: EngineCalls
    """From `install` on."""

    def __init__(self) -> None:
        self._made: list[weakref.ref[Any]] = []

    @property
    def state(self) -> EngineState:
        return self.calls.state

    def package(self) -> tuple[str, str]:
        import deepspeed

        return "deepspeed", deepspeed.__version__

    def install(self, handler: CallHandler, saves: Saves) -> None:
        from deepspeed.runtime.engine import DeepSpeedEngine
        from deepspeed.runtime.pipe.engine import PipelineEngine

        self.calls = calls = EngineCalls(handler)
        calls.install(DeepSpeedEngine, PipelineEngine)
        checkpoints.install(saves, calls, DeepSpeedEngine)
        zero3.install(calls)
        refusals.install(DeepSpeedEngine, lambda: calls.is_training)
        after_init(DeepSpeedEngine, self._engine_made)

    def _engine_made(self, engine: Any) -> None:
        if self.calls.is_training:
            raise Unsupported("the script makes another DeepSpeed engine during training", "exactly one", ONE_ENGINE)
        self._made.append(weakref.ref(engine))
        zero3.watch_model(self.calls, engine)

    def _engines(self) -> list[Any]:
        return [engine for made in self._made if (engine := made()) is not None]

    def is_used(self) -> bool:
        return bool(self._engines())

    def beforehand(self) -> Sequence[str]:
        return extensions.beforehand()

    def inside_step(self) -> AbstractContextManager[None]:
        return self.calls.inside()

    def attach(self) -> None:
        gc.collect()  # engines that the script has let go of are full of cycles
        engines = self._engines()
        if len(engines) != 1:
            raise Unsupported(f"the script has {len(engines)} DeepSpeed engines", "exactly one", ONE_ENGINE)
        refusals.check(engines[0])
        refusals.check_recurrent(engines[0].module)
        zero3.watch_model(self.calls, engines[0])
        self.calls.begin_training(EngineState(engines[0]))

    def rng_states(self) -> dict[str, Any]:
        return {name: dict(tracker.get_states()) for name, tracker in self._rng_trackers().items()}

    def set_rng_states(self, states: dict[str, Any]) -> None:
        for name, tracker in self._rng_trackers().items():
            if name in states:
                tracker.set_states(dict(states[name]))

    def _rng_trackers(self) -> dict[str, Any]:
        return {name: sys.modules[name].get_cuda_rng_tracker() for name in RNG_TRACKERS if name in sys.modules}

    def guessed(self) -> str:
        return Guess.first_taken
