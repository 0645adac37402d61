"""One host's asyncio event loop on simulated time.

Rules of this file: what one host does is in the order of asyncio, first in, first out; what hosts do at the same
moment is in the order in which it was asked for. A host that stands still finds everything that came for it when it
goes on. Of one that is gone nothing runs any more: its coroutines are parked for ever and never cancelled, as after
SIGKILL.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable, Coroutine, Iterator
from contextvars import Context
from typing import Any, TypeVar
from unittest.mock import patch

from .clock import Timeline

T = TypeVar("T")
_running: list[HostLoop | None] = [None]
CLOSES_MAX = 8
CALLBACKS_MAX = 100
"""That one host runs before others have their turn."""


class Due:
    """A callback that is ready, or will be `at` a time of its host's clock: what asyncio calls a handle.

    Context variables are left out: nothing that is simulated has any.
    """

    __slots__ = ("args", "at", "callback")

    def __init__(self, callback: Callable[..., object], args: tuple[Any, ...], at: float | None = None) -> None:
        self.callback: Callable[..., object] | None = callback
        self.args, self.at = args, at

    def cancel(self) -> None:
        self.callback, self.args = None, ()

    def cancelled(self) -> bool:
        return self.callback is None

    def when(self) -> float:
        assert self.at is not None
        return self.at


class HostLoop(asyncio.AbstractEventLoop):
    """`rate`: how much faster than simulated time the host's clock runs; it began at `offset_s`.

    `kernel`: the host's, for its sockets (network.py).
    """

    kernel: Any

    def __init__(self, timeline: Timeline, rate: float, offset_s: float) -> None:
        self.timeline = timeline
        self._rate, self._offset_s = rate, offset_s
        self._ready: deque[Due] = deque()
        self._has_turn = False
        self.paused = self.gone = False
        self._handler: Callable[[asyncio.AbstractEventLoop, dict[str, Any]], object] | None = None

    # ---- time and turns

    def time(self) -> float:
        return self._offset_s + self._rate * self.timeline.now

    def call_soon(self, callback: Callable[..., object], *args: Any, context: Context | None = None) -> Due:  # type: ignore[override]
        due = Due(callback, args)
        if not self.gone:
            self._ready.append(due)
            if not self._has_turn and not self.paused:
                self._has_turn = True
                self.timeline.next(self._turn)
        return due

    call_soon_threadsafe = call_soon  # type: ignore[assignment]

    def call_later(  # type: ignore[override]
        self, delay: float, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> Due:
        due = Due(callback, args, self._offset_s + self._rate * self.timeline.now + delay)
        self.timeline.after(delay / self._rate if delay > 0.0 else 0.0, self._fire, due)
        return due

    def call_at(  # type: ignore[override]
        self, when: float, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> Due:
        return self.call_later(when - self.time(), callback, *args, context=context)

    def _fire(self, due: Due) -> None:
        if due.callback is not None and not self.gone:
            self._ready.append(due)
            if not self._has_turn and not self.paused:
                self._turn()

    def hear(self, work: Callable[[], None]) -> None:
        """Do `work`, which comes from outside, and then what that makes ready, without a turn of its own."""
        if self._has_turn or self.paused or self.gone:
            work()
            return
        self._has_turn = True  # what is made ready asks for none
        work()
        self._turn()

    def _turn(self) -> None:
        """All that is ready now, and what that makes ready, as long as that is not too much at a time."""
        ready, self._has_turn, left = self._ready, True, CALLBACKS_MAX
        _running[0] = self
        while ready and left and not (self.paused or self.gone):
            left -= 1
            due = ready.popleft()
            if (callback := due.callback) is not None:
                try:
                    callback(*due.args)
                except (SystemExit, KeyboardInterrupt):
                    raise
                except BaseException as error:
                    self.call_exception_handler({"message": str(callback), "exception": error})
        if ready and not (self.paused or self.gone):
            self.timeline.next(self._turn)
        else:
            self._has_turn = False

    def run_from_here(self) -> None:
        """This is the running loop until another one is."""
        _running[0] = self

    def pause(self) -> None:
        self.paused = True

    def wake(self, timers_first: bool) -> None:
        """Go on with all that came meanwhile; `timers_first`: its own clock speaks before anybody else."""
        self.paused = False
        if timers_first:
            self._ready = deque(sorted(self._ready, key=lambda due: due.at is None))
        if self._ready and not self._has_turn:
            self._has_turn = True
            self.timeline.next(self._turn)

    def end(self) -> None:
        """SIGKILL."""
        self.gone = True
        self._ready.clear()

    def forget(self) -> None:
        """The run is over and judged: close what is parked here. Left to the garbage collector, coroutines that are
        closed while their tasks are freed crash Python (3.11: asyncio.timeout)."""
        self.end()
        self.run_from_here()
        for task in asyncio.all_tasks(self):
            coro: Any = task.get_coro()
            for _ in range(CLOSES_MAX):  # what awaits something as it ends ignores the first
                with contextlib.suppress(BaseException):
                    coro.close()
                    break
            task._log_destroy_pending = False  # type: ignore[attr-defined]

    # ---- what asyncio asks of a loop

    def create_future(self) -> asyncio.Future[Any]:
        return asyncio.Future(loop=self)

    def create_task(self, coro: Coroutine[Any, Any, T], **options: Any) -> asyncio.Task[T]:  # type: ignore[override]
        return asyncio.Task(coro, loop=self, **options)

    def get_debug(self) -> bool:
        return False

    def is_running(self) -> bool:
        return not self.gone

    def is_closed(self) -> bool:
        return False

    def set_exception_handler(
        self, handler: Callable[[asyncio.AbstractEventLoop, dict[str, Any]], object] | None
    ) -> None:
        self._handler = handler

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        if self._handler is not None and not self.gone:
            self._handler(self, context)

    def add_signal_handler(self, sig: int, callback: Any, *args: Any) -> None:  # type: ignore[override]
        """Nobody sends a simulated agent a signal that it could handle."""

    # ---- sockets: see network.py

    async def sock_connect(self, sock: Any, address: Any) -> None:
        await sock.connect(address)

    async def sock_accept(self, sock: Any) -> tuple[Any, Any]:
        accepted = await sock.accept()
        return accepted, accepted.getpeername()

    async def sock_recv(self, sock: Any, nbytes: int) -> bytes:
        return bytes(await sock.receive(nbytes))

    async def sock_sendall(self, sock: Any, data: Any) -> None:
        sock.send(bytes(data))

    async def create_connection(self, protocol_factory: Any, *args: Any, sock: Any = None, **options: Any) -> Any:
        protocol = protocol_factory()
        return sock.carry(protocol), protocol


@contextlib.contextmanager
def simulated() -> Iterator[None]:
    """Host loops run meanwhile, one at a time.

    asyncio's own way to set or ask which loop runs calls getpid(2) each time, which costs up to a seventh of a run.
    """

    def running() -> Any:
        return _running[0]

    def task(loop: asyncio.AbstractEventLoop | None = None) -> asyncio.Task[Any] | None:
        return current_task(loop or _running[0])

    current_task, events = asyncio.tasks.current_task, asyncio.events
    with contextlib.ExitStack() as fakes:
        fakes.callback(_running.__setitem__, 0, None)
        for module, name, function in (
            (asyncio, "get_running_loop", running),
            (events, "get_running_loop", running),
            (events, "_get_running_loop", running),
            (events, "_get_event_loop", lambda stacklevel=3: running()),
            (asyncio, "current_task", task),
            (asyncio.tasks, "current_task", task),
        ):
            fakes.enter_context(patch.object(module, name, function))
        yield
