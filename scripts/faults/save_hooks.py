"""Places in evaluation, in saving and at the end where a fault can strike; hooked from outside, as inject.py does.

Rules of this file: torch and megatron-core only; nothing here decides when, only where. Step s means: s updates made.

  evaluate   inside TransformerBlock.forward of an evaluation after step s
  planned    a save of step s: its plans are exchanged, nothing is written
  write      a save of step s: a file is open, its first item not written. Asynchronous: in the writer, so training
             goes on meanwhile
  waiting    an asynchronous save of step s by a persistent writer: this rank looks whether it is done
  finishing  a save of step s: everything is written, the coordinator is about to write what makes it complete
  exit       the script is through with step s, the last one, and about to give up its process groups

Writers of an asynchronous save that a fault is to strike get as far as `write`, until the swap kills them.
"""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING, Any

from faults.hooks import around

if TYPE_CHECKING:
    from faults.inject import Injector

BEHIND = ("write", "waiting")
PLAN = "save_state_dict_async_plan"
PHASES = ("evaluate", "planned", *BEHIND, "finishing", "exit")


def install(injector: Injector) -> None:
    import torch
    import torch.distributed as dist
    from megatron.core.dist_checkpointing.strategies import (
        async_utils,
        filesystem_async,
        state_dict_saver,
        torch as strategy,
    )
    from megatron.core.transformer.transformer_block import TransformerBlock
    from torch.distributed.checkpoint import FileSystemWriter, _async_thread_executor as executor, filesystem, utils

    reached = Reached(injector)
    around(TransformerBlock, "forward", before=lambda self, *_, **__: None if self.training else reached("evaluate"))
    planner = strategy if hasattr(strategy, PLAN) else state_dict_saver  # from 0.17 on it is imported at every save
    around(planner, PLAN, after=lambda *_, **__: reached("planned"))
    around(utils._DistWrapper, "reduce_scatter", after=lambda *_, **__: reached("planned"))
    around(filesystem_async, "_write_item", before=lambda *_, **__: reached("write"))
    around(filesystem, "_write_item", before=lambda *_, **__: reached("write"))
    around(torch.serialization, "_save", before=lambda *_, **__: reached("write"))
    around(FileSystemWriter, "finish", before=lambda *_, **__: reached("finishing"))
    around(dist, "destroy_process_group", before=lambda *_, **__: reached("exit"))
    around(async_utils.AsyncCallsQueue, "schedule_async_request", before=reached.remember)
    looked = async_utils.PersistentAsyncCaller
    around(looked, "is_current_async_call_done", before=lambda *_, **__: reached("waiting"))
    around(executor._ThreadBasedAsyncCheckpointExecutor, "execute_save", before=reached.remember)


class Reached:
    """Tells the injector where this rank is, from whatever thread or process writes for it."""

    def __init__(self, injector: Injector) -> None:
        self.injector, self.pid = injector, os.getpid()
        self.saved, self.struck = 0, False

    def remember(self, *_: Any, **__: Any) -> None:
        """The step that is saved asynchronously from here on."""
        self.saved = self.injector.completed()
        self.struck = any(self.injector.plan.awaits(phase, self.saved) for phase in BEHIND)

    def __call__(self, phase: str) -> None:
        step = self.injector.completed() if phase in ("evaluate", "exit") or not self.saved else self.saved
        if os.getpid() == self.pid:
            self.injector.reached(phase, step)
        else:  # in a writer's process, which must not be taken for the rank's
            self.injector.strike_if_due(phase, step, int(os.environ["RANK"]), self.pid)
            while self.struck and phase == "write":
                signal.pause()
