"""The way of a collective inside a call: from the framework's process group to the communication library.

Rules of this file: a real gloo group under a real worker context; only what its agent and framework would do is faked.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from support import present
from support.comm import become
from support.forked import Fleet
from support.stand_in import fake
from support.zygote import in_zygote

import deadpool_plugin
from deadpool_plugin.comm.groups import Groups, host_store
from deadpool_plugin.mirror.arena import SlotPair
from deadpool_plugin.worker.calls import Call, CallKind
from deadpool_plugin.worker.context import Context
from deadpool_plugin.worker.live import Live
from deadpool_plugin.worker.staging import Layout

OURS = os.path.dirname(deadpool_plugin.__file__)
FRAMES_MAX, CALLS_MAX = 6, 11
"""Frames of ours below the library's; functions of ours that are entered on the way there and back."""


def _ours(frame: FrameType | None) -> list[str]:
    found = []
    while frame is not None:
        if frame.f_code.co_filename.startswith(OURS):
            found.append(frame.f_code.co_qualname)
        frame = frame.f_back
    return found


class _Spy:
    """The group behind a handle; keeps the way by which its operations are reached."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self.frames: list[str] = []

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def operation(*args: Any, **kwargs: Any) -> Any:
            self.frames = _ours(sys._getframe(1))
            return getattr(self._inner, name)(*args, **kwargs)

        return operation


def _live(address: str, next_address: str) -> Live:
    """A rank in training, alone, in its second generation."""
    become(0, 1)
    groups = Groups()
    adapter: Any = fake(
        framework="torch", install=lambda handler, saves: None, rng_states=dict,
        state=fake(changing=(), entry_state=lambda: lambda: None, left=lambda: None),
    )  # fmt: skip
    link: Any = fake(send=lambda message: None, event=lambda kind, **fields: None)
    context = Context(link, groups, [adapter], local_rank=1)
    context._adapter = adapter
    context.install()
    groups.start(0, address)
    dist.init_process_group("gloo")
    groups.stop_recording()
    layout = Layout([torch.ones(3)])
    slots = SlotPair.create(0, 4096, layout.payload_bytes)
    context.mode = live = Live(context, layout, slots, step=0)
    groups.rebuild(1, next_address)
    return live


def _ways() -> tuple[list[str], list[str]]:
    keep = [host_store("127.0.0.1") for _ in range(2)]
    live = _live(*(address for _, address in keep))
    (handle,) = live._groups.handles
    spy: Any = _Spy(handle.inner)
    entered: list[str] = []

    def profile(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(OURS):
            entered.append(frame.f_code.co_qualname)

    def forward() -> None:
        handle.inner = spy
        dist.all_reduce(torch.ones(1))
        handle.inner = spy._inner
        sys.setprofile(profile)
        work = present(dist.all_reduce(torch.ones(1), async_op=True))
        sys.setprofile(None)
        work.wait()

    live.call(Call("forward", CallKind.FORWARD, forward))
    return spy.frames, entered


@in_zygote
def test_a_collective_inside_a_call_reaches_the_library_in_a_few_frames() -> None:
    with Fleet() as fleet:
        ((frames, entered),) = fleet.values([fleet.fork(_ways)])
    below = frames[: next(number for number, name in enumerate(frames) if "operation" in name) + 1]
    assert below[-1].endswith("operation"), "the handle's"
    assert len(below) <= FRAMES_MAX, below
    assert len(entered) <= CALLS_MAX, entered
