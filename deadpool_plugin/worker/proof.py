"""Digests of the batches a rank read, with which the process that takes it over proves that it reads the same ones.

Rules of this file: a digest is of what a batch has of numbers, strings and tensors in host memory; objects, and the
values of tensors on a device, are left out. Of large arrays it is of blocks spread over them. It never raises.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
import torch
import xxhash

WHOLE_BYTES_MAX = 256 << 10
"""Arrays above are digested by as much of them, in `_BLOCKS` blocks: some 20 microseconds, whatever their size."""
_BLOCKS = 64
_BLOCK_BYTES = WHOLE_BYTES_MAX // _BLOCKS
_ITEMS_MAX = 4096  # looked at in a batch's lists
_DEPTH_MAX = 8
ITEMS_MAX = 64  # the last micro-batches of a call count: a newcomer that has passed over them reads them again
_PLAIN = {int, float, str, bool}
_NUMPYS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""By size in bytes, a type that numpy has: it has none of 16-bit or 8-bit floats."""


def digest(value: Any) -> int:
    """Return 32 bits of `value`, never 0."""
    state = xxhash.xxh3_64()
    # A class of the script's may fail when it is looked at: in every process alike, and no job shall end by that.
    with contextlib.suppress(Exception):
        _feed(state, value, _ITEMS_MAX, 0)
    return state.intdigest() & 0xFFFFFFFF or 1  # a record has room for so much


def combined(digests: Sequence[int]) -> int:
    """Return one of several, the last; 0 of none, and of one itself."""
    many = digests[-ITEMS_MAX:]
    if len(many) <= 1:
        return many[0] if many else 0
    return xxhash.xxh3_64_intdigest(np.array(many, dtype=np.uint64).tobytes()) & 0xFFFFFFFF or 1


def _feed(state: Any, value: Any, items: int, depth: int) -> None:
    if isinstance(value, torch.Tensor):
        state.update(_form(value.dtype, value.shape))
        is_known = type(value) in (torch.Tensor, torch.nn.Parameter) and value.is_cpu
        is_lazy = value.is_quantized or value.is_conj() or value.is_neg()
        if is_known and value.layout is torch.strided and not is_lazy:
            if value.is_contiguous():  # a batch is digested in every step: with as few of torch's functions as can be
                if value.nbytes:
                    _feed_bytes(state, memoryview((ctypes.c_ubyte * value.nbytes).from_address(value.data_ptr())))
            else:
                plain = value.detach()
                _feed_array(state, plain.view(_NUMPYS.get(plain.element_size(), plain.dtype)).numpy())
    elif isinstance(value, np.ndarray):
        if value.dtype != object:
            state.update(f"{value.dtype.str}{value.shape}".encode())
            _feed_array(state, value)
    elif type(value) in _PLAIN or isinstance(value, np.generic):
        state.update(repr(value).encode(errors="backslashreplace"))
    elif isinstance(value, (bytes, bytearray)):
        state.update(b"%d" % len(value))
        _feed_array(state, np.frombuffer(value, dtype=np.uint8))
    elif depth == _DEPTH_MAX:
        return
    elif isinstance(value, Mapping):  # HF's BatchEncoding among them; names may come from a set, whose order is random
        for name in sorted(value, key=str):
            _feed(state, value[name], max(1, items // len(value)), depth + 1)
    elif isinstance(value, (list, tuple)):
        looked_at = value[:: -(-len(value) // items)] if len(value) > items else value
        if set(map(type, looked_at)) <= _PLAIN:
            # Not so a long integer, or half a character.
            with contextlib.suppress(OverflowError, UnicodeEncodeError, msgspec.MsgspecError):
                state.update(msgspec.msgpack.encode(looked_at))
                return
        state.update(b"%d" % len(value))
        for item in looked_at:
            _feed(state, item, max(1, items // max(1, len(looked_at))), depth + 1)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            _feed(state, getattr(value, field.name, None), items, depth + 1)


@functools.lru_cache(4096)
def _form(dtype: torch.dtype, shape: torch.Size) -> bytes:
    return f"{dtype}{list(shape)}".encode()


def _feed_array(state: Any, array: np.ndarray[Any, Any]) -> None:
    if not array.flags.c_contiguous and array.nbytes > WHOLE_BYTES_MAX:
        array = array.flat[:: -(-array.size // _ITEMS_MAX)]
    _feed_bytes(state, np.ascontiguousarray(array).reshape(-1).view(np.uint8))


def _feed_bytes(state: Any, data: Any) -> None:
    if data.nbytes <= WHOLE_BYTES_MAX:
        state.update(data)
        return
    apart = (data.nbytes - _BLOCK_BYTES) // (_BLOCKS - 1)
    for number in range(_BLOCKS):
        state.update(data[number * apart : number * apart + _BLOCK_BYTES])
