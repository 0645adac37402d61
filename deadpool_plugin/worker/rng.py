"""Random states that a training call reads (Python's, numpy's and torch's own), and switches of torch.

Rules of this file: a state is read a dozen times a step, so that Python's and numpy's are copied from memory. Where
they lie is found by trial at import, on generators of our own. Where the trial fails, generators are asked.
"""

from __future__ import annotations

import contextlib
import ctypes
import random
import struct
import sys
from array import array
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, cast

import numpy as np
import torch

from ..errors import Unsupported

# Each of the three is a Mersenne Twister. Captured, it is (words, position, and what else it keeps): what it gives next
# is made of the word at its position, and after the last word all are made anew.
WORDS = 624
_TORCH_BEGIN, _TORCH_END = 24, 24 + 8 * WORDS  # of the words in torch's bytes, which end at 5,056
_Twister = tuple[bytes, int, Any]


_Reader = Callable[[Any, int], _Twister]  # of a generator, and `at`: how far into its memory
_PYTHON = struct.Struct(f"i{4 * WORDS}s")  # position and words
_NUMPY = struct.Struct(f"{4 * WORDS}si")  # words and position
_GAUSS = struct.Struct("i4xd")  # whether the second of two normal values is kept, and that value


def _ask_python(generator: random.Random) -> _Twister:
    version, words, gauss = generator.getstate()
    return array("I", words[:-1]).tobytes(), words[-1], (version, gauss)


def _read_python(generator: random.Random, at: int) -> _Twister:
    position, words = _PYTHON.unpack(ctypes.string_at(id(generator) + at, _PYTHON.size))
    return words, position, (random.Random.VERSION, generator.gauss_next)  # type: ignore[attr-defined]


def _ask_numpy(generator: np.random.RandomState) -> _Twister:
    name, keys, position, *rest = cast("tuple[str, Any, int, int, float]", generator.get_state())
    return keys.tobytes(), int(position), (name, int(rest[0]), float(rest[1]))


def _read_numpy(generator: np.random.RandomState, at: int) -> _Twister:
    engine = generator._bit_generator  # type: ignore[attr-defined]
    words, position = _NUMPY.unpack(ctypes.string_at(engine.ctypes.state_address, _NUMPY.size))
    return words, position, ("MT19937", *_GAUSS.unpack(ctypes.string_at(id(generator) + at, _GAUSS.size)))


def _place(read: _Reader, size: int, ask: Callable[[Any], _Twister], generator: Any, *draws: str) -> int | None:
    """Find the only `at` for which `read`, which needs `size` bytes there, tells what `ask` tells, after each draw."""
    places = list(range(object.__basicsize__, type(generator).__basicsize__ - size + 1, 4))
    with contextlib.suppress(AttributeError):
        for draw in draws:
            getattr(generator, draw)()
            asked = ask(generator)
            places = [at for at in places if read(generator, at) == asked]
        return places[0] if len(places) == 1 else None
    return None


_PYTHON_AT = _place(_read_python, _PYTHON.size, _ask_python, random.Random(1), "random", "random", "random")
_NUMPY_AT = _place(_read_numpy, _GAUSS.size, _ask_numpy, np.random.RandomState(1), "rand", "randn", "rand", "randn")


def _capture_python() -> _Twister:
    generator = random._inst  # type: ignore[attr-defined]
    return _ask_python(generator) if _PYTHON_AT is None else _read_python(generator, _PYTHON_AT)


def _capture_numpy() -> _Twister:
    generator = np.random.mtrand._rand
    if type(engine := generator._bit_generator) is not np.random.MT19937:
        raise Unsupported(
            f"numpy.random draws from {type(engine).__name__}",
            "MT19937, its default: no other state is restored",
            "leave numpy.random.set_bit_generator out",
        )
    return _ask_numpy(generator) if _NUMPY_AT is None else _read_numpy(generator, _NUMPY_AT)


def _restore_python(words: bytes, position: int, rest: Any) -> None:
    version, gauss = rest
    random.setstate((version, (*array("I", words), position), gauss))


def _restore_numpy(words: bytes, position: int, rest: Any) -> None:
    name, *gauss = rest
    np.random.set_state((name, np.frombuffer(words, dtype=np.uint32), position, *gauss))


def _capture_torch() -> _Twister:
    state = torch.get_rng_state().numpy().tobytes()
    position = int.from_bytes(state[16:24], sys.byteorder) if len(state) == _TORCH_END + 40 else 0
    return state[_TORCH_BEGIN:_TORCH_END], position, (state[:_TORCH_BEGIN], state[_TORCH_END:])


def _restore_torch(words: bytes, position: int, rest: Any) -> None:
    head, tail = rest
    torch.set_rng_state(torch.frombuffer(bytearray(head + words + tail), dtype=torch.uint8))


_TWISTERS: dict[str, tuple[Callable[[], _Twister], Callable[[bytes, int, Any], None], int]] = {
    "python": (_capture_python, _restore_python, 4),
    "numpy": (_capture_numpy, _restore_numpy, 4),
    "torch": (_capture_torch, _restore_torch, 8),
}
"""How each is captured and restored, and the bytes of a word."""


def capture_host() -> dict[str, Any]:
    """Copy the random states, as bytes: they are compared and kept at every call, and at every item of a loader."""
    state: dict[str, Any] = {name: capture() for name, (capture, _, _) in _TWISTERS.items()}
    is_built = torch.version.cuda is not None or torch.version.hip is not None  # for NVIDIA's devices or AMD's
    if is_built and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]  # a loader may augment there
        state["device"] = torch.cuda.get_rng_state()
    return state


def drawn(before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    """Select what `restore_host` needs of `before` for the same draws again: the words that they have used up.

    A generator that nothing was drawn from is left out. One that was seeded, or has made all its words anew, is whole.
    """
    found: dict[str, Any] = {}
    for name, state in before.items():
        if equal(state, after.get(name)):
            continue
        found[name] = state
        if name in _TWISTERS:
            (words, position, rest), (words_after, end, _), size = state, after[name], _TWISTERS[name][2]
            if words == words_after and position < end:
                found[name] = words[size * position : size * end], position, rest
    return found


def restore_host(state: dict[str, Any]) -> None:
    """Put back what `capture_host` has copied, or `drawn` selected. Words that it left out stay as they are."""
    for name, (capture, restore, size) in _TWISTERS.items():
        if name in state:
            words, position, rest = state[name]
            if len(words) < size * WORDS:
                mine, begin = capture()[0], size * position
                words = mine[:begin] + words + mine[begin + len(words) :]
            restore(words, position, rest)
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
    (torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode),
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
    try:
        return read()
    except (RuntimeError, AttributeError):
        return None
