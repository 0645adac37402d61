"""Waiting for a collective in such a way that the main thread always comes back.

Rules of this file: a wait ends with the collective's result, its error, or GenerationChanged; never by itself.
gloo's collectives are waited for in slices, on the calling thread: a timed wait that expires leaves them untouched.
gloo's sends and receives break their connection when a timed wait expires, and its reduce-scatters ignore the time, so
a helper thread waits for them.
NCCL's waits only order streams. Whoever still waits `ABANDON_S` after an announcement abandons the operation;
its group must then be kept for ever, because its destructor would join the stuck thread.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from ..errors import GenerationChanged, StaleGeneration
from .collective import COALESCED, Operation, completed_future, named_source, outputs
from .fence import Fence

if TYPE_CHECKING:
    from .handle import Handle

SLICE_S = 0.05
ABANDON_S = 0.2
"""A severed operation fails by itself within some 20 ms; about one in 300 never does."""
_SLICE = timedelta(seconds=SLICE_S)


class Abandoned(Exception):
    """The function given to `in_helper` is still running, in a thread nobody waits for any more."""


class _Helper:
    """A daemon thread that runs one function at a time for one waiting thread."""

    def __init__(self) -> None:
        self._start, self._done = threading.Lock(), threading.Lock()
        self._start.acquire()
        self._done.acquire()
        self._function: Callable[[], Any] = bool
        self._value: Any = None
        self._error: BaseException | None = None
        self._given_up = False
        threading.Thread(target=self._serve, name="deadpool-wait", daemon=True).start()

    def _serve(self) -> None:
        while not self._given_up:
            self._start.acquire()
            try:
                self._value, self._error = self._function(), None
            except BaseException as error:  # handed to the waiting thread
                self._value, self._error = None, error
            self._function = bool
            self._done.release()

    def run(self, function: Callable[[], Any], stop: Callable[[], bool], grace_s: float) -> Any:
        self._function = function
        self._start.release()
        while not self._done.acquire(timeout=SLICE_S):
            if stop():
                if self._done.acquire(timeout=grace_s):
                    break
                self._given_up = True
                raise Abandoned
        value, error = self._value, self._error
        self._value = self._error = None
        _idle.append(self)
        if error is not None:
            raise error
        return value


_idle: list[_Helper] = []


def in_helper(function: Callable[[], Any], stop: Callable[[], bool], grace_s: float = 0.0) -> Any:
    """The result of `function`, run in a helper thread, unless `stop()` first.

    Raises:
        Abandoned: `stop()` became true and `function` did not end within `grace_s`; it goes on, unattended.
    """
    try:
        helper = _idle.pop()
    except IndexError:
        helper = _Helper()
    return helper.run(function, stop, grace_s)


class SwapWork(dist.Work):
    """The Work of one operation on a handle; `wait` is interruptible.

    In `registry`, until it is done, if it is one that may write late and can be watched without waiting for it.
    Thread: like torch's own, one thread at a time.
    """

    def __init__(
        self, inner: Any, handle: Handle, fence: Fence, operation: Operation, *, style: str, registry: set[Any]
    ) -> None:
        super().__init__()
        self._inner, self._handle, self._fence, self._operation = inner, handle, fence, operation
        self._style, self._registry = style, registry
        self._generation = fence.current
        self._source = named_source(*operation)
        self.on_done: Callable[[SwapWork], None] | None = None
        if style == "slices":
            registry.add(self)

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Raises: GenerationChanged, or what the operation failed with once no announcement explains it."""
        if self._inner is None:
            return True
        self._check()
        try:
            _WAITS[self._style](self, timeout)
        except RuntimeError as error:
            self._registry.discard(self)
            self._fence.explain(error)
        self._finish()
        return True

    def is_completed(self) -> bool:
        if self._inner is None:
            return True
        self._check()
        if not self._inner.is_completed():
            return False
        if self.on_done is not None:
            self.wait()
        return True

    def is_success(self) -> bool:
        return self._inner is None or self._inner.is_success()

    def exception(self) -> Any:
        return None if self._inner is None else self._inner.exception()

    def synchronize(self) -> None:
        if self._inner is not None:
            self._inner.synchronize()

    def block_current_stream(self) -> None:
        if self._inner is not None:
            self._inner.block_current_stream()

    def result(self) -> list[torch.Tensor]:
        self.wait()
        return outputs(*self._operation)

    def source_rank(self) -> int:
        return self._source

    _source_rank = source_rank

    def get_future(self) -> torch.futures.Future[Any]:
        """torch's own future where waiting is only a matter of streams; else a completed one, after the wait."""
        if self._style == "direct" and self._inner is not None:
            self._check()
            future: torch.futures.Future[Any] = self._inner.get_future()
            if self._operation[0] in COALESCED:  # issued as a batch, whose future has no value
                return future.then(lambda _: outputs(*self._operation))
            return future
        return completed_future(self.result())

    def at_rest(self) -> bool:
        """Nobody needs to keep an eye on this operation any more."""
        return self._inner is None or self._inner.is_completed()

    def settle(self, deadline: float) -> None:
        """Let an operation of an ended generation end, so that its group need not be kept. Never raises."""
        while not self.at_rest() and time.monotonic() < deadline:
            time.sleep(0.001)
        if not self.at_rest():
            self._handle.abandoned = True

    def _check(self) -> None:
        self._fence.check()
        if self._generation != self._fence.current:
            raise StaleGeneration(
                f"waited in generation {self._fence.current} for an operation of generation {self._generation}",
                "every pending Work to be dropped when a call is interrupted",
            )

    def _finish(self) -> None:
        if self._operation[0] == "recv_anysource":  # of a plain receive only gloo's Work knows it
            self._source = self._inner._source_rank()
        self._inner = None
        self._registry.discard(self)
        if self.on_done is not None:
            on_done, self.on_done = self.on_done, None
            on_done(self)

    def _changed(self) -> bool:
        return self._fence.announced > self._generation

    def _wait_in_slices(self, timeout: timedelta | None) -> None:
        inner = self._inner
        limit = None if timeout is None or timeout <= timedelta(0) else time.monotonic() + timeout.total_seconds()
        abandon_at: float | None = None
        while True:
            began = time.monotonic()
            try:
                inner.wait(_SLICE)
                return
            except RuntimeError:
                if inner.is_completed():
                    inner.wait()
                    return
                now = time.monotonic()
                # A Work made of several never says that it is completed, but fails at once.
                if now - began < SLICE_S / 2:
                    raise
                if limit is not None and now >= limit:
                    raise
            if self._changed():
                abandon_at = abandon_at or now + ABANDON_S
                if now >= abandon_at:
                    self._abandon()

    def _wait_in_helper(self, timeout: timedelta | None) -> None:
        inner = self._inner
        try:
            in_helper(lambda: inner.wait() if timeout is None else inner.wait(timeout), self._changed, ABANDON_S)
        except Abandoned:
            self._abandon()

    def _wait_directly(self, timeout: timedelta | None) -> None:
        if timeout is None:
            self._inner.wait()
        else:
            self._inner.wait(timeout)
        self._fence.check_since(self._generation)  # an abort ends a wait for a barrier without an error

    def _abandon(self) -> None:
        self._handle.abandoned = True
        raise GenerationChanged(self._fence.announced)


_WAITS: dict[str, Callable[[SwapWork, timedelta | None], None]] = {
    "slices": SwapWork._wait_in_slices,
    "helper": SwapWork._wait_in_helper,
    "direct": SwapWork._wait_directly,
}


class BatchWork(dist.Work):
    """Several Works waited for as one, in the order they were issued."""

    def __init__(self, works: list[Any], results: list[torch.Tensor]) -> None:
        super().__init__()
        self._works, self._results = works, results
        self.on_done: Callable[[Any], None] | None = None

    def wait(self, timeout: timedelta | None = None) -> bool:
        for work in self._works:
            work.wait() if timeout is None else work.wait(timeout)
        if self.on_done is not None:
            on_done, self.on_done = self.on_done, None
            on_done(self)
        return True

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works)

    def result(self) -> list[torch.Tensor]:
        self.wait()
        return self._results

    def source_rank(self) -> int:
        return -1

    _source_rank = source_rank

    def get_future(self) -> torch.futures.Future[Any]:
        self.wait()
        return completed_future(self._results)
