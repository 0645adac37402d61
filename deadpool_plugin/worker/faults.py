"""Faults of a host that reach a script as exceptions: errors of its device, its file systems and its own processes.

Rules of this file: a rule has its source; what no rule names may be the script's own error, and is tried again before
it is called that (core/README.md, "Whose fault"). Exceptions are known by what they say: the libraries that raise them
are not imported here, and a process of a DataLoader passes its errors on as text. A device-side assertion and an
allocation that finds no memory have no rule: a wrong index and too large a batch are scripts' errors.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator

# Errors of the storage behind the script's files, or of the device behind that (errno(3)).
_ERRNOS = frozenset({errno.EIO, errno.ESTALE, errno.ENOSPC, errno.EREMOTEIO, errno.EUCLEAN, errno.ENODEV})
_NUMBERS = "|".join(str(number) for number in sorted(_ERRNOS))
_RULES = (
    # Python's own spelling, and Rust's (safetensors, tokenizers), where only the text has come through.
    ("an error of a file system", re.compile(rf"\[Errno ({_NUMBERS})\]|\(os error ({_NUMBERS})\)")),
    # torch.save says no more than these (caffe2/serialize/inline_container.cc).
    ("an error of a file system", re.compile("PytorchStreamWriter failed writing|inline_container.*unexpected pos")),
    # The CUDA runtime's texts for errors after which "the process must be terminated and relaunched" (cudaError_t in
    # driver_types.h), and for those of a device that is not there; torch and NCCL quote them.
    (
        "an error of the device",
        re.compile(
            "cuda.*("
            "uncorrectable ECC error encountered|uncorrectable NVLink error|nvlink or a hardware error"
            "|illegal memory access|illegal instruction|misaligned address|hardware stack error|invalid program counter"
            "|operation not supported on global/shared address space|unspecified launch failure|launch timed out"
            "|busy or unavailable|no CUDA-capable device|system not yet initialized|unknown error"
            ")",
            re.IGNORECASE | re.DOTALL,
        ),
    ),
    # ncclResult_t in nccl.h: "a call to the system failed", "possibly due to a network error or a remote process".
    ("an error of the network or of the system", re.compile("ncclSystemError|ncclRemoteError")),
    # torch.utils.data._utils.signal_handling; killed: by the kernel for want of memory.
    (
        "the end of a process of a DataLoader",
        re.compile(r"DataLoader worker .*is killed by signal: (Killed|Bus error|Illegal instruction)", re.DOTALL),
    ),
)


def machine_fault(error: BaseException) -> str:
    """Name the fault of this host that `error`, or an exception it came from, is; "" if it may be the script's own."""
    for one in _chain(error):
        if isinstance(one, OSError) and one.errno in _ERRNOS:
            return f"an error of a file system ({os.strerror(one.errno)})"
        text = f"{type(one).__name__}: {one}"
        for fault, rule in _RULES:
            if found := rule.search(text):
                return f"{fault} ({next(filter(None, found.groups()), found[0])})"
    return ""


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """`error`, then what it was raised from, or while it was handled, as a traceback shows them."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
