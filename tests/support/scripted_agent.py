"""Worker processes without agents: one loop in the test plays every node's agent over socket pairs.

Workers are forked from a process that has imported torch and megatron-core once (a worker then starts in
milliseconds). The loop does what agents do, without the protocol: it starts the groups, hands out arenas, commits
what all ranks have staged, and after a kill moves survivors and a rehearsed process to the next generation.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from deadpool_plugin.config import Config
from deadpool_plugin.core import local
from deadpool_plugin.mirror.arena import SlotPair
from deadpool_plugin.transport.framing import ConnectionClosed
from deadpool_plugin.transport.unix import LocalConnection

from . import expect, present

SILENT_S = 180.0
"""Without a word of any process that is a hang, however loaded the machine is: a step takes a process a second of CPU,
and its start ten."""


@dataclass
class Worker:
    """The loop's view of one rank."""

    pid: int
    connection: LocalConnection
    ready: local.RankReady | None = None
    arena: SlotPair | None = None
    staged: int = -1
    records: list[bytes] = field(default_factory=list)
    finished: bool = False
    events: list[tuple[str, dict[str, Any]]] = field(default_factory=list)

    def tell(self, message: local.LocalMessage, *descriptors: int) -> None:
        """One that has died is found by `turn`, when it comes to that."""
        with contextlib.suppress(ConnectionClosed):
            self.connection.send(message, descriptors)


@dataclass
class Outcome:
    """Outcome of a job: exit statuses by rank (of the last process that had it), and what was seen on the way."""

    exit_codes: dict[int, int]
    swaps: int
    restore_steps: list[int]
    events: dict[int, list[tuple[str, dict[str, Any]]]]


class ScriptedAgent:
    """Runs one job of `world_size` ranks of `argv`.

    Args:
        before_script: called in each child (rank, incarnation) before the script runs; installs faults.
        rehearse: ranks that stand by from the start of training; others are rehearsed after they are lost.
        output: directory for one log file per process.
    """

    def __init__(self, world_size, argv, output: Path, before_script=lambda rank, incarnation: None, rehearse=()):
        self.world_size, self.argv, self.output = world_size, argv, output
        self.before_script, self.rehearse = before_script, tuple(rehearse)
        self.config = Config(header_kib=256, patience_s=20, output_dir=output / "deadpool")
        self.workers: dict[int, Worker] = {}
        self.spares: dict[int, Worker] = {}
        self.incarnations = dict.fromkeys(range(world_size), 0)
        self.stores: dict[tuple[int, int], tuple[str, Worker]] = {}
        """By rank and process: a rank and who rehearses it offer one each, in either order."""
        self.generation = self.swaps = 0
        self.committed = -1
        self.restore_steps: list[int] = []
        self.lost: set[int] = set()
        self.restored: set[int] = set()

    # ---- processes

    def fork(self, rank: int, spare: bool) -> Worker:
        ours, theirs = socket.socketpair()
        pid = os.fork()
        if pid == 0:
            ours.close()
            code = 99
            try:
                code = self.child(rank, LocalConnection(theirs), spare)
            finally:
                os._exit(code)
        theirs.close()
        return Worker(pid, LocalConnection(ours))

    def child(self, rank: int, connection: LocalConnection, spare: bool) -> int:
        import faulthandler
        import sys

        from deadpool_plugin.launch.worker import run_script, start_following, start_live, tell_failing
        from deadpool_plugin.worker.mute import Mute

        log = os.open(self.output / f"rank{rank}.{self.incarnations[rank]}.log", os.O_WRONLY | os.O_CREAT, 0o644)
        os.dup2(log, 1)
        os.dup2(log, 2)
        sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
        sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
        faulthandler.register(signal.SIGUSR1, all_threads=True)
        os.environ.update(RANK=str(rank), WORLD_SIZE=str(self.world_size), LOCAL_RANK=str(rank), DEADPOOL_SOCKET="x")
        if spare:
            rehearsal = expect(local.Recording, connection.recv()[0])
            mute = Mute(os.open(self.output / f"rehearsal{rank}.log", os.O_WRONLY | os.O_CREAT, 0o644))
            context = start_following(connection, self.config, rehearsal, 0, mute)
        else:
            role = local.RunRank(rank, {})
            context = start_live(connection, self.config, role, local_rank=0)
        self.before_script(rank, self.incarnations[rank])
        return run_script(list(self.argv), context, lambda error: tell_failing(connection, rank, error))

    def start_rehearsal(self, rank: int) -> None:
        self.incarnations[rank] += 1
        spare = self.spares[rank] = self.fork(rank, spare=True)
        spare.tell(local.Recording(rank, present(self.workers[rank].ready).recording))
        spare.records = list(self.workers[rank].records[: self.committed + 1])
        spare.tell(local.History(spare.records[1:]))

    # ---- the loop

    def run(self) -> Outcome:
        """Raises: TimeoutError if nobody says anything for `SILENT_S`; stacks are dumped."""
        self.workers = {rank: self.fork(rank, spare=False) for rank in range(self.world_size)}
        try:
            while not all(worker.finished for worker in self.workers.values()):
                self.turn()
            for worker in self.workers.values():
                worker.tell(local.End(0))
            codes = {rank: wait_for(worker.pid) for rank, worker in self.workers.items()}
            events = {rank: worker.events for rank, worker in self.workers.items()}
            return Outcome(codes, self.swaps, self.restore_steps, events)
        finally:
            self.kill_everything()

    def turn(self) -> None:
        living = [(rank, worker) for rank, worker in self.workers.items() if rank not in self.lost]
        sockets = {worker.connection: (rank, worker) for rank, worker in [*living, *self.spares.items()]}
        readable, _, _ = select.select(list(sockets), [], [], SILENT_S)
        if not readable:
            self.dump_stacks()
            raise TimeoutError(f"nobody said anything for {SILENT_S:g} s; stacks are in {self.output}")
        for connection in readable:
            rank, worker = sockets[connection]
            try:
                message, _ = connection.recv()
            except ConnectionClosed:
                if worker is self.workers.get(rank):
                    self.rank_lost(rank)
                    return
                raise AssertionError(f"the rehearsal of rank {rank} ended: see {self.output}") from None
            self.handle(rank, worker, message)

    def handle(self, rank: int, worker: Worker, message: local.LocalMessage) -> None:
        match message:
            case local.StoreOffer(address):  # of a spare, too, which offers one only
                self.stores[rank, worker.pid] = address, worker
                if self.generation == 0 and rank == 0 and self.workers[0].ready is None:
                    store, _ = self.stores.pop((0, worker.pid))
                    for other in self.workers.values():
                        other.tell(local.StartGroups(0, store))
                self.continue_swap()
            case local.RankReady():
                worker.ready = message
                worker.arena = SlotPair.create(rank, message.header_bytes, message.payload_bytes)
                worker.tell(local.ArenaHandOver(rank, message.header_bytes, message.payload_bytes), worker.arena.fd)
                if all(one.ready for one in self.workers.values()):
                    for standby in self.rehearse:
                        self.start_rehearsal(standby)
            case local.Staged(_, step, generation, records) if generation == self.generation and not self.lost:
                worker.staged = step
                worker.records[step + 1 - len(records) :] = records
                self.commit()
            case local.WorkerFinished():
                worker.finished = True
            case local.Moved(_, step):
                worker.events.append(("Moved", {"step": step}))
            case local.WorkerEvent(kind, fields):
                worker.events.append((kind, fields))
            case local.Failing(_, reason):
                raise AssertionError(f"the script of rank {rank} failed: {reason}")

    def commit(self) -> None:
        newest = min(worker.staged for worker in self.workers.values())
        if newest <= self.committed:
            return
        self.committed = newest
        for worker in self.workers.values():
            worker.tell(local.Committed(newest))
        for rank, spare in self.spares.items():
            known = len(spare.records)
            new = self.workers[rank].records[known : newest + 1]
            spare.records += new
            spare.tell(local.History(new))

    # ---- a swap

    def rank_lost(self, rank: int) -> None:
        self.lost.add(rank)
        os.waitpid(self.workers[rank].pid, 0)
        self.generation += 1
        self.stores.pop((rank, self.workers[rank].pid), None)
        for other, worker in self.workers.items():
            worker.finished = False
            if other not in self.lost:
                worker.tell(local.Abort(self.generation))
        self.continue_swap()

    def continue_swap(self) -> None:
        """Once a store is on offer: everyone to the newest step all ranks have staged."""
        if not self.lost or not self.stores:
            return
        store, host = self.stores.pop(min(self.stores))
        step = min(worker.staged for worker in self.workers.values())
        self.restore_steps.append(step)
        self.swaps += 1
        for rank in self.lost:
            if rank not in self.spares:
                self.start_rehearsal(rank)
            self.take_over(rank, self.spares.pop(rank), store, step)
        for rank, worker in self.workers.items():
            if rank not in self.lost:
                worker.tell(local.Join(self.generation, store, step))
            worker.staged = step
            worker.tell(local.Committed(step))
        host.tell(local.HostStore())
        self.committed = step
        self.lost.clear()

    def take_over(self, rank: int, spare: Worker, store: str, step: int) -> None:
        lost = self.workers[rank]
        known = len(spare.records)
        spare.tell(local.History(lost.records[known : step + 1]))
        spare.records, spare.arena, spare.ready, spare.staged = lost.records[: step + 1], lost.arena, lost.ready, step
        ready = present(lost.ready)
        order = local.TakeOver(self.generation, store, step, ready.header_bytes, ready.payload_bytes)
        spare.tell(order, present(lost.arena).fd)
        spare.events = lost.events + [("TakenOver", {"rank": rank})]
        self.workers[rank] = spare

    # ---- the end

    def dump_stacks(self) -> None:
        for worker in [*self.workers.values(), *self.spares.values()]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(worker.pid, signal.SIGUSR1)
        time.sleep(0.5)  # the dumps are written by the processes themselves

    def kill_everything(self) -> None:
        for worker in [*self.workers.values(), *self.spares.values()]:
            try:
                os.kill(worker.pid, signal.SIGKILL)
                os.waitpid(worker.pid, 0)
            except (ProcessLookupError, ChildProcessError):
                pass


def wait_for(pid: int) -> int:
    deadline = time.monotonic() + SILENT_S
    while time.monotonic() < deadline:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        select.select([], [], [], 0.01)
    raise TimeoutError(f"process {pid} did not end")
