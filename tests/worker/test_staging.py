"""Snapshots of tensors on a GPU, played on a CPU: the thread's device, the stream, and memory that cannot be pinned."""

from __future__ import annotations

import contextlib
import queue
import threading
from typing import Any, ClassVar

import pytest
import torch
from support.stand_in import fake

from deadpool_plugin.comm.generations import Generations
from deadpool_plugin.core import local
from deadpool_plugin.core.chain import Chain
from deadpool_plugin.mirror.arena import SlotPair
from deadpool_plugin.worker import codec, staging
from deadpool_plugin.worker.link import AgentLink
from deadpool_plugin.worker.staging import Layout, Stager, give_back


class OnDevice(torch.Tensor):
    """Says that it is on a GPU."""

    is_cuda = True


class Stream:
    device = torch.device("cuda", 1)

    def wait_stream(self, other): ...


def told(**answers: Any) -> Any:
    """A link whose gate is open."""
    common = dict(chain=Chain(), committed=-1, committed_at=0.0, locked=contextlib.nullcontext, wake=lambda: None)
    return fake(**common, wait_until=lambda done: None, wait_for_gate=lambda step, cancelled: step - 1, **answers)


class Event:
    """Event that counts how many are recorded and not waited for; a later one of the stream stands for it, too."""

    recorded: ClassVar[list[Event]] = []
    most = 0

    def __init__(self, blocking):
        assert blocking, "a thread that spins keeps the queue full"

    def record(self, stream):
        assert self not in self.recorded
        self.recorded.append(self)
        Event.most = max(Event.most, len(self.recorded))

    def synchronize(self):
        if self in self.recorded:
            del self.recorded[: self.recorded.index(self) + 1]


def test_a_snapshot_is_copied_on_a_ranks_own_gpu_through_whatever_memory(monkeypatch):
    sent: queue.SimpleQueue[Any] = queue.SimpleQueue()
    chosen, notes, launches = [], [], []

    def check_error(code):
        raise RuntimeError("out of memory (2)")

    def launch(*args, **kwargs):
        launches.append(args)
        raise RuntimeError("CUDA error: out of memory")  # of the registration, told once

    fakes = {
        "Stream": Stream,
        "Event": Event,
        "set_device": lambda device: chosen.append((device, threading.current_thread().name)),
        "current_stream": lambda: None,
        "stream": contextlib.nullcontext,
        "cudart": lambda: fake(cudaHostRegister=lambda address, size, flags: 2),
        "check_error": check_error,
    }
    for name, attribute in fakes.items():
        monkeypatch.setattr(torch.cuda, name, attribute)
    monkeypatch.setattr(staging, "PIECE_BYTES", 16)
    monkeypatch.setattr(staging, "COPY_BYTES", 1)
    tensors = [torch.ones(3), torch.full((2,), 7.0).as_subclass(OnDevice), torch.arange(30.0), torch.rand(5, 6).T]
    tensors += [torch.ones(()), torch.empty(0), torch.rand(30, 2)[:, 0]]
    layout = Layout(tensors)
    slots = SlotPair.create(0, 4096, layout.payload_bytes)
    link = told(event=lambda kind, text: notes.append((kind, text)), send=sent.put)
    with monkeypatch.context() as patched:
        patched.setattr(torch, "zeros", launch)
        stager = Stager(layout, [], slots, link)
    stager.stage(0, 0, {}, [b""])
    assert isinstance(sent.get(), local.Staged)
    assert all(map(torch.equal, layout.views(slots.payload(0)), tensors))
    assert Event.most == 2 and not Event.recorded, "pieces under way"
    tensors[2] += 1.0
    stager.stage(1, 0, {}, [b""])
    assert isinstance(sent.get(), local.Staged)
    assert all(map(torch.equal, layout.views(slots.payload(1)), tensors)) and not Event.recorded
    assert chosen == [(Stream.device, "deadpool-stager_0")]
    assert len(launches) == 1
    ((kind, text),) = notes
    assert kind == "Note" and "could not be page-locked: out of memory" in text


def test_training_that_waits_for_mirroring_is_said_once_and_short_waits_are_not(monkeypatch):
    said, clock = [], iter([0.0])
    monkeypatch.setattr(staging, "time", fake(monotonic=lambda: next(clock)))
    link = told(event=lambda kind, text: said.append(text))
    layout = Layout([torch.ones(3)])
    stager = Stager(layout, [], SlotPair.create(0, 4096, layout.payload_bytes), link)

    def steps(number, computes_s, waits_s):
        nonlocal clock
        for _ in range(number):
            now = stager._waited_at + computes_s
            clock = iter([now, now + waits_s])
            stager.wait()

    steps(20, 0.1, 0.9)
    steps(20, 3.0, 2.0)
    steps(4, 1.0, 2.0)
    steps(1, 3.0, 2.0)
    assert said == [], "short; the smaller part of a step; not for long"
    steps(20, 1.0, 2.0)
    assert len(said) == 1 and said[0].startswith("training waits for mirroring: 2.0 of 3.0 s from one snapshot")


def test_memory_that_is_given_back_is_free_and_filled_by_the_next_load():
    large, small = torch.arange(1 << 20, dtype=torch.float32), torch.ones(3)
    kept = torch.ones(1 << 20)
    view = kept[100:200]
    layout = Layout([large, small, view])
    payload = memoryview(bytearray(layout.payload_bytes))
    for place, tensor in zip(layout.views(payload), layout.tensors, strict=True):
        place.copy_(tensor)
    before, address = resident(), large.data_ptr()
    give_back(layout.tensors)
    assert before - resident() > 3 << 20
    assert kept.sum() == 1 << 20, "no page of a neighbour's"
    assert large[2048:-2048].sum() == 0, "it can still be read"
    layout.load(payload)
    assert large.data_ptr() == address and torch.equal(large, torch.arange(1 << 20, dtype=torch.float32))
    assert torch.equal(small, torch.ones(3)) and torch.equal(view, torch.ones(100))


def resident() -> int:
    """Read how much memory this process has, in bytes."""
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * 4096


class Wire:
    """An agent's connection: what was said on it."""

    def __init__(self) -> None:
        self.said: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def send(self, message: local.LocalMessage) -> None:
        self.said.put(message)


def rank_of(every: int, fixed: bool = True) -> tuple[Stager, AgentLink, Wire, torch.Tensor]:
    """A rank's stager at step 0, its link, what that says, and its shard."""
    wire, shard = Wire(), torch.zeros(3)
    layout = Layout([shard])
    link = AgentLink(wire, Generations(explain_timeout_s=0.0))  # type: ignore[arg-type]
    link.chain = Chain(0, every, fixed)
    stager = Stager(layout, [], SlotPair.create(0, 4096, layout.payload_bytes), link)
    stager.stage(0, 0, {}, [b"0"])
    assert wire.said.get().step == 0
    return stager, link, wire, shard


def step_to(stager: Stager, shard: torch.Tensor, step: int) -> None:
    """Make the steps up to `step`, each of which adds one to the shard."""
    for made in range(stager._step + 1, step + 1):
        stager.wait()
        shard += 1
        stager.stage(made, 0, {"made": made}, [b"%d" % one for one in range(stager.newest + 1, made + 1)])


def snapshot(stager: Stager, step: int) -> tuple[float, Any]:
    header = stager._slots.open(step)
    assert header is not None
    return stager._layout.views(stager._slots.payload(step))[0][0].item(), codec.decode(header.scalars)


def test_only_snapshots_are_copied_and_take_the_records_since_the_one_before_along():
    stager, link, wire, shard = rank_of(every=3)
    step_to(stager, shard, 5)
    staged = wire.said.get()
    assert (staged.step, staged.records) == (3, [b"1", b"2", b"3"]) and wire.said.empty()
    assert snapshot(stager, 3) == (3.0, {"made": 3}) and stager._slots.open(0) is not None
    step_to(stager, shard, 6)
    assert wire.said.empty(), "the slot of step 0 is needed until step 3 is committed"
    link._note(local.Committed(3), [])
    assert wire.said.get().step == 6 and stager._slots.open(0) is None and stager._slots.open(3) is not None


@pytest.mark.parametrize("shapes", [[], [(0,)], [(3,), (2, 5), (0,), (70,)]], ids=str)
def test_a_snapshot_is_of_where_the_tensors_lie_now(shapes):
    shard = [torch.rand(shape) for shape in shapes] + [torch.rand(4, 3).T for _ in shapes]
    layout, wire = Layout(shard), Wire()
    link = AgentLink(wire, Generations(explain_timeout_s=0.0))  # type: ignore[arg-type]
    link.chain = Chain(0, 1, True)
    stager = Stager(layout, [], SlotPair.create(0, 4096, layout.payload_bytes), link)
    for step in range(6):
        for tensor in shard[:: 1 + step % 2]:
            tensor.data = torch.rand(tensor.shape)  # elsewhere, as an offload puts it
        stager.stage(step, 0, {}, [b""])
        stager.wait()
        assert wire.said.get().step == step
        for view, tensor in zip(layout.views(stager._slots.payload(step)), shard, strict=True):
            assert torch.equal(view, tensor)
        link._note(local.Committed(step), [])


def test_a_step_becomes_a_snapshot_with_the_state_of_its_cut_until_the_next_update():
    stager, link, wire, shard = rank_of(every=4)
    step_to(stager, shard, 5)
    assert wire.said.get().step == 4
    link._note(local.Committed(4, (5,)), [])
    stager.wait()
    shard += 1
    staged = wire.said.get()
    assert (staged.step, staged.records) == (5, [b"5"]) and snapshot(stager, 5) == (5.0, {"made": 5})
    link._note(local.Committed(5, (6,)), [])
    step_to(stager, shard, 6)
    assert wire.said.get().step == 6, "who hears of it before its cut takes it there"


def test_what_the_script_changes_after_a_cut_is_not_in_the_snapshot_of_it():
    stager, link, wire, shard = rank_of(every=4)
    step_to(stager, shard, 4)
    assert wire.said.get().step == 4
    stager.wait()
    shard += 1
    state = {"schedule": {"rates": [0.1]}}
    stager.stage(5, 0, state, [b"5"])
    state["schedule"]["rates"][0] = 0.2
    link._note(local.Committed(4, (5,)), [])
    assert wire.said.get().step == 5 and snapshot(stager, 5) == (5.0, {"schedule": {"rates": [0.1]}})


def test_a_rank_that_has_gone_on_from_a_step_says_so_once_and_what_is_void_is_overwritten_next():
    stager, link, wire, shard = rank_of(every=4)
    step_to(stager, shard, 5)
    assert wire.said.get().step == 4
    stager.wait()
    for _ in range(2):
        link._note(local.Committed(4, (5,)), [])
    assert wire.said.get() == local.Passed(0, 5, 0) and wire.said.empty()
    shard += 1
    stager.stage(6, 0, {}, [])
    link._note(local.Committed(4, (5, 6)), [])
    link._note(local.Committed(4, (6,), (5,)), [])
    assert wire.said.get().step == 6, "it waits for what is void no longer"
    link._note(local.Committed(4, (), (5, 6)), [])
    step_to(stager, shard, 8)
    assert wire.said.get().step == 8
    assert stager._slots.open(4) is not None and stager._slots.open(6) is None, "step 4 is the newest committed one"
    assert (stager.oldest, stager.newest) == (4, 8), "a swap may go back to step 4: its calls are needed"


def test_a_process_that_restores_begins_the_chain_anew_and_forgets_what_was_offered():
    stager, link, wire, shard = rank_of(every=4)
    step_to(stager, shard, 5)
    assert wire.said.get().step == 4
    link._note(local.Join(1, "store", 4, every=2, fixed=True), [])
    stager.drop()
    assert stager.load(4) == {"made": 4} and shard[0] == 4.0
    link._note(local.Committed(4, (5,)), [])
    assert wire.said.empty() and stager.oldest == 4
    step_to(stager, shard, 6)
    assert wire.said.get().step == 5
    link._note(local.Committed(5), [])
    assert wire.said.get().step == 6


def test_how_many_steps_mirroring_took_is_said_with_the_next_snapshot(monkeypatch):
    stager, link, wire, shard = rank_of(every=2)
    now = stager._worked_at
    monkeypatch.setattr(staging, "time", fake(monotonic=lambda: now))
    for made in range(1, 5):
        now += 1.0
        step_to(stager, shard, made)
        if made == 2:
            assert wire.said.get().took_steps == 0.0, "nothing was committed before"
            link.committed, link.committed_at = 2, now + 1.5
    assert wire.said.get().took_steps == 1.5
