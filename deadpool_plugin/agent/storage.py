"""Storage: this node's memory as files, and the files of an earlier job as this node's memory.

Rules of this file: every node comes to the same step from the hellos of all. A node reads the ranks that it runs or
mirrors; if fewer nodes than that see a rank's files, all that see them read them. A damaged file is reported, and
another copy is read.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from .. import events
from ..config import STORING_S
from ..core import api, local
from ..core.ledger import Ledger
from ..core.placement import held_by
from ..core.types import NO_STEP, Generation, Holding, NodeId, Rank, Step, World
from ..errors import ConfigError, DeadpoolError, StorageError, present
from ..mirror import disk
from ..mirror.disk import Manifest, Shelf, StoredSnapshot
from ..transport.rendezvous import Hello, Stored
from ..transport.tasks import Tasks, loop_time
from .links import versions
from .node import LocalNode
from .world import first_difference

TOLD_MAX = 8  # of so many hosts a host tells all that it sees of files
EXPORT = "let the earlier job's own script save a checkpoint, and load that"


class Beginning(NamedTuple):
    """The step that a job goes on from. `seen`: the nodes that see files of each rank's snapshot; `passed`: why it is
    none of a newer generation, "" if there is none."""

    generation: Generation
    step: Step
    seen: dict[Rank, set[NodeId]]
    passed: str = ""

    def readers(self, world: World, rank: Rank, copies: int) -> set[NodeId]:
        """Choose the nodes that read a rank's files: as many as hold it in the job, or a damaged file could be all."""
        seen = self.seen[rank]
        holders = {node for node in seen if rank in held_by(world, node, copies)}
        return holders if len(holders) > copies else seen


def beginning(world: World, hellos: Sequence[Hello], command: Sequence[str], copies: int) -> Beginning:
    """Choose a step of which the files of all hosts together hold every rank: of the newest generation, and in it as a
    swap does. Raises: ConfigError."""
    stored = {hello.node: hello.stored for hello in hellos if hello.stored is not None}
    hosts = {hello.node: hello.host for hello in hellos}
    if not stored:
        raise ConfigError("`resume` names a job of which no host has files", "STORE_DIR/JOB", "correct `resume`")
    node, first = next(iter(stored.items()))
    for other, its in stored.items():
        if its.job != first.job:
            found = f"`resume` leads to job {first.job} on {hosts[node]} and to job {its.job} on {hosts[other]}"
            raise ConfigError(found, "the same job on all hosts", "name its folder, STORE_DIR/JOB")
    if first.command != command:
        raise ConfigError(
            f"job {first.job} ran {' '.join(first.command)}",
            f"the command of this job, {' '.join(command)}",
            f"start it with the same command; to change it {EXPORT}",
        )
    if differs := first_difference(first.versions, hellos[0].versions):
        package, then, now = differs
        raise ConfigError(
            f"job {first.job} ran with {package} {then}, this one has {now}",
            "the same version",
            f"install {package} {then}; to change it {EXPORT}",
        )
    if first.ranks_total != len(world.node_of):
        raise ConfigError(
            f"job {first.job} had {first.ranks_total} rank(s), this one has {len(world.node_of)}",
            "as many as before (spares may differ)",
            f"start it on as many hosts; for another layout {EXPORT}",
        )
    committed = {one for its in stored.values() for one in its.committed}
    generations = sorted({one for its in stored.values() for one, _ in its.holdings}, reverse=True)
    reasons = list[str]()
    for generation in generations:  # steps of two generations may be of two histories
        held = {node: [held for one, held in its.holdings if one == generation] for node, its in stored.items()}
        steps = {one.step for its in held.values() for one in its}
        # A newer generation has committed the step with which it began.
        least = max(
            (step for one, step in committed if one == generation or (one > generation and step in steps)),
            default=NO_STEP,
        )
        point = Ledger(held).restore_point(world, held, copies, least)
        if not isinstance(point, str):
            return Beginning(generation, point.step, _seen(held, point.step), next(iter(reasons), ""))
        reasons.append(point)
    raise ConfigError(
        f"job {first.job} cannot be resumed: {reasons[0] if reasons else 'no host has a snapshot of it'}",
        "files of every rank on the hosts that take part",
        "let the hosts take part that have the missing files",
    )


def _seen(held: dict[NodeId, list[Holding]], step: Step) -> dict[Rank, set[NodeId]]:
    seen = dict[Rank, set[NodeId]]()
    for node, holdings in held.items():
        for holding in holdings:
            if holding.step == step:
                seen.setdefault(holding.rank, set()).add(node)
    return seen


class Storage:
    """Files of this node: those it leaves in `store_dir`, and those of the job that `resume` names."""

    def __init__(self, node: LocalNode) -> None:
        self._node, self._store = node, node.host.store
        self._shelves: list[Shelf] = []
        self._writing = asyncio.Lock()
        self._written: list[tuple[Step, Path]] = []  # by this job, as it ran
        self._hangs = False  # the disk has not answered for so long that nothing more is written while the job runs
        self._whole: deque[Step] = deque(maxlen=node.config.store_keep)  # the newest that all nodes have written
        self._tasks = Tasks()

    @property
    def command(self) -> list[str]:
        """The script and its arguments."""
        words = self._node.job.command
        return [word for word in words if not word.startswith(("--local_rank=", "--local-rank="))]

    # ---- flush

    async def flush(self, generation: Generation, committed: Step) -> None:
        """Write what this node holds of the newest committed step, and of newer ones, and report it."""
        node = self._node
        store_dir, began = node.config.store_dir, loop_time()
        if store_dir is None or node.world is None:
            return
        self._store.fence(generation + 1)  # what others still send is of no use
        manifest = self._manifest(generation, committed)
        try:
            async with asyncio.timeout(STORING_S), self._writing:
                written = await node.host.at_files(lambda: disk.write(store_dir, manifest, self._store))
        except TimeoutError:
            return node.reports.emit(events.StateLost(f"{store_dir} has not taken it within {STORING_S:g} s"))
        except DeadpoolError as error:
            return node.reports.emit(events.StateLost(str(error)))
        if not written.snapshots:
            return
        job_dir, took_s = store_dir.absolute() / manifest.job, loop_time() - began
        node.reports.emit(events.StateWritten(committed, str(job_dir), written.nbytes / (1 << 30), took_s))

    def _manifest(self, generation: Generation, step: Step) -> Manifest:
        node = self._node
        ranks_total = len(present(node.world, "a state is written before the world has formed").node_of)
        return Manifest(node.credentials.job, node.id, generation, step, ranks_total, self.command, versions())

    # ---- while the job runs

    def write(self, generation: Generation, step: Step) -> None:
        """Begin to write a step that was just committed, unless an earlier one is still being written."""
        world = present(self._node.world, "a step is written before the world has formed")
        if self._node.id in world.active:
            ranks = held_by(world, self._node.id, self._node.config.copies)
            self._tasks.start(self._write(generation, step, ranks))

    async def _write(self, generation: Generation, step: Step, ranks: Collection[Rank]) -> None:
        node, store_dir = self._node, present(self._node.config.store_dir, "a step is written without a store_dir")
        manifest, why = self._manifest(generation, step), ""
        if self._hangs or self._writing.locked():
            why = "an earlier one still is"
        else:
            try:
                async with asyncio.timeout(STORING_S), self._writing:
                    await node.host.at_files(lambda: disk.write(store_dir, manifest, self._store, of_ranks=ranks))
                self._written.append((step, disk.folder_of(store_dir, manifest)))
            except TimeoutError:
                self._hangs, why = True, f"the disk has not taken it within {STORING_S:g} s, and is not asked again"
            except DeadpoolError as error:
                why = str(error)
        if why:
            node.reports.emit(events.Note(text=f"node {node.id}: step {step} is not written to {store_dir}: {why}"))
        node.feed(api.StepWritten(step, generation, not why))

    def stored(self, step: Step) -> None:
        """Note that all nodes have written `step`, and remove what is older than the newest such steps."""
        self._whole.append(step)
        if len(self._whole) == self._whole.maxlen:
            oldest = min(self._whole)
            for _, folder in [one for one in self._written if one[0] < oldest]:
                self._tasks.start(self._remove(folder))
            self._written = [one for one in self._written if one[0] >= oldest]

    async def _remove(self, folder: Path) -> None:
        await self._node.host.at_files(lambda: disk.remove(folder))

    # ---- resume

    def look(self, job_dir: Path) -> Stored | None:
        """Find the earlier job's files on this host. Raises: StorageError. Blocks: for the disk."""
        self._shelves, problems = disk.shelves(job_dir)
        for problem in problems:
            self._node.reports.say(f"{problem}; it is left out")
        if not self._shelves:
            return None
        first = self._shelves[0].manifest
        # On storage that many share each tells of one host's files, and of those that nobody else tells of: all that
        # tell of all would be too much.
        manifests, place = [manifest for _, manifest in self._shelves], self._node.place
        if len({manifest.node for manifest in manifests}) > TOLD_MAX:
            own = [one for one in manifests if one.node == place.node or one.node >= place.nodes_total]
            manifests = own or manifests
        holdings = dict[tuple[Generation, Rank, Step], Holding]()
        for manifest in manifests:
            for one in manifest.snapshots:
                key = one.generation, one.rank, one.step
                held = Holding(one.rank, one.step, one.payload is not None, one.replicas, one.paired)
                if key not in holdings or held.payload:
                    holdings[key] = held
        told = tuple((generation, held) for (generation, _, _), held in sorted(holdings.items()))
        committed = tuple(sorted({(manifest.generation, manifest.step) for _, manifest in self._shelves}))
        return Stored(first.job, first.command, first.versions, first.ranks_total, committed, told)

    async def read(self, world: World, begins: Beginning) -> None:
        """Bring the snapshots that this node is to hold into its memory, and feed them. Damaged files are reported.

        Raises: StaleGeneration if a swap begins meanwhile; MemoryShortage.
        """
        node, copies = self._node, self._node.config.copies
        run = world.ranks_of(node.id)
        for rank in sorted(begins.seen):
            if node.id not in begins.readers(world, rank, copies):
                continue
            for shelf, one in self._copies_of(rank, begins, 0 if rank in run else 1):
                try:
                    holding = await node.host.in_thread(lambda: self._read(world, shelf, one))  # noqa: B023
                except StorageError as error:
                    node.reports.emit(events.Note(text=f"node {node.id}: {error}; another copy is looked for"))
                    continue
                node.feed(api.SnapshotHeld(holding, world.generation))
                break
        node.feed(api.FilesRead())

    def _copies_of(self, rank: Rank, begins: Beginning, turn: int) -> Iterable[tuple[Shelf, StoredSnapshot]]:
        """Find the copies of a rank's snapshot here, with payload first; the holders begin with different ones."""
        found = [
            (shelf, one)
            for shelf in self._shelves
            for one in shelf.manifest.snapshots
            if (one.generation, one.rank, one.step) == (begins.generation, rank, begins.step)
        ]
        whole = [copy for copy in found if copy[1].payload is not None]
        turn = turn % len(whole) if whole else 0
        return [*whole[turn:], *whole[:turn], *(copy for copy in found if copy[1].payload is None)]

    def _read(self, world: World, shelf: Shelf, snapshot: StoredSnapshot) -> Holding:
        store, rank, step, generation = self._store, snapshot.rank, snapshot.step, world.generation
        at_home = world.node_of[rank] == self._node.id
        with_payload = snapshot.payload is not None
        script = next((one for one in shelf.manifest.ranks if one.rank == rank), None)
        if script is None or script.first > 0 or script.last < step:
            kept = f"steps {script.first} to {script.last}" if script is not None else "none"
            raise StorageError(
                f"{shelf.folder} has call records of rank {rank} of {kept}",
                f"those of all steps up to {step}, which a new process needs",
                "raise history_limit_mib in the next job",
            )
        recording = disk.read_recording(shelf.folder, script)
        try:
            profile = msgspec.msgpack.decode(recording, type=local.RankReady)
        except msgspec.MsgspecError as error:
            raise StorageError(f"the recording of rank {rank} in {shelf.folder} cannot be read: {error}") from error
        records = disk.read_history(shelf.folder, script)
        holding = Holding(rank, step, with_payload, snapshot.replicas, snapshot.paired)
        payload_bytes = profile.payload_bytes if with_payload else 0
        shape = rank, profile.header_bytes, payload_bytes
        if at_home and with_payload:
            pair = store.make_own(*shape)
            try:
                disk.read_snapshot(shelf.folder, snapshot, pair)
                holding = store.adopt_own(pair, step, generation, snapshot.replicas)
            except BaseException:
                pair.invalidate(step)
                store.put_back(pair)
                raise
        else:
            with store.writing(rank):
                pair = store.begin_mirror(rank, step, generation, *shape[1:])
                encoded = disk.read_snapshot(shelf.folder, snapshot, pair)
                sums = snapshot.payload.sums if snapshot.payload is not None else ()
                store.finish_mirror(pair, encoded, generation, holding, [], sums)
        store.recordings[rank] = recording
        store.history(rank).truncate(NO_STEP)
        store.history(rank).append(script.last, *records)
        store.history(rank).truncate(step)
        return holding
