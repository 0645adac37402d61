"""Snapshots of tensors on a GPU, played on a CPU: the thread's device, the stream, and memory that cannot be pinned."""

from __future__ import annotations

import contextlib
import queue
import threading
from typing import Any, ClassVar

import torch
from support.stand_in import fake

from deadpool_plugin.core import local
from deadpool_plugin.mirror.arena import SlotPair
from deadpool_plugin.worker import staging
from deadpool_plugin.worker.staging import Layout, Stager, give_back


class OnDevice(torch.Tensor):
    """Says that it is on a GPU."""

    is_cuda = True


class Stream:
    device = torch.device("cuda", 1)

    def wait_stream(self, other): ...


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
    link = fake(event=lambda kind, text: notes.append((kind, text)), send=sent.put, wake=lambda: None)
    with monkeypatch.context() as patched:
        patched.setattr(torch, "zeros", launch)
        stager = Stager(layout, [], slots, link)
    stager.stage(0, 0, b"", b"")
    assert isinstance(sent.get(), local.Staged)
    assert all(map(torch.equal, layout.views(slots.payload(0)), tensors))
    assert Event.most == 2 and not Event.recorded, "pieces under way"
    tensors[2] += 1.0
    stager.stage(1, 0, b"", b"")
    assert isinstance(sent.get(), local.Staged)
    assert all(map(torch.equal, layout.views(slots.payload(1)), tensors)) and not Event.recorded
    assert chosen == [(Stream.device, "deadpool-stager_0")]
    assert len(launches) == 1
    ((kind, text),) = notes
    assert kind == "Note" and "could not be page-locked: out of memory" in text


def test_training_that_waits_for_mirroring_is_said_once_and_short_waits_are_not(monkeypatch):
    said, clock = [], iter([0.0])
    monkeypatch.setattr(staging, "time", fake(monotonic=lambda: next(clock)))
    link = fake(event=lambda kind, text: said.append(text), wait_until=lambda done: None)
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
    assert len(said) == 1 and said[0].startswith("training waits for mirroring: 2.0 of 3.0 s of a step")


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
