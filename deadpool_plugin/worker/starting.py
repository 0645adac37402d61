"""A rank in start-up, whose collectives are recorded; the first forward makes it `Live`."""

from __future__ import annotations

import contextlib
import itertools
import sys
import zlib
from collections.abc import Iterator
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.hooks import RemovableHandle

from .. import versions
from ..comm.collective import Operation
from ..comm.handle import Handle
from ..core import local
from ..errors import WHOLE_STEP, Unsupported
from ..mirror.arena import SlotPair
from . import codec
from .calls import RUNS_MODEL, Call, CallKind
from .context import Context
from .file_view import Folder, Looks
from .live import Live
from .loaded_files import Loads, Recorded
from .patching import Function, around, when_imported
from .staging import Layout

_KNOWN = "Megatron-core's schedules and optimizer, or a DeepSpeed engine (imported before init_process_group)"
UNKNOWN_STEPS_MAX = 20  # before the first call that we know: frameworks make a few to build their optimizers' state
_FSDP = "torch.distributed.fsdp"


class Starting:
    """Start-up of an active rank, from the top of the script to the first forward."""

    inside = False

    def __init__(self, context: Context, rank: int, header_bytes: int) -> None:
        self._context, self._rank, self._header_bytes = context, rank, header_bytes
        self._looks: Looks | None = None
        self._loads: Loads | None = None
        self._hook: RemovableHandle | None = None

    def call(self, call: Call) -> Any:
        if call.kind is CallKind.UPDATE:
            raise Unsupported(
                "the first optimizer step came before any forward that deadpool_plugin knows",
                "Megatron-core's get_forward_backward_func() or a DeepSpeed engine to be called in every step",
                f"import Megatron's schedule after init_process_group, or {WHOLE_STEP}",
            )
        if call.kind is CallKind.SAVE:
            with self._context.groups.unrecorded():  # a rehearsal saves nothing, so it makes none of these exchanges
                value = call()
                self._context.saves.wait_for_threads()  # those of one that goes on behind the script's back, too
                return value
        if call.kind is CallKind.FACT:
            return self._context.groups.fact(call.name, call)
        if call.kind not in RUNS_MODEL:
            return call()
        self._become_live()
        return self._context.mode.call(call)

    def collective(self, handle: Handle, operation: Operation) -> Any:
        return self._context.groups.issue(handle, operation)

    def finish(self) -> int:
        raise Unsupported(
            "the script ended without one training call that deadpool_plugin knows",
            _KNOWN,
            "train the model through deepspeed.initialize, or run this script without the plugin",
        )

    def watch(self) -> None:
        """Note which files the script looks for, from here to the first forward, and what would train past us."""
        # Refused where a script makes one: it would be told at its end only.
        self._refuse_in(DistributedDataParallel, "__init__", "torch's DistributedDataParallel")
        when_imported(_FSDP, lambda fsdp: self._refuse_in(fsdp.FullyShardedDataParallel, "__init__", "torch's FSDP"))
        when_imported(_FSDP, lambda fsdp: self._refuse_in(fsdp, "fully_shard", "torch's FSDP (fully_shard)"))
        steps = itertools.count(1)

        def stepped(*_: Any) -> None:
            if next(steps) == UNKNOWN_STEPS_MAX:
                text = (
                    f"{UNKNOWN_STEPS_MAX} optimizer steps of rank {self._rank}, and not one training call that "
                    f"deadpool knows: nothing is protected yet; expected {_KNOWN}; to do: train with one of these, or "
                    "without deadpool. The script goes on unprotected, and its end is refused with exit code 78"
                )
                self._context.link.event("Note", text=text)

        self._hook = register_optimizer_step_post_hook(stepped)
        self._looks, self._loads = Looks(), Loads()

    def _refuse_in(self, owner: Any, name: str, what: str) -> None:
        def refused(original: Function, *args: Any, **kwargs: Any) -> Any:
            if self._context.mode is self:
                raise Unsupported(
                    f"the script wraps its model in {what}, whose training deadpool_plugin does not know",
                    _KNOWN,
                    "give the Trainer or accelerate a DeepSpeed configuration, or run this script without the plugin",
                )
            return original(*args, **kwargs)

        setattr(owner, name, around(getattr(owner, name), refused))

    def unwatch(self) -> tuple[list[Folder], list[Recorded]]:
        """End `watch`. Returns: the files that a rehearsal has to know of, and what was read of checkpoints."""
        if self._hook is None or self._looks is None or self._loads is None:
            return [], []
        self._hook.remove()
        folders = self._looks.finish()
        records, too_large = self._loads.finish(self._looks.opened, self._context.groups.recording_limit_bytes)
        if too_large:
            first, more = too_large[0], f" and {len(too_large) - 1} more" if too_large[1:] else ""
            text = (
                f"rank {self._rank} has loaded {first}{more}, whose objects are too large to be recorded: keep what "
                "was loaded until the job has ended, or raise recording_limit_mib"
            )
            self._context.link.event("Note", text=text)
        return folders, records

    @torch.inference_mode(False)  # the script may evaluate first; what is made here is trained
    def _become_live(self) -> None:
        context = self._context
        context.adapter.attach()
        if (unknown := versions.check(*context.adapter.package(), torch.__version__)) and self._rank == 0:
            context.link.event("Note", text=unknown)
        layout = Layout(context.adapter.state.shard)
        recording = codec.encode([context.groups.stop_recording(), layout.digest, *self.unwatch()])
        sizes, replicas = (self._header_bytes, layout.payload_bytes), context.adapter.state.replicas()
        on_device = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        modules = zlib.compress("\n".join((*imported(), *context.adapter.beforehand())).encode())
        context.link.send(local.RankReady(self._rank, *sizes, layout.digest, replicas, recording, on_device, modules))
        _, (descriptor,) = context.link.receive(local.ArenaHandOver)
        slots = SlotPair.attach(descriptor, self._rank, *sizes)
        context.mode = live = Live(context, layout, slots, step=0)
        context.groups.begin_counting()
        live.stage(0)
        context.offer_store()


def imported() -> Iterator[str]:
    """Name the modules that this process has imported: installed ones and ours, none of the user's."""
    for name, module in list(sys.modules.items()):
        with contextlib.suppress(Exception):  # a module that imports as it is asked may raise anything
            if name.startswith("deadpool_plugin.") or "site-packages" in str(module.__file__):
                yield name
