"""Random states that a training call reads (Python's, numpy's, torch's, the framework's), and switches of torch."""

from __future__ import annotations

import contextlib
import random
from array import array
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, cast

import numpy as np
import torch

from .adapter import Adapter


def capture(adapter: Adapter) -> dict[str, Any]:
    """Copy every random state; the framework's tensors are never written in place and go by reference."""
    return {**capture_host(), "framework": adapter.rng_states()}


def capture_host() -> dict[str, Any]:
    """Copy those states that data loaders draw from, as bytes: they are compared and kept at every call."""
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


def restore(adapter: Adapter, state: dict[str, Any]) -> None:
    restore_host(state)
    adapter.set_rng_states(state["framework"])


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

Switch = tuple[Callable[[], Any], Callable[[Any], Any]]


def _attribute(owner: Any, name: str) -> Switch:
    return lambda: getattr(owner, name), lambda value: setattr(owner, name, value)


def _all_switches() -> list[Switch]:
    cuda, cudnn = torch.backends.cuda, torch.backends.cudnn
    found: list[Switch] = [
        (getattr(cuda, f"{kind}_sdp_enabled"), getattr(cuda, f"enable_{kind}_sdp"))
        for kind in ("flash", "mem_efficient", "math", "cudnn")
    ]
    if hasattr(torch._C, "_get_sdp_priority_order"):
        found.append((torch._C._get_sdp_priority_order, torch._C._set_sdp_priority_order))
    found += [_attribute(cudnn, name) for name in ("enabled", "benchmark", "deterministic")]
    found += [_attribute(cuda.matmul, f"allow_{kind}_reduced_precision_reduction") for kind in ("fp16", "bf16")]
    # Precision is read and set the new way, which tells of the old way, too; the old one raises where both were used.
    owners: list[Any] = [torch.backends, cuda.matmul, cudnn, getattr(torch.backends.mkldnn, "matmul", None)]
    owners += [getattr(cudnn, name, None) for name in ("conv", "rnn")]
    found += [_attribute(owner, "fp32_precision") for owner in owners]
    found.append((torch.is_grad_enabled, torch.set_grad_enabled))
    for kind in ("cpu", "cuda"):
        found.append((partial(torch.is_autocast_enabled, kind), partial(torch.set_autocast_enabled, kind)))
        found.append((partial(torch.get_autocast_dtype, kind), partial(torch.set_autocast_dtype, kind)))
    return found


_SWITCHES = _all_switches()


def capture_switches() -> list[Any]:
    """Read every switch, for `restore_switches`; None stands for one that this torch does not have."""
    return [_read(read) for read, _ in _SWITCHES]


def restore_switches(values: list[Any]) -> None:
    for (read, write), value in zip(_SWITCHES, values, strict=True):
        if value is not None and value != _read(read):
            write(value)


def _read(read: Callable[[], Any]) -> Any:
    try:
        return read()
    except (RuntimeError, AttributeError):
        return None
