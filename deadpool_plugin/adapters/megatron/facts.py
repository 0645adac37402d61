"""What Megatron-LM finds when a job begins, and a process that rehearses a rank of it later must find, too.

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
from typing import Any

from ...worker.adapter import CallHandler, CallKind
from .wrapping import wrap

TRACKER = "latest_checkpointed_iteration.txt"
HASHES = "check_param_hashes_across_dp_replicas"


def install(handler: CallHandler) -> None:
    """Once, when torch.distributed is initialised."""
    original = os.path.isfile

    @functools.wraps(original)
    def isfile(path: Any) -> bool:
        if not str(path).endswith(TRACKER) or threading.current_thread() is not threading.main_thread():
            return original(path)
        return bool(handler(f"isfile {path}", CallKind.FACT, original, (path,), {}))

    os.path.isfile = isfile
    for module in map(sys.modules.get, ("megatron.core.utils", "megatron.training.training")):
        if hasattr(module, HASHES):
            wrap(module, HASHES, CallKind.FACT, handler=handler)
