"""Facts that Megatron-LM finds when a job begins, and that a process which rehearses a rank later must find, too.

With `--load X --save X` a job begins without a checkpoint and soon has one: a rehearsal that saw it would load it, with
collectives that the job never made. Which one is loaded is decided by such a collective, whose result is recorded; so
what matters is whether the file that names the newest one is there. Nor has a rehearsal parameters whose hashes
(`--check-weight-hash-across-dp-replicas-interval`) could be compared.
Source: megatron/training/checkpointing.py `_load_base_checkpoint`, `checkpoint_exists` (core_v0.14.0 to main; those of
0.19 and later ask `os.path` itself); megatron/core/utils.py `check_param_hashes_across_dp_replicas`.
"""

from __future__ import annotations

import functools
import os
import sys
import threading
from collections.abc import Callable
from typing import Any

from ...worker.adapter import CallHandler, CallKind
from .wrapping import wrap

TRACKER = "latest_checkpointed_iteration.txt"
HASHES = "check_param_hashes_across_dp_replicas"


class _Asks:
    """Ask once whether the file is there, however many functions the question goes through."""

    def __init__(self, handler: CallHandler) -> None:
        self._handler, self._inside = handler, False

    def around(self, original: Callable[[Any], bool]) -> Callable[[Any], bool]:
        @functools.wraps(original)
        def isfile(path: Any) -> bool:
            on_main_thread = threading.current_thread() is threading.main_thread()
            if self._inside or not on_main_thread or not str(path).endswith(TRACKER):
                return original(path)
            self._inside = True
            try:
                return bool(self._handler(f"isfile {path}", CallKind.FACT, original, (path,), {}))
            finally:
                self._inside = False

        return isfile


def install(handler: CallHandler) -> None:
    """Once, when torch.distributed is initialised."""
    asks = _Asks(handler)
    os.path.isfile = asks.around(os.path.isfile)  # type: ignore[assignment]
    saving: Any = sys.modules.get("megatron.training.checkpointing")
    if hasattr(saving, "isfile"):  # which asks multi-storage-client where that is installed
        saving.isfile = asks.around(saving.isfile)
    for module in map(sys.modules.get, ("megatron.core.utils", "megatron.training.training")):
        if hasattr(module, HASHES):
            wrap(module, HASHES, CallKind.FACT, handler=handler)
