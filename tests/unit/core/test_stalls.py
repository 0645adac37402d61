"""Who never arrived: what ranks have issued and where they are, laid side by side."""

from __future__ import annotations

import msgspec
import pytest
from support import present

from deadpool_plugin.core.messages import RankCalls
from deadpool_plugin.core.signatures import DEVICE, Activity, Signature
from deadpool_plugin.core.stalls import find
from deadpool_plugin.transport.flight_recorder import AREA_BYTES, FlightRecorder, Whereabouts, read_calls, read_place

SUM = Signature("all_reduce", "float32", 8, "sum")
MAX = Signature("all_reduce", "float32", 8, "max")
NODE_OF = (0, 0, 1, 1)
GATE = "the step before to be committed"


def told(rank, issued, waits="", group="", peer=-1, activity=Activity.STEP, begins=None, step=5):
    """What a rank's agent reads: how many collectives it issued in each group, and what it waits for in which.

    `begins`: how many it had issued there before the newest step."""
    area = memoryview(bytearray(AREA_BYTES))
    members = {"row": (0, 1), "col": (0, 2), "low": (1, 3), "end": (2, 3), "all": (0, 1, 2, 3)}
    keys = [key for key in issued if rank in members[key]]
    books = FlightRecorder(area, 3, [(key, members[key].index(rank), len(members[key])) for key in keys])
    for key, book in zip(keys, books.records, strict=True):
        for _ in range((begins or {}).get(key, 0)):
            book.note(SUM.encoded())
    books.cut(5)
    for key, book in zip(keys, books.records, strict=True):
        for code in issued[key] if isinstance(issued[key], list) else [SUM] * issued[key]:
            book.note(code.encoded())
    place = Whereabouts(area)
    place.made(step)
    place.enter(activity, "train_step")
    if waits:
        place.wait(waits, group, peer)
    return RankCalls(rank, read_calls(area, 3), place=read_place(area))


def test_the_rank_that_all_wait_for_is_found_through_those_that_wait_for_it_in_between():
    """Rank 0 waits for rank 1, which waits for rank 3, for which rank 2 waits, too."""
    found = find(
        [
            told(0, {"row": 3, "col": 1}, "allreduce", "row"),
            told(1, {"row": 2, "low": 2}, "allreduce", "low"),
            told(2, {"col": 1, "end": 5}, "allreduce", "end"),
            told(3, {"low": 1, "end": 4}),
        ],
        NODE_OF,
    )
    assert found.ranks == (3,)
    assert "rank 3 on node 1 has not come to collective 2 of the group of ranks 1, 3 (all_reduce float32 x 8 sum)" in (
        found.what
    )
    assert "rank(s) 1 waits; it is in train_step, after step 5" in found.what


def test_where_the_device_waits_all_that_was_issued_counts():
    found = find([told(rank, {"all": 3}, DEVICE) for rank in (0, 1, 3)] + [told(2, {"all": 2})], NODE_OF)
    assert found.ranks == (2,) and "rank(s) 0, 1, 3 wait" in found.what
    on_device = find([told(rank, {"all": 3 - (rank == 2)}, DEVICE) for rank in range(4)], NODE_OF)
    assert on_device.ranks == (2,)


def test_a_message_that_is_waited_for_names_its_sender():
    found = find([told(0, {"row": 2}), told(1, {"row": 2}, "recv", "row", 0)], NODE_OF)
    assert found.ranks == (0,) and found.what.startswith("rank 1 waits for rank 0 on node 0 in recv")


def test_who_passes_a_collective_by_is_found_at_the_gate():
    issued = [told(rank, {"all": 4}, "allreduce", "all") for rank in (0, 1, 2)]
    assert find([*issued, told(3, {"all": 3}, GATE)], NODE_OF).ranks == (3,)


@pytest.mark.parametrize("others", [(), (2, 3)])
def test_a_newcomer_that_issues_more_in_its_step_is_found_though_the_others_have_made_it(others):
    """Rank 0 waits for step 6, which rank 1 has not made: it waits in a collective of that step that no other issued,
    and the others in the same place of the next step."""
    odd = msgspec.structs.replace(told(1, {"all": 2}, "allreduce", "all"), newcomer=True)
    issued = [told(rank, {"all": 2}, "allreduce", "all", step=6) for rank in others]
    found = find([told(0, {"all": 1}, GATE, step=6), odd, *issued], NODE_OF)
    assert found.ranks == (1,) and "rank 0 waits for rank 1 on node 0 in the step before to be committed" in found.what


@pytest.mark.parametrize("step", [5, 6])
def test_who_passes_a_collective_by_is_found_whether_it_has_made_its_step(step):
    issued = [told(rank, {"all": 2}, "allreduce", "all") for rank in (1, 2, 3)]
    assert find([told(0, {"all": 1}, GATE, step=step), *issued], NODE_OF).ranks == (0,)


def test_who_waits_for_a_message_that_nobody_sends_is_the_one_that_most_wait_for():
    issued = [told(rank, {"all": 4}, "allreduce", "all") for rank in (0, 1, 2)]
    assert find([*issued, told(3, {"all": 3}, "recv", "all", 0)], NODE_OF).ranks == (3,)


def test_members_that_began_to_count_at_different_places_are_compared_from_their_newest_common_step():
    """A rank evaluates alone before training: it has begun to count two collectives earlier."""
    found = find([told(0, {"row": 1}, begins={"row": 2}), told(1, {"row": 2}, "allreduce", "row")], NODE_OF)
    assert found.ranks == (0,)


def test_different_collectives_in_the_same_place_are_named():
    found = find([told(rank, {"row": [SUM, (SUM, MAX)[rank]]}, "allreduce", "row") for rank in (0, 1)], NODE_OF)
    assert not found.ranks and "sum), and rank 1 in collective 2" in found.what and "max)" in found.what


@pytest.mark.parametrize("waits", ["", "allreduce"])
def test_nobody_is_blamed_where_all_are_alike(waits):
    found = find([told(rank, {"all": 3}, waits, "all" if waits else "") for rank in range(4)], NODE_OF)
    assert not found.ranks and "nobody is seen to be late: rank(s) 0, 1, 2, 3 in train_step" in found.what


def test_a_rank_that_is_alone_hangs_itself():
    assert find([told(0, {})], NODE_OF).ranks == (0,)


def test_an_activity_within_another_ends_with_what_it_waited_for():
    now = [0]
    area = memoryview(bytearray(AREA_BYTES))
    place = Whereabouts(area, lambda: now[0])
    with place.within(Activity.SAVE, "torch.save"):
        now[0] = 4_000_000_000
        place.wait("broadcast", "all")
        found = present(read_place(area))
        assert found.activity == Activity.FIRST_SAVE and found.waits
    with place.within(Activity.SAVE, "torch.save"):
        assert present(read_place(area)).activity == Activity.FIRST_SAVE, "of the same checkpoint"
    with pytest.raises(TimeoutError), place.within(Activity.SAVE, "torch.save"):
        now[0] += 60_000_000_000
        raise TimeoutError
    place.made(1)
    with place.within(Activity.SAVE, "torch.save"):
        found = present(read_place(area))
        assert (found.activity, found.longest_s, found.waits, found.call) == (Activity.SAVE, 4.0, False, "torch.save")
    assert present(read_place(area)).activity == Activity.SCRIPT
