"""This node's processes: who they are when they connect, and what they are told.

Rules of this file: an order replaces the process of the order before, whose last words mean nothing from then on.
Deaths are lives.py's; what processes say beside hellos is passed on, and the hello of a rehearsal, too.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
from collections.abc import Callable
from io import FileIO
from pathlib import Path
from typing import NamedTuple, TypeVar

from ..core import api, local
from ..core.types import NO_STEP, Generation, Rank, Step, World
from ..errors import invariant, present
from ..host.output import rank_file
from ..host.repeats import READ_S, Printed, Repeats, printed_since
from ..transport.tasks import Tasks
from ..transport.unix import LocalPeer, close_descriptors
from .host import Host
from .lives import Lives
from .slots import Process, Slot
from .world import Place, worker_env

T = TypeVar("T")


class Output(NamedTuple):
    """A rank's file on this node, None if it cannot be opened; and what earlier processes of the rank have printed of
    what one that takes it over will print again."""

    file: FileIO | None
    printed: Printed

    def opened(self) -> int:
        """A descriptor of the file, the caller's. Raises: OSError if it could not be opened in time."""
        if self.file is None:
            raise OSError(errno.ETIMEDOUT, os.strerror(errno.ETIMEDOUT))
        return os.dup(self.file.fileno())


class Workers:
    """Thread: the event loop's only. `feed` gets the controller's inputs; `heard` what slots' processes say."""

    def __init__(
        self,
        place: Place,
        host: Host,
        output_dir: Path,
        slots: list[Slot],
        lives: Lives,
        feed: Callable[[api.Input], None],
        heard: Callable[[Slot, LocalPeer, local.LocalMessage], None],
        job: Callable[[], str],
    ) -> None:
        self._place, self._host, self._output_dir = place, host, output_dir
        self.slots, self.lives, self._feed, self._heard, self._job = slots, lives, feed, heard, job
        self.world: World | None = None
        self.committed: Step = NO_STEP
        self._orders = 0
        self._opening = Tasks()
        self._start: local.StartGroups | None = None

    # ---- what comes in

    def on_message(self, peer: LocalPeer, message: local.LocalMessage, descriptors: list[int]) -> None:
        if isinstance(message, local.SupervisorHello):
            self._supervisor(peer, message, descriptors)
            return
        if isinstance(message, local.RehearsalOutput) and isinstance(peer.tag, Slot):
            self._keep_apart(peer.tag, peer, descriptors)
            return
        close_descriptors(descriptors)
        if isinstance(message, local.StandbyHello):
            self._standby(peer, message)
        elif isinstance(message, local.WorkerHello):
            self._worker(peer, message)
        elif isinstance(peer.tag, Slot):
            self._heard(peer.tag, peer, message)

    def _slot(self, local_rank: int) -> Slot:
        invariant(0 <= local_rank < len(self.slots), f"no local rank {local_rank} of {len(self.slots)}")
        return self.slots[local_rank]

    def _supervisor(self, peer: LocalPeer, hello: local.SupervisorHello, descriptors: list[int]) -> None:
        slot = peer.tag = self._slot(hello.local_rank)
        slot.supervisor, slot.standby_pid = peer, hello.standby_pid
        slot.pipe = self._host.pipe(descriptors[0])
        self.lives.watch_standby(slot)
        if self.world is not None:
            self._name_output(slot)

    def _standby(self, peer: LocalPeer, hello: local.StandbyHello) -> None:
        slot = peer.tag = self._slot(hello.local_rank)
        slot.standby = peer
        if slot.order is not None:
            peer.send(slot.order)
        elif self.lives.ending:
            peer.send(local.EndWorker(0))

    def _worker(self, peer: LocalPeer, hello: local.WorkerHello) -> None:
        slot, process = self._slot(hello.local_rank), self._slot(hello.local_rank).living
        if process is None or process.order != hello.order:
            peer.close()  # an order that has been overtaken
            return
        peer.tag, process.peer, process.pid = slot, peer, hello.pid
        self.lives.watch(slot, process)
        if hello.rehearsing:
            self._heard(slot, peer, hello)
        elif self._start is not None:
            peer.send(self._start)

    def _keep_apart(self, slot: Slot, peer: LocalPeer, descriptors: list[int]) -> None:
        """Assign the file for the output of a rehearsal; until it is open, output stays in the pipe."""
        process = slot.living
        if process is None or process.peer is not peer:  # these are the last words of one that is known to be dead
            close_descriptors(descriptors)
            return
        pipe = self._host.pipe(descriptors[0])
        path = self._output_dir / "rehearsals" / f"rank{process.rank:04d}.{process.pid}.txt"

        async def begin() -> None:
            file = await self._in_time(lambda: self._host.output.file(path))
            pipe.assign(path, False, Output(file, {}).opened)

        self._opening.start(begin())

    def store_offer(self, slot: Slot, message: local.StoreOffer) -> None:
        if slot.living is not None:  # else these are the last words of one that is known to be dead
            self.lives.hosts(slot, slot.living, message.address)

    def replace_store(self, address: str) -> None:
        """Groups are built over the store at `address`: whichever process here hosts it offers another one.

        At once, and also if it only stands by: the next loss may leave no other that has one.
        """
        for slot in self.slots:
            process = slot.living
            if process is not None and process.peer is not None and address in process.stores:
                process.peer.send(local.HostStore())

    def restored(self, slot: Slot, message: local.Restored) -> None:
        """The slot's process is in training in the new world."""
        if slot.process is not None:
            slot.process.in_training = True
        self._feed(api.WorkerRestored(message.rank, message.generation))

    # ---- orders

    def form(self, world: World) -> None:
        """A world whose ranks begin the script: tell every slot what it is."""
        self.world, self.committed, self._start = world, NO_STEP, None
        ranks = world.ranks_of(self._place.node)
        for slot in self.slots:
            slot.rank = ranks[slot.local_rank] if slot.local_rank < len(ranks) else -1
            self._name_output(slot)
            if slot.rank >= 0:
                env = self._env(slot.rank, slot)
                self._order(slot, local.RunRank(slot.rank, env, self._next()))

    def enter(self, world: World, restore_step: Step) -> None:
        """A world that goes on from `restore_step` of the one before (for a host that has joined: its first)."""
        self.world, self.committed = world, min(self.committed, restore_step)
        for slot in self.slots:
            if slot.pipe is not None and not slot.pipe.assigned:
                self._name_output(slot)

    def rehearse(self, slot: Slot, rank: Rank) -> Process:
        """Order a fresh process that rehearses `rank`."""
        return self._order(slot, local.RehearseRank(rank, self._env(rank, slot), self._next()))

    def _next(self) -> int:
        self._orders += 1
        return self._orders

    def _order(self, slot: Slot, order: local.RunRank | local.RehearseRank) -> Process:
        if slot.process is not None:
            self.lives.forget(slot.process)
        slot.order = order
        slot.process = Process(order.order, order.rank, isinstance(order, local.RehearseRank))
        if slot.standby is not None:
            slot.standby.send(order)
        return slot.process

    def _env(self, rank: Rank, slot: Slot) -> dict[str, str]:
        """The environment of the process of `rank` in this slot (it takes the ring position of who runs it now)."""
        world = present(self.world, "a process was ordered before the world had formed")
        return worker_env(self._place, world, rank, world.node_of[rank], slot.local_rank, self._host.where[1])

    def _name_output(self, slot: Slot, opened: Callable[[], int] | None = None) -> None:
        """`opened`: as for `Pipe.assign`."""
        if slot.pipe is None:
            return
        node = self._place.node
        if slot.rank >= 0:
            slot.pipe.assign(rank_file(self._output_dir, slot.rank, node), True, opened)
        else:
            slot.pipe.assign(self._output_dir / f"spare{slot.local_rank}.node{node}.log", forward=False)

    def hear_unnamed(self) -> None:
        """Keep the output from before this slot had a rank, if there never was more."""
        for slot in self.slots:
            if slot.pipe is not None and self.world is None:
                name = f"standby{slot.local_rank}.node{self._place.node}.log"
                slot.pipe.assign(self._output_dir / name, forward=True)

    async def output_of(self, rank: Rank, step: Step) -> Output:
        """For `take`. What the file system does not say in time is done without: it may hang with a lost host."""
        path = rank_file(self._output_dir, rank, self._place.node)
        file, printed = await asyncio.gather(
            self._in_time(lambda: self._host.output.file(path)),
            self._in_time(lambda: printed_since(self._output_dir, self._job(), rank, step)),
        )
        return Output(file, printed or {})

    async def _in_time(self, look: Callable[[], T]) -> T | None:
        """Return what `look` finds in files; None if it fails or is late."""
        with contextlib.suppress(OSError):
            async with asyncio.timeout(READ_S):
                return await self._host.at_files(look)
        return None

    def take(self, slot: Slot, output: Output, step: Step) -> None:
        """The slot's process, which rehearsed the slot's rank, runs it from `step` on and need not say again what was
        printed."""
        process = present(slot.living, f"nothing runs rank {slot.rank}")
        invariant(process.rank == slot.rank, f"rank {process.rank} is run in the place of rank {slot.rank}")
        process.took_over = True
        self._name_output(slot, output.opened)
        if slot.pipe is not None:
            slot.pipe.repeats = Repeats(output.printed, step) if output.printed else None

    def start_groups(self, generation: Generation, store: str) -> None:
        """To every process that begins the script, also to those that have yet to connect."""
        self._start = local.StartGroups(generation, store)
        self.tell_serving(self._start)

    def abort(self, generation: Generation) -> None:
        """To every process that runs a rank. Who has yet to connect is not to look for a store that may be gone."""
        self._start = None
        self.tell_serving(local.Abort(generation))

    def commit(self, step: Step) -> None:
        """Open the gate of every process that runs a rank, and later of those that take one over."""
        self.committed = max(self.committed, step)
        self.tell_serving(local.Committed(step))

    def tell_serving(self, message: local.LocalMessage) -> None:
        """To every process that runs a rank."""
        for slot in self.slots:
            if slot.serving is not None:
                slot.serving.send(message)
