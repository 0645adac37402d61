"""DeepSpeed as an `Adapter`: which functions are calls, and what a rank's state is.

A script need not know: it finds the wrapped methods on the engine that `deepspeed.initialize` gives it.
Source: DeepSpeed 0.19.8.
"""

from __future__ import annotations

import functools
import gc
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from ...errors import Unsupported, present
from ...worker.adapter import CallHandler, Scalars
from ...worker.saving import Saves
from ..options import REMEDY
from . import extensions, gathered, loading, monitors, past_engine, reading, refusals, saving
from .calls import Calls
from .state import EngineState
from .untold import Guess

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


class DeepSpeedAdapter:
    """See `Adapter` for when each method runs."""

    framework = "deepspeed"

    def __init__(self) -> None:
        self._made: list[weakref.ref[Any]] = []
        self._state: EngineState | None = None
        self._calls: Calls | None = None

    def package(self) -> tuple[str, str]:
        import deepspeed

        return "deepspeed", deepspeed.__version__

    # ---- calls

    def install(self, handler: CallHandler) -> None:
        from deepspeed.runtime.engine import DeepSpeedEngine
        from deepspeed.runtime.pipe.engine import PipelineEngine

        self._calls = calls = Calls(handler, lambda engine: self.state)
        _after_init(DeepSpeedEngine, self._engine_made)
        calls.install(DeepSpeedEngine, PipelineEngine)
        past_engine.refuse_parts(calls)
        gathered.install(calls)
        reading.install(calls)
        loading.install(calls, DeepSpeedEngine)
        monitors.install(calls)
        refusals.install(DeepSpeedEngine, lambda: calls.is_training)

    @property
    def calls(self) -> Calls:
        return present(self._calls, "install() comes first")

    def _engine_made(self, engine: Any) -> None:
        if self.calls.is_training:
            raise Unsupported("the script makes another DeepSpeed engine during training", "exactly one", ONE_ENGINE)
        self._made.append(weakref.ref(engine))
        past_engine.watch(self.calls, engine)

    def install_saving(self, saves: Saves) -> None:
        from deepspeed.runtime.engine import DeepSpeedEngine

        saving.install(saves, self.calls, DeepSpeedEngine)

    # ---- state

    def is_used(self) -> bool:
        return any(made() is not None for made in self._made)

    def beforehand(self) -> Sequence[str]:
        return extensions.beforehand()

    def inside_step(self) -> AbstractContextManager[None]:
        return self.calls.inside()

    def attach(self) -> None:
        gc.collect()  # engines that the script has let go of are full of cycles
        engines = [engine for engine in (made() for made in self._made) if engine is not None]
        if len(engines) != 1:
            raise Unsupported(f"the script has {len(engines)} DeepSpeed engines", "exactly one", ONE_ENGINE)
        refusals.check(engines[0])
        refusals.check_recurrent(engines[0].module)
        past_engine.watch(self.calls, engines[0])
        self._state = EngineState(engines[0])
        self.calls.is_training = True

    @property
    def state(self) -> EngineState:
        return present(self._state, "attach() comes first")

    def shard(self) -> Sequence[torch.Tensor]:
        return self.state.tensors

    def owns(self, tensor: torch.Tensor) -> bool:
        return self.state.owns(tensor)

    def changing(self) -> Sequence[torch.Tensor]:
        return self.state.buffers.tensors

    def replicas(self) -> tuple[int, ...]:
        return self.state.replicas()

    def scalars(self) -> Scalars:
        return self.state.scalars()

    def load(self, scalars: Scalars) -> None:
        self.state.load(scalars)

    def visible(self) -> Scalars:
        return self.state.visible()

    def show(self, visible: Scalars) -> None:
        self.state.show(visible)

    def entry_state(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[[], None]:
        return functools.partial(self.state.load_entry, self.state.entry())

    def left(self) -> None:
        self.state.buffers.left()

    def clean(self) -> None:
        self.state.clean()

    def after_restore(self) -> None:
        self.state.refresh_parameters()

    def rng_states(self) -> dict[str, Any]:
        return {name: dict(tracker.get_states()) for name, tracker in _rng_trackers()}

    def set_rng_states(self, states: dict[str, Any]) -> None:
        for name, tracker in _rng_trackers():
            if name in states:
                tracker.set_states(dict(states[name]))

    def guessed(self) -> str:
        return Guess.first_taken

    def loss_of(self, result: Any) -> float | None:
        """None: a call that steps knows the newest loss itself (engine_calls.py)."""
        return None


def _rng_trackers() -> Iterator[tuple[str, Any]]:
    for name in RNG_TRACKERS:
        if name in sys.modules:
            yield name, sys.modules[name].get_cuda_rng_tracker()


def _after_init(cls: type, act: Callable[[Any], None]) -> None:
    """Call `act` with each instance once it is initialised."""
    original = cls.__init__  # type: ignore[misc]

    @functools.wraps(original)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        act(self)

    cls.__init__ = init  # type: ignore[misc]
