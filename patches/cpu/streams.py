"""Streams, events and synchronisation: everything on a CPU is already in order, so they do nothing."""

from __future__ import annotations

import contextlib
from typing import Any

import torch


class Event:
    """An event that has always happened."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def record(self, *args: Any) -> None: ...

    def wait(self, *args: Any) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True

    def elapsed_time(self, other: Event) -> float:
        return 0.0


class Stream:
    """The one stream a CPU has; all instances are equal."""

    cuda_stream = 0
    device = torch.device("cpu")

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def wait_stream(self, other: Stream) -> None: ...

    def wait_event(self, event: Event) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True

    def record_event(self, event: Event | None = None) -> Event:
        return event or Event()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream)

    def __hash__(self) -> int:
        return 0


def apply() -> None:
    synchronisation()
    streams()


def synchronisation() -> None:
    """Point-to-point communication and checkpointing synchronise the device after a batch of sends."""
    torch.cuda.synchronize = lambda *args, **kwargs: None
    torch.cuda.empty_cache = lambda: None


def streams() -> None:
    """Overlapped gradient reduction, MoE dispatch and activation offload order themselves with side streams."""
    only = Stream()
    torch.cuda.Stream = Stream  # type: ignore[assignment, misc]
    torch.cuda.Event = Event  # type: ignore[assignment, misc]
    torch.cuda.current_stream = lambda *args, **kwargs: only  # type: ignore[assignment, return-value]
    torch.cuda.default_stream = lambda *args, **kwargs: only  # type: ignore[assignment, return-value]
    torch.cuda.stream = lambda stream: contextlib.nullcontext()  # type: ignore[assignment, misc, return-value]
    torch.Tensor.record_stream = lambda self, stream: None  # type: ignore[assignment, method-assign]
