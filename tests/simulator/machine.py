"""The machine of a simulated host: the body of host/machine.py's, in which nothing is real but the books.

Rules of this file: what works in a thread on a real machine is awaited for a drawn time here, and then done at once.
"""

from __future__ import annotations

import asyncio
import functools
import io
import itertools
import random
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from deadpool_plugin.core.types import NO_STEP, Generation, Holding, Rank, Step, SwapPlan
from deadpool_plugin.host.output import Writer
from deadpool_plugin.mirror.arena import SlotMaker, SlotPair, SnapshotHeader
from deadpool_plugin.mirror.store import SnapshotStore

from .bulk import Bulk
from .network import address_of
from .processes import Processes

if TYPE_CHECKING:
    from .node import Node

T = TypeVar("T")
FROZEN_S = 1.0  # how often storage that does not answer is looked at
SHORT = 0.1  # of the looks at a host's memory find too little


class ToyPair(SlotPair):
    """Slots in the simulation's own memory; `fd` names them. `changed(rank, step)` hears of every write to a header."""

    _numbers = itertools.count(1000)

    def __init__(
        self, rank: Rank, header_bytes: int, payload_bytes: int, changed: Callable[[Rank, Step], None]
    ) -> None:
        super().__init__(next(self._numbers), rank, header_bytes, payload_bytes)
        self._changed = changed

    def _mapped(self, size: int) -> memoryview:
        return memoryview(bytearray(size))

    def _empty(self, slot: int) -> Step:
        old = super()._empty(slot)
        if old != NO_STEP:
            self._changed(self.rank, old)
        return old

    def seal_encoded(self, step: Step, encoded: bytes) -> None:
        super().seal_encoded(step, encoded)
        self._changed(self.rank, step)

    def close(self) -> None:
        """Whoever still looks at it keeps it."""


def is_whole(pair: SlotPair, header: SnapshotHeader) -> bool:
    """Return whether the payload is what was staged: its checksum is in the header."""
    return int.from_bytes(header.scalars[:4], "little") == zlib.crc32(pair.payload(header.step)[: header.payload_bytes])


class Listed(dict[tuple[Rank, Step], Holding]):
    """What a store lists as held; `changed(rank, step)` hears of every change."""

    def __init__(self, changed: Callable[[Rank, Step], None]) -> None:
        super().__init__()
        self._changed = changed

    def __setitem__(self, key: tuple[Rank, Step], holding: Holding) -> None:
        super().__setitem__(key, holding)
        self._changed(*key)

    def __delitem__(self, key: tuple[Rank, Step]) -> None:
        super().__delitem__(key)
        self._changed(*key)

    def pop(self, key: tuple[Rank, Step], *default: Any) -> Any:
        found = super().pop(key, *default)
        self._changed(*key)
        return found


def _at_once(method: Callable[..., T]) -> Callable[..., T]:
    """What `method` changes under the store's lock is seen when it is done."""

    @functools.wraps(method)
    def whole(self: Store, *arguments: Any) -> T:
        self._depth += 1
        try:
            return method(self, *arguments)
        finally:
            self._depth -= 1
            if not self._depth:
                changes, self._unseen = self._unseen, []
                for change in dict.fromkeys(changes):
                    self._tell(*change)

    return whole


class ToyMaker(SlotMaker):
    """Makes toy slots. `made`: all of them by `fd`."""

    def __init__(self, changed: Callable[[Rank, Step], None]) -> None:
        super().__init__()
        self._changed = changed
        self.made: dict[int, ToyPair] = {}

    def check(self, need_bytes: int) -> None:
        """There is enough."""

    def make(
        self, rank: Rank, header_bytes: int, payload_bytes: int, going_on: Callable[[], None] = lambda: None
    ) -> SlotPair:
        going_on()
        pair = ToyPair(rank, header_bytes, payload_bytes, self._changed)
        self.made[pair.fd] = pair
        return pair


class Store(SnapshotStore):
    """Production's store over toy slots. `made`: all of them by `fd`.

    `writers`: who is just writing a rank's mirror, and in which generation.
    """

    def __init__(self, history_limit_bytes: int, history_kept: int, changed: Callable[[Rank, Step], None]) -> None:
        super().__init__(history_limit_bytes, history_kept=history_kept)
        self._tell, self._unseen = changed, list[tuple[Rank, Step]]()
        self._depth = 0
        self._holdings = Listed(self._changed)
        self.maker = ToyMaker(self._changed)
        self.writers: dict[Rank, tuple[Node, Generation]] = {}
        self.made = self.maker.made

    adopt_own = _at_once(SnapshotStore.adopt_own)
    create_own = _at_once(SnapshotStore.create_own)
    begin_mirror = _at_once(SnapshotStore.begin_mirror)
    finish_mirror = _at_once(SnapshotStore.finish_mirror)
    staged = _at_once(SnapshotStore.staged)
    drop_newer = _at_once(SnapshotStore.drop_newer)
    release = _at_once(SnapshotStore.release)

    def _changed(self, rank: Rank, step: Step) -> None:
        if self._depth:
            self._unseen.append((rank, step))
        else:
            self._tell(rank, step)

    @property
    def entered(self) -> Generation:
        """The newest generation in which others may mirror here."""
        return self._entered

    def pair(self, rank: Rank) -> SlotPair | None:
        return self._pair(rank)

    def lists(self, rank: Rank, step: Step) -> Holding | None:
        return self._holdings.get((rank, step))

    @property
    def listed(self) -> list[tuple[Rank, Step]]:
        return sorted(self._holdings)

    @property
    def mirrored(self) -> dict[Rank, SlotPair]:
        return self._mirrored

    def corrupt(self, rank: Rank, step: Step) -> bool:
        """Flip a bit of that payload; False if there is none."""
        pair, holding = self._pair(rank), self.lists(rank, step)
        if pair is None or holding is None or not holding.payload or pair.open(step) is None:
            return False
        pair.payload(step)[0] ^= 1
        self._changed(rank, step)
        return True


class Silent(Writer):
    """Nobody reads what a simulated job prints."""

    dropped_bytes = 0  # type: ignore[assignment]

    def __init__(self) -> None:
        pass

    def open(self, path: Path) -> Any:
        if path.suffix != ".jsonl":
            raise FileNotFoundError(path)
        return io.BytesIO()

    def write(self, file: object, data: bytes) -> None:
        pass

    def empty(self, file: object) -> None:
        pass

    def forward(self, data: bytes) -> None:
        pass

    def close(self) -> None:
        pass


class NoPipe:
    """What processes print."""

    assigned = True
    repeats = None

    def __init__(self) -> None:
        self.ended = asyncio.Event()
        self.ended.set()

    def assign(self, *arguments: object, **options: object) -> None:
        pass

    def note(self, line: str) -> None:
        pass

    def cut(self, step: Step) -> int | None:
        return None

    def close(self) -> None:
        pass


class ToyStacks:
    """The stack that a process writes: the same line for as long as it does the same, none while it is stopped."""

    def __init__(self, node: Node, pid: int) -> None:
        self._node, self._pid = node, pid

    async def read(self) -> str:
        await asyncio.sleep(self._node.cluster.local_s())
        process = self._node.processes.pids[self._pid]
        if not process.alive or process.held or process.stuck:
            return "no stack: its state is T"
        return f'  File "toy.py", line {process.looked_at()} in train\n'

    def close(self) -> None:
        pass


class Witness:
    """Keeps the first plan of each generation, whatever becomes of who asks."""

    def __init__(self) -> None:
        self.kept: dict[Generation, SwapPlan] = {}

    def keep(self, job: str, plan: SwapPlan) -> SwapPlan:
        return self.kept.setdefault(plan.world.generation, plan)

    def look(self, job: str, generation: Generation) -> SwapPlan | None:
        return self.kept.get(generation)

    def share(self, job: str) -> None:
        pass

    def is_shared(self, job: str) -> bool:
        return True


class Machine:
    """One host's."""

    def __init__(self, node: Node) -> None:
        self._node, self._cluster = node, node.cluster
        self.name, self.where = f"host{node.number}", (address_of(node.number), address_of(node.number))
        self.output, self.processes = Silent(), Processes(node)
        self.store = Store(
            node.cluster.config.history_limit_bytes, node.cluster.config.history_kept, node.memory_changed
        )
        self.bulk = Bulk(node, self.store)
        self.frozen_until = 0.0  # by the simulation's clock, for its storage
        self.witness = node.cluster.witness if node.cluster.policy.witness else None

    def pipe(self, descriptor: int) -> Any:
        return NoPipe()

    def stacks(self, descriptor: int, pid: int) -> ToyStacks:
        return ToyStacks(self._node, pid)

    def serve(self, on_message: Any, on_closed: Any) -> None:
        self.processes.serve(on_message, on_closed)

    def publish(self, hello: object, secret_files: object, job: str) -> None:
        pass

    def withdraw(self) -> None:
        pass

    def fits_beside(self, parked: int, like: Sequence[int], starting: int, limit_bytes: float | None) -> bool:
        """Every host has room for another number of processes."""
        scenario, node = self._cluster.scenario, self._node
        return parked < random.Random(f"{scenario.seed} {node.number}").choice((0, 1, 2, 4, 8)) * scenario.slots

    def is_short(self) -> bool:
        return self._cluster.rng.random() < SHORT

    async def at_files(self, work: Callable[[], T]) -> T:
        await asyncio.sleep(self._cluster.network.latency())
        while self._cluster.timeline.now < self.frozen_until:
            await asyncio.sleep(FROZEN_S)
        done = work()
        await asyncio.sleep(self._cluster.network.latency())
        return done

    async def in_thread(self, work: Callable[[], T]) -> T:
        await asyncio.sleep(self._cluster.local_s())
        done = work()
        await asyncio.sleep(self._cluster.local_s())
        return done

    def has_program(self, name: str) -> bool:
        return True

    async def run_command(self, words: Sequence[str], output: Path, limit_s: float) -> tuple[int | None, str]:
        return await self._cluster.arrivals.run_command(limit_s)

    def end_commands(self) -> None:
        pass

    async def close(self) -> None:
        self.processes.watched.clear()

    def end(self) -> None:
        self.processes.end()
