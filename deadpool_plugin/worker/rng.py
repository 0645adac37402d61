"""All random states a training call may read: Python's, numpy's, torch's, the devices', the framework's own."""

from __future__ import annotations

import contextlib
import random
from array import array
from collections.abc import Iterator
from typing import Any, cast

import numpy as np
import torch

from .adapter import Adapter


def capture(adapter: Adapter) -> dict[str, Any]:
    """Copy every random state; the framework's tensors are never written in place and go by reference."""
    return {**capture_host(), "framework": adapter.rng_states()}


def capture_host() -> dict[str, Any]:
    """Copy those states that data loaders draw from, as bytes: they are compared and kept at every call.

    A loader may augment on the device, too, whose generator's state torch keeps on the host.
    """
    name, keys, position, has_gauss, cached = cast("tuple[str, Any, int, int, float]", np.random.get_state())
    version, words, gauss = random.getstate()
    state: dict[str, Any] = {
        "python": (version, array("I", words).tobytes(), gauss),
        "numpy": (name, keys.tobytes(), int(position), int(has_gauss), float(cached)),
        "torch": torch.get_rng_state().numpy().tobytes(),
    }
    is_built = torch.version.cuda is not None or torch.version.hip is not None  # for NVIDIA's devices or AMD's
    if is_built and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
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
