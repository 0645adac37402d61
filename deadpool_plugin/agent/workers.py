"""This node's processes: who they are when they connect, what they are told, and where their output goes.

Rules of this file: an order replaces the process of the order before, whose last words mean nothing from then on.
Deaths are process_monitor.py's.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from io import FileIO
from typing import TypeVar

from ..core import api, local
from ..core.types import NO_STEP, Generation, Rank, Step, World
from ..errors import invariant, present
from ..host.output import rank_file
from ..host.output_dedup import READ_S, Printed, Repeats, printed_since
from ..transport.tasks import Tasks
from ..transport.unix import LocalPeer, close_descriptors
from .node import LocalNode, Process, Slot
from .process_monitor import ProcessMonitor
from .world import worker_env

T = TypeVar("T")


class Workers:
    """The processes of this node's slots."""

    def __init__(self, node: LocalNode, monitor: ProcessMonitor) -> None:
        self._node, self._monitor, self._output_dir = node, monitor, node.config.output_dir
        self.committed: Step = NO_STEP
        self._orders = 0
        self._opening = Tasks()
        self._start: local.StartGroups | None = None

    def _slot(self, local_rank: int) -> Slot:
        slots = self._node.slots
        invariant(0 <= local_rank < len(slots), f"no local rank {local_rank} of {len(slots)}")
        return slots[local_rank]

    def supervisor(self, peer: LocalPeer, hello: local.SupervisorHello, descriptors: list[int]) -> None:
        slot = peer.tag = self._slot(hello.local_rank)
        slot.supervisor, slot.standby_pid = peer, hello.standby_pid
        slot.pipe = self._node.host.pipe(descriptors[0])
        self._monitor.watch_standby(slot)
        if self._node.world is not None:
            self._name_output(slot)

    def standby(self, peer: LocalPeer, hello: local.StandbyHello) -> None:
        slot = peer.tag = self._slot(hello.local_rank)
        slot.standby = peer
        if slot.order is not None:
            peer.send(slot.order)
        elif self._monitor.ending:
            peer.send(local.End(0))

    def worker(self, peer: LocalPeer, hello: local.WorkerHello) -> None:
        """Take in a process for a slot's newest order, and begin it unless it is to rehearse."""
        slot, process = self._slot(hello.local_rank), self._slot(hello.local_rank).living
        if process is None or process.order != hello.order:
            peer.close()  # an order that has been overtaken
            return
        peer.tag, process.peer, process.pid = slot, peer, hello.pid
        self._monitor.watch(slot, process)
        if not hello.rehearsing and self._start is not None:
            peer.send(self._start)

    def store_offer(self, slot: Slot, message: local.StoreOffer) -> None:
        process = slot.living
        if process is not None:  # else these are the last words of one that is known to be dead
            process.stores.append(message.address)
            stand_in = process.rehearses and not process.took_over
            self._node.feed(api.StoreOffered(message.address, slot.local_rank, stand_in))

    def replace_store(self, address: str) -> None:
        """Have the process here that hosts the store at `address` offer another one."""
        # At once, and also if it only stands by: the next loss may leave no other that has one.
        for slot in self._node.slots:
            process = slot.living
            if process is not None and process.peer is not None and address in process.stores:
                process.peer.send(local.HostStore())

    def form(self, world: World) -> None:
        """Enter a world whose ranks begin the script: tell every slot what it is."""
        self._node.world, self.committed, self._start = world, NO_STEP, None
        ranks = world.ranks_of(self._node.id)
        for slot in self._node.slots:
            slot.rank = ranks[slot.local_rank] if slot.local_rank < len(ranks) else -1
            self._name_output(slot)
            if slot.rank >= 0:
                self.order(slot, slot.rank, rehearses=False)

    def enter(self, world: World, restore_step: Step) -> None:
        """Enter a world that goes on from `restore_step` of the one before (for a host that has joined: its first)."""
        self._node.world, self.committed = world, min(self.committed, restore_step)
        for slot in self._node.slots:
            if slot.pipe is not None and not slot.pipe.assigned:
                self._name_output(slot)

    def order(self, slot: Slot, rank: Rank, *, rehearses: bool) -> Process:
        """Order a fresh process that runs or rehearses `rank`, in the place of the slot's process."""
        node = self._node
        world = present(node.world, "a process was ordered before the world had formed")
        if slot.process is not None:
            self._monitor.forget(slot.process)
        self._orders += 1
        # It takes the ring position of whoever runs the rank now.
        env = worker_env(node.place, world, rank, world.node_of[rank], slot.local_rank, node.host.where[1])
        slot.order = local.RunRank(rank, env, self._orders, rehearses)
        slot.process = Process(self._orders, rank, rehearses)
        if slot.standby is not None:
            slot.standby.send(slot.order)
        return slot.process

    def start_groups(self, generation: Generation, store: str) -> None:
        """Tell every process that begins the script to build groups, also those that have yet to connect."""
        self._start = local.StartGroups(generation, store)
        self._tell_serving(self._start)

    def abort(self, generation: Generation) -> None:
        self._start = None  # who has yet to connect is not to look for a store that may be gone
        self._tell_serving(local.Abort(generation))

    def commit(self, step: Step) -> None:
        """Open the gate of every process that runs a rank, and later of those that take one over."""
        self.committed = max(self.committed, step)
        self._tell_serving(local.Committed(step))

    def _tell_serving(self, message: local.LocalMessage) -> None:
        for slot in self._node.slots:
            if slot.serving is not None:
                slot.serving.send(message)

    def keep_apart(self, slot: Slot, peer: LocalPeer, descriptors: list[int]) -> None:
        """Assign the file for the output of a rehearsal; until it is open, output stays in the pipe."""
        process = slot.living
        if process is None or process.peer is not peer:  # these are the last words of one that is known to be dead
            close_descriptors(descriptors)
            return
        pipe = self._node.host.pipe(descriptors[0])
        path = self._output_dir / "rehearsals" / f"rank{process.rank:04d}.{process.pid}.txt"

        async def begin() -> None:
            file = await self._in_time(lambda: self._node.host.output.file(path))
            pipe.assign(path, False, file, late=file is None)

        self._opening.start(begin())

    def _name_output(self, slot: Slot, file: FileIO | None = None, late: bool = False) -> None:
        if slot.pipe is None:
            return
        if slot.rank >= 0:
            slot.pipe.assign(rank_file(self._output_dir, slot.rank, self._node.id), True, file, late)
        else:
            name = f"spare{slot.local_rank}.node{self._node.id}.log"
            slot.pipe.assign(self._output_dir / name, forward=False)

    async def drain(self, timeout_s: float) -> None:
        """Write the last words of the workers, which are still in their pipes."""
        pipes = {slot.local_rank: slot.pipe for slot in self._node.slots if slot.pipe is not None}
        if self._node.world is None:  # no slot ever had a rank
            for local_rank, pipe in pipes.items():
                pipe.assign(self._output_dir / f"standby{local_rank}.node{self._node.id}.log", forward=True)
        if pipes:
            await asyncio.wait([asyncio.create_task(pipe.ended.wait()) for pipe in pipes.values()], timeout=timeout_s)
        for pipe in pipes.values():
            pipe.close()

    async def output_of(self, rank: Rank, step: Step) -> tuple[FileIO | None, Printed]:
        """Look up what `take` needs, as far as the file system, which may hang with a lost host, says it in time."""
        node, path = self._node, rank_file(self._output_dir, rank, self._node.id)
        file, printed = await asyncio.gather(
            self._in_time(lambda: node.host.output.file(path)),
            self._in_time(lambda: printed_since(self._output_dir, node.credentials.job, rank, step)),
        )
        return file, printed or {}

    async def _in_time(self, look: Callable[[], T]) -> T | None:
        with contextlib.suppress(OSError):
            async with asyncio.timeout(READ_S):
                return await self._node.host.at_files(look)
        return None

    def take(self, slot: Slot, file: FileIO | None, printed: Printed, step: Step) -> None:
        """Have the slot's process, which rehearsed its rank, run it from `step` on, and print nothing again."""
        process = present(slot.living, f"nothing runs rank {slot.rank}")
        invariant(process.rank == slot.rank, f"rank {process.rank} is run in the place of rank {slot.rank}")
        process.took_over = True
        self._name_output(slot, file, late=file is None)
        if slot.pipe is not None:
            slot.pipe.repeats = Repeats(printed, step)
