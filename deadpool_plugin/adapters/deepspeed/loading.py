"""A checkpoint that a script loads in mid-training (the best one, at the end) is a call, done again like any other.

Rules of this file: what DeepSpeed reads goes into the tensors that the shard consists of; where it has put others in
their place, those give their values and leave. Before the first forward loading is DeepSpeed's affair, but for which
checkpoint is the newest: a process that rehearses a rank later is told what the rank itself found.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

from ...errors import Unsupported
from ...worker.adapter import CallKind
from . import adam
from .calls import Calls
from .engine_calls import OfEngine


def install(calls: Calls, engine_class: type) -> None:
    """Wrap `load_checkpoint`. Once, before the engine is built."""
    owner: Any = engine_class
    original = owner.load_checkpoint

    @functools.wraps(original)
    def load_checkpoint(engine: Any, load_dir: Any, tag: Any = None, *args: Any, **kwargs: Any) -> Any:
        if calls.busy:
            return original(engine, load_dir, tag, *args, **kwargs)
        if not calls.is_training:
            newest = Path(load_dir) / ("latest_universal" if engine.load_universal_checkpoint() else "latest")
            if tag is None:
                tag = calls.handler(f"the tag in {newest}", CallKind.FACT, _tag_in, (newest,), {})
            if tag is None and newest.is_file():
                return None, None  # there was none when the job began
            return original(engine, load_dir, tag, *args, **kwargs)
        call = Load(calls, functools.partial(original, engine, load_dir, tag, *args, **kwargs), engine)
        return calls.handler("engine.load_checkpoint", CallKind.PLAIN, call, (), {})

    owner.load_checkpoint = load_checkpoint


def _tag_in(newest: Path) -> str | None:
    """Return the tag that DeepSpeed itself reads there; None if there is no checkpoint.

    Source: DeepSpeedEngine.load_checkpoint.
    """
    return newest.read_text().strip() if newest.is_file() else None


class Load(OfEngine):
    """Its value is a path and what the script had saved beside the engine's state."""

    def __call__(self) -> Any:
        state = self._calls.state_of(self._engine)
        optimizer = state.basic_optimizer
        if adam.is_in_cpp(optimizer, state.masters):
            raise Unsupported(
                f"engine.load_checkpoint was called during training with {type(optimizer).__name__} on the CPU, whose "
                "products of the betas a swap could not bring back then",
                "it before the first forward",
                "use torch's AdamW, or load in a job of its own",
            )
        with self._calls.inside():
            value = self._function()
            state.take_back()
            state.frozen.loaded()
        return value

    def outcome(self, value: Any) -> Any:
        return [value, self._calls.state_of(self._engine).visible()]

    def skipped(self, outcome: Any) -> Any:
        value, visible = outcome
        self._calls.state_of(self._engine).show(visible)
        return tuple(value)
