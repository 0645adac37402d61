"""The stand-in for CUDA's runtime: what is in a stream's order and what is not, lifetimes, faults, what is refused.

Rules of this file: a kernel that spins until it is released stands for work that takes long; nothing waits for time.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from fakecuda import control
from fakecuda.control import call, order, report
from support.forked import Fleet
from support.zygote import in_zygote

from deadpool_plugin.launch.standby import has_initialised_cuda

pytestmark = control.only_here
NOT_SUPPORTED, INITIALIZATION_ERROR, ALREADY_REGISTERED, INVALID_VALUE = 801, 3, 712, 1
ALREADY_MAPPED = 208
SIZE = 1 << 16


@contextlib.contextmanager
def busy() -> Iterator[None]:
    """A kernel spins on the current stream as long as the block lasts."""
    spins = report()["spins"]
    order("spin", 1)
    torch.zeros(1, device="cuda").add_(1.0)
    yield
    assert report()["spins"] == spins + 1
    order("spin", 0)


@contextlib.contextmanager
def meanwhile(function: Callable[[], object], count: str) -> Iterator[threading.Thread]:
    """`function` in a thread of its own; the block begins when it is counted as `count`, and is joined afterwards."""
    before, errors = report()[count], []

    def run() -> None:
        try:
            function()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    while report()[count] == before and thread.is_alive():
        pass
    yield thread
    thread.join()
    assert not errors, errors


@in_zygote
def test_the_host_runs_ahead_and_the_stream_keeps_its_order():
    x = torch.zeros(SIZE, device="cuda")
    with busy():
        x.add_(1.0)
        y = x * 2
        assert not torch.cuda.current_stream().query()
    assert y.eq(2.0).all().item()


@in_zygote
def test_only_events_and_waits_order_streams():
    x, side = torch.zeros(SIZE, device="cuda"), torch.cuda.Stream()
    before, after = (torch.empty(SIZE).pin_memory() for _ in range(2))
    torch.cuda.synchronize()
    with busy():
        x.add_(1.0)
        with torch.cuda.stream(side):
            before.copy_(x, non_blocking=True)
        side.synchronize()
        assert before.eq(0.0).all()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            after.copy_(x, non_blocking=True)
        assert not side.query()
    side.synchronize()
    assert after.eq(1.0).all()


@in_zygote
def test_pageable_memory_is_read_at_the_call_and_pinned_memory_when_the_stream_comes_to_it():
    pageable, pinned = torch.zeros(SIZE), torch.zeros(SIZE).pin_memory()
    with busy():
        from_pageable, from_pinned = (x.to("cuda", non_blocking=True) for x in (pageable, pinned))
        pageable.fill_(1.0)
        pinned.fill_(1.0)
    assert from_pageable.eq(0.0).all().item() and from_pinned.eq(1.0).all().item()


@in_zygote
def test_a_copy_into_pageable_memory_returns_when_it_is_done():
    x, into = torch.ones(SIZE, device="cuda"), torch.zeros(SIZE)
    torch.cuda.synchronize()
    with busy(), meanwhile(lambda: into.copy_(x, non_blocking=True), "copy_waits") as thread:
        assert thread.is_alive() and into.eq(0.0).all()
        order("spin", 0)
    assert into.eq(1.0).all()


@in_zygote
def test_memory_is_given_back_only_when_the_device_rests():
    x = torch.ones(64 << 20, dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    with busy():
        used = report()["bytes"]
        del x
        with meanwhile(torch.cuda.empty_cache, "device_waits") as thread:
            assert thread.is_alive() and report()["bytes"] == used
            order("spin", 0)
    assert report()["bytes"] <= used - (64 << 20)


@in_zygote
def test_a_kernel_keeps_no_tensor_alive():
    """Memory that is freed under a kernel of another stream is another tensor's by the time the kernel runs, unless the
    allocator was told (record_stream)."""
    for told in (False, True):
        x, y = torch.ones(SIZE, device="cuda"), torch.zeros(SIZE, device="cuda")
        torch.cuda.synchronize()
        side = torch.cuda.Stream()
        with torch.cuda.stream(side), busy():
            y.copy_(x)
            if told:
                x.record_stream(side)
            del x
            with torch.cuda.stream(torch.cuda.default_stream()):
                z = torch.full((SIZE,), 7.0, device="cuda")
                torch.cuda.current_stream().synchronize()
        torch.cuda.synchronize()
        assert y.eq(1.0 if told else 7.0).all().item()
        del y, z


@in_zygote
def test_the_legacy_default_stream_waits_for_streams_that_block_and_they_for_it():
    handle, event = ctypes.c_void_p(), ctypes.c_void_p()
    assert call("cudaStreamCreate", ctypes.byref(handle)) == call("cudaEventCreate", ctypes.byref(event)) == 0
    blocking = torch.cuda.ExternalStream(handle.value)
    for first, second in ((torch.cuda.default_stream(), blocking), (blocking, torch.cuda.default_stream())):
        with torch.cuda.stream(first):
            x = torch.zeros(SIZE, device="cuda")
            torch.cuda.synchronize()
            with busy():
                x.add_(1.0)
                with torch.cuda.stream(second):
                    y = x * 2
                assert not second.query()
        assert y.eq(2.0).all().item()


@in_zygote
def test_many_streams_have_few_threads():
    x = torch.zeros(SIZE, device="cuda")
    torch.cuda.synchronize()
    threads = report()["threads"]
    for _ in range(200):
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            x.add_(1.0)
        torch.cuda.current_stream().wait_stream(stream)
    assert x.eq(200.0).all().item()
    assert report()["threads"] == threads


@in_zygote
def test_registered_memory_is_pinned_and_refused_twice_unmapped_or_by_order():
    memory = mmap.mmap(-1, 1 << 20)
    tensor = torch.frombuffer(memory, dtype=torch.uint8)
    torch.zeros(1, device="cuda")
    address, size = ctypes.c_void_p(tensor.data_ptr()), ctypes.c_size_t(1 << 20)
    order("refuse_register", 1)
    assert call("cudaHostRegister", address, size, 0) == NOT_SUPPORTED and report()["refused_registrations"] == 1
    order("refuse_register", 0)
    assert not tensor.is_pinned()
    assert call("cudaHostRegister", address, size, 0) == 0 and tensor.is_pinned()
    assert call("cudaHostRegister", address, size, 0) == ALREADY_REGISTERED
    assert call("cudaHostUnregister", address) == 0 and not tensor.is_pinned()
    assert call("cudaHostRegister", ctypes.c_void_p(1 << 20), size, 0) == INVALID_VALUE
    with pytest.raises(RuntimeError, match="cudaErrorInvalidValue"):  # it was kept for whoever looks next
        torch.zeros(1, device="cuda")
    torch.zeros(1, device="cuda")


@in_zygote
def test_memory_unmapped_while_it_is_registered_breaks_a_later_allocation():
    memory = mmap.mmap(-1, 8 << 20)
    size, address = len(memory), ctypes.c_void_p(torch.frombuffer(memory, dtype=torch.uint8).data_ptr())
    torch.zeros(1, device="cuda")
    assert call("cudaHostRegister", address, ctypes.c_size_t(size), 0) == 0
    memory.close()
    found, tries = ctypes.c_void_p(), 200  # gaps above it are filled first
    answers = {call("cudaMalloc", ctypes.byref(found), ctypes.c_size_t(2 << 20)) for _ in range(tries)}
    assert ALREADY_MAPPED in answers and answers <= {0, ALREADY_MAPPED}


@in_zygote
def test_memory_ends_and_the_process_goes_on():
    x = torch.zeros(1, device="cuda")
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(1 << 40, dtype=torch.uint8, device="cuda")
    order("refuse_malloc", 2)  # torch frees what it has cached, and tries again
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(32 << 20, dtype=torch.uint8, device="cuda")
    assert report()["refused_allocations"] == 4
    torch.empty(32 << 20, dtype=torch.uint8, device="cuda")
    assert (x + 1).item() == 1.0


@in_zygote
def test_a_dead_context_stays_dead_and_what_was_enqueued_is_not_done():
    x, pinned = torch.zeros(SIZE, device="cuda"), torch.zeros(SIZE).pin_memory()
    torch.cuda.synchronize()
    with busy():
        x.add_(1.0)
        pinned.copy_(x, non_blocking=True)
        control.break_context()
        for _ in range(2):
            with pytest.raises(torch.AcceleratorError, match="illegal memory access"):
                torch.cuda.synchronize()
        with pytest.raises(torch.AcceleratorError, match="illegal memory access"):
            torch.zeros(1, device="cuda")
    assert report()["breaks"] == 1 and pinned.eq(0.0).all()


@in_zygote
def test_a_context_dies_at_the_launch_that_is_named():
    x = torch.zeros(1, device="cuda")
    order("break_after", 3)
    x.add_(1.0)
    x.add_(1.0)
    torch.cuda.synchronize()
    with pytest.raises(torch.AcceleratorError, match="illegal memory access"):
        x.add_(1.0)
        torch.cuda.synchronize()


def _error_of_child() -> int:
    count = ctypes.c_int()
    return call("cudaGetDeviceCount", ctypes.byref(count))


@in_zygote
def test_a_fork_of_a_process_that_has_used_cuda_cannot_use_it():
    with Fleet() as fleet:
        before = fleet.fork(_error_of_child)
        torch.zeros(1, device="cuda")
        after = fleet.fork(_error_of_child)
        assert fleet.values([before, after]) == [0, INITIALIZATION_ERROR]


@in_zygote
def test_a_fork_of_a_process_that_has_asked_nvml_only_can_use_cuda():
    assert torch.cuda.device_count() == 1
    names = {Path(f"/proc/self/task/{thread}/comm").read_text().strip() for thread in os.listdir("/proc/self/task")}
    assert any(name.startswith("cuda") for name in names) and not has_initialised_cuda()
    with Fleet() as fleet:
        assert fleet.values([fleet.fork(_error_of_child)]) == [0]
    torch.zeros(1, device="cuda")
    assert has_initialised_cuda()


@in_zygote
def test_a_slow_bus_is_between_host_and_device_only():
    x, y = torch.ones(SIZE, device="cuda"), torch.zeros(SIZE, device="cuda")
    order("slow_bus", 1)
    y.copy_(x)
    assert report()["slow_copies"] == 0
    assert y.cpu().eq(1.0).all() and report()["slow_copies"] == 1


@in_zygote
def test_what_is_not_there_is_refused():
    x = torch.ones(SIZE, device="cuda")
    with pytest.raises(RuntimeError, match="cudaErrorNotSupported"):
        torch._fused_dropout(x, 0.5)  # a kernel of device code
    pointer = ctypes.c_void_p()
    assert call("cudaMallocManaged", ctypes.byref(pointer), ctypes.c_size_t(1), 1) == NOT_SUPPORTED
    assert (x + 1).eq(2.0).all().item()


ENDS = """
import ctypes, torch
library = ctypes.CDLL(None)
x = torch.zeros(1, device="cuda")
library.fakecuda_order(b"spin", ctypes.c_long(%d))
for _ in range(100):
    x.add_(1.0)
print("reached")
"""


@pytest.mark.parametrize("spin", [0, 1])
def test_a_process_ends_whatever_its_streams_do(spin):
    done = subprocess.run([sys.executable, "-c", ENDS % spin], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "reached\n", "")


@in_zygote
def test_no_library_of_a_driver_or_of_nccl_is_in_the_process():
    torch.zeros(1, device="cuda")
    mapped = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if ".so" in line}
    found = [path for path in mapped if Path(path).name.split(".")[0] in ("libcudart", "libcuda", "libnccl")]
    assert len(found) == 3 and all("fakecuda" in path for path in found)
    assert "no GPU" in torch.cuda.get_device_name(0)


@in_zygote
def test_memory_in_use_is_told_as_nvidia_smi_does():
    held = torch.zeros(64 << 20, dtype=torch.uint8, device="cuda")
    words = ["nvidia-smi", "--id=0", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    environ = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
    assert int(subprocess.check_output(words, env=environ)) >= 64
    del held
