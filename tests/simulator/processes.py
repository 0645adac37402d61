"""The processes of a simulated host beside its agent: for each local rank a supervisor, a standby process, a worker.

Rules of this file: what production's processes do for their agent: they connect, tell in order what they have to, do
as they are told. Their deaths are noticed in three ways (/proc, the standby process's word, the end of the connection),
each some time later. The toy job itself is worker.py's.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from deadpool_plugin.core import local
from deadpool_plugin.core.types import Rank

from .worker import Process

if TYPE_CHECKING:
    from .node import Node

FIRST_PID = 100
NOTICE_S = 0.05


class Peer:
    """The agent's end of a connection with a process; `hear(message, descriptors)` is the other end's."""

    def __init__(self, node: Node, pid: int, hear: Callable[[Any, tuple[int, ...]], None]) -> None:
        self._node, self.pid, self._hear = node, pid, hear
        self.tag: object = None
        self.closed = self._gone = False
        self._said: deque[tuple[Any, list[int]]] = deque()
        self._said_at = self._told_at = 0.0

    # ---- the agent's side

    def send(self, message: Any, fds: tuple[int, ...] = ()) -> None:
        if self.closed or self._gone:
            return
        timeline, cluster = self._node.timeline, self._node.cluster
        self._told_at = max(self._told_at, timeline.now + cluster.local_s())
        timeline.at(self._told_at, self._tell, message, tuple(fds))

    def _tell(self, message: Any, fds: tuple[int, ...]) -> None:
        if not self._gone:
            self._hear(message, fds)

    def close(self) -> None:
        self.closed = True
        self._said.clear()

    def read_rest(self) -> None:
        """All that is on its way is heard now."""
        while self._said and not self.closed:
            self._node.machine.processes.on_message(self, *self._said.popleft())

    async def drained(self) -> None:
        """It reads at once."""

    # ---- the process's side

    def say(self, message: Any, descriptors: tuple[int, ...] = ()) -> None:
        if self.closed or self._gone:
            return
        self._said.append((message, list(descriptors)))
        self._soon(self._arrive)

    def add(self, message: Any, descriptors: tuple[int, ...] = ()) -> None:
        """Say it together with what was said last."""
        self._said.append((message, list(descriptors)))
        self._node.timeline.at(self._said_at, self._node.loop.call_soon, self._arrive)

    def _soon(self, work: Callable[[], None]) -> None:
        timeline, cluster = self._node.timeline, self._node.cluster
        self._said_at = max(self._said_at, timeline.now + cluster.local_s())
        timeline.at(self._said_at, self._node.loop.call_soon, work)

    def _arrive(self) -> None:
        if self._said and not self.closed:
            self._node.machine.processes.on_message(self, *self._said.popleft())

    def end(self) -> None:
        """The process is gone: its last words are heard first."""
        if not self._gone:
            self._gone = True
            self._soon(self._closed)

    def _closed(self) -> None:
        self.read_rest()
        if not self.closed:
            self.closed = True
            self._node.machine.processes.on_closed(self)


class Slot:
    """One local rank's processes."""

    def __init__(self, node: Node, number: int, pids: Callable[[], int]) -> None:
        self._node, self.number, self._pids = node, number, pids
        self.supervisor = Peer(node, pids(), self._supervise)
        self.standby = Peer(node, pids(), self._stand_by)
        self.processes: dict[int, Process] = {}
        self._running = 0
        self.standby_ended = False

    def begin(self) -> None:
        self.supervisor.say(local.SupervisorHello(self.number, self.standby.pid), (0,))
        self.standby.say(local.StandbyHello(self.number))

    def _supervise(self, message: Any, fds: tuple[int, ...]) -> None:
        if isinstance(message, local.End):
            self.end()

    def _stand_by(self, message: Any, fds: tuple[int, ...]) -> None:
        match message:
            case local.RunRank():
                self._fork(message)
            case local.EndProcess(order=order):
                self._end(order)
            case local.RunsRank(order=order):
                self._replace(order)
            case local.End():
                self._node.timeline.after(self._node.cluster.end_s(), self._end_standby)

    def _fork(self, message: local.RunRank) -> None:
        if self.standby_ended:
            return
        if not message.stands_in:
            self._replace(message.order)
        order, rank = message.order, message.rank
        self.processes[order] = Process(self._node, self.number, order, rank, message.rehearses, self._pids())

    def _replace(self, order: int) -> None:
        self._end(self._running)
        self._running = order

    def _end(self, order: int) -> None:
        if (process := self.processes.pop(order, None)) is not None:
            process.end()

    def told_of_end(self, order: int, exit_code: int) -> None:
        """The standby process has seen its child's end."""
        if not self.standby_ended and self.processes.pop(order, None) is not None:
            self.standby.say(local.WorkerExited(order, exit_code))

    def _end_standby(self) -> None:
        if not self.standby_ended:
            self.standby_ended = True
            for process in self.processes.values():
                process.end()
            self.standby.end()
            self.supervisor.say(local.StandbyExited(0))

    def end(self) -> None:
        """All of it."""
        self._end_standby()
        self.supervisor.end()


class Processes:
    """One host's, for its agent (the contract of host/proc.py) and for the faults."""

    on_message: Callable[[Any, Any, list[int]], None]
    on_closed: Callable[[Any], None]

    def __init__(self, node: Node) -> None:
        self._node = node
        self._last_pid = FIRST_PID
        self.slots: list[Slot] = []
        self.pids: dict[int, Process] = {}
        self.watched: dict[int, tuple[Callable[[int], None], Callable[[float], None]]] = {}
        self._paused: list[Process] = []

    def _pid(self) -> int:
        self._last_pid += 1
        return self._last_pid

    def serve(self, on_message: Callable[[Any, Any, list[int]], None], on_closed: Callable[[Any], None]) -> None:
        self.on_message, self.on_closed = on_message, on_closed
        self.slots = [Slot(self._node, number, self._pid) for number in range(self._node.cluster.scenario.slots)]
        for slot in self.slots:
            slot.begin()

    @property
    def alive(self) -> list[Process]:
        return [process for slot in self.slots for process in slot.processes.values() if process.alive]

    def of(self, rank: Rank) -> Process | None:
        """The process that runs `rank` here now, if it lives."""
        return next((one for one in self.alive if one.rank == rank and (not one.rehearses or one.took_over)), None)

    def ended(self, process: Process, exit_code: int) -> None:
        """`process` has ended, which is noticed soon."""
        timeline, rng = self._node.timeline, self._node.cluster.rng
        slot = self.slots[process.slot]
        process.peer.end()
        timeline.after(NOTICE_S * rng.random(), slot.told_of_end, process.order, exit_code)
        if exit_code:
            timeline.after(NOTICE_S * rng.random(), self._node.loop.call_soon, self._seen, process.pid, exit_code)

    def _seen(self, pid: int, exit_code: int) -> None:
        watched = self.watched.pop(pid, None)
        if watched is not None:
            watched[0](exit_code)

    def stands_still(self, process: Process, for_s: float) -> None:
        """Somebody has stopped it, which is noticed after the job's patience."""

        def seen() -> None:
            if process.alive and process.pid in self.watched:
                self.watched[process.pid][1](for_s)

        self._node.timeline.after(for_s, self._node.loop.call_soon, seen)

    # ---- as the agent has it

    def watch(self, pid: int, on_end: Callable[[int], None], on_stopped: Callable[[float], None]) -> None:
        self.watched[pid] = (on_end, on_stopped)
        process = self.pids.get(pid)
        if process is not None and not process.alive and process.exit_code:
            self._node.loop.call_later(NOTICE_S, self._seen, pid, process.exit_code)

    def forget(self, pid: int) -> None:
        self.watched.pop(pid, None)

    def is_gone(self, pid: int) -> bool:
        for slot in self.slots:
            if slot.standby.pid == pid:
                return slot.standby_ended
        return pid not in self.pids or not self.pids[pid].alive

    def exit_code(self, pid: int) -> int | None:
        process = self.pids.get(pid)
        return process.exit_code or None if process is not None and not process.alive else None

    def catches(self, pid: int, number: int) -> bool:
        return False

    def kill(self, pid: int) -> None:
        if (process := self.pids.get(pid)) is not None:
            process.end()

    def sweep(self, local_rank: int) -> None:
        self.slots[local_rank].end()

    def pause(self, running: Mapping[int, int], others: Mapping[int, int]) -> None:
        for pid in running.values():
            if (process := self.pids.get(pid)) is not None and not process.held:
                process.hold()
                self._paused.append(process)

    def resume(self) -> None:
        paused, self._paused = self._paused, []
        for process in paused:
            process.go_on()

    def kill_paused(self) -> None:
        paused, self._paused = self._paused, []
        for process in paused:
            process.end()

    def end(self) -> None:
        """Everything that runs here ends at once."""
        for slot in self.slots:
            slot.end()
