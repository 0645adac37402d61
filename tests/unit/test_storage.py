"""agent/storage.py: what hosts leave on disk, and what another job's hosts make of it, in whatever order they come."""

from __future__ import annotations

import asyncio
import random
import shutil
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest
from support import present
from support.hosts import host, local_node
from support.stores import free

from deadpool_plugin import events
from deadpool_plugin.agent.links import versions
from deadpool_plugin.agent.mirroring import Mirroring
from deadpool_plugin.agent.node import LocalNode
from deadpool_plugin.agent.storage import Beginning, Storage, beginning
from deadpool_plugin.agent.world import Job
from deadpool_plugin.core import api, local
from deadpool_plugin.core.ledger import Ledger
from deadpool_plugin.core.placement import buddies_of, held_by
from deadpool_plugin.core.types import Holding, World
from deadpool_plugin.errors import ConfigError
from deadpool_plugin.mirror import disk
from deadpool_plugin.mirror.store import SnapshotStore
from deadpool_plugin.transport.rendezvous import Hello, Stored

WORLD = World(0, (0, 0, 1, 1, 2, 2), (3,))
PAYLOAD_BYTES = 3000
STEP, GENERATION = 5, 2
SEEDS = range(40)


class Host:
    """One node's agent, as far as its files go. `said`: the events it emits; `fed`: what its controller hears."""

    def __init__(self, node: int, store_dir: Path, command: Sequence[str] = ("train.py",)) -> None:
        self.store, self.fed, self.said = SnapshotStore(), list[api.Input](), list[events.Event]()
        made: LocalNode = local_node(host(self.store), self.fed.append, node=node, store_dir=store_dir)
        made.job = Job(["--local_rank=0", *command], "/", "", {})
        made.reports.emit, made.reports.say = self.said.append, self.said.append  # type: ignore[method-assign,assignment]
        made.world = WORLD
        self.node, self.mirroring = made, Mirroring(made)
        self.storage = Storage(made)

    def hello(self, job_dir: Path) -> Hello:
        stored = self.storage.look(job_dir)
        return Hello(self.node.id, f"h{self.node.id}", ("h", 1), (("h", 2),), 2, versions(), "", stored=stored)


def content(rank: int, step: int) -> bytes:
    return random.Random(f"{rank} {step}").randbytes(PAYLOAD_BYTES)


def hold(on: Host, rank: int, step: int, own: bool, replicas: tuple[int, ...] = (), payload: bool = True) -> None:
    store, replicas = on.store, replicas or (rank,)
    profile = local.RankReady(rank, 4096, PAYLOAD_BYTES, "layout", replicas, b"recording")
    if own:
        pair = store.own(rank) or store.create_own(rank, 4096, PAYLOAD_BYTES)
    else:
        pair = store.begin_mirror(rank, step, 0, 4096, PAYLOAD_BYTES)
    pair.invalidate(step)
    pair.payload(step)[:] = content(rank, step)
    pair.seal(step, GENERATION, "layout", b"scalars")
    if own:
        store.staged(rank, step, 0, replicas)
        on.mirroring.adopt(profile)
    else:
        encoded = present(pair.sealed(step)).encoded
        store.finish_mirror(pair, encoded, 0, Holding(rank, step, payload, replicas), [], ())
        store.recordings[rank] = msgspec.msgpack.encode(profile)
    store.history(rank).append(step, *(b"step %d" % one for one in range(step + 1)))


def flushed(folders: dict[int, Path], lost: Sequence[int] = ()) -> None:
    """Have the nodes of a job leave steps 5 and 6; node 2 has heard of no commit of 6, and rank 5 has not made it."""
    for node, folder in folders.items():
        on = Host(node, folder)
        for rank in held_by(WORLD, node, 1):
            for step in (STEP, STEP + 1):
                if (rank, step) != (5, STEP + 1):
                    hold(on, rank, step, own=WORLD.node_of[rank] == node)
        asyncio.run(on.storage.flush(GENERATION, STEP))
        free(on.store)
        if node in lost:
            shutil.rmtree(folder)


def resumed(folders: dict[int, Path], world: World = WORLD) -> tuple[dict[int, Host], Beginning]:
    """Have the hosts of `folders` read what is there. The hosts' stores are the caller's to free."""
    hosts = {node: Host(node, folder) for node, folder in folders.items()}
    hellos = [on.hello(folders[node] / "job") for node, on in hosts.items()]
    begins = beginning(world, hellos, ["train.py"], copies=1)
    for on in hosts.values():
        asyncio.run(on.storage.read(world, begins))
        assert isinstance(on.fed[-1], api.FilesRead)
    return hosts, begins


@pytest.mark.parametrize("seed", SEEDS)
def test_every_rank_is_found_whatever_became_of_one_host_or_file(tmp_path, seed):
    """Local disks or shared storage, hosts in any order, a host's files lost or one file damaged."""
    draw = random.Random(seed)
    shared, order = draw.random() < 0.5, draw.sample(range(4), 4)
    before = {node: tmp_path / ("all" if shared else f"disk{node}") for node in WORLD.members}
    flushed({node: before[node] for node in (0, 1, 2)})
    if (what := draw.choice(["wiped", "damaged", "well"])) == "wiped":
        shutil.rmtree(before[wiped := draw.randrange(3)] / "job" / f"{GENERATION}.{STEP}" / f"node{wiped}.end")
    elif what == "damaged":
        path = draw.choice(sorted(path for path in tmp_path.rglob("rank*") if path.is_file()))
        data = bytearray(path.read_bytes())
        data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
        path.write_bytes(data)
    hosts, begins = resumed({order[node]: folder for node, folder in before.items()})
    assert (begins.generation, begins.step) == (GENERATION, STEP)
    holdings = {node: on.store.holdings() for node, on in hosts.items()}
    for node, on in hosts.items():
        assert {one.holding for one in on.fed if isinstance(one, api.SnapshotHeld)} == {*holdings[node]}
    point = Ledger(holdings).restore_point(WORLD, WORLD.members)
    assert not isinstance(point, str) and point.step == STEP, f"seed {seed}: {point}"
    for on in hosts.values():
        for holding in on.store.holdings():
            read = on.store.readable(holding.rank, STEP, payload=True)
            assert bytes(read.payload) == content(holding.rank, STEP)
            assert on.store.history(holding.rank).last == STEP and on.store.history(holding.rank).first == 0
            assert msgspec.msgpack.decode(on.store.recording(holding.rank), type=local.RankReady).rank == holding.rank
        free(on.store)


def test_what_a_host_runs_is_in_own_slots_and_what_it_mirrors_is_a_mirror(tmp_path):
    folders = {node: tmp_path / "all" for node in WORLD.members}
    flushed({node: tmp_path / "all" for node in (0, 1, 2)})
    hosts, _ = resumed(folders)
    for node, on in hosts.items():
        assert {held.rank for held in on.store.holdings()} == set(held_by(WORLD, node, 1))
        for rank in WORLD.ranks_of(node):
            assert on.store.owns(rank, STEP)
            (buddy,) = buddies_of(WORLD, node, 1)
            assert not hosts[buddy].store.owns(rank, STEP)
        free(on.store)


@pytest.mark.parametrize("lost", [(0, 1), (2, 0)])
def test_a_host_and_its_buddy_are_missed_by_name(tmp_path, lost):
    folders = {node: tmp_path / f"disk{node}" for node in (0, 1, 2)}
    flushed(folders, lost)
    with pytest.raises(ConfigError, match=r"job job cannot be resumed: no surviving node holds any snapshot of rank"):
        resumed(folders | {3: tmp_path / "disk3"})


def test_damage_to_all_copies_is_said_for_each(tmp_path):
    folders = {node: tmp_path / "all" for node in WORLD.members}
    flushed({node: tmp_path / "all" for node in (0, 1, 2)})
    for path in (tmp_path / "all").rglob(f"rank3.step{STEP}.payload"):
        path.write_bytes(b"x" * PAYLOAD_BYTES)
    hosts, _ = resumed(folders)
    for node in (1, 2):  # who runs rank 3, and its buddy
        notes = [said.text for said in hosts[node].said if isinstance(said, events.Note)]
        assert len(notes) == 2 and all("rank3.step5.payload is damaged" in note for note in notes)
    assert "rank(s) 3" in str(Ledger({node: on.store.holdings() for node, on in hosts.items()}).restore_point(
        WORLD, WORLD.members
    ))  # fmt: skip
    for on in hosts.values():
        free(on.store)


def folders(top: Path) -> list[str]:
    return sorted(path.name for path in (top / "job").iterdir())


async def settled(on: Host) -> None:
    while on.storage._tasks._tasks:
        await asyncio.sleep(0)


def make_all(on: Host, step: int) -> None:
    for rank in held_by(WORLD, 0, 1):
        hold(on, rank, step, own=WORLD.node_of[rank] == 0)


def test_while_the_job_runs_the_newest_steps_that_all_have_written_stay(tmp_path):
    """Step 2 was written here, and not by all: it goes when the steps around it do."""

    async def run(on: Host) -> None:
        for step in range(6):
            make_all(on, step)
            on.storage.write(GENERATION, step)
            await settled(on)
            if step != 2:
                on.storage.stored(step)
            await settled(on)
            assert folders(tmp_path) == [f"{GENERATION}.{one}" for one in range(step + 1) if one >= kept[step]]

    kept = {0: 0, 1: 0, 2: 0, 3: 1, 4: 3, 5: 4}
    on = Host(0, tmp_path)
    asyncio.run(run(on))
    assert on.fed == [api.StepWritten(step, GENERATION) for step in range(6)]
    free(on.store)


def test_a_step_that_training_has_replaced_is_left_out_and_said(tmp_path):
    async def run(on: Host) -> None:
        make_all(on, STEP)
        present(on.store.own(1)).invalidate(STEP + 1)
        present(on.store.own(1)).drop_newer(STEP - 1)
        on.storage.write(GENERATION, STEP)
        await settled(on)

    on = Host(0, tmp_path)
    asyncio.run(run(on))
    assert on.fed == [api.StepWritten(STEP, GENERATION, False)]
    (note,) = [said.text for said in on.said if isinstance(said, events.Note)]
    assert note.endswith("step 5 of rank(s) 1 is not in memory any more") and not disk.shelves(tmp_path / "job")[0]
    free(on.store)


def test_what_cannot_be_written_while_the_job_runs_is_said_and_disturbs_nobody(tmp_path, monkeypatch):
    async def run(on: Host) -> None:
        make_all(on, STEP)
        async with on.storage._writing:
            on.storage.write(GENERATION, STEP)
            await settled(on)
        monkeypatch.setattr(disk, "_write_file", full)
        on.storage.write(GENERATION, STEP)
        await settled(on)

    def full(*arguments: object, **more: object) -> None:
        raise OSError(28, "No space left on device")

    on = Host(0, tmp_path)
    asyncio.run(run(on))
    busy, failed = [said.text for said in on.said if isinstance(said, events.Note)]
    assert "step 5 is not written to" in busy and "an earlier one still is" in busy
    assert failed.endswith("cannot be written: No space left on device")
    assert on.fed == [api.StepWritten(STEP, GENERATION, False)] * 2
    free(on.store)


def test_a_disk_that_does_not_answer_is_not_asked_again_while_the_job_runs(tmp_path, monkeypatch):
    async def run(on: Host) -> None:
        make_all(on, STEP)
        on.node.host.at_files = lambda work: asyncio.Event().wait()  # type: ignore[method-assign,assignment,return-value]
        for _ in range(2):
            on.storage.write(GENERATION, STEP)
            await settled(on)

    monkeypatch.setattr("deadpool_plugin.agent.storage.STORING_S", 0.01)
    on = Host(0, tmp_path)
    asyncio.run(run(on))
    hangs, after = [said.text for said in on.said if isinstance(said, events.Note)]
    assert "has not taken it within 0.01 s, and is not asked again" in hangs and "an earlier one still is" in after
    free(on.store)


def test_files_of_hosts_that_are_no_more_are_told_of(tmp_path):
    """Of more hosts than each could tell of: a host tells of its own, and of those whose number nobody has now."""
    for node in range(12):
        on = Host(node, tmp_path)
        hold(on, node % 6, STEP, own=False)
        asyncio.run(on.storage.flush(GENERATION, STEP))
        free(on.store)
    told = {node: present(Host(node, tmp_path).hello(tmp_path / "job").stored).holdings for node in (0, 1)}
    assert len(told[0]) == len(told[1]) == 6
    few = present(Host(0, tmp_path).hello(tmp_path / "job").stored)
    assert {held.rank for _, held in few.holdings} == {0, *(node % 6 for node in range(3, 12))}


def test_payloads_of_replicas_are_read_wherever_they_are(tmp_path):
    """Two hosts change places: each has the payload of the rank that the other one runs now, and its own's header."""
    two = World(0, (0, 1), ())
    for node in (0, 1):
        on = Host(node, tmp_path / f"disk{node}")
        on.node.world = two
        hold(on, node, STEP, own=True, replicas=(0, 1))
        hold(on, 1 - node, STEP, own=False, replicas=(0, 1), payload=False)
        asyncio.run(on.storage.flush(GENERATION, STEP))
        free(on.store)
    hosts, _ = resumed({0: tmp_path / "disk1", 1: tmp_path / "disk0"}, two)
    point = Ledger({node: on.store.holdings() for node, on in hosts.items()}).restore_point(two, (0, 1))
    assert not isinstance(point, str) and point.step == STEP
    for on in hosts.values():
        free(on.store)


def test_another_command_or_version_is_refused(tmp_path):
    flushed({0: tmp_path})
    hello = Host(0, tmp_path).hello(tmp_path / "job")
    with pytest.raises(ConfigError, match=r"ran train.py; expected the command of this job, train.py --lr 2; to do"):
        beginning(WORLD, [hello], ["train.py", "--lr", "2"], 1)
    newer = msgspec.structs.replace(hello, versions=hello.versions | {"torch": "9.9"})
    with pytest.raises(ConfigError, match=r"job job ran with torch .*, this one has 9.9; expected the same version"):
        beginning(WORLD, [newer], ["train.py"], 1)


def test_a_spare_that_mirrors_leaves_its_mirrors(tmp_path):
    """With few hosts a spare is a buddy, too, and may be all that is left."""
    on = Host(3, tmp_path)
    hold(on, 0, STEP, own=False)
    asyncio.run(on.storage.flush(GENERATION, STEP))
    assert present(on.storage.look(tmp_path / "job")).holdings[0][1].rank == 0
    free(on.store)


def test_a_node_that_holds_nothing_leaves_and_says_nothing(tmp_path):
    on = Host(0, tmp_path)
    asyncio.run(on.storage.flush(GENERATION, -1))
    assert not on.said and not [path for path in tmp_path.rglob("*") if path.name != "job"]


def test_what_was_resumed_is_older_than_all_that_the_job_itself_writes(tmp_path):
    """The earlier job had reached generation 2; this one begins to count anew, and ends in generation 1."""
    flushed({node: tmp_path / "all" for node in (0, 1, 2)})
    hosts, _ = resumed({node: tmp_path / "all" for node in WORLD.members})
    for on in hosts.values():
        on.node.credentials.job = "next"
        asyncio.run(on.storage.flush(1, STEP))
        free(on.store)
    written, _ = disk.shelves(tmp_path / "all" / "next")
    assert {one.generation for _, its in written for one in its.snapshots} == {0}


def test_records_whose_beginning_was_dropped_are_refused(tmp_path):
    on = Host(0, tmp_path)
    hold(on, 0, STEP, own=True)
    on.store.history(0).truncate(-1)
    on.store.history(0).append(STEP, b"step 4", b"step 5")
    asyncio.run(on.storage.flush(GENERATION, STEP))
    other = Host(0, tmp_path)
    other.hello(tmp_path / "job")
    asyncio.run(other.storage.read(WORLD, Beginning(GENERATION, STEP, {0: {0}})))
    (note,) = [said.text for said in other.said if isinstance(said, events.Note)]
    assert "has call records of rank 0 of steps 4 to 5; expected those of all steps up to 5" in note
    free(on.store)


def offered(node: int, *held: tuple[int, int, int], job: str = "job", ranks: int = 2) -> Hello:
    """A node that sees snapshots (generation, rank, step)."""
    holdings = tuple((generation, Holding(rank, step, True, (rank,))) for generation, rank, step in held)
    committed = tuple({(generation, step) for generation, _, step in held})
    stored = Stored(job, ["train.py"], {}, ranks, committed, holdings)
    return Hello(node, f"h{node}", ("h", 1), (("h", 2),), 1, {}, "", stored=stored)


TWO = World(0, (0, 1), ())


def test_the_newest_history_counts_not_the_largest_step():
    """Step 9 of generation 1 was undone: generation 2 began behind it."""
    seen = [(1, 0, 9), (1, 1, 9), (2, 0, 8), (2, 1, 8), (2, 0, 10)]
    assert beginning(TWO, [offered(0, *seen), offered(1)], ["train.py"], 1)[:2] == (2, 8)


def test_what_is_not_whole_in_the_newest_history_is_taken_from_the_one_before():
    begins = beginning(TWO, [offered(0, (1, 0, 7), (2, 0, 8)), offered(1, (1, 1, 7))], ["train.py"], 1)
    assert begins[:2] == (1, 7) and begins.passed == "no surviving node holds any snapshot of rank(s) 1"


def test_a_step_that_is_held_twice_is_preferred_to_one_that_all_had_only_begun_to_mirror():
    """Of step 9, which was not committed, a damaged file would be the end."""
    own = {0: (0, 0, 9), 1: (0, 1, 9)}
    hellos = [offered(node, (0, 0, 8), (0, 1, 8), own[node]) for node in (0, 1)]
    told = [msgspec.structs.replace(present(hello.stored), committed=((0, 8),)) for hello in hellos]
    hellos = [msgspec.structs.replace(hello, stored=its) for hello, its in zip(hellos, told, strict=True)]
    assert beginning(TWO, hellos, ["train.py"], 1)[:2] == (0, 8)


@pytest.mark.parametrize(
    ("hellos", "what"),
    [
        ([offered(0, (0, 0, 1)), offered(1, (0, 1, 1), job="other")], "job job on h0 and to job other on h1"),
        ([offered(0, (0, 0, 1), ranks=4)], r"had 4 rank\(s\), this one has 2"),
        ([offered(0, (0, 0, 1))], r"snapshot of rank\(s\) 1"),
        ([msgspec.structs.replace(offered(0), stored=None)], "no host has files"),
        ([offered(0)], "no host has a snapshot"),
    ],
)
def test_what_cannot_be_resumed_is_said(hellos, what):
    with pytest.raises(ConfigError, match=what):
        beginning(TWO, hellos, ["train.py"], 1)


def test_who_reads_a_rank():
    begins = Beginning(0, 1, {0: {0, 1}, 1: {2, 3}, 2: {0, 1, 2, 3}})
    world = World(0, (0, 1, 2, 3), ())
    assert begins.readers(world, 0, 1) == {0, 1}
    assert begins.readers(world, 1, 1) == {2, 3}, "node 1 sees no files of its rank: its buddy's may be damaged"
    assert begins.readers(world, 2, 1) == {2, 3}
    assert Beginning(0, 1, {3: {1, 2}}).readers(world, 3, 1) == {1, 2}, "no holder sees them: all who do read"
