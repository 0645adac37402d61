"""Iterators are rewound on survivors and moved forward without reading on newcomers."""

import random
from collections.abc import Iterator
from typing import Any, cast

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from deadpool_plugin.errors import Divergence, GenerationChanged, Unsupported
from deadpool_plugin.worker import codec, iterators
from deadpool_plugin.worker.copies import COPIED_BYTES_MAX
from deadpool_plugin.worker.iterators import IteratorTable, RewindIterator


def counted(count: int) -> Dataset[Any]:
    """A tensor: torch takes it for a data set."""
    return cast("Dataset[Any]", torch.arange(count))


def test_rewound_items_are_the_same_objects_and_the_source_is_read_once():
    read = []

    def numbers():
        for i in range(10):
            read.append(i)
            yield object()

    source = numbers()
    it = RewindIterator(source)
    first = [next(it) for _ in range(4)]
    it.rewind(1)
    assert all(a is b for a, b in zip([next(it) for _ in range(3)], first[1:], strict=True))
    next(it)
    assert read == [0, 1, 2, 3, 4]


def test_what_a_call_does_to_the_dict_it_got_is_not_there_when_it_gets_it_again():
    """Megatron-LM moves a batch's tensors to the device, drops some and slices the others, in the loader's dict."""
    it = RewindIterator(iter([{"tokens": torch.arange(8), "more": [torch.ones(2), "text"]}]))
    for _ in range(3):
        batch = next(it)
        assert batch["tokens"].tolist() == [*range(8)] and len(batch["more"]) == 2
        batch["tokens"] = batch["tokens"][:4]
        batch["more"].clear()
        it.rewind(0)


@pytest.mark.parametrize("changed", ["tokens", "mask"])
def test_a_large_batch_that_was_changed_in_place_is_not_read_again(changed):
    large = COPIED_BYTES_MAX // 4 + 1
    it = RewindIterator(iter([{"tokens": torch.zeros(large), "mask": [torch.ones(1, large)]}, None]))
    batch = next(it)
    it.check(0, 1)
    (batch["tokens"] if changed == "tokens" else batch["mask"][0]).zero_()
    it.check(1, 1)
    shape = rf"\[{large}\]" if changed == "tokens" else rf"\[1, {large}\]"
    with pytest.raises(Unsupported, match=f"a tensor of {shape} in a batch .*make new tensors for each batch"):
        it.check(0, 1)
    it.rewind(0)
    with pytest.raises(Unsupported, match="changed in place"):
        next(it)


def test_a_small_batch_may_be_changed_in_place_whatever_holds_it():
    """Megatron-LM 0.18 cuts batches for context parallelism in the dict that the loader gave."""
    tokens, mask = torch.arange(8), torch.ones(2, 3)
    it = RewindIterator(iter([{"tokens": tokens, "masks": [mask]}]))
    for _ in range(3):
        batch = next(it)
        assert torch.equal(batch["tokens"], torch.arange(8)) and torch.equal(batch["masks"][0], torch.ones(2, 3))
        batch["tokens"].zero_()
        batch["masks"][0] = None
        it.check(0, 1)
        it.rewind(0)


def test_table_keeps_one_stand_in_per_iterator_and_forgets_what_no_call_needs():
    table, source = IteratorTable(), iter(range(10))
    (wrapped, nothing), found = table.wrap([source, None])
    assert nothing is None and table.wrap(source)[0] is wrapped and found == [wrapped]
    next(wrapped), next(wrapped), next(wrapped)
    table.keep_only([(wrapped, 2)])
    wrapped.rewind(2)
    assert next(wrapped) == 2
    table.keep_only([])
    fresh, _ = table.wrap(source)
    assert fresh is not wrapped and next(fresh) == 3


def test_other_iterators_are_skipped_by_reading():
    source = iter(range(10))
    RewindIterator(source).skip(4)
    assert next(source) == 4


class WithoutIter:
    """As Megatron's RerunDataIterator: it can only say what is next."""

    def __init__(self):
        self.count = 0

    def __next__(self):
        self.count += 1
        return self.count


def test_whatever_has_a_next_can_be_rewound():
    wrapped, found = IteratorTable().wrap(WithoutIter())
    assert [next(wrapped), next(wrapped)] == [1, 2]
    found[0].rewind(0)
    assert [next(wrapped), next(wrapped), next(wrapped)] == [1, 2, 3]


def test_what_cannot_be_rewound_is_refused():
    with pytest.raises(Unsupported, match="given a DataLoader"):
        IteratorTable().wrap([DataLoader(Shared())])


def test_a_loader_that_shuffles_draws_alike_when_it_is_rewound_and_when_it_is_followed():
    """An endless loader over six items: the order of each epoch comes from the default generator."""

    def endless():
        loader = DataLoader(counted(6), batch_size=2, shuffle=True)
        while True:
            yield from loader

    torch.manual_seed(7)
    it = RewindIterator(endless())
    start = torch.get_rng_state()
    first = [(next(it).tolist(), torch.rand(1).item()) for _ in range(8)]
    pulled = it.pulled_since(0)
    assert pulled[0] == 8 and [number for number, _ in pulled[1]] == [0, 3, 6]
    end = torch.get_rng_state()
    it.rewind(0)
    torch.set_rng_state(start)
    assert [(next(it).tolist(), torch.rand(1).item()) for _ in range(8)] == first
    follower = endless()
    torch.manual_seed(99)
    RewindIterator(follower).skip(*codec.decode(codec.encode(pulled)))
    torch.set_rng_state(end)
    follows = next(follower).tolist()
    torch.set_rng_state(end)
    assert next(it).tolist() == follows


class Shared(Dataset[Any]):
    """Says how often it was read, in whatever process; item i is i."""

    def __init__(self, length=4000):
        self.reads = torch.zeros(1, dtype=torch.int64).share_memory_()
        self.length = length

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        self.reads += 1
        return torch.tensor(index)


@pytest.fixture
def known(monkeypatch):
    monkeypatch.setattr(iterators, "DRAWS_NOTHING", [lambda data_set: isinstance(data_set, Shared)])


def test_a_single_process_loader_over_a_known_data_set_is_moved_without_reading(known):
    data = Shared()
    loader = iter(DataLoader(data, batch_size=2))
    RewindIterator(loader).skip(3)
    assert data.reads.item() == 0
    assert next(loader).tolist() == [6, 7]


class Augmenting(Dataset[Any]):
    """Draws from a generator that nobody else sees, in the data set or where samples are collated."""

    def __init__(self):
        self.rng = random.Random(7)

    def __len__(self):
        return 20

    def __getitem__(self, index):
        return index + self.rng.random()

    def collate(self, samples):
        return [sample + self.rng.random() for sample in samples]


@pytest.mark.parametrize(
    "make", [lambda data: DataLoader(data), lambda data: DataLoader(data, collate_fn=data.collate)]
)
def test_a_single_process_loader_that_may_draw_is_read(make):
    ours, newcomers = (iter(make(Augmenting())) for _ in range(2))
    it = RewindIterator(ours)
    [next(it) for _ in range(5)]
    RewindIterator(newcomers).skip(*it.pulled_since(0))
    assert next(newcomers) == next(it)


def test_a_known_data_set_with_a_collator_of_the_scripts_own_is_read(known):
    loader = iter(DataLoader(Shared(), collate_fn=lambda samples: (samples, next(numbers))))
    numbers = iter(range(10))
    RewindIterator(loader).skip(4)
    assert next(loader)[1] == 4


@pytest.mark.parametrize("persistent", [False, True])
def test_a_loader_with_processes_over_a_known_data_set_is_moved_without_reading(known, persistent):
    data = Shared()
    loader = DataLoader(data, batch_size=2, num_workers=1, prefetch_factor=2, persistent_workers=persistent)
    ahead, behind = iter(loader), None
    plain = [batch.tolist() for batch in ahead]
    data.reads.zero_()
    behind = iter(loader)
    for _ in range(500):
        RewindIterator(behind).skip(3)
    assert next(behind).tolist() == plain[1500]
    RewindIterator(behind).skip(1)  # fewer than its process has been asked for
    assert [next(behind).tolist() for _ in range(3)] == plain[1502:1505]
    RewindIterator(behind).skip(2000 - 1505 - 1)
    assert [batch.tolist() for batch in behind] == plain[-1:]
    assert data.reads.item() < 60


def test_a_data_set_that_has_become_shorter_is_no_end_of_the_data(known):
    loader = iter(DataLoader(Shared(10), batch_size=2, num_workers=1))
    RewindIterator(loader).skip(6)
    with pytest.raises(Divergence, match="before 6 batches"):
        next(loader)


def test_one_that_begins_anew_has_missed_nothing(known):
    loader = DataLoader(Shared(20), batch_size=2, num_workers=1, persistent_workers=True)
    RewindIterator(iter(loader)).skip(7)
    assert [batch.tolist() for batch in loader] == [[2 * n, 2 * n + 1] for n in range(10)]


def test_what_wraps_a_loader_is_looked_through(known, monkeypatch):
    class Wrapper(Iterator[Any]):
        repeats: bool

        def __init__(self, inner):
            self.inner = inner

        def __next__(self):
            return next(self.inner)

    monkeypatch.setattr(iterators, "WRAPPERS", {Wrapper: ("inner", "repeats")})
    data = Shared()
    wrapped = Wrapper(iter(DataLoader(data, num_workers=1)))
    wrapped.repeats = False
    RewindIterator(wrapped).skip(900)
    wrapped.repeats = True
    RewindIterator(wrapped).skip(3)
    assert next(wrapped).item() == 900 and data.reads.item() < 30


def test_worker_processes_of_an_unknown_data_set_may_draw_so_it_is_read():
    data = Shared()
    loader = iter(DataLoader(data, num_workers=1))
    RewindIterator(loader).skip(40)
    assert next(loader).item() == 40 and data.reads.item() >= 41


def test_one_that_a_swap_has_cut_off_is_not_taken_for_one_at_its_end():
    def communicates():
        yield 0
        raise GenerationChanged(1)

    it = RewindIterator(communicates())
    next(it)
    with pytest.raises(GenerationChanged):
        next(it)
    it.rewind(0)
    assert next(it) == 0
    with pytest.raises(Unsupported, match="a generator communicates.*read the batch before the call"):
        next(it)
