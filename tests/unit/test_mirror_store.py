import threading
from collections.abc import Callable
from unittest import mock

import pytest
from hypothesis import given, strategies as st
from support import present
from support.stores import ends, free

from deadpool_plugin.core.types import Holding
from deadpool_plugin.errors import MemoryShortage, StaleGeneration, TransportError
from deadpool_plugin.mirror import records
from deadpool_plugin.mirror.arena import TOUCH_BYTES, SlotPair, arena_bytes, decode_header
from deadpool_plugin.mirror.records import ROW_STEPS, CallHistory, HistoryPruned, NotHeld
from deadpool_plugin.mirror.store import SnapshotStore


def staged(store: SnapshotStore, rank: int, step: int, generation: int = 0) -> Holding:
    pair = store.own(rank) or store.create_own(rank, 4096, 64)
    pair.seal(step, generation, "layout", b"")
    return store.staged(rank, step, generation, (rank,))


def test_holdings_are_the_two_newest_steps() -> None:
    store = SnapshotStore()
    for step in range(4):
        staged(store, 0, step)
    assert [holding.step for holding in store.holdings()] == [2, 3]
    pair = store.own(0)
    assert pair is not None
    pair.invalidate(4)
    assert [holding.step for holding in store.holdings()] == [3], "a slot being rewritten is not held"
    with pytest.raises(NotHeld, match="rank 0, step 2"):
        store.readable(0, 2, payload=True)
    with pytest.raises(TransportError, match="does not hold it"):
        store.staged(0, 4, 0, (0,))
    free(store)


def test_a_roll_back_forgets_later_steps_and_records() -> None:
    store = SnapshotStore()
    for step in range(4):
        staged(store, 0, step)
        store.history(0).append(step, b"records")
    store.drop_newer(0, 2)
    assert [holding.step for holding in store.holdings()] == [2] and ends(store, 0) == (0, 2)
    store.fence(1)
    with pytest.raises(StaleGeneration, match="generation 0; expected generation 1"):
        store.staged(0, 3, 0, (0,))
    staged(store, 0, 3, 1)
    assert [holding.step for holding in store.holdings()] == [2, 3]
    free(store)


def test_only_ranks_of_which_something_is_here_take_part_in_a_roll_back() -> None:
    store = SnapshotStore()
    staged(store, 3, 0)
    store.recordings[5] = b"recording"
    store.history(7).append(0, b"records")
    for rank in range(10):
        store.drop_newer(rank, 0)
    assert ends(store, 9) == (-1, -1)
    assert store.ranks() == [3, 5, 7]
    store.release(3)
    store.release(7)
    assert store.ranks() == [5]
    free(store)


def test_the_fence_never_goes_back_and_is_told_once() -> None:
    told: list[int] = []
    store = SnapshotStore()
    store.on_fence(told.append)
    for generation in (2, 1, 2, 3):
        store.fence(generation)
    assert told == [2, 3] and store.generation == 3


def test_a_mirror_keeps_headers_when_it_needs_room_for_payloads() -> None:
    store, origin = SnapshotStore(), SnapshotStore()
    staged(origin, 0, 4)
    source = origin.own(0)
    assert source is not None
    encoded = present(source.sealed(4)).encoded
    small = store.begin_mirror(0, 4, 0, 4096, 0)
    store.finish_mirror(small, encoded, 0, Holding(0, 4, False, (0, 1)), [b"a", b"b"], ())
    assert store.history(0).get(3, 4) == [b"a", b"b"]
    large = store.begin_mirror(0, 5, 0, 4096, 64)
    assert large.payload_bytes == 64
    assert store.holdings() == (Holding(0, 4, False, (0, 1)),)
    with pytest.raises(NotHeld, match="payload"):
        store.readable(0, 4, payload=True)
    with pytest.raises(TransportError, match="expected rank 0, step 5"):
        decode_header(encoded, 0, 5)
    with pytest.raises(TransportError, match="runs on this node"):
        origin.begin_mirror(0, 5, 0, 4096, 64)
    free(store)
    free(origin)


def test_slots_that_were_replaced_are_closed_also_if_the_world_changed_meanwhile(monkeypatch) -> None:
    store, create = SnapshotStore(), SlotPair.create
    made: list[SlotPair] = []

    def begin_while(meanwhile: Callable[[], object], size: int, generation: int = 0) -> SlotPair:
        def slowly(*arguments) -> SlotPair:
            made.append(create(*arguments))
            meanwhile()
            return made[-1]

        monkeypatch.setattr(SlotPair, "create", slowly)
        return store.begin_mirror(0, 4, generation, 4096, size)

    nothing = lambda: None  # noqa: E731
    small, large = begin_while(nothing, 0), begin_while(nothing, 64)
    assert small.fd == -1 and store._mirrored.get(0) is large
    largest = begin_while(lambda: store.release(0), 128)
    assert large.fd == -1 and store._mirrored.get(0) is largest
    with pytest.raises(StaleGeneration):
        begin_while(lambda: store.fence(1), 256)
    assert made[-1].fd == -1 and store._mirrored.get(0) is largest
    with pytest.raises(TransportError, match="runs on this node"):
        begin_while(lambda: store._become_own(create(0, 4096, 256)), 256, generation=1)
    assert [pair.fd for pair in made] == [-1] * 5
    free(store)


def test_one_writer_per_rank() -> None:
    store, refused = SnapshotStore(), threading.Event()

    def second() -> None:
        with pytest.raises(TransportError, match="still runs"), store.writing(0, 0.01):
            pass
        refused.set()

    with store.writing(0):
        threading.Thread(target=second).start()
        assert refused.wait(20)
        with store.writing(1):
            pass


def test_recordings() -> None:
    store = SnapshotStore()
    store.recordings[1] = b"recording"
    assert store.recording(1) == b"recording"
    with pytest.raises(NotHeld, match=r"rank 0 .*held: \[1\]"):
        store.recording(0)
    store.fence(2)
    with pytest.raises(StaleGeneration):
        store.put_recording(1, b"of a history that is over", 1)
    assert store.recording(1) == b"recording"


def test_a_rank_is_held_as_long_as_anything_of_it_takes_memory() -> None:
    store = SnapshotStore()
    staged(store, 0, 1)
    store.begin_mirror(1, 1, 0, 4096, 64)
    store.recordings[2] = b"recording"
    assert [rank for rank in range(4) if store.holds(rank)] == [0, 1, 2]
    free(store)


@given(st.lists(st.tuples(st.integers(0, 12), st.integers(0, 6))), st.integers(0, 12), st.integers(0, 12))
def test_history_against_an_oracle(writes: list[tuple[int, int]], first: int, last: int) -> None:
    oracle: dict[int, int] = {}
    history = CallHistory(12)
    for step, size in writes:
        history.append(step, bytes(size))
        oracle = {past: size for past, size in oracle.items() if past < step}
        if step - 1 not in oracle:
            oracle = {}
        oracle[step] = size
        while sum(oracle.values()) > 12 and len(oracle) > 3:
            del oracle[min(oracle)]
    held = set(range(first, last + 1)) <= set(oracle)
    if held:
        assert history.get(first, last) == [bytes(oracle[step]) for step in range(first, last + 1)]
    else:
        with pytest.raises(HistoryPruned, match="raise history_limit_mib"):
            history.get(first, last)


def flat(parts: list[bytes]) -> list[bytes]:
    return [record for part in parts for record in records.unpack(part)]


@given(st.data())
def test_rows_against_an_oracle(data: st.DataObject) -> None:
    """What two nodes hold that write, go back and ask each other for ranges, is what was written, at any bound."""
    limit = data.draw(st.sampled_from((80, 200, 10**6)))
    with mock.patch.multiple(records, ROW_STEPS=4, ROW_BYTES=60):  # so that a short history has many
        nodes = [(CallHistory(limit), dict[int, bytes]()) for _ in range(2)]
        for _ in range(data.draw(st.integers(1, 25))):
            (mine, oracle), (other, theirs) = data.draw(st.permutations(nodes))
            match data.draw(st.sampled_from(("write", "go back", "ask"))):
                case "write":
                    begin = data.draw(st.integers(max(0, mine.last - 5), mine.last + 2))
                    sizes = data.draw(st.lists(st.sampled_from((0, 1, 7, 70)), min_size=1, max_size=9))
                    new = {step: bytes([step % 7]) * size for step, size in enumerate(sizes, begin)}
                    mine.append(max(new), *new.values())
                case "go back":
                    mine.truncate(data.draw(st.integers(-1, mine.last + 1)))
                    begin, new = mine.last + 1, {}
                case "ask":
                    if other.last < 0:
                        continue
                    begin = data.draw(st.integers(other.first, other.last))
                    last = data.draw(st.integers(begin, other.last))
                    new = {step: theirs[step] for step in range(begin, last + 1)}
                    mine.append(last, *other.get(begin, last))
            kept = {step: record for step, record in oracle.items() if step < begin}
            oracle.clear()
            oracle |= (kept if begin - 1 in kept or not new else {}) | new
            assert mine.last == max(oracle, default=-1)
            if not oracle:
                continue
            assert mine.first == min(oracle) or limit < 10**6
            assert mine.first <= max(min(oracle), mine.last - records.KEPT_MIN + 1)
            for step in range(min(oracle), mine.first):
                del oracle[step]
            held = mine.get(mine.first, mine.last)
            assert flat(held) == list(oracle.values())
            assert mine.held_bytes == sum(map(len, held))
            assert mine.held_bytes <= limit or sum(map(records.steps_in, held[1:])) < records.KEPT_MIN
            first = data.draw(st.integers(mine.first, mine.last))
            last = data.draw(st.integers(first, mine.last))
            parts = mine.get(first, last)
            assert flat(parts) == [oracle[step] for step in range(first, last + 1)]
            assert sum(map(records.steps_in, parts)) == last - first + 1


def test_rows_go_from_node_to_node_as_they_are_and_only_the_ends_of_a_range_are_opened() -> None:
    history, copy = CallHistory(1 << 20), CallHistory(1 << 20)
    count = 3 * ROW_STEPS
    for step in range(count):
        history.append(step, b"record %d" % step)
    parts = history.get(5, count - 1)
    assert [records.is_row(part) for part in parts] == [False] * (ROW_STEPS - 5) + [True] + [False] * ROW_STEPS
    history.append(count + 2, b"", b"", b"")  # a row is made when its last step can be gone back to no more
    copy.append(count - 1, *history.get(0, count - 1))
    assert copy.get(0, count - 1) == history.get(0, count - 1) and len(copy.get(0, count - 1)) == 3
    assert copy.held_bytes < len(b"record 1000") * count / 3
    copy.append(ROW_STEPS + 7, b"other")
    assert (copy.first, copy.last) == (0, ROW_STEPS + 7)
    assert copy.get(ROW_STEPS + 6, ROW_STEPS + 7) == [b"record %d" % (ROW_STEPS + 6), b"other"]


def test_a_step_with_much_to_tell_is_a_row_of_its_own() -> None:
    history = CallHistory(1 << 24)
    for step in range(20):
        history.append(step, bytes([step]) * (1 << 20))
    assert history.held_bytes < 4 << 20
    (part,) = history.get(3, 3)
    assert records.is_row(part) and records.unpack(part) == [b"\x03" * (1 << 20)]
    assert history.get(19, 19) == [b"\x13" * (1 << 20)], "the newest steps stay as they are"


def test_a_copy_of_a_history_ends_where_it_is_told_and_goes_its_own_way() -> None:
    history = CallHistory(60)
    for step in range(100):
        history.append(step, bytes([step]))
    copy = history.upto(96)
    history.append(100, b"x")
    copy.append(97, b"other")
    assert (copy.first, copy.last, copy.held_bytes) == (42, 97, 55 + 5)
    assert copy.get(96, 97) == [b"\x60", b"other"] and history.get(97, 97) == [b"\x61"]
    with pytest.raises(HistoryPruned):
        history.upto(101)


def test_however_much_one_step_has_to_tell_what_a_swap_may_go_back_to_is_held() -> None:
    history = CallHistory(limit_bytes=100)
    for step in range(5):
        history.append(step, bytes(10))
    for step in range(5, 9):
        history.append(step, bytes(1000))
        assert history.get(step - 2, step)[-1] == bytes(1000)
    assert (history.first, history.last) == (6, 8)


def test_prepared_slots_are_used_once_and_only_if_they_fit() -> None:
    store = SnapshotStore()
    for rank in range(3):
        store.prepare_own(rank, 4096, 64)
    prepared = {rank: pair.fd for rank, pair in store._prepared.items()}
    assert not store.holdings() and store.own(0) is None
    assert store.create_own(0, 4096, 64).fd == prepared[0]
    larger = store.create_own(1, 4096, 128)
    assert larger.payload_bytes == 128 and 1 not in store._prepared
    store.prepare_own(0, 4096, 64)
    assert 0 not in store._prepared, "the rank runs here already"
    store.drop_prepared(kept={2})
    assert list(store._prepared) == [2]
    store.drop_prepared()
    assert not store._prepared
    free(store)


def test_slots_that_are_still_being_prepared_are_waited_for_and_count_as_begun(monkeypatch) -> None:
    store, create = SnapshotStore(), SlotPair.create
    begun, may_end, made = threading.Event(), threading.Event(), []

    def slowly(*arguments) -> SlotPair:
        begun.set()
        assert may_end.wait(20)
        made.append(create(*arguments))
        return made[-1]

    monkeypatch.setattr(SlotPair, "create", slowly)
    assert not store.has_slots(0)
    preparing = threading.Thread(target=store.prepare_own, args=(0, 4096, 64))
    preparing.start()
    assert begun.wait(20) and store.has_slots(0) and not store.has_slots(1)
    taken: list[SlotPair] = []
    taking = threading.Thread(target=lambda: taken.append(store.make_own(0, 4096, 64)))
    taking.start()
    may_end.set()
    preparing.join()
    taking.join()
    assert taken == made and not store.has_slots(0)
    made[0].close()
    free(store)


def test_who_asks_for_memory_is_told_of_what_others_have_not_taken_yet(monkeypatch) -> None:
    """Eight slots of a spare ask at the same moment, when nobody has touched a page yet."""
    store, need, asked, may_go_on = SnapshotStore(headroom_bytes=7), [], threading.Event(), threading.Event()
    monkeypatch.setattr("deadpool_plugin.mirror.arena.check_memory", lambda *arguments: need.append(arguments))
    size = arena_bytes(4096, 3 * TOUCH_BYTES)

    def going_on() -> None:
        asked.set()
        assert may_go_on.wait(20)

    first = threading.Thread(target=lambda: store.put_back(store.make_own(0, 4096, 3 * TOUCH_BYTES, going_on)))
    first.start()
    assert asked.wait(20)
    store.prepare_own(1, 4096, 64)
    may_go_on.set()
    first.join()
    store.prepare_own(2, 4096, 64)
    small = arena_bytes(4096, 64)
    assert need == [(size, 7), (small + size - TOUCH_BYTES, 7), (small, 7)]
    free(store)


def test_of_two_that_ask_at_once_only_one_gets_what_is_enough_for_one(monkeypatch) -> None:
    store, both, refused = SnapshotStore(), threading.Barrier(2), []
    size = arena_bytes(4096, 64)

    def check(need_bytes: int, headroom_bytes: int) -> None:
        if need_bytes > size:
            raise MemoryShortage("only one fits")

    def create(*arguments) -> None:
        both.wait(20)  # until the other one has been refused: nothing is touched so far
        raise TransportError("enough")

    def make(rank: int) -> None:
        try:
            store.prepare_own(rank, 4096, 64)
        except MemoryShortage:
            refused.append(rank)
            both.wait(20)
        except TransportError:
            pass

    monkeypatch.setattr("deadpool_plugin.mirror.arena.check_memory", check)
    monkeypatch.setattr(SlotPair, "create", create)
    makers = [threading.Thread(target=make, args=(rank,)) for rank in (0, 1)]
    for maker in makers:
        maker.start()
    for maker in makers:
        maker.join()
    assert len(refused) == 1 and not store.has_slots(0) and not store.has_slots(1)
    store.maker.check(size)
    free(store)


def test_own_slots_replace_a_mirror_only_with_their_step_in_them() -> None:
    """A take-over that is cut off half-way must leave what was held, or what replaces it."""
    store, origin = SnapshotStore(), SnapshotStore()
    staged(origin, 0, 4)
    encoded = present(present(origin.own(0)).sealed(4)).encoded
    mirror = store.begin_mirror(0, 4, 0, 4096, 64)
    store.finish_mirror(mirror, encoded, 0, Holding(0, 4, True, (0,)), [b"records"], ())
    pair = store.make_own(0, 4096, 64)
    with pytest.raises(TransportError, match="do not hold step 4"):
        store.adopt_own(pair, 4, 0, (0,))
    pair.seal_encoded(4, encoded)
    store.fence(1)
    with pytest.raises(StaleGeneration):
        store.adopt_own(pair, 4, 0, (0,))
    assert store._mirrored.get(0) is mirror and not store.owns(0, 4)
    assert store.readable(0, 4, payload=True).pair is mirror
    store.adopt_own(pair, 4, 1, (0,))
    assert store.owns(0, 4) and store._mirrored.get(0) is None and mirror.fd == -1
    assert store.readable(0, 4, payload=True).pair is pair
    free(store)
    free(origin)
