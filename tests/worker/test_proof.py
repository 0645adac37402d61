"""Digests of batches: whoever reads other data is found out, whatever holds them; and the last ones are read again."""

import collections
import dataclasses
import os
from typing import Any

import numpy as np
import pytest
import torch
from support.stand_in import fake
from torch.utils.data import DataLoader, Dataset

from deadpool_plugin.errors import Divergence
from deadpool_plugin.worker import codec, iterators
from deadpool_plugin.worker.calls import Call, CallKind, CallLog, LoggedCall
from deadpool_plugin.worker.follow import Follow
from deadpool_plugin.worker.iterators import RewindIterator
from deadpool_plugin.worker.proof import WHOLE_BYTES_MAX, digest
from deadpool_plugin.worker.resumable import Tapes

LARGE = torch.arange(WHOLE_BYTES_MAX, dtype=torch.int32)


def nothing() -> None:
    pass


@dataclasses.dataclass
class Sample:
    tokens: torch.Tensor
    source: object = None


class Strange:
    """An object that cannot even be looked at."""

    @property  # type: ignore[misc]  # object's can be set, this one need not be
    def __class__(self):
        raise RuntimeError("do not touch")


BATCHES = {
    "tensor": (torch.arange(6), torch.arange(6) + 1),
    "16 bits": (torch.zeros(3, dtype=torch.bfloat16), torch.ones(3, dtype=torch.bfloat16)),
    "shape": (torch.zeros(2, 3), torch.zeros(3, 2)),
    "one number": (torch.tensor(1), torch.tensor(2)),
    "large": (LARGE, LARGE + 1),
    "large and transposed": (LARGE.view(2, -1).t(), LARGE.view(2, -1).t() + 1),
    "array": (np.arange(6), np.arange(6)[::-1]),
    "large array": (LARGE.numpy()[::2], LARGE.numpy()[1::2]),
    "number": (3, 4),
    "long number": ([1 << 80], [1 << 81]),
    "text": ("a", "b"),
    "half a character": ("\ud800", "\ud801"),
    "bytes": (b"a", b"b"),
    "nested": ([{"x": (torch.ones(2), "text")}], [{"x": (torch.ones(2), "texts")}]),
    "many": (list(range(10_000)), list(range(1, 10_001))),
    "mapping": (collections.UserDict(ids=[1, 2]), collections.UserDict(ids=[1, 3])),
    "dataclass": (Sample(torch.zeros(2)), Sample(torch.ones(2))),
}


@pytest.mark.parametrize("kind", BATCHES)
def test_other_batches_have_other_digests(kind):
    one, other = BATCHES[kind]
    assert digest(one) == digest(one) != digest(other)
    assert 0 < digest(one) < 1 << 32


def test_objects_and_the_order_of_names_do_not_count_and_nothing_raises():
    assert digest(Sample(torch.zeros(2), object())) == digest(Sample(torch.zeros(2), object()))
    assert digest({"a": 1, "b": 2}) == digest({"b": 2, "a": 1})
    assert digest([Strange()]) and digest(object()) and digest({1: 2, "x": Strange()})
    assert digest(torch.ones(2, device="meta")) != digest(torch.ones(3, device="meta"))
    endless: list[object] = []
    endless.append(endless)
    assert digest(endless)


class Table(Dataset[Any]):
    """Item i is `i`, from `changed` on something else."""

    def __init__(self, changed=10**9):
        self.changed = changed

    def __len__(self):
        return 4000

    def __getitem__(self, index):
        return torch.tensor(index if index < self.changed else -index)


@pytest.fixture
def known(monkeypatch):
    monkeypatch.setattr(iterators, "DRAWS_NOTHING", [lambda data_set: isinstance(data_set, Table)])


def pulled(calls, count, **loader):
    """Return what a rank's records say of so many calls, each of `count` batches."""
    it, records = RewindIterator(iter(DataLoader(Table(), batch_size=2, **loader))), []
    for _ in range(calls):
        position = it.position
        for _ in range(count):
            next(it)
        records.append(it.pulled_since(position))
    return it, records


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("calls", [2, 9])
def test_batches_that_were_passed_over_are_read_at_the_end_and_nothing_is_missed(known, workers, calls):
    rank, records = pulled(calls, 3, num_workers=workers)
    follower = RewindIterator(iter(DataLoader(Table(), batch_size=2, num_workers=workers)))
    read = [follower.skip(*record) for record in records]
    assert read == [records[0][-1], *[None] * (calls - 1)], "the first ones are read"
    assert iterators.prove(follower.inner, 3) == records[-1][-1]
    assert next(follower).tolist() == next(rank).tolist()


@pytest.mark.parametrize("workers", [0, 2])
def test_a_data_set_that_changed_later_on_is_found_out(known, workers):
    _, records = pulled(9, 3, num_workers=workers)
    follower = RewindIterator(iter(DataLoader(Table(changed=40), batch_size=2, num_workers=workers)))
    assert follower.skip(*records[0]) == records[0][-1]
    for record in records[1:]:
        follower.skip(*record)
    assert iterators.prove(follower.inner, 3) not in (None, records[-1][-1])


def follower_of(log, reads, **more):
    adapter = fake(guessed=lambda: "")
    context = fake(**{**dict(tapes=reads, difference=None, link=None, mode=None, adapter=adapter), **more})
    one = Follow(context, 3, "", fake(), fake(gone=()), fake(finish=lambda restored: None))
    one._layout = fake()
    one._segments.append(log.records(0))
    return one


def test_a_script_that_reads_its_batches_itself_is_compared_at_its_next_call():
    log, ours, reads = CallLog(), Tapes(), Tapes()
    for number in range(2):
        ours.note([number, os.urandom(0)])
        log.add(LoggedCall(Call("engine.forward", CallKind.FORWARD, int), 0, nothing), 0.5, ours.take_digest())
    follower = follower_of(log, reads)
    reads.note([0, b""])
    assert follower.call(Call("engine.forward", CallKind.FORWARD, int)) == 0.5
    reads.note([7, b""])
    for _ in range(2):  # whoever catches it does not come past it
        with pytest.raises(
            Divergence, match="rank 3 read other data than the rank itself for engine.forward of step 1"
        ):
            follower.call(Call("engine.forward", CallKind.FORWARD, int))


@pytest.mark.parametrize("decides", ["which call is next", "which batch is read"])
def test_a_number_that_followers_are_not_told_is_said_once_and_again_where_it_decided_something(decides):
    log, ours, reads, said = CallLog(), Tapes(), Tapes(), []
    for number in range(2):
        ours.note(number)
        log.add(LoggedCall(Call("engine.forward", CallKind.FORWARD, int), 0, nothing), 0.5, ours.take_digest())
    adapter = fake(guessed=lambda: "train.py:57")
    link = fake(event=lambda kind, text: said.append(text))
    follower = follower_of(log, reads, adapter=adapter, link=link)
    reads.note(0)
    follower.call(Call("engine.forward", CallKind.FORWARD, int))
    name = "engine.zero_grad" if decides == "which call is next" else "engine.forward"
    reads.note(7)
    with pytest.raises(
        Divergence, match="after the script took a number at train.py:57 .*above 64 KiB.*to do: take it"
    ):
        follower.call(Call(name, CallKind.FORWARD, int))
    (text,) = said
    assert "rank 3: the script took a number at train.py:57" in text and "to do: take it after engine.backward" in text


def test_what_is_recorded_of_a_call_can_be_sent():
    _, records = pulled(1, 2)
    assert codec.decode(codec.encode(records)) == records
