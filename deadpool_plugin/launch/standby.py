"""`python -m deadpool_plugin.launch.standby COMMAND...`: a slot's standby process, which forks the slot's worker.

Rules of this file: nothing of the user's runs here, and no thread may exist while it forks. One forked process lives at
a time: an order ends the one before, with everything that one has left behind (orphans are reparented to us); what
cannot be ended is the node's end. A forked process that could not use its GPU executes this module again, with its
order in the environment. What the agent is told is how a process ended; what that means is decided elsewhere.
"""

from __future__ import annotations

import functools
import os
import select
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

import msgspec

from ..config import load
from ..core import local
from ..host import proc
from ..host.spawning import be_the_first_to_go, become_subreaper, end_children, reaped
from ..transport.framing import ConnectionClosed
from ..transport.linux import die_with_parent
from ..transport.unix import LocalConnection
from .lessons import NVML_CHECK, Lessons, cuda_is_lost, preload

DEFAULT_PRELOAD = ("torch", "torch.distributed")
ENDING_S = 60.0
"""Longer than a large process takes to give back what it has, on a device and in memory."""
_ORDER = "DEADPOOL_ORDER"
Run = Callable[[local.RunRank, int], object]
"""The work of a forked process: gets the order, and a descriptor to tell what it has imported (-1: nobody asks)."""


class Standby:
    """Serves orders until the agent says it is over; `serve` never returns.

    Args: ending_s: how long what was killed may take to end.
    """

    def __init__(
        self,
        connection: LocalConnection,
        local_rank: int,
        run: Run,
        modules: Sequence[str],
        ending_s: float = ENDING_S,
    ) -> None:
        self._connection, self._local_rank, self._run, self._modules = connection, local_rank, run, modules
        self._ending_s = ending_s
        self._pid = os.getpid()
        self._child = self._order = 0
        self._lessons = Lessons()

    def serve(self) -> NoReturn:
        """Import, then wait for orders and for ends."""
        become_subreaper()
        be_the_first_to_go()
        signal.signal(signal.SIGTERM, self._told_to_end)
        self._signals = _wake_on_children()
        self._connection.send(local.StandbyHello(self._local_rank))
        preload(self._modules)
        while True:
            waited = [self._connection.fileno(), self._signals[0], *self._lessons.pipes]
            readable, _, _ = select.select(waited, [], [])
            if self._signals[0] in readable:
                os.read(self._signals[0], 1 << 12)
                self._reap()
            if set(self._lessons.pipes) & set(readable):
                self._lessons.begin()
            if self._connection.fileno() in readable:
                self._hear()

    def _told_to_end(self, number: int, frame: object) -> None:
        """The launcher tells everybody on its host. A script that handles that itself needs us until it has ended."""
        if not (os.getpid() == self._pid and self._child and proc.catches(self._child, number)):
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    def _hear(self) -> None:
        try:
            message, _ = self._connection.recv()
        except ConnectionClosed:
            os._exit(0)
        if isinstance(message, local.EndWorker):
            self._end_child()
            os._exit(message.exit_code)
        if isinstance(message, local.RunRank):
            self._end_child()
            self._fork(message)

    def _end_child(self) -> None:
        """Kill the forked process and what it started. Blocks: until its memory is given back."""
        if self._child:
            os.kill(self._child, signal.SIGKILL)  # at once; it takes a while to look for the others
            self._child = 0
        self._end_children()

    def _end_children(self) -> None:
        """End our children. One that a driver or file system does not let go would hold the slot: leave the node."""
        try:
            end_children(self._ending_s)
        except TimeoutError as error:
            self._connection.send(local.CannotEnd(str(error)))
            os._exit(1)

    def _reap(self) -> None:
        for pid, exit_code in reaped():
            if pid == self._child:
                self._child = 0
                self._end_children()
                self._connection.send(local.WorkerExited(self._order, exit_code))

    def _fork(self, order: local.RunRank) -> None:
        self._lessons.pause()
        tell = self._lessons.ask(trains=not order.rehearses)
        me = os.getpid()
        sys.stdout.flush()
        sys.stderr.flush()
        self._order, self._child = order.order, os.fork()
        if self._child == 0:
            self._become(order, tell, me)
        if tell >= 0:
            os.close(tell)
        self._lessons.resume()

    def _become(self, order: local.RunRank, tell: int, parent: int) -> NoReturn:
        """The forked process; whatever happens, it does not return into the loop above."""
        try:
            die_with_parent(signal.SIGKILL, parent)
            signal.set_wakeup_fd(-1)
            for number in (signal.SIGCHLD, signal.SIGTERM):
                signal.signal(number, signal.SIG_DFL)
            for fd in (*self._signals, *self._lessons.pipes, self._connection.fileno()):
                os.close(fd)
            self._run(order, tell)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)


def _wake_on_children() -> tuple[int, int]:
    """The ends of a pipe that becomes readable whenever a child ends."""
    read_end, write_end = os.pipe()
    os.set_blocking(read_end, False)
    os.set_blocking(write_end, False)
    signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    return read_end, write_end


def main(script: list[str]) -> NoReturn:
    """Entry point, also for a process that was forked instead of executed (the environment says the rest)."""
    from .worker import become

    die_with_parent()
    os.environ.setdefault(NVML_CHECK, "1")
    config = load(Path(os.environ["DEADPOOL_CONFIG"]))
    local_rank = int(os.environ["LOCAL_RANK"])
    carry_out = functools.partial(become, config, local_rank, script)
    if _ORDER in os.environ:
        carry_out(msgspec.json.decode(os.environ.pop(_ORDER), type=local.RunRank), -1)

    def run(order: local.RunRank, tell: int) -> None:
        if cuda_is_lost():
            _execute(script, order)
        carry_out(order, tell)

    connection = LocalConnection.to(os.environ["DEADPOOL_SOCKET"])
    modules = config.preload if config.preload is not None else DEFAULT_PRELOAD
    Standby(connection, local_rank, run, modules, max(config.phase_timeout_s, ENDING_S)).serve()


def _execute(script: list[str], order: local.RunRank) -> NoReturn:
    """Carry out `order`, in a forked process, without anything that was imported before the fork."""
    print(
        "[deadpool] the import of a module initialised CUDA: this process imports everything again",
        file=sys.stderr,
        flush=True,
    )
    os.environ[_ORDER] = msgspec.json.encode(order).decode()
    os.execv(sys.executable, [sys.executable, "-u", "-m", "deadpool_plugin.launch.standby", *script])


if __name__ == "__main__":
    main(sys.argv[1:])
