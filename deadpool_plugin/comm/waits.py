"""Waiting for a collective in such a way that the main thread always comes back.

Rules of this file: a wait ends with the collective's result, its error, or GenerationChanged; never by itself. An
operation that does not end within `ABANDON_S` after an announcement is abandoned: its group must then be kept for ever,
because its destructor would join the stuck thread.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from datetime import timedelta
from queue import SimpleQueue
from typing import Any, TypeVar

import torch

from ..errors import GenerationChanged, StaleGeneration
from .collective import COALESCED, HandleWork, Operation, outputs
from .generations import Generations
from .handle import Handle

T = TypeVar("T")
SLICE_S = 0.05
ABANDON_S = 0.2
"""A severed operation fails by itself within some 20 ms; about one in 300 never does."""
_SLICE = timedelta(seconds=SLICE_S)


class _Helper(threading.Thread):
    """A thread that runs one function at a time for one waiting thread, until it is left."""

    def __init__(self) -> None:
        super().__init__(name="deadpool-wait", daemon=True)
        self.functions: SimpleQueue[Callable[[], Any]] = SimpleQueue()
        self.outcome: tuple[Any, BaseException | None] = None, None
        self.ended = threading.Lock()
        self.ended.acquire()
        self.is_left = False
        self.start()

    def run(self) -> None:
        while not self.is_left:
            function = self.functions.get()
            try:
                self.outcome = function(), None
            except BaseException as error:  # handed to the waiting thread
                self.outcome = None, error
            del function  # it may hold a group
            self.ended.release()


_idle: list[_Helper] = []


def in_helper(function: Callable[[], T], generations: Generations, since: int, grace_s: float = 0.0) -> T:
    """Run `function` in a helper thread, and return its result.

    Raises:
        GenerationChanged: one newer than `since` was announced, and `function` did not end within `grace_s` after
            that; it goes on, unattended.
    """
    try:
        helper = _idle.pop()
    except IndexError:
        helper = _Helper()
    helper.functions.put(function)
    while not helper.ended.acquire(timeout=SLICE_S):
        if generations.announced > since:
            if helper.ended.acquire(timeout=grace_s):
                break
            helper.is_left = True
            raise GenerationChanged(generations.announced)
    (value, error), helper.outcome = helper.outcome, (None, None)
    _idle.append(helper)
    if error is not None:
        raise error
    result: T = value
    return result


class SwapWork(HandleWork):
    """The Work of one operation of torch's on a handle; `wait` is interruptible, in a way of each class below.

    Thread: like torch's own, one thread at a time.
    """

    def __init__(self, inner: Any, handle: Handle, generations: Generations, operation: Operation) -> None:
        super().__init__(inner=inner)
        self._handle, self._generations, self._operation = handle, generations, operation
        self._generation = generations.current
        name, args, kwargs = operation
        if name == "recv":
            self._source = int(kwargs["srcRank"] if "srcRank" in kwargs else args[1])
        self._on_done: Callable[[], None] | None = None

    def _wait_for(self, inner: Any, timeout: timedelta | None) -> None:
        """Raises: GenerationChanged, or what the operation failed with."""
        raise NotImplementedError

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Raises: GenerationChanged, or what the operation failed with once no announcement explains it."""
        if self._inner is None:
            return True
        self._check()
        try:
            self._wait_for(self._inner, timeout)
        except RuntimeError as error:
            self._generations.explain(error)
        if self._operation[0] == "recv_anysource":  # of a plain receive only gloo's Work knows it
            self._source = self._inner._source_rank()
        self._inner = None
        if self._on_done is not None:
            on_done, self._on_done = self._on_done, None
            on_done()
        return True

    def when_done(self, call: Callable[[], None]) -> None:
        self._on_done = call

    def is_completed(self) -> bool:
        if self._inner is None:
            return True
        self._check()
        if not self._inner.is_completed():
            return False
        if self._on_done is not None:
            self.wait()
        return True

    def result(self) -> list[torch.Tensor]:
        self.wait()
        return outputs(*self._operation)

    def _check(self) -> None:
        self._generations.check()
        if self._generation != self._generations.current:
            raise StaleGeneration(
                f"waited in generation {self._generations.current} for an operation of generation {self._generation}",
                "every pending Work to be dropped when a call is interrupted",
            )

    def _abandon(self) -> None:
        self._handle.abandoned = True
        raise GenerationChanged(self._generations.announced)


class StreamWork(SwapWork):
    """A Work of NCCL's, whose wait only orders streams."""

    def _wait_for(self, inner: Any, timeout: timedelta | None) -> None:
        inner.wait() if timeout is None else inner.wait(timeout)
        self._generations.check(self._generation)  # an abort ends a wait for a barrier without an error

    def get_future(self) -> torch.futures.Future[Any]:
        """torch's own, which streams wait for; a completed one after the wait."""
        if self._inner is None:
            return super().get_future()
        self._check()
        future: torch.futures.Future[Any] = self._inner.get_future()
        if self._operation[0] in COALESCED:  # issued as a batch, whose future has no value
            return future.then(lambda _: outputs(*self._operation))
        return future


class HelperWork(SwapWork):
    """A Work of gloo's that a timed wait would break: a helper thread waits for it."""

    def _wait_for(self, inner: Any, timeout: timedelta | None) -> None:
        try:
            wait = inner.wait if timeout is None else lambda: inner.wait(timeout)
            in_helper(wait, self._generations, self._generation, ABANDON_S)
        except GenerationChanged:
            self._abandon()


class SlicedWork(SwapWork):
    """A Work of gloo's that a timed wait leaves as it is when the time is up: the calling thread waits in slices.

    In `registry` until it is done: it may write late.
    """

    def __init__(
        self, inner: Any, handle: Handle, generations: Generations, operation: Operation, registry: set[SlicedWork]
    ) -> None:
        super().__init__(inner, handle, generations, operation)
        self._registry = registry
        registry.add(self)

    def _wait_for(self, inner: Any, timeout: timedelta | None) -> None:
        limit = None if timeout is None or timeout <= timedelta(0) else time.monotonic() + timeout.total_seconds()
        abandon_at: float | None = None
        while True:
            began = time.monotonic()
            try:
                inner.wait(_SLICE)
                break
            except RuntimeError:
                now = time.monotonic()
                is_completed = inner.is_completed()
                # a Work made of several never says that it is completed, but fails at once
                if is_completed or now - began < SLICE_S / 2 or (limit is not None and now >= limit):
                    self._registry.discard(self)
                    if not is_completed:
                        raise
                    inner.wait()
                    return
            if self._generations.announced > self._generation:
                abandon_at = abandon_at or now + ABANDON_S
                if now >= abandon_at:
                    self._abandon()
        self._registry.discard(self)

    def at_rest(self) -> bool:
        """Nobody needs to keep an eye on this operation any more."""
        return self._inner is None or self._inner.is_completed()

    def settle(self, deadline: float) -> None:
        """Let an operation of an ended generation end, so that its group need not be kept. Never raises."""
        while not self.at_rest() and time.monotonic() < deadline:
            time.sleep(0.001)
        if not self.at_rest():
            self._handle.abandoned = True


class BatchWork(HandleWork):
    """Several Works waited for as one, in the order they were issued."""

    def __init__(self, works: list[HandleWork], results: list[torch.Tensor]) -> None:
        super().__init__(results)
        self._works = works

    def wait(self, timeout: timedelta | None = None) -> bool:
        for work in self._works:
            work.wait() if timeout is None else work.wait(timeout)
        return True

    def when_done(self, call: Callable[[], None]) -> None:
        self._works[-1].when_done(call)

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works)
