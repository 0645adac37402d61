"""Loaders made resumable: untouched without the plugin, rewound over epochs on survivors, set or read again later."""

import subprocess
import sys
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from deadpool_plugin.data import resumable
from deadpool_plugin.errors import Divergence, Unsupported
from deadpool_plugin.worker import codec
from deadpool_plugin.worker.iterators import IteratorTable
from deadpool_plugin.worker.resumable import ENDED, TAPES_MAX, Tapes


def counted(count: int) -> Dataset[Any]:
    """A tensor: torch takes it for a data set."""
    return cast("Dataset[Any]", torch.arange(count))


class ToldOfCalls(Tapes):
    call = False


@pytest.fixture
def tapes(monkeypatch):
    """Those of a training process; `tapes.call` says whether a call is under way."""
    from torch.utils.data.dataloader import _BaseDataLoaderIter

    monkeypatch.setattr(_BaseDataLoaderIter, "__next__", _BaseDataLoaderIter.__next__)
    monkeypatch.setattr(Tapes, "installed", None)
    made = ToldOfCalls()
    made.install(lambda: made.call)
    return made


class Stateful:
    """Items of each pass in a new order, drawn when the pass begins from numbers that no process can draw again."""

    def __init__(self, seed, items=4):
        self.chance = torch.Generator().manual_seed(seed)
        self.items, self.reads = items, 0
        self.order, self.place, self.resumes = [], 0, False

    def state_dict(self):
        return {"chance": self.chance.get_state(), "order": self.order, "place": self.place}

    def load_state_dict(self, state):
        self.chance.set_state(state["chance"])
        self.order, self.place, self.resumes = list(state["order"]), state["place"], True

    def __iter__(self):
        if not self.resumes:
            self.order, self.place = torch.randperm(self.items, generator=self.chance).tolist(), 0
        self.resumes = False
        while self.place < len(self.order):
            self.reads += 1
            self.place += 1
            yield self.order[self.place - 1]


class Numbers(Dataset[Any]):
    def __init__(self, size):
        self.size, self.reads = size, 0

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        self.reads += 1
        return index


def endless(loader):
    while True:
        yield from loader


def test_without_the_plugin_a_loader_comes_back_as_it_is():
    code = (
        "import sys\nfrom deadpool_plugin.data import resumable\nloader = [1]\n"
        "assert resumable(loader) is loader and 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    loader = [1]
    assert Tapes.installed is None and resumable(loader) is loader


def test_a_loader_is_itself_to_the_script(tapes):
    loader = DataLoader(counted(6), batch_size=2, shuffle=True)
    torch.manual_seed(3)
    plain = [[batch.tolist() for batch in loader] for _ in range(3)], torch.rand(1).item()
    torch.manual_seed(3)
    mine = resumable(loader)
    assert ([[batch.tolist() for batch in mine] for _ in range(3)], torch.rand(1).item()) == plain
    assert len(mine) == 3 and mine.batch_size == 2 and resumable(mine) is mine


def test_a_redo_crosses_into_the_next_epoch_with_the_same_items_and_draws(tapes):
    """The function holds the pass itself and begins the next one when it must."""
    data = Numbers(6)
    loader = resumable(DataLoader(data, batch_size=2, shuffle=True))
    (tape,) = tapes
    it = iter(loader)

    def batch():
        nonlocal it
        try:
            return next(it).tolist()
        except StopIteration:
            it = iter(loader)
            return next(it).tolist()

    first, entry = [batch(), batch()], tape.position
    states = torch.get_rng_state()
    called = [(batch(), torch.rand(1).item()) for _ in range(5)]
    for _ in range(2):
        tape.rewind(entry)
        torch.set_rng_state(states)
        assert [(batch(), torch.rand(1).item()) for _ in range(5)] == called
    tape.rewind(1)  # behind the beginning of the first pass
    assert [batch(), batch()] == first
    assert data.reads == 2 * 7


def follow(source_of, calls, tapes):
    """A rank's `calls` (each a list of how many items it pulls, all passes going on), followed in a second process."""
    rank = resumable(source_of())
    (tape,) = tapes
    items, records, states = endless(rank), [], []
    for pulls in calls:
        position = tape.position
        for _ in range(pulls):
            next(items)
        records.append(codec.encode(tape.pulled_since(position)))
        states.append(tape.state())
    follower = Tapes()
    source = source_of()
    followed = follower.wrap(source)
    for record in map(codec.decode, records):
        for one in follower:
            assert one.skip(*record) in (record[2], None), "it reads what the rank read, if it reads"
    return items, follower, followed, source, codec.decode(codec.encode(states[-1]))


def test_a_plain_source_is_skipped_to_the_same_place(tapes):
    torch.manual_seed(5)
    items, follower, followed, _, state = follow(
        lambda: DataLoader(counted(8), batch_size=2, shuffle=True), [3, 0, 2, 4], tapes
    )
    assert state is None
    draws = torch.get_rng_state()
    follower.load([state])
    want = [next(items).tolist() for _ in range(3)]
    torch.set_rng_state(draws)
    have = endless_from(followed, follower)
    assert [next(have).tolist() for _ in range(3)] == want


def endless_from(followed, follower):
    """Yield what a script reads next that holds a pass since before it was followed."""
    (tape,) = follower
    while True:
        event = tape.event(begins=False)
        if event is ENDED:
            tape.event(begins=True)
        else:
            yield event


def test_a_source_that_tells_its_state_is_set_to_it_and_not_read(tapes):
    """Two sources of the same script that differ: only the state brings them together."""
    seeds = iter([1, 2])
    items, follower, followed, source, state = follow(lambda: Stateful(next(seeds)), [3, 2, 4], tapes)
    assert source.reads == 0
    random_states = torch.get_rng_state()
    follower.load([state])
    assert source.reads == 0 and torch.equal(torch.get_rng_state(), random_states)
    have = endless_from(followed, follower)
    assert [next(have) for _ in range(9)] == [next(items) for _ in range(9)]


def test_what_a_follower_read_itself_is_not_set_again(tapes):
    loader, other = resumable(Stateful(7)), Tapes()
    follower = other.wrap(Stateful(7))
    mine, others = iter(loader), iter(follower)
    assert [next(mine), next(mine)] == [next(others), next(others)]
    follower.source.load_state_dict = None  # would raise
    other.load(tapes.states())
    assert list(mine) == list(others)


def test_an_unread_source_catches_up_when_the_script_asks_for_an_item(tapes):
    source = Stateful(9)
    rank, expected = resumable(source), Stateful(9)
    (tape,) = tapes
    tape.skip(3, [], 0, [[0, True]])  # the beginning and two items
    assert source.reads == 0
    it = endless(expected)
    next(it), next(it)
    assert tape.event(begins=False) == next(it) and source.reads == 3 and rank.place == 3


def test_a_source_that_gives_less_than_the_ranks_own_is_found_out(tapes):
    resumable([1])
    (tape,) = tapes
    with pytest.raises(Divergence, match="a resumable list ended earlier"):
        tape.skip(3, [], 0, [[0, True]])


def test_a_source_that_gives_more_than_the_ranks_own_is_found_out(tapes):
    """An array has no truth value, however it is compared with the end of a pass."""
    resumable([np.ones(2), np.ones(2)])
    (tape,) = tapes
    with pytest.raises(Divergence, match="a resumable list went on longer"):
        tape.skip(3, [], 0, [[0, True], [2, False]])


def test_a_stream_without_a_length_is_skipped_and_has_a_truth_value(tapes):
    """An iterator of torch's DataLoader over an IterableDataset says it has a length, and raises if asked for it."""

    class Stream(IterableDataset[Any]):
        def __iter__(self):
            return iter(range(6))

    resumable(DataLoader(Stream(), batch_size=2))
    (tape,) = tapes
    tape.skip(3, [], 0, [[0, True]])
    assert tape.event(begins=False).tolist() == [4, 5]
    assert bool(resumable(Stream()))


def test_what_is_owed_to_an_unread_source_does_not_grow_with_the_calls(tapes):
    resumable(Stateful(9))
    (tape,) = tapes
    tape.skip(2, [], 0, [[0, True]])
    sizes = set()
    for _ in range(100):
        tape.skip(1)
        sizes.add(len(codec.encode([tape._owed, list(tape._draws), list(tape._passes)])))
    assert len(sizes) == 1


def test_a_state_is_told_at_each_cut_and_again_when_it_is_redone(tapes):
    source = Stateful(4, items=10)
    it = iter(resumable(source))
    (tape,) = tapes
    next(it)
    first = tape.state()
    next(it)
    second = tape.state()
    tape.rewind(2)  # behind the beginning and one item
    assert tape.state() == first != second
    next(it)
    assert tape.state() == second
    tape.forget_before(tape.position)
    assert tape.state() == second


def test_between_passes_there_is_no_state(tapes):
    loader = resumable(Stateful(4))
    assert tapes.states() == [None]
    list(loader)
    assert tapes.states() == [None]


@pytest.mark.parametrize("item", [1, {"tokens": [1]}])
def test_a_call_that_reads_otherwise_when_redone_is_found_out(tapes, item):
    loader = resumable([item, item, item])
    (tape,) = tapes
    it = iter(loader)
    next(it)
    tape.rewind(1)
    with pytest.raises(Divergence, match="a pass was begun, and there was an item"):
        iter(loader)


def test_below_another_iterator_it_is_that_ones_to_rewind(tapes):
    loader = resumable([1, 2, 3, 4])
    (tape,) = tapes
    stand_in, (outer,) = IteratorTable().wrap(endless(loader))
    assert [next(stand_in), next(stand_in)] == [1, 2]
    tape.rewind(tape.position)
    outer.rewind(0)
    assert [next(stand_in) for _ in range(5)] == [1, 2, 3, 4, 1]
    assert tape.pulled_since(0) == [0, [], 0, []] and tapes.states() == [None]
    with pytest.raises(Unsupported, match="both directly and through another iterator"):
        iter(loader)


def test_a_pass_may_be_given_to_a_call_as_it_is(tapes):
    it = iter(resumable([1, 2]))
    assert IteratorTable().wrap([it, None]) == ([it, None], [])


def test_two_passes_at_a_time_are_refused(tapes):
    loader = resumable([1, 2, 3])
    first, second = iter(loader), iter(loader)
    assert next(second) == 1
    with pytest.raises(Unsupported, match="two passes over one resumable list"):
        next(first)


def test_what_is_no_loader_or_one_too_many_is_refused(tapes):
    with pytest.raises(Unsupported, match="something of type int was to be made resumable"):
        resumable(cast(Any, 3))
    for _ in range(TAPES_MAX):
        resumable([1])
    with pytest.raises(Unsupported, match="wrap each loader once"):
        resumable([1])


def test_a_state_that_is_not_plain_is_refused_at_the_first_snapshot(tapes):
    source = Stateful(1)
    source.state_dict = lambda: {"rng": object()}
    next(iter(resumable(source)))
    with pytest.raises(Unsupported, match=r"state_dict\(\) of a Stateful cannot be kept.*without state_dict"):
        tapes.states()


def test_a_call_that_reads_past_what_it_was_given_is_refused(tapes):
    loader = DataLoader(Numbers(4))
    bare, mine = iter(loader), iter(resumable(DataLoader(Numbers(4))))
    next(bare)
    stand_in, _ = IteratorTable().wrap(iter(loader))
    tapes.call = True
    assert next(mine) == next(stand_in) == 0
    with pytest.raises(Unsupported, match=r"not given: a swap.*deadpool_plugin\.data\.resumable"):
        next(bare)


def test_torchdata_s_loader_goes_on_where_its_state_was_told(tapes):
    stateful = pytest.importorskip("torchdata.stateful_dataloader")

    def source_of():
        return stateful.StatefulDataLoader(torch.arange(12), batch_size=2, shuffle=True, num_workers=0)

    torch.manual_seed(11)
    items, follower, followed, _, state = follow(source_of, [4, 5, 2], tapes)
    torch.manual_seed(99)  # the replacement draws other orders
    follower.load([state])
    have = endless_from(followed, follower)
    assert [next(have).tolist() for _ in range(1)] == [next(items).tolist() for _ in range(1)]
