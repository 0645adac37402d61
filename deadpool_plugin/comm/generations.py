"""The generation that this process lives in, the newest announced one, and waits that end with an announcement.

Rules of this file: nothing else in a worker knows a generation. `current` only grows, on the main thread; `announced`
only grows, from any thread. While `announced > current`, collectives and interruptible waits raise GenerationChanged.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, NoReturn, TypeVar, cast

import torch.distributed as dist

from ..errors import GenerationChanged
from ..transport.flight_recorder import Whereabouts

T = TypeVar("T")
SLICE_S = 0.05
_NCCL = ("ncclRemoteError", "ncclSystemError")
_OTHERS = (
    "NCCL Error 2:", "NCCL Error 6:",
    "Connection closed by peer", "Connection reset by peer", "Connection timed out", "Connection refused",
    "Broken pipe", "No route to host", "Network is unreachable", "Host is unreachable", "Socket is not connected",
    "Transport endpoint is not connected", "Connection aborted", "Software caused connection abort",
)  # fmt: skip
"""Errors of a connection to another process, whatever the script did; a store's have a type of their own.
Source: torch's NCCLUtils.cpp (getNcclErrorDetailStr), csrc/cuda/nccl.cpp (throw_nccl_error, of what is made of sends
and receives); gloo's transport/tcp (pair.cc, error.cc), which says what strerror(3) says."""


class Generations:
    """The two generations of a process, and the place where errors and waits meet an announcement.

    Args: on_broken: told the generation and the error of a broken connection; returns whether a new generation follows.
    """

    def __init__(
        self, explain_timeout_s: float, on_broken: Callable[[int, str], bool] = lambda generation, reason: False
    ):
        self.current = self.announced = 0
        self.announced_at = 0.0
        self.changed = threading.Condition()
        """Notified of each announcement; whoever waits for something else besides notifies it, too."""
        self.place = Whereabouts()
        """Where the main thread is; a rank's agent reads it once the rank has an arena."""
        self._explain_timeout_s, self._on_broken = explain_timeout_s, on_broken

    def announce(self, generation: int) -> bool:
        """Note that `generation` begins; False if that was known. Thread: any."""
        with self.changed:
            if generation <= self.announced:
                return False
            self.announced, self.announced_at = generation, time.monotonic()
            self.changed.notify_all()
            return True

    def check(self, since: int | None = None) -> None:
        """Raises: GenerationChanged if one newer than `since` (by default: the current one) has been announced."""
        if self.announced > (self.current if since is None else since):
            raise GenerationChanged(self.announced)

    def check_heard(self, generation: int) -> None:
        """Block until `generation`, which is known to be announced to others, is here too; then `check`."""
        if self.announced < generation:
            with self.changed:
                self.changed.wait_for(lambda: self.announced >= generation)
        self.check()

    def enter(self, generation: int) -> None:
        """Live in `generation` from here on. Raises: GenerationChanged if a newer one was announced meanwhile."""
        with self.changed:
            self.check(generation)
            self.current = self.announced = generation

    def explain(self, error: BaseException, since: int | None = None) -> NoReturn:
        """Raise GenerationChanged if one is announced, else `error`, met in a collective (or while `since` was built).

        Blocks: for the announcement, because neighbours feel a dead peer before anybody has decided anything.
        """
        before = self.current if since is None else since
        with self.changed:
            told = self.changed.wait_for(lambda: self.announced > before, self._explain_timeout_s)
        known = _NCCL if isinstance(error, dist.DistBackendError) else _OTHERS
        is_broken = isinstance(error, dist.DistNetworkError) or any(text in str(error) for text in known)
        # A connection that broke although nobody died is not the script's error, however long it takes to follow.
        if not told and is_broken and self._on_broken(before, str(error)):
            with self.changed:
                self.changed.wait_for(lambda: self.announced > before)
        if self.announced > before:
            raise GenerationChanged(self.announced) from error
        raise error

    def run(self, function: Callable[[], T], since: int, grace_s: float = 0.0) -> T:
        """Run `function` in a helper thread, and return its result. Raises: GenerationChanged if one newer than `since`
        was announced and `function` did not end within `grace_s` after that; it goes on, unattended."""
        try:
            helper = _idle.pop()
        except IndexError:
            helper = _Helper()
        helper.functions.put(function)
        while not helper.ended.acquire(timeout=SLICE_S):
            if self.announced > since:
                if helper.ended.acquire(timeout=grace_s):
                    break
                helper.is_left = True
                raise GenerationChanged(self.announced)
        (value, error), helper.outcome = helper.outcome, (None, None)
        _idle.append(helper)
        if error is not None:
            raise error
        return cast(T, value)


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
