"""Random states that a training call reads: Python's, numpy's and torch's own.

Rules of this file: a state is read a dozen times a step, with caches that training has filled: the number of functions
and objects on the way is what it costs. So the generators' memory is copied as it is. Where it lies is found by trial
at import, on generators of our own. Where a trial fails, the generator is asked.
"""

from __future__ import annotations

import contextlib
import ctypes
import random
import struct
from array import array
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch

from ..errors import Unsupported, invariant

# Each of the three is a Mersenne Twister: what it gives next is made of the word at its position, and after the last
# word all are made anew.
WORDS = 624
_WORDS_BYTES = 4 * WORDS
_PYTHON = struct.Struct(f"<I{_WORDS_BYTES}s")  # position, words
_NUMPY = struct.Struct(f"<{_WORDS_BYTES}sI")  # words, position
_NORMAL = struct.Struct("<i4xd")  # of numpy: whether the second of two normal values is kept, and that value
_TORCH_TELLS = struct.Struct(f"<16xQ{2 * _WORDS_BYTES}s40x")  # position, words of twice the size
_TORCH_BEFORE, _TORCH_BEHIND = 16, 28  # bytes before and behind these: seed and words left; normal values that are kept


class _Memory:
    """The state of a generator as it lies in memory. `words`, `position`: where in it they begin."""

    def __init__(self, address: int, size: int, words: int = 0, position: int = 0) -> None:
        self.bytes, self._size = (ctypes.c_char * size).from_address(address), size
        self._words, self._position = slice(words, words + _WORDS_BYTES), slice(position, position + 4)

    def capture(self) -> bytes:
        return self.bytes.raw

    def used(self, before: bytes, after: bytes) -> Any:
        """Select from `before` what the same draws need: all but the words, the first one used up, and these words.

        Returns: `before` itself if the generator was seeded between the two, or has made its words anew.
        """
        words, first, end = before[self._words], *(int.from_bytes(s[self._position], "little") for s in (before, after))
        if words != after[self._words] or first >= end:
            return before
        return before[: self._words.start] + before[self._words.stop :], first, words[4 * first : 4 * end]

    def restore(self, state: Any) -> None:
        """Set a state, or what `used` has selected of one: words that it left out stay as they are."""
        if not isinstance(state, bytes):
            rest, first, used = state
            words = bytearray(self.bytes.raw[self._words])
            words[4 * first : 4 * first + len(used)] = used
            state = b"".join((rest[: self._words.start], words, rest[self._words.start :]))
        invariant(len(state) == self._size, "a random state was captured in another version of its library")
        self.bytes.raw = state


class _Asked:
    """The state of a generator that is asked for it, and told it."""

    def __init__(self, capture: Callable[[], Any], restore: Callable[[Any], object]) -> None:
        self.capture, self.restore = capture, restore

    def used(self, before: Any, after: Any) -> Any:
        return before


def _found(begin: int, size: int, tell: Callable[[], bytes], *draws: Callable[[], object]) -> int | None:
    """Find how far behind `begin` is the only place where there is what `tell` returns, after each of `draws`."""
    places = list(range(0, size, 4))
    for draw in draws:
        draw()
        memory, told = ctypes.string_at(begin, size), tell()
        places = [at for at in places if memory.startswith(told, at)]
    return places[0] if len(places) == 1 else None


_python: Any = random._inst  # type: ignore[attr-defined]
_numpy: Any = np.random.mtrand._rand
_engine: Any = _numpy._bit_generator if type(_numpy._bit_generator) is np.random.MT19937 else None


def _python_state() -> _Memory | _Asked:
    def tell() -> bytes:
        *words, position = ours.getstate()[1]
        return _PYTHON.pack(position, array("I", words).tobytes())

    ours = random.Random(1)
    at = _found(id(ours), type(ours).__basicsize__, tell, *3 * [ours.random])
    if at is None:
        return _Asked(_python.getstate, _python.setstate)
    return _Memory(id(_python) + at, _PYTHON.size, words=4)


def _numpy_states() -> dict[str, _Memory | _Asked]:
    """Return those of the words, and of the normal value."""

    def tell() -> bytes:
        _, words, position, *_ = ours.get_state()
        return _NUMPY.pack(words.tobytes(), position)

    def tell_normal() -> bytes:
        return _NORMAL.pack(*ours.get_state()[3:])

    def ask() -> tuple[Any, ...]:
        name, words, *rest = _numpy.get_state()
        return name, words.tobytes(), *rest

    def restore(state: tuple[Any, ...]) -> None:
        name, words, *rest = state
        _numpy.set_state((name, np.frombuffer(words, dtype=np.uint32), *rest))

    ours: Any = np.random.RandomState(1)
    draws = [ours.rand, ours.randn, ours.rand, ours.randn]
    with contextlib.suppress(AttributeError):
        if _engine is None:  # that which `capture_host` refuses
            return {}
        words = _found(ours._bit_generator.ctypes.state_address, _NUMPY.size, tell, *draws)
        normal = _found(id(ours), type(ours).__basicsize__, tell_normal, *draws)
        if words is not None and normal is not None:
            return {
                "numpy": _Memory(_engine.ctypes.state_address, _NUMPY.size, position=_WORDS_BYTES),
                "normal": _Memory(id(_numpy) + normal, _NORMAL.size),
            }
    return {"numpy": _Asked(ask, restore)}


def _torch_state() -> _Memory | _Asked:
    def tell() -> bytes:
        position, words = _TORCH_TELLS.unpack(ours.get_state().numpy().tobytes())
        return _PYTHON.pack(position, array("I", array("Q", words)).tobytes())

    def is_whole(draw: Callable[[], object]) -> bool:
        told, state = ours.get_state(), memory.capture()
        draw()
        memory.restore(state)
        return torch.equal(ours.get_state(), told)

    ours: Any = torch.Generator()
    default: Any = torch.default_generator
    before = _TORCH_BEFORE
    draws = [partial(torch.randn, 1, generator=ours, dtype=kind) for kind in 2 * [torch.float, torch.double]]
    with contextlib.suppress(AttributeError, struct.error):
        usable_size = ctypes.CDLL(None).malloc_usable_size
        usable_size.argtypes, usable_size.restype = [ctypes.c_void_p], ctypes.c_size_t
        end = usable_size(ours._cdata)
        at, size = _found(ours._cdata, end, tell, *draws), before + _PYTHON.size + _TORCH_BEHIND
        if at is not None and before <= at <= end - size + before:
            memory, found = (
                _Memory(one._cdata + at - before, size, words=before + 4, position=before) for one in (ours, default)
            )
            if all(map(is_whole, draws)):
                return found
    return _Asked(torch.get_rng_state, torch.set_rng_state)


_GENERATORS: dict[str, _Memory | _Asked] = {"python": _python_state(), **_numpy_states(), "torch": _torch_state()}
_KEPT = {"python": "pair", "numpy": "normal"}
"""Where a generator keeps the second of two normal values, apart from its words."""
_HAS_DEVICES = torch.version.cuda is not None or torch.version.hip is not None  # it was built for NVIDIA's or AMD's


def capture_host() -> dict[str, Any]:
    """Copy the random states: they are compared and kept at every call, and at every item of a loader.

    Raises: Unsupported if numpy.random was given another engine.
    """
    if _numpy._bit_generator is not _engine:
        raise Unsupported(
            f"numpy.random draws from {type(_numpy._bit_generator).__name__}, which the script has set",
            "the engine that numpy comes with: no other state is restored",
            "leave numpy.random.set_bit_generator out",
        )
    states = {name: generator.capture() for name, generator in _GENERATORS.items()}
    states["pair"] = _python.gauss_next
    if _HAS_DEVICES and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]  # a loader may augment there
        states["device"] = torch.cuda.get_rng_state()
    return states


def drawn(before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    """Select what `restore_host` needs of `before` for the same draws again: the words that they have used up.

    A generator that nothing was drawn from is left out. One that was seeded, or has made all its words anew, is whole.
    """
    found = {name: state for name, state in before.items() if not equal(state, after.get(name))}
    for name, kept in _KEPT.items():  # also that there is none: who follows may have one
        if name in found and kept in before:
            found[kept] = before[kept]
    return found | {
        name: _GENERATORS[name].used(state, after[name]) for name, state in found.items() if name in _GENERATORS
    }


def restore_host(state: dict[str, Any]) -> None:
    """Put back what `capture_host` has copied, or `drawn` selected. Words that it left out stay as they are."""
    for name, generator in _GENERATORS.items():
        if name in state:
            generator.restore(state[name])
    if "pair" in state:
        _python.gauss_next = state["pair"]
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
        if left.keys() != right.keys():
            return False
        for name, value in left.items():
            other = right[name]
            if value is not other and not (value == other if type(value) is bytes else equal(value, other)):
                return False
        return True
    return bool(left == right)
