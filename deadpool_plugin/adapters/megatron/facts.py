"""What Megatron-LM finds when a job begins, and a process that rehearses a rank of it later must find, too.

With `--load X --save X` a job begins without a checkpoint and soon has one: a rehearsal that saw it would load it, with
collectives that the job never made. Which one is loaded is decided by such a collective, whose result is recorded; so
what matters is whether the file that names the newest one is there.
Source: megatron/training/checkpointing.py `_load_base_checkpoint`, `checkpoint_exists` (core_v0.14.0 to main; those of
0.19 and later ask `os.path` itself).
"""

from __future__ import annotations

import functools
import os
import threading
from typing import Any

from ...worker.adapter import CallHandler, CallKind

TRACKER = "latest_checkpointed_iteration.txt"


def install(handler: CallHandler) -> None:
    """Once, when torch.distributed is initialised."""
    original = os.path.isfile

    @functools.wraps(original)
    def isfile(path: Any) -> bool:
        if not str(path).endswith(TRACKER) or threading.current_thread() is not threading.main_thread():
            return original(path)
        return bool(handler(f"isfile {path}", CallKind.FACT, original, (path,), {}))

    os.path.isfile = isfile
