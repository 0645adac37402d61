"""Which exceptions are faults of the host, by the words that libraries of others use for them."""

from __future__ import annotations

import errno
import os

import pytest
import torch

from deadpool_plugin.worker.faults import machine_fault

OF_HOST = [
    OSError(errno.EIO, "Input/output error", "data/shard-7"),
    OSError(errno.ESTALE, "Stale file handle"),
    OSError(errno.ENOSPC, "No space left on device"),
    RuntimeError("Caught OSError in DataLoader worker process 0.\n  ...\nOSError: [Errno 5] Input/output error"),
    RuntimeError("Error while serializing: I/O error: No space left on device (os error 28)"),
    RuntimeError("CUDA error: uncorrectable ECC error encountered\nCUDA kernel errors might be reported later"),
    RuntimeError("CUDA error: uncorrectable NVLink error detected during the execution"),
    RuntimeError("CUDA error: Invalid access of peer GPU memory over nvlink or a hardware error"),
    RuntimeError("CUDA error: an illegal memory access was encountered"),
    RuntimeError("CUDA error: unspecified launch failure"),
    RuntimeError("CUDA error: CUDA-capable device(s) is/are busy or unavailable"),
    RuntimeError("No CUDA GPUs are available: no CUDA-capable device is detected"),
    RuntimeError("NCCL error in: NCCLUtils.cpp:133, unhandled cuda error\nLast error:\nCuda failure 719 'unspecified "
                 "launch failure'"),
    RuntimeError("NCCL error: remote process exited\nncclRemoteError: A call failed possibly due to a network error"),
    RuntimeError("ncclSystemError: System call (e.g. socket, malloc) or external library call failed or device error"),
    RuntimeError("DataLoader worker (pid 4711) is killed by signal: Killed. "),
    RuntimeError("DataLoader worker (pid(s) 4711) is killed by signal: Bus error. It is possible that dataloader's"),
]  # fmt: skip
OF_SCRIPT = [
    ValueError("loss is nan"),
    FileNotFoundError(errno.ENOENT, "No such file or directory"),
    PermissionError(errno.EACCES, "Permission denied"),
    RuntimeError("CUDA error: device-side assert triggered"),
    RuntimeError("CUDA error: CUBLAS_STATUS_INVALID_VALUE when calling cublasGemmEx"),
    RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB."),
    RuntimeError("an unknown error in my own code"),
    RuntimeError("DataLoader worker (pid 4711) exited unexpectedly"),
    RuntimeError("ncclInvalidUsage: This usually reflects invalid usage of NCCL library."),
    MemoryError(),
    KeyboardInterrupt(),
]


@pytest.mark.parametrize("error", OF_HOST, ids=str)
def test_errors_of_the_host(error):
    assert machine_fault(error).startswith(("an error of ", "the end of a process "))


@pytest.mark.parametrize("error", OF_SCRIPT, ids=repr)
def test_errors_that_may_be_the_scripts(error):
    assert machine_fault(error) == ""


def test_the_error_is_found_behind_what_was_raised_for_it():
    for how in ("cause", "context"):
        try:
            try:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            except OSError as error:
                if how == "cause":
                    raise ValueError("the batch cannot be read") from error
                raise ValueError("the batch cannot be read")  # noqa: B904
        except ValueError as error:
            assert machine_fault(error) == "an error of a file system (Input/output error)"


def test_an_error_that_was_handled_and_is_not_shown_counts_no_more():
    try:
        try:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        except OSError:
            raise ValueError("no such token") from None
    except ValueError as error:
        assert machine_fault(error) == ""


def test_a_real_full_disk_is_recognised():
    with pytest.raises(OSError) as raised, open("/dev/full", "wb", buffering=0) as full:
        full.write(b"x")
    assert machine_fault(raised.value) == "an error of a file system (No space left on device)"
    with pytest.raises(RuntimeError) as wrote:
        torch.save(torch.zeros(1 << 20), "/dev/full")
    assert machine_fault(wrote.value).startswith("an error of a file system (")


def test_a_killed_process_of_a_loader_is_recognised():
    class Dies(torch.utils.data.Dataset[int]):
        def __len__(self):
            return 1

        def __getitem__(self, index):
            os.kill(os.getpid(), 9)

    with pytest.raises(RuntimeError) as raised:
        list(torch.utils.data.DataLoader(Dies(), num_workers=1))
    assert machine_fault(raised.value) == "the end of a process of a DataLoader (Killed)"
