"""The worker's line to its node's agent: one reading thread, and waits that a swap can interrupt.

Rules of this file: the reading thread notes what came, and carries out two orders at once. Every other decision is
the main thread's, but that a snapshot is wanted of a step that was to have none. The agent's end of file ends the
process: a worker without an agent is nobody's.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable
from typing import NoReturn, Protocol

from ..comm.generations import Generations
from ..core import local
from ..core.chain import Chain
from ..errors import EXIT_FENCED, EXIT_OK, present
from ..transport.framing import ConnectionClosed
from ..transport.unix import LocalConnection


def give_up(reason: str) -> NoReturn:
    """End this process, which its agent then replaces: one that exits with a code might end the job."""
    print(f"[deadpool] process {os.getpid()} ends itself to be replaced: {reason}", file=sys.stderr, flush=True)
    while True:
        os.kill(os.getpid(), signal.SIGKILL)


class JobEnded(Exception):
    """The job has ended well in the midst of a swap: all scripts had come to their end before it."""


class Orders(Protocol):
    """The agent's orders that are carried out at once, on the link's thread."""

    def abort(self, generation: int) -> None: ...  # announce it, and unblock the main thread
    def offer_store(self) -> None: ...  # host another store, and send where


class AgentLink:
    """Messages of the agent, and `send` to it. Thread: main, but any for `send`, `event` and `wake`."""

    def __init__(self, connection: LocalConnection, generations: Generations) -> None:
        self._connection, self._generations = connection, generations
        self._changed = generations.changed  # one condition: the main thread also waits for the next generation
        self._inbox: deque[tuple[local.LocalMessage, list[int]]] = deque()
        self._join: local.Join | None = None
        self._end_code: int | None = None
        self.committed = -1  # the newest step known to be so, -1 before the first,
        self.committed_at = 0.0  # and since when
        self.chain = Chain()  # the steps of which this rank takes a snapshot, as far as they are known
        self.on_snapshots: Callable[[], None] = lambda: None  # called when that changes, with the lock held

    def start(self, orders: Orders) -> None:
        """Begin reading (the process has a second thread from here on: no fork afterwards)."""
        threading.Thread(target=self._read, args=(orders,), name="deadpool-link", daemon=True).start()

    def send(self, message: local.LocalMessage) -> None:
        self._connection.send(message)

    def event(self, kind: str, **fields: object) -> None:
        self.send(local.WorkerEvent(kind, {"time": time.time(), **fields}))

    # ---- reading thread

    def _read(self, orders: Orders) -> None:
        try:
            while True:
                match self._connection.recv():
                    case local.Abort(generation), _:
                        orders.abort(generation)
                    case local.HostStore(), _:
                        orders.offer_store()  # the main thread may be waiting for others that wait for it
                    case message, descriptors:
                        self._note(message, descriptors)
        except ConnectionClosed:
            os._exit(EXIT_FENCED)
        except BaseException as error:  # a deaf worker would hang the others
            traceback.print_exc()
            give_up(f"it could not carry out its agent's order: {error}")

    def _note(self, message: local.LocalMessage, descriptors: list[int]) -> None:
        with self._changed:
            match message:
                case local.Committed(step, snapshots, void):
                    if step > self.committed:
                        self.committed, self.committed_at = step, time.monotonic()
                        self.chain.forget_before(step)
                    # Else this process has yet to leave the state that a snapshot would be taken of.
                    if self.chain.learn(snapshots, void) and self._generations.announced <= self._generations.current:
                        self.on_snapshots()
                case local.Join(restore_step=restore_step):
                    self._join = message
                    self.committed = min(self.committed, restore_step)  # what came after it has not happened
                    self.chain = Chain(restore_step, message.every, message.fixed)
                case local.TakeOver(restore_step=restore_step):
                    self.chain = Chain(restore_step, message.every, message.fixed)
                    self._inbox.append((message, descriptors))
                case local.ArenaHandOver():
                    self.chain = Chain(0, message.every, message.fixed)
                    self._inbox.append((message, descriptors))
                case local.End(exit_code):
                    self._end_code = exit_code
                case _:
                    self._inbox.append((message, descriptors))
            self._changed.notify_all()

    # ---- main thread

    def receive(self, *kinds: type[local.LocalMessage]) -> tuple[local.LocalMessage, list[int]]:
        """Return the oldest message of one of `kinds`; blocks until there is one."""
        with self._changed:
            found = self._changed.wait_for(lambda: [item for item in self._inbox if isinstance(item[0], kinds)])
            self._inbox.remove(found[0])
            return found[0]

    def wait_until(self, done: Callable[[], bool], *, interruptible: bool = True) -> None:
        """Block until `done()`, whose changes call `wake`. Raises: GenerationChanged if `interruptible`."""
        with self._changed:
            while not done():
                if interruptible:
                    self._generations.check()
                self._changed.wait()

    def wake(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def wait_for_gate(self, step: int, cancelled: Callable[[], bool]) -> int | None:
        """Staging thread: block until `step` may be staged. Returns: the snapshot before it; None if `cancelled()`."""
        with self._changed:
            self._changed.wait_for(lambda: cancelled() or self.chain.may_stage(step, self.committed))
            return None if cancelled() else self.chain.before(step)

    @property
    def generation(self) -> int:
        return self._generations.current

    def locked(self) -> threading.Condition:
        """Return what keeps `committed` and `chain` as they are while it is held."""
        return self._changed

    def wait_for_join(self) -> local.Join:
        """Tell the agent that this rank has unwound; block until it hands over the newest plan. Raises: JobEnded."""
        told = self._generations.current
        with self._changed:
            while True:
                if self._end_code == EXIT_OK:
                    raise JobEnded
                if self._generations.announced > told:
                    told = self._generations.announced
                    self.send(local.Unwound(told))
                if self._join is not None and self._join.generation >= max(told, self._generations.current + 1):
                    return self._join
                self._changed.wait()

    def wait_for_end(self, *, interruptible: bool = True) -> int:
        """Block until the agent ends this worker. Raises: GenerationChanged if `interruptible`."""
        self.wait_until(lambda: self._end_code is not None, interruptible=interruptible)
        return present(self._end_code, "the wait for the end was over before it")
