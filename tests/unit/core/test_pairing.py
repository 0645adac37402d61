"""Ranks that have issued other collectives: nothing is committed or restored, newcomers go, and at last the job."""

from __future__ import annotations

import itertools
import random

import msgspec
import pytest
from support import expect, present

from deadpool_plugin.core.ledger import Ledger, RestorePoint
from deadpool_plugin.core.signatures import Signature, decoded, first_difference, share
from deadpool_plugin.core.types import MASK, Holding, World
from deadpool_plugin.transport.flight_recorder import AREA_BYTES, RECENT, FlightRecorder, read_calls

WORLD = World(0, (0, 1), (2,))
SUM, MORE = Signature("all_reduce", "float32", 1, "sum"), Signature("all_reduce", "int32", 1, "sum")


def issued(codes, place=0, size=2, cuts=()):
    """One member's calls, as its agent reads them, and its part of the sum at the end."""
    area = memoryview(bytearray(AREA_BYTES))
    books = FlightRecorder(area, 1, [("0+2", place, size)])
    for number, code in enumerate(codes):
        if number in cuts:
            books.cut(cuts.index(number))
        books.records[0].note(code)
    total = books.cut(9)
    (calls,) = read_calls(area, 1)
    return calls, total


@pytest.mark.parametrize(
    "call",
    [
        SUM,
        MORE,
        Signature("broadcast", "", 1 << 33, "", 4000),
        Signature("barrier"),
        Signature("reduce", "bfloat16", 7, "max", 0),
    ],
)
def test_a_call_is_what_its_code_says(call):
    assert decoded(call.encoded()) == call and call.encoded() <= MASK


def test_the_sums_of_a_group_add_up_to_nothing_if_its_members_agree_and_only_then():
    chance = random.Random(5)
    for size in (2, 3, 8):
        codes = [Signature("all_reduce", "float32", chance.randrange(1 << 20), "sum").encoded() for _ in range(50)]
        sums = [issued(codes, place, size)[1] for place in range(size)]
        assert sum(sums) & MASK == 0
        for place, other in itertools.product(range(size), (codes[:-1], [*codes, codes[-1]], codes[1:] + codes[:1])):
            assert (sum(sums) - sums[place] + issued(other, place, size)[1]) & MASK
    assert sum(share(place, 5, 77) for place in range(5)) & MASK == 0


def test_the_first_difference_is_found_as_long_as_it_is_known():
    codes = [Signature("all_reduce", "float32", size, "sum").encoded() for size in range(3 * RECENT)]
    at = 2 * RECENT + 20
    mine, _ = issued(codes)
    wrong, _ = issued([*codes[:at], MORE.encoded(), *codes[at:]])
    found = first_difference((0, mine), (1, wrong))
    assert present(found).what == f"group 0+2: collective {at + 1} of rank 0 was {decoded(codes[at])}, of rank 1 {MORE}"
    behind = msgspec.structs.replace(issued(codes[:-40])[0], cuts=())
    assert first_difference((0, mine), (1, behind)) is None, "a member that is behind differs in nothing"
    long_ago, _ = issued([MORE.encoded(), *codes[1:]])
    assert "one no longer known" in present(first_difference((0, mine), (1, long_ago))).what


def test_what_is_issued_after_a_peers_script_has_ended_pairs_with_nothing():
    codes = [SUM.encoded()] * 3
    waits, ended = (msgspec.structs.replace(issued(codes[:count])[0], cuts=()) for count in (3, 2))
    assert first_difference((0, ended), (1, waits)) is None, "rank 0 may be behind"
    said = f"group 0+2: rank 1 has issued 3 collectives, the newest {SUM}; rank 0 2, and its script has ended"
    for one, other in itertools.permutations([(0, ended), (1, waits)]):
        assert present(first_difference(one, other, {0})).what == said
        assert first_difference(one, other, {1}) is None, "rank 0 may be behind"
    assert first_difference((0, waits), (1, waits), {0, 1}) is None


def test_members_differ_if_and_only_if_what_both_have_issued_does():
    chance = random.Random(6)
    known = [call.encoded() for call in (SUM, MORE, Signature("barrier"))]
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
    FlightRecorder(area, 4, [("0+2", 0, 2)])
    assert read_calls(area, 4) and not read_calls(area, 5)
    many = [(f"{number}+2", 0, 2) for number in range(200)]
    assert FlightRecorder(area, 5, many).cut(1) and len(read_calls(area, 5)) < 200, (
        "more groups than can be named are compared"
    )


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
