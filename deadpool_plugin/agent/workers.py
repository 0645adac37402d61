"""This node's processes as the agent sees them: one slot per local rank, with its supervisor, worker and rehearser.

Rules of this file: facts in, inputs out. A process's death becomes an input once, with the best reason there is: a
signal or a vanished supervisor means lost (somebody else can do it), an exit code of its own means failed (it would
fail anywhere). Messages that are not about life and death go to the handlers others have registered.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..core import io
from ..core.types import NO_STEP, Generation, NodeId, Rank, Step, World
from ..errors import invariant
from ..transport import local
from ..transport.local import LocalPeer
from ..transport.unix import close_descriptors
from . import proc
from .output import Pipe, Writer
from .watch import Watch, described_exit
from .world import Place, standby_env, worker_env

EXIT_REPORT_S = 2.0
"""How long after a worker's connection has ended its supervisor may take to say how it ended."""


@dataclass
class Slot:
    """One local rank. `worker` is the process the supervisor started; on a node that stood by, `rehearser` is the one
    it forked, which serves `rank` once it has been told to take over."""

    local_rank: int
    rank: Rank = -1
    supervisor: LocalPeer | None = None
    worker: LocalPeer | None = None
    worker_pid: int = 0
    rehearser: LocalPeer | None = None
    rehearsing: Rank = -1
    took_over: bool = False
    restored: bool = False
    ended: bool = False
    pipe: Pipe | None = None

    @property
    def serving(self) -> LocalPeer | None:
        """The process that runs the slot's rank, if there is one now."""
        if self.rank < 0:
            return None
        if self.rehearsing >= 0:
            return self.rehearser if self.took_over else None
        return self.worker


Handler = Callable[[Slot, LocalPeer, Any], None]


class Workers:
    """Thread: the event loop's only. `feed` gets the controller's inputs; `handlers` the messages not handled here."""

    def __init__(
        self,
        place: Place,
        job_tag: str,
        address: str,
        output_dir: Path,
        writer: Writer,
        watch: Watch,
        feed: Callable[[io.Input], None],
    ) -> None:
        self._place, self._job_tag, self.address = place, job_tag, address
        self._output_dir, self._writer, self._watch, self._feed = output_dir, writer, watch, feed
        self.slots = [Slot(local_rank) for local_rank in range(place.local_size)]
        self.world: World | None = None
        self.ending = False
        self.committed: Step = NO_STEP
        self._exit_code = 0
        self.late_exit_code = 0
        self.changed = asyncio.Event()
        self.handlers: dict[type[local.LocalMessage], Handler] = {
            local.WorkerExited: lambda slot, peer, message: self._ended(slot, message.exit_code),
            local.Leaving: self._leaving,
            local.StoreOffer: self._store_offer,
            local.Restored: self._restored,
            local.Finished: lambda slot, peer, message: self._feed(io.WorkerFinished(message.rank)),
        }

    # ---- what comes in

    def on_message(self, peer: LocalPeer, message: local.LocalMessage, descriptors: list[int]) -> None:
        if isinstance(message, local.SupervisorHello):
            self._supervisor(peer, message, descriptors)
            return
        close_descriptors(descriptors)
        if isinstance(message, local.WorkerHello):
            self._worker(peer, message)
        elif isinstance(message, local.RehearserHello):
            self._rehearser(peer, message)
        elif isinstance(peer.tag, Slot):
            self.handlers[type(message)](peer.tag, peer, message)

    def _slot(self, local_rank: int) -> Slot:
        invariant(0 <= local_rank < len(self.slots), f"no local rank {local_rank} of {len(self.slots)}")
        return self.slots[local_rank]

    def _supervisor(self, peer: LocalPeer, hello: local.SupervisorHello, descriptors: list[int]) -> None:
        slot = peer.tag = self._slot(hello.local_rank)
        slot.supervisor, slot.worker_pid = peer, hello.worker_pid
        slot.pipe = Pipe(descriptors[0], self._writer)
        self._watch.add(hello.worker_pid, lambda code: self._ended(slot, code), lambda s: self._stopped(slot, s))
        if self.world is not None:
            self._name_output(slot)

    def _worker(self, peer: LocalPeer, hello: local.WorkerHello) -> None:
        slot = peer.tag = self._slot(hello.local_rank)
        slot.worker = peer
        if self.world is not None:
            self._assign(slot)

    def _rehearser(self, peer: LocalPeer, hello: local.RehearserHello) -> None:
        slot = self._slot(hello.local_rank)
        if hello.rank != slot.rehearsing or slot.rehearser is not None:
            peer.close()  # an order that has been overtaken
            return
        peer.tag, slot.rehearser = slot, peer
        self._watch.add(
            hello.pid, lambda code: self._rehearser_ended(slot, peer, code), lambda s: self._stopped(slot, s)
        )
        self.handlers[local.RehearserHello](slot, peer, hello)

    def _leaving(self, slot: Slot, peer: LocalPeer, message: local.Leaving) -> None:
        name = signal.Signals(message.signal).name
        if message.signal == signal.SIGINT:
            self._feed(io.StopRequested(f"interrupted by {name} on node {self._place.node}", 128 + message.signal))
        else:
            self._lost(slot, f"the launcher of node {self._place.node} ended its processes ({name})")

    def _store_offer(self, slot: Slot, peer: LocalPeer, message: local.StoreOffer) -> None:
        host = message.host
        if not host or host.startswith("127.") and not self.address.startswith("127."):
            host = self.address
        self._feed(io.StoreOffered(f"{host}:{message.port}"))

    def _restored(self, slot: Slot, peer: LocalPeer, message: local.Restored) -> None:
        slot.restored = True
        self._feed(io.WorkerRestored(message.rank, message.generation))

    # ---- life and death

    def _lost(self, slot: Slot, reason: str) -> None:
        if self.ending:
            return
        if slot.rank >= 0:
            self._feed(io.WorkerLost(slot.rank, reason))
        else:
            self._feed(io.SpareFailed(slot.local_rank, slot.rehearsing, reason))

    def _ended(self, slot: Slot, exit_code: int) -> None:
        """The supervisor's child is ending (told by /proc or by the supervisor, whichever is first)."""
        self.changed.set()
        if slot.ended:
            return
        slot.ended = True
        if self.ending and exit_code > 0:
            self.late_exit_code = exit_code
        self._watch.forget(slot.worker_pid)
        self._judge(slot, exit_code, f"process {slot.worker_pid}")

    def _judge(self, slot: Slot, exit_code: int, what: str) -> None:
        if self.ending:
            return
        if exit_code < 0 or slot.rank < 0 or (slot.took_over and not slot.restored):
            self._lost(slot, f"{what} {described_exit(exit_code)}")
        elif exit_code > 0:
            self._feed(io.WorkerFailed(slot.rank, exit_code, "see its output above"))
        else:
            self._feed(io.WorkerFailed(slot.rank, 1, f"{what} exited with 0 before the job had ended"))

    def _rehearser_ended(self, slot: Slot, peer: LocalPeer, exit_code: int) -> None:
        if slot.rehearser is peer:
            slot.rehearser, slot.ended = None, slot.took_over or slot.ended
            self._watch.forget(peer.pid)
            self._judge(slot, exit_code, f"process {peer.pid}")

    def _stopped(self, slot: Slot, seconds: float) -> None:
        self._lost(slot, f"it has been stopped (state T) for {seconds:.1f} s")

    def on_closed(self, peer: LocalPeer) -> None:
        slot = peer.tag
        if not isinstance(slot, Slot):
            return
        self.changed.set()
        if peer is slot.supervisor:
            slot.supervisor = None
            if not self.ending:
                proc.sweep(f"{self._job_tag}{slot.local_rank}.")
                self._lost(slot, f"supervisor of local rank {slot.local_rank} is gone")
        elif peer is slot.rehearser:
            if self.ending and slot.worker is not None:
                slot.worker.send(local.EndWorker(self._exit_code))
            status = proc.look(peer.pid)
            known = status is not None and status.ending
            self._rehearser_ended(slot, peer, os.waitstatus_to_exitcode(status.wait_status) if status and known else -9)
        elif peer is slot.worker:
            slot.worker = None
            asyncio.get_running_loop().call_later(EXIT_REPORT_S, self._unexplained, slot)

    def _unexplained(self, slot: Slot) -> None:
        if not slot.ended:
            slot.ended = True
            self._lost(slot, f"process {slot.worker_pid} closed its connection and did not end")

    # ---- orders

    def form(self, world: World, node: NodeId) -> None:
        """The world is known: tell every process who it is."""
        self.world = world
        for slot, rank in zip(self.slots, world.ranks_of(node), strict=False):
            slot.rank = rank
        for slot in self.slots:
            if slot.worker is not None:
                self._assign(slot)
            if slot.pipe is not None:
                self._name_output(slot)

    def _assign(self, slot: Slot) -> None:
        assert self.world is not None and slot.worker is not None
        size = len(self.world.node_of)
        env = self.env(slot.rank, slot) if slot.rank >= 0 else standby_env(self._place, slot.local_rank, self.address)
        slot.worker.send(local.Assign(slot.rank, size, self.world.generation, env))

    def env(self, rank: Rank, slot: Slot) -> dict[str, str]:
        """The environment of the process of `rank` in this slot (it takes the ring position of who runs it now)."""
        assert self.world is not None
        node = self.world.node_of[rank]
        return worker_env(self._place, self.world, rank, node, slot.local_rank, self.address)

    def _name_output(self, slot: Slot) -> None:
        if slot.pipe is None:
            return
        node = self._place.node
        if slot.rank >= 0:
            slot.pipe.assign(self._output_dir / f"rank{slot.rank:04d}.node{node}.log", forward=True)
        else:
            slot.pipe.assign(self._output_dir / f"spare{slot.local_rank}.node{node}.log", forward=False)

    def rehearse(self, slot: Slot, rank: Rank) -> None:
        """Order a fresh process for `rank`; the one before is forgotten."""
        assert self.world is not None
        if slot.rehearser is not None:
            self._watch.forget(slot.rehearser.pid)
            slot.rehearser.tag = None
        slot.rehearser, slot.rehearsing = None, rank
        if slot.worker is not None:
            slot.worker.send(local.RehearseRank(rank, len(self.world.node_of), self.env(rank, slot)))

    def take(self, slot: Slot, rank: Rank) -> None:
        """The slot's rehearser runs `rank` from now on."""
        slot.took_over = True
        slot.rank = rank
        self._name_output(slot)

    def start_groups(self, generation: Generation, store: str) -> None:
        for slot in self.slots:
            if slot.worker is not None and slot.rank >= 0:
                slot.worker.send(local.StartGroups(generation, store))

    def commit(self, step: Step) -> None:
        """Open the gate of every process that runs a rank, and later of those that take one over."""
        self.committed = max(self.committed, step)
        self.tell_serving(local.Committed(step))

    def tell_serving(self, message: local.LocalMessage) -> None:
        """To every process that runs a rank."""
        for slot in self.slots:
            if slot.serving is not None:
                slot.serving.send(message)

    # ---- the end

    def end_workers(self, exit_code: int) -> None:
        """From now on every death is expected. A standing-by process outlives the one it forked."""
        self.ending, self._exit_code = True, exit_code
        for slot in self.slots:
            peer = slot.serving or slot.worker
            if peer is not None:
                peer.send(local.EndWorker(exit_code))

    @property
    def workers_gone(self) -> bool:
        return all(slot.ended and slot.worker is None and slot.rehearser is None for slot in self.slots)

    def end_supervisors(self, exit_code: int) -> None:
        for slot in self.slots:
            if slot.supervisor is not None:
                slot.supervisor.send(local.EndSupervisor(exit_code))

    @property
    def supervisors_gone(self) -> bool:
        return all(slot.supervisor is None for slot in self.slots)

    async def wait(self, done: Callable[[], bool], timeout_s: float) -> bool:
        """Until `done()`, looked at after every change; False at the deadline."""
        deadline = asyncio.get_running_loop().time() + timeout_s
        while not done():
            self.changed.clear()
            try:
                await asyncio.wait_for(self.changed.wait(), deadline - asyncio.get_running_loop().time())
            except asyncio.TimeoutError:
                return done()
        return True
