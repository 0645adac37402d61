"""Rehearsals on a standing-by node: started on order, and kept at the committed step.

Rules of this file: a rehearsal has one process, one recording and one growing history; records are pulled from the
node that runs the rank, in step order, only up to what is committed. A rehearsal that fails takes the node out.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field

from ..core import io
from ..core.types import NO_STEP, NodeId, Rank, Step
from ..errors import DeadpoolError
from ..mirror.history import History
from ..transport import local
from ..transport.local import LocalPeer
from .mirroring import Profile, decode_profile
from .peers import Peers
from .reports import Reports
from .workers import Slot, Workers

CHUNK_STEPS = 64


@dataclass
class Rehearsal:
    """One slot's rehearsal of one rank. `history` is what has been pulled; `told` the newest step its process knows."""

    slot: Slot
    rank: Rank
    profile: Profile
    source: NodeId
    history: History
    told: Step = NO_STEP
    finished: asyncio.Event = field(default_factory=asyncio.Event)
    refused: str = ""
    pulling: asyncio.Lock = field(default_factory=asyncio.Lock)

    @property
    def ready(self) -> bool:
        return self.finished.is_set() and not self.refused


class Spares:
    """Thread: the event loop's only."""

    def __init__(
        self,
        workers: Workers,
        peers: Peers,
        reports: Reports,
        history_limit_bytes: int,
        feed: Callable[[io.Input], None],
    ) -> None:
        self._workers, self._peers, self._reports, self._feed = workers, peers, reports, feed
        self._history_limit_bytes = history_limit_bytes
        self._committed: Step = NO_STEP
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self.rehearsals: dict[int, Rehearsal] = {}
        workers.handlers[local.RehearserHello] = self._introduced
        workers.handlers[local.Rehearsed] = self._rehearsed
        workers.handlers[local.RehearsalRefused] = self._refused

    # ---- starting one

    def order(self, action: io.StartRehearsal) -> None:
        slot = self._workers.slots[action.local_slot]
        self._run(slot, self._start(slot, action.rank, action.source))

    def _run(self, slot: Slot, work: Coroutine[None, None, None]) -> None:
        self.stop_following(slot)
        self._tasks[slot.local_rank] = asyncio.get_running_loop().create_task(work)

    async def _start(self, slot: Slot, rank: Rank, source: NodeId) -> None:
        try:
            await self.begin(slot, rank, source)
        except DeadpoolError as error:
            self._fail(slot, rank, str(error))

    async def begin(self, slot: Slot, rank: Rank, source: NodeId) -> Rehearsal:
        """Get the rank's recording from `source` and have a process rehearse it.

        Raises: TransportError
        """
        peer = self._peers.to(source)
        profile = decode_profile(await self._peers.ask(lambda: peer.get_recording(rank)))
        rehearsal = Rehearsal(slot, rank, profile, source, History(self._history_limit_bytes))
        self.rehearsals[slot.local_rank] = rehearsal
        self._workers.rehearse(slot, rank)
        return rehearsal

    def _of(self, slot: Slot, rank: Rank) -> Rehearsal | None:
        rehearsal = self.rehearsals.get(slot.local_rank)
        return rehearsal if rehearsal is not None and rehearsal.rank == rank else None

    def _introduced(self, slot: Slot, peer: LocalPeer, message: local.RehearserHello) -> None:
        rehearsal = self._of(slot, message.rank)
        if rehearsal is not None and self._workers.world is not None:
            size = len(self._workers.world.node_of)
            peer.send(local.Rehearsal(message.rank, size, rehearsal.profile.recording))

    def _rehearsed(self, slot: Slot, peer: LocalPeer, message: local.Rehearsed) -> None:
        rehearsal = self._of(slot, message.rank)
        if rehearsal is None or peer is not slot.rehearser:
            return
        rehearsal.finished.set()
        self._reports.emit("Rehearsed", rank=message.rank, duration_s=message.duration_s)
        if slot.rank < 0:
            self._feed(io.SpareRehearsed(slot.local_rank, message.rank))
            self._run(slot, self._follow(rehearsal))

    def _refused(self, slot: Slot, peer: LocalPeer, message: local.RehearsalRefused) -> None:
        rehearsal = self._of(slot, message.rank)
        if rehearsal is None or peer is not slot.rehearser or slot.restored:
            return
        rehearsal.refused = message.reason
        rehearsal.finished.set()
        self._fail(slot, message.rank, message.reason)

    def _fail(self, slot: Slot, rank: Rank, reason: str) -> None:
        self._reports.emit("RehearsalFailed", rank=rank, reason=reason)
        world = self._workers.world
        taking = world is not None and rank < len(world.node_of) and world.node_of[rank] == self._reports.node
        self._feed(io.WorkerLost(rank, reason) if taking else io.SpareFailed(slot.local_rank, rank, reason))

    # ---- following

    def committed(self, step: Step) -> None:
        """Spares follow to `step`."""
        self._committed = max(self._committed, step)
        for rehearsal in self.rehearsals.values():
            task = self._tasks.get(rehearsal.slot.local_rank)
            if rehearsal.ready and rehearsal.slot.rank < 0 and (task is None or task.done()):
                self._run(rehearsal.slot, self._follow(rehearsal))

    async def _follow(self, rehearsal: Rehearsal) -> None:
        """Up to the committed step, which may grow meanwhile; what fails is tried again at the next commit."""
        try:
            while rehearsal.told < self._committed:
                await self.pull(rehearsal, rehearsal.source, self._committed)
                self.tell(rehearsal)
        except DeadpoolError as error:
            self._reports.emit("Note", text=f"cannot follow rank {rehearsal.rank} now: {error}")

    async def pull(self, rehearsal: Rehearsal, source: NodeId, last: Step) -> None:
        """Have the records up to `last`, from `source`. Raises: TransportError."""
        history = rehearsal.history
        async with rehearsal.pulling:
            while history.last < last:
                first, until = history.last + 1, min(last, history.last + CHUNK_STEPS)
                ask = functools.partial(self._peers.to(source).get_history, rehearsal.rank, first, until)
                records = await self._peers.ask(ask)
                for step, record in enumerate(records, first):
                    history.append(step, record)

    def tell(self, rehearsal: Rehearsal) -> None:
        """Pass on to the process, which has rehearsed, what it does not know yet.

        Raises: HistoryPruned if that is not held any more (history_limit_mib).
        """
        first, last = rehearsal.told + 1, rehearsal.history.last
        if rehearsal.slot.rehearser is not None and first <= last:
            rehearsal.slot.rehearser.send(local.History(first, rehearsal.history.get(first, last)))
            rehearsal.told = last

    def stop_following(self, slot: Slot) -> None:
        task = self._tasks.pop(slot.local_rank, None)
        if task is not None and task is not asyncio.current_task():
            task.cancel()

    def swapped(self, owners: tuple[NodeId, ...], restore_step: Step) -> None:
        """A new world, back at `restore_step`: its nodes are the sources from now on."""
        self._committed = NO_STEP
        for rehearsal in self.rehearsals.values():
            self.stop_following(rehearsal.slot)
            rehearsal.source = owners[rehearsal.rank]
            rehearsal.history.truncate(restore_step)

    def close(self) -> None:
        for rehearsal in list(self.rehearsals.values()):
            self.stop_following(rehearsal.slot)
        for task in self._tasks.values():
            task.cancel()
