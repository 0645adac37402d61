"""Ranks that have issued other collectives: nothing is committed or restored, newcomers go, and at last the job."""

from __future__ import annotations

import itertools
import random

import msgspec
import pytest
from support import expect, present

from deadpool_plugin.core import io
from deadpool_plugin.core.ledger import Ledger, RestorePoint
from deadpool_plugin.core.messages import RankCalls
from deadpool_plugin.core.pairing import Call, decoded, first_difference, share
from deadpool_plugin.core.types import MASK, Holding, World
from deadpool_plugin.transport.calls import AREA_BYTES, RECENT, CallBooks, read

from .cluster import TIMING, Cluster

WORLD = World(0, (0, 1), (2,))
SUM, MORE = Call("all_reduce", "float32", 1, "sum"), Call("all_reduce", "int32", 1, "sum")


def issued(codes, place=0, size=2, cuts=()):
    """One member's calls, as its agent reads them, and its part of the sum at the end."""
    area = memoryview(bytearray(AREA_BYTES))
    books = CallBooks(area, 1, [("0+2", place, size)])
    for number, code in enumerate(codes):
        if number in cuts:
            books.cut(cuts.index(number))
        books.books[0].note(code)
    total = books.cut(9)
    (calls,) = read(area, 1)
    return calls, total


@pytest.mark.parametrize(
    "call",
    [SUM, MORE, Call("broadcast", "", 1 << 33, "", 4000), Call("barrier"), Call("reduce", "bfloat16", 7, "max", 0)],
)
def test_a_call_is_what_its_code_says(call):
    assert decoded(call.encoded()) == call and call.encoded() <= MASK


def test_the_sums_of_a_group_add_up_to_nothing_if_its_members_agree_and_only_then():
    chance = random.Random(5)
    for size in (2, 3, 8):
        codes = [Call("all_reduce", "float32", chance.randrange(1 << 20), "sum").encoded() for _ in range(50)]
        sums = [issued(codes, place, size)[1] for place in range(size)]
        assert sum(sums) & MASK == 0
        for place, other in itertools.product(range(size), (codes[:-1], [*codes, codes[-1]], codes[1:] + codes[:1])):
            assert (sum(sums) - sums[place] + issued(other, place, size)[1]) & MASK
    assert sum(share(place, 5, 77) for place in range(5)) & MASK == 0


def test_the_first_difference_is_found_as_long_as_it_is_known():
    codes = [Call("all_reduce", "float32", size, "sum").encoded() for size in range(3 * RECENT)]
    at = 2 * RECENT + 20
    mine, _ = issued(codes)
    wrong, _ = issued([*codes[:at], MORE.encoded(), *codes[at:]])
    found = first_difference((0, mine), (1, wrong))
    assert present(found).what == f"collective {at + 1} of rank 0 was {decoded(codes[at])}, of rank 1 {MORE}"
    behind = msgspec.structs.replace(issued(codes[:-40])[0], cuts=())
    assert first_difference((0, mine), (1, behind)) is None, "a member that is behind differs in nothing"
    long_ago, _ = issued([MORE.encoded(), *codes[1:]])
    assert "one no longer known" in present(first_difference((0, mine), (1, long_ago))).what


def test_what_is_issued_after_a_peers_script_has_ended_pairs_with_nothing():
    codes = [SUM.encoded()] * 3
    waits, ended = (msgspec.structs.replace(issued(codes[:count])[0], cuts=()) for count in (3, 2))
    assert first_difference((0, ended), (1, waits)) is None, "rank 0 may be behind"
    said = f"rank 1 has issued 3 collectives, the newest {SUM}; rank 0 2, and its script has ended"
    for one, other in itertools.permutations([(0, ended), (1, waits)]):
        assert present(first_difference(one, other, {0})).what == said
        assert first_difference(one, other, {1}) is None, "rank 0 may be behind"
    assert first_difference((0, waits), (1, waits), {0, 1}) is None


def test_members_differ_if_and_only_if_what_both_have_issued_does():
    chance = random.Random(6)
    known = [call.encoded() for call in (SUM, MORE, Call("barrier"))]
    for _ in range(300):
        codes = chance.choices(known, k=chance.randrange(1, 2 * RECENT))
        other, place = list(codes), chance.randrange(len(codes))
        other[place : place + chance.randrange(2)] = chance.choices(known, k=chance.randrange(3))
        other = other[: len(other) - chance.randrange(min(len(other), RECENT // 2) + 1)]
        (mine, _), (its, _) = issued(codes), issued(other)
        found = first_difference(
            (0, msgspec.structs.replace(mine, cuts=())), (1, msgspec.structs.replace(its, cuts=()))
        )
        both = min(len(codes), len(other))
        assert (found is None) == (codes[:both] == other[:both]), (codes, other)


def test_a_group_of_another_generation_is_not_read():
    area = memoryview(bytearray(AREA_BYTES))
    CallBooks(area, 4, [("0+2", 0, 2)])
    assert read(area, 4) and not read(area, 5)
    many = [(f"{number}+2", 0, 2) for number in range(200)]
    assert CallBooks(area, 5, many).cut(1) and len(read(area, 5)) < 200, "more groups than can be named are compared"


def holdings(step, sums):
    held: dict[int, list[Holding]] = {node: [] for node in (0, 1, 2)}
    for rank, paired in enumerate(sums):
        for node in (rank, 1 - rank):
            held[node].append(Holding(rank, step, True, (rank,), paired))
    return held


def test_a_step_that_does_not_pair_is_neither_committed_nor_restored():
    before, after = holdings(4, (7, -7 & MASK)), holdings(5, (7, 8))
    ledger = Ledger({node: before[node] + after[node] for node in before})
    assert ledger.committed(WORLD) == 4 and ledger.unpaired == 5
    for lost in ((), (1,)):
        point = ledger.restore_point(WORLD, [node for node in (0, 1, 2) if node not in lost], committed=4)
        assert expect(RestorePoint, point).step == 4, "the copy of a lost node says what its rank had issued"


def after_a_swap(calls):
    """A job whose node 1 was lost to its spare; `calls` of each rank are what its agent would read."""
    cluster = Cluster(World(0, (0, 1, 2), (3, 4)), last_step=60)
    cluster.form()
    assert cluster.run(lambda: bool(cluster.said("Protected")) and cluster.at_step(2))
    cluster.kill(1)
    assert cluster.run(lambda: list(cluster.plans) == [1] and cluster.generation_protected())
    cluster.hold = True
    homes = {rank: home for rank, home in enumerate(cluster.newest().world.node_of)}
    cluster.calls = {homes[rank]: (RankCalls(rank, (mine,)),) for rank, mine in calls.items()}
    return cluster


def three(newcomers, others=(SUM, SUM)):
    """Return the calls of ranks 0 and 2, and of the newcomer 1."""
    issues = {0: others, 1: newcomers, 2: others}
    read_now = {rank: issued([call.encoded() for call in calls], rank, 3)[0] for rank, calls in issues.items()}
    return {rank: msgspec.structs.replace(calls, cuts=()) for rank, calls in read_now.items()}


def test_a_newcomer_that_hangs_with_another_call_is_replaced_and_then_the_job_ends():
    cluster = after_a_swap(three([MORE, SUM]))
    cluster.idle(1.1 * TIMING.stall_timeout_s)
    said = f"collective 1 of rank 0 was {SUM}, of rank 1 {MORE}"
    assert [(node, rank) for node, rank, reason in cluster.ended if said in reason] == [
        (cluster.plans[1].world.node_of[1], 1)
    ]
    assert list(cluster.plans) == [1, 2] and cluster.newest().lost_ranks == (1,)
    assert cluster.run(events=400_000)
    living = {number: node.exit for number, node in cluster.nodes.items() if not node.killed}
    assert {code for code, _ in living.values()} == {86}
    assert all(said in reason and "rank(s) 1 were replaced" in reason for _, reason in living.values())


def test_a_stall_of_ranks_that_pair_is_a_stall():
    cluster = after_a_swap(three([SUM]))
    cluster.idle(1.1 * TIMING.stall_timeout_s)
    assert not cluster.ended and list(cluster.plans) == [1, 2]
    cluster.calls, cluster.hold = {}, False
    assert cluster.run(events=400_000)
    assert {node.left[0] for node in cluster.nodes.values() if not node.killed} == {0}


def test_a_newcomer_that_waits_for_ranks_that_have_finished_is_replaced():
    """One collective more in the last step, of the same kind: none of the others is left to pair with it."""
    cluster = after_a_swap(three([SUM, SUM], others=[SUM]))
    homes = cluster.plans[1].world.node_of
    for rank in (0, 2):
        cluster.feed(cluster.nodes[homes[rank]], io.WorkerFinished(rank))
    cluster.idle(1.1 * TIMING.stall_timeout_s)
    assert [(node, rank) for node, rank, reason in cluster.ended if "its script has ended" in reason] == [(homes[1], 1)]
    cluster.calls, cluster.hold = {}, False
    assert cluster.run(events=400_000)
    assert {node.left[0] for node in cluster.nodes.values() if not node.killed} == {0}


def test_who_has_finished_has_all_the_time_it_needs_if_all_pairs():
    cluster = after_a_swap(three([SUM]))
    cluster.feed(cluster.nodes[cluster.plans[1].world.node_of[1]], io.WorkerFinished(1))
    cluster.calls = {home: ranks for home, ranks in cluster.calls.items() if ranks[0].rank != 1}
    cluster.idle(3 * TIMING.stall_timeout_s)
    assert not cluster.ended and list(cluster.plans) == [1]


def test_a_job_whose_last_step_does_not_pair_does_not_end_well():
    """All scripts have ended before the last step was mirrored, and so before its sums were compared."""
    cluster = after_a_swap(three([MORE, SUM]))
    homes = cluster.plans[1].world.node_of
    for rank, home in enumerate(homes):
        cluster.feed(cluster.nodes[home], io.WorkerFinished(rank))
    assert cluster.run(lambda: 2 in cluster.plans)
    assert [(node, rank) for node, rank, _ in cluster.ended] == [(homes[1], 1)]
    cluster.calls, cluster.hold = {}, False
    assert cluster.run(events=400_000)
    assert {node.left[0] for node in cluster.nodes.values() if not node.killed} == {0}


def test_what_was_compared_before_scripts_ended_is_compared_again_at_their_end():
    cluster = after_a_swap(three([SUM, SUM]))
    homes = cluster.plans[1].world.node_of
    cluster.feed(cluster.nodes[homes[1]], io.WorkerFinished(1))
    cluster.idle(1.1 * TIMING.stall_timeout_s)
    assert not cluster.ended and list(cluster.plans) == [1], "compared, and nothing found"
    cluster.calls = {homes[rank]: (RankCalls(rank, (mine,)),) for rank, mine in three([MORE, SUM]).items()}
    for rank in (0, 2):
        cluster.feed(cluster.nodes[homes[rank]], io.WorkerFinished(rank))
    assert cluster.run(lambda: 2 in cluster.plans)
    assert [(node, rank) for node, rank, _ in cluster.ended] == [(homes[1], 1)]


def all_finish(cluster):
    homes = cluster.newest().world.node_of
    for rank, home in enumerate(homes):
        cluster.feed(cluster.nodes[home], io.WorkerFinished(rank))
    return homes


def test_a_job_does_not_end_well_while_a_newcomers_node_is_silent():
    """It takes the last step's collectives along: nobody knows what they were."""
    cluster = after_a_swap(three([MORE, SUM]))
    silent = cluster.nodes[cluster.plans[1].world.node_of[1]]
    all_finish(cluster)
    silent.frozen = True
    cluster.idle(1.5 * TIMING.silent_after_s)
    assert not any(node.exit == (0, "finished") for node in cluster.nodes.values())
    assert silent.number in cluster.nodes[0].controller._ctx.suspects or silent.number in cluster.newest().lost_nodes


def test_a_coordinator_that_stood_still_waits_for_the_answers_it_has_in_hand():
    cluster = after_a_swap(three([MORE, SUM]))
    homes, pairing = all_finish(cluster), cluster.nodes[0].controller._pairing
    assert cluster.run(lambda: pairing._asked_at > 0) and not pairing.answered
    cluster.now += 1.2 * TIMING.silent_after_s
    cluster.feed(cluster.nodes[0], io.Ticked())
    assert not pairing.answered
    cluster.idle(0.3 * TIMING.silent_after_s)
    assert [(node, rank) for node, rank, _ in cluster.ended] == [(homes[1], 1)]


def test_a_last_step_that_does_not_pair_ends_a_job_without_newcomers_too():
    cluster = Cluster(World(0, (0, 1, 2), (3, 4)), last_step=60)
    cluster.form()
    assert cluster.run(lambda: bool(cluster.said("Protected")) and cluster.at_step(2))
    cluster.hold = True
    cluster.idle(1.1 * TIMING.stall_timeout_s)
    assert list(cluster.plans) == [1] and cluster.run(lambda: cluster.generation_protected())
    cluster.calls = {rank: (RankCalls(rank, (mine,)),) for rank, mine in three([MORE, SUM]).items()}
    all_finish(cluster)
    assert cluster.run(events=400_000)
    assert {node.left[0] for node in cluster.nodes.values()} == {86} and not cluster.ended


def test_a_script_whose_own_ranks_differ_is_told_so_when_it_stalls_again():
    """Generation 0 is not compared: all go on in generation 1, where the same happens, and no process is new."""
    cluster = Cluster(World(0, (0, 1, 2), (3, 4)), last_step=60)
    cluster.form()
    assert cluster.run(lambda: bool(cluster.said("Protected")) and cluster.at_step(2))
    cluster.hold = True
    cluster.calls = {rank: (RankCalls(rank, (mine,)),) for rank, mine in three([MORE, SUM]).items()}
    cluster.idle(1.1 * TIMING.stall_timeout_s)
    assert list(cluster.plans) == [1] and not cluster.ended
    assert cluster.run(events=400_000)
    said = f"collective 1 of rank 0 was {SUM}, of rank 1 {MORE}"
    assert {node.left[0] for node in cluster.nodes.values()} == {86} and not cluster.ended
    assert all(said in node.left[1] and "correct the script" in node.left[1] for node in cluster.nodes.values())


def test_who_was_replaced_is_not_forgotten_with_the_coordinator():
    """The first one dies when it has asked for the newcomer's end; the next one learns of that from its node."""
    cluster = after_a_swap(three([MORE, SUM]))
    homes = cluster.plans[1].world.node_of
    cluster.idle(1.05 * TIMING.stall_timeout_s)
    assert [(node, rank) for node, rank, _ in cluster.ended] == [(homes[1], 1)]
    cluster.kill(0)
    assert cluster.run(lambda: max(cluster.plans) >= 2 and cluster.generation_protected())
    newest = cluster.newest().world.node_of
    for rank in (0, 1, 2):
        cluster.calls[newest[rank]] = (RankCalls(rank, (three([MORE, SUM])[rank],)),)
    assert cluster.run(events=400_000)
    living = {node.exit for node in cluster.nodes.values() if not node.killed}
    assert {code for code, _ in living} == {86} and len(cluster.ended) == 1
    assert all("as before rank(s) 1 were replaced" in reason for _, reason in living)


def test_an_error_after_a_swap_may_be_the_newcomers():
    """Rank 0 is answered with what it cannot read, and raises: rank 1 goes, too."""
    cluster = after_a_swap(three([MORE, SUM]))
    cluster.kill_rank(0, 0, exit_code=1)
    assert cluster.run(lambda: 2 in cluster.plans and cluster.generation_protected())
    assert [(node, rank) for node, rank, _ in cluster.ended] == [(cluster.plans[1].world.node_of[1], 1)]
    cluster.calls = {}
    cluster.hold = False
    assert cluster.run(events=400_000)
    assert {node.left[0] for node in cluster.nodes.values() if not node.killed} == {0}


def test_a_step_that_does_not_pair_has_its_newcomer_replaced():
    """All calls look alike from outside: what the snapshots say is enough."""
    cluster = after_a_swap(three([SUM, SUM]))
    before = cluster.committed[1]  # and one step more may be staged already
    cluster.paired = {1: 5}
    cluster.hold = False
    assert cluster.run(lambda: bool(cluster.ended), events=400_000)
    assert cluster.committed[1] <= before + 1 and [(node, rank) for node, rank, _ in cluster.ended] == [
        (cluster.plans[1].world.node_of[1], 1)
    ]
    cluster.paired = {}
    assert cluster.run(events=400_000)
    assert {node.left[0] for node in cluster.nodes.values() if not node.killed} == {0}
