"""Iterators are rewound on survivors and moved forward without reading on newcomers."""

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from deadpool_plugin.errors import Unsupported
from deadpool_plugin.worker import codec
from deadpool_plugin.worker.iterators import IteratorTable, RewindIterator


def test_rewound_items_are_the_same_objects_and_the_source_is_read_once():
    read = []
    source = (read.append(i) or [i] for i in range(10))
    it = RewindIterator(source)
    first = [next(it) for _ in range(4)]
    it.rewind(1)
    assert all(a is b for a, b in zip([next(it) for _ in range(3)], first[1:], strict=True))
    assert next(it) == [4] and read == [0, 1, 2, 3, 4]


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


class Counting(Dataset):
    def __init__(self):
        self.reads = 0

    def __len__(self):
        return 20

    def __getitem__(self, index):
        self.reads += 1
        return torch.tensor(index)


def test_a_single_process_loader_is_skipped_without_reading():
    data = Counting()
    loader = iter(DataLoader(data, batch_size=2))
    RewindIterator(loader).skip(3)
    assert data.reads == 0
    assert next(loader).tolist() == [6, 7]


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
        IteratorTable().wrap([DataLoader(Counting())])


def test_a_loader_that_shuffles_draws_alike_when_it_is_rewound_and_when_it_is_followed():
    """An endless loader over six items: the order of each epoch comes from the default generator."""

    def endless():
        loader = DataLoader(torch.arange(6), batch_size=2, shuffle=True)
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
