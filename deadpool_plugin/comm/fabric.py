"""The seam between handles and a communication library: a Fabric for each, and the Work of an operation it began.

Rules of this file: a wait ends with the operation's result, its error, or GenerationChanged; never by itself.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Backend, Store

from ..errors import StaleGeneration
from .collective import Operation
from .generations import Generations
from .handle import Handle


class Fabric(Protocol):
    """One backend's communicators of one generation; unblocked once, after it is over."""

    generations: Generations

    def build(self, handle: Handle, store: Store) -> Backend:
        """Connect to the group's other members. Blocks: until they do the same. Thread: main, or one it waits for."""

    def begin(self, handle: Handle, operation: Operation) -> HandleWork:
        """Issue `operation` on the group behind `handle`. Raises: GenerationChanged; RuntimeError if it cannot be
        issued, and then nothing of it is open in this thread."""

    def wait_for(self, work: SwapWork, timeout: timedelta | None) -> None:
        """Wait for torch's own Work. Raises: GenerationChanged, or what the operation failed with."""

    def unblock(self) -> None:
        """End whatever is in flight, with errors. Thread: any."""

    def ranks_named(self, text: str) -> tuple[int, ...]:
        """The ranks that a connection may have led to which the library names in an error."""
        return ()

    def quiesce(self, stop: Callable[[], bool]) -> bool:
        """Wait, after `unblock`, until nothing that was in flight can write any more; False if `stop()` first."""
        return True


class HandleWork(dist.Work):
    """The Work of an operation on a handle: done, but for an `inner` one or `parts`. `source`: the sender."""

    inner: Any = None

    def __init__(self, operation: Operation, source: int = -1, parts: Sequence[HandleWork] = ()) -> None:
        super().__init__()
        self.operation, self._source, self._parts = operation, source, parts

    def wait(self, timeout: timedelta | None = None) -> bool:
        return all(part.wait(timeout) for part in self._parts)

    def when_done(self, call: Callable[[], None]) -> None:
        """Call `call` once the operation has ended well: now, or in the wait for it."""
        if self._parts:
            self._parts[-1].when_done(call)
        else:
            call()

    def is_completed(self) -> bool:
        return all(part.is_completed() for part in self._parts)

    def is_success(self) -> bool:
        return self.inner is None or self.inner.is_success()

    def exception(self) -> Any:
        return None if self.inner is None else self.inner.exception()

    def synchronize(self) -> None:
        if self.inner is not None:
            self.inner.synchronize()

    def block_current_stream(self) -> None:
        if self.inner is not None:
            self.inner.block_current_stream()

    def result(self) -> list[torch.Tensor]:
        self.wait()
        return self.operation.outputs()

    def source_rank(self) -> int:
        return self._source

    _source_rank = source_rank

    def get_future(self) -> torch.futures.Future[Any]:
        value = self.result()
        devices = {tensor.device for tensor in value if tensor.is_cuda}
        future: torch.futures.Future[Any] = torch.futures.Future(devices=list(devices))
        future.set_result(value)
        return future


class SwapWork(HandleWork):
    """The Work of an operation of torch's, whose wait an announcement ends. Thread: one at a time, like torch's own."""

    def __init__(self, inner: Any, fabric: Fabric, handle: Handle, operation: Operation) -> None:
        super().__init__(operation)
        self.inner, self.handle, self.generation, self._fabric = inner, handle, fabric.generations.current, fabric
        if operation.name == "recv":
            self._source = int(operation.argument(1, "srcRank"))
        self._on_done: Callable[[], None] | None = None

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Raises: GenerationChanged, or what the operation failed with once no announcement explains it."""
        if self.inner is None:
            return True
        self._check()
        place = self._fabric.generations.place if threading.current_thread() is threading.main_thread() else None
        if place is not None:
            place.wait(self.operation.name, self.handle.key, self._peer())
        try:
            self._fabric.wait_for(self, timeout)
        except RuntimeError as error:
            self._fabric.generations.explain(error)
        finally:
            if place is not None:
                place.go_on()
        if self.operation.name == "recv_anysource":  # of a plain receive only gloo's Work knows it
            self._source = self.inner._source_rank()
        self.inner = None
        if self._on_done is not None:
            on_done, self._on_done = self._on_done, None
            on_done()
        return True

    def _peer(self) -> int:
        """The rank that a send or receive is with, -1 if there is none."""
        name = {"send": "dstRank", "recv": "srcRank"}.get(self.operation.name)
        return self.handle.ranks[int(self.operation.argument(1, name))] if name else -1

    def when_done(self, call: Callable[[], None]) -> None:
        self._on_done = call

    def is_completed(self) -> bool:
        if self.inner is not None:
            self._check()
            if not self.inner.is_completed():
                return False
            if self._on_done is not None:
                self.wait()
        return True

    def has_ended(self) -> bool:
        return self.inner is None or self.inner.is_completed()

    def _check(self) -> None:
        generations = self._fabric.generations
        generations.check()
        if self.generation != generations.current:
            raise StaleGeneration(
                f"waited in generation {generations.current} for an operation of generation {self.generation}",
                "every pending Work to be dropped when a call is interrupted",
            )
