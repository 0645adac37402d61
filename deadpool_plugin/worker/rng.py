"""Random states that a training call reads (Python's, numpy's and torch's own), and switches of torch."""

from __future__ import annotations

import contextlib
import random
from array import array
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, cast

import numpy as np
import torch


def capture_host() -> dict[str, Any]:
    """Copy the random states, as bytes: they are compared and kept at every call, and at every item of a loader."""
    name, keys, position, has_gauss, cached = cast("tuple[str, Any, int, int, float]", np.random.get_state())
    version, words, gauss = random.getstate()
    state: dict[str, Any] = {
        "python": (version, array("I", words).tobytes(), gauss),
        "numpy": (name, keys.tobytes(), int(position), int(has_gauss), float(cached)),
        "torch": torch.get_rng_state().numpy().tobytes(),
    }
    is_built = torch.version.cuda is not None or torch.version.hip is not None  # for NVIDIA's devices or AMD's
    if is_built and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]  # a loader may augment there
        state["device"] = torch.cuda.get_rng_state()
    return state


def restore_host(state: dict[str, Any]) -> None:
    version, words, gauss = state["python"]
    random.setstate((version, tuple(array("I", words)), gauss))
    name, keys, *rest = state["numpy"]
    np.random.set_state((name, np.frombuffer(keys, dtype=np.uint32), *rest))
    torch.set_rng_state(torch.frombuffer(bytearray(state["torch"]), dtype=torch.uint8))
    if "device" in state:
        torch.cuda.set_rng_state(state["device"])


@contextlib.contextmanager
def preserved() -> Iterator[None]:
    """Hide from the script that anything in this block draws random numbers."""
    before = capture_host()
    try:
        yield
    finally:
        restore_host(before)


def equal(left: Any, right: Any) -> bool:
    """Return whether two captured states (or parts of them) are the same."""
    if left is right:
        return True
    if isinstance(left, torch.Tensor):
        return torch.equal(left, right)
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(equal(value, right[key]) for key, value in left.items())
    return bool(left == right)


# ---- switches of torch that decide how a call computes: a redo has those of the call, not of the moment

_CUDA, _CUDNN, _DEVICES = torch.backends.cuda, torch.backends.cudnn, ("cpu", "cuda")
_ATTRIBUTES: list[tuple[Any, str]] = [
    *((_CUDNN, name) for name in ("enabled", "benchmark", "deterministic")),
    *((_CUDA.matmul, f"allow_{kind}_reduced_precision_reduction") for kind in ("fp16", "bf16")),
    # Precision is read and set the new way, which tells of the old way, too; the old one raises where both were used.
    *((owner, "fp32_precision") for owner in (torch.backends, _CUDA.matmul, _CUDNN)),
    (getattr(torch.backends.mkldnn, "matmul", None), "fp32_precision"),
    *((getattr(_CUDNN, name, None), "fp32_precision") for name in ("conv", "rnn")),
]
_SWITCHES: list[tuple[Callable[[], Any], Callable[[Any], Any]]] = [
    *(
        (getattr(_CUDA, f"{kind}_sdp_enabled"), getattr(_CUDA, f"enable_{kind}_sdp"))
        for kind in ("flash", "mem_efficient", "math", "cudnn")
    ),
    *((partial(getattr, *attribute), partial(setattr, *attribute)) for attribute in _ATTRIBUTES),
    (torch.is_grad_enabled, torch.set_grad_enabled),
    *((partial(torch.is_autocast_enabled, kind), partial(torch.set_autocast_enabled, kind)) for kind in _DEVICES),
    *((partial(torch.get_autocast_dtype, kind), partial(torch.set_autocast_dtype, kind)) for kind in _DEVICES),
]
if hasattr(torch._C, "_get_sdp_priority_order"):
    _SWITCHES.append((torch._C._get_sdp_priority_order, torch._C._set_sdp_priority_order))


def capture_switches() -> list[Any]:
    """Read every switch, for `restore_switches`; None stands for one that this torch does not have."""
    return [_read(read) for read, _ in _SWITCHES]


def restore_switches(values: list[Any]) -> None:
    for (read, write), value in zip(_SWITCHES, values, strict=True):
        if value is not None and value != _read(read):
            write(value)


def _read(read: Callable[[], Any]) -> Any:
    with contextlib.suppress(RuntimeError, AttributeError):
        return read()
