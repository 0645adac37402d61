"""Snapshots of tensors on a GPU, played on a CPU: the thread's device, the stream, and memory that cannot be pinned."""

from __future__ import annotations

import contextlib
import queue
import threading
import types

import torch

from deadpool_plugin.mirror.arena import SlotPair
from deadpool_plugin.transport import local
from deadpool_plugin.worker.staging import Layout, Stager


class OnDevice(torch.Tensor):
    """Says that it is on a GPU."""

    is_cuda = True


class Stream:
    device = torch.device("cuda", 1)

    def wait_stream(self, other): ...

    def synchronize(self): ...


def test_a_snapshot_is_copied_on_a_ranks_own_gpu_through_whatever_memory(monkeypatch):
    chosen, notes, sent, launches = [], [], queue.SimpleQueue(), []

    def check_error(code):
        raise RuntimeError("out of memory (2)")

    def launch(*args, **kwargs):
        launches.append(args)
        raise RuntimeError("CUDA error: out of memory")  # of the registration, told once

    fakes = {
        "Stream": Stream,
        "set_device": lambda device: chosen.append((device, threading.current_thread().name)),
        "current_stream": lambda: None,
        "stream": contextlib.nullcontext,
        "cudart": lambda: types.SimpleNamespace(cudaHostRegister=lambda address, size, flags: 2),
        "check_error": check_error,
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    tensors = [torch.ones(3), torch.full((2,), 7.0).as_subclass(OnDevice)]
    layout = Layout(tensors)
    slots = SlotPair.create(0, 4096, layout.payload_bytes)
    link = types.SimpleNamespace(event=lambda kind, text: notes.append((kind, text)), send=sent.put, wake=lambda: None)
    with monkeypatch.context() as patched:
        patched.setattr(torch, "zeros", launch)
        stager = Stager(0, layout, [], slots, link)
    stager.stage(0, 0, b"", b"")
    assert isinstance(sent.get(), local.Staged)
    assert [view.tolist() for view in layout.views(slots.payload(0))] == [[1.0] * 3, [7.0] * 2]
    assert chosen == [(Stream.device, "deadpool-stager")]
    assert len(launches) == 1
    ((kind, text),) = notes
    assert kind == "Note" and "could not be page-locked: out of memory" in text
