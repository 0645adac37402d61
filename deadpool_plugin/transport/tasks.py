"""Work on an event loop that nobody awaits: kept until it is over, and begun from other threads."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class Tasks:
    """Running tasks, which the loop alone would not keep alive. Who starts one minds its errors. Thread: the loop's."""

    def __init__(self) -> None:
        self._tasks: dict[asyncio.Task[None], None] = {}

    def start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks[task] = None
        task.add_done_callback(self._tasks.pop)
        return task

    def cancel(self) -> None:
        for task in self._tasks:
            task.cancel()

    async def end(self) -> None:
        """`cancel`, and wait until they have ended."""
        self.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


def begin(work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
    """Start a task that may be given up before it is awaited: its exception is then nobody's, and not reported."""
    task = asyncio.get_running_loop().create_task(work)
    task.add_done_callback(lambda task: task.cancelled() or task.exception())
    return task


def loop_time() -> float:
    """Read the running event loop's clock, in seconds, monotonic; a simulated loop has its own."""
    return asyncio.get_running_loop().time()


def call_at_multiple(
    loop: asyncio.AbstractEventLoop, period_s: float, function: Callable[[], object]
) -> asyncio.TimerHandle:
    """Call `function` at the next whole multiple of `period_s`: what is due at one wakes the process up once."""
    now = loop.time()
    when = (now // period_s + 1) * period_s
    return loop.call_at(when if when > now else when + period_s, function)  # a quotient may be rounded down


def soon(loop: asyncio.AbstractEventLoop, function: Callable[..., object], *arguments: object) -> None:
    """Call `function` on the loop, unless that has ended. Thread: any."""
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(function, *arguments)
