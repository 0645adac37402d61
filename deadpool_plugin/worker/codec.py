"""Plain data, small tensors and exceptions as bytes or plain data, and back, without pickle.

Rules of this file: what cannot be encoded is refused by name; decoding imports nothing and never runs code. Tuples keep
being tuples. A tensor is (dtype, shape, kind of device, bytes) and comes back where it was; of one above the limit only
dtype and shape are kept, and it comes back as a `TooLarge`: never as made-up numbers.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import torch

from ..comm.record import contents
from ..errors import Unsupported

TUPLE, TENSOR, LACKING = 1, 2, 3
TENSOR_LIMIT_BYTES = 1 << 20
INTEGER_BITS_MAX = 63
PLAIN = frozenset({bool, float, str, bytes, type(None)})
RAISED = "raised"
TEXT_MAX = 4096  # characters of an exception's text


@dataclass
class TooLarge:
    """A stand-in for a tensor, or a result, that was not recorded."""

    description: str

    @classmethod
    def tensor(cls, dtype: str, shape: list[int]) -> TooLarge:
        return cls(f"a tensor of {dtype} {shape}, above the limit of {TENSOR_LIMIT_BYTES} bytes")


def too_large(value: Any) -> TooLarge | None:
    """Make the stand-in for the first tensor in `value` above the limit."""
    if type(value) in PLAIN:
        return None
    if isinstance(value, torch.Tensor):
        return TooLarge.tensor(*_form(value)) if not is_recorded(value) else None
    items = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    return next(filter(None, map(too_large, items)), None)


def is_plain(value: Any) -> bool:
    """Return whether nothing in `value` can change any more: no tensors, and nothing unknown."""
    if isinstance(value, (dict, list, tuple)):
        return all(map(is_plain, value.values() if isinstance(value, dict) else value))
    return type(value) in PLAIN or isinstance(value, int)


def is_recorded(tensor: torch.Tensor) -> bool:
    """Return whether the content of `tensor` is, not its form alone."""
    return tensor.numel() * tensor.element_size() <= TENSOR_LIMIT_BYTES


def encode(value: Any) -> bytes:
    """Encode `value`. Raises: Unsupported, which names the type that is neither plain data nor a tensor."""
    return _encoder.encode(_prepare(value))


def joined(encoded: Sequence[bytes]) -> bytes:
    """Encode the list of what has been encoded one by one."""
    return msgspec.msgpack.encode([msgspec.Raw(one) for one in encoded])


def decode(data: bytes | memoryview) -> Any:
    return _decoder.decode(data)


def _prepare(value: Any) -> Any:
    kind = type(value)
    if kind in PLAIN:
        return value
    if isinstance(value, dict):
        return {key: item if type(item) in PLAIN else _prepare(item) for key, item in value.items()}
    if isinstance(value, list):
        return _prepare_items(value)
    if isinstance(value, tuple):
        return msgspec.msgpack.Ext(TUPLE, msgspec.msgpack.encode(_prepare_items(value)))
    if isinstance(value, torch.Tensor):
        device = getattr(value, "came_from", value.device)  # before `copies.to_host`
        body = contents(value) if is_recorded(value) else None
        return msgspec.msgpack.Ext(TENSOR, msgspec.msgpack.encode((*_form(value), device.type, body)))
    if kind is TooLarge:
        return msgspec.msgpack.Ext(LACKING, value.description.encode())
    if isinstance(value, int):
        if value.bit_length() > INTEGER_BITS_MAX:
            raise Unsupported(
                f"a training call's result or state holds the integer {value}",
                f"integers of at most {INTEGER_BITS_MAX} bits",
                "return or keep it as a string",
            )
        return int(value)
    if isinstance(value, float):  # numpy's numbers among them
        return float(value)
    raise Unsupported(
        f"a training call's result or state holds a {kind.__module__}.{kind.__name__}; "
        "expected None, numbers, strings, bytes, tensors, and lists, tuples and dicts of them"
    )


def _prepare_items(items: Sequence[Any]) -> Sequence[Any]:
    # Many small integers (the order of an epoch) go as they are: a tenth of the time.
    if set(map(type, items)) == {int} and max(max(items), -min(items)).bit_length() <= INTEGER_BITS_MAX:
        return items
    return [item if type(item) in PLAIN else _prepare(item) for item in items]


def _form(tensor: torch.Tensor) -> tuple[str, list[int]]:
    return str(tensor.dtype).removeprefix("torch."), list(tensor.shape)


def _restore(code: int, data: memoryview) -> Any:
    if code == LACKING:
        return TooLarge(bytes(data).decode())
    if code == TUPLE:
        return tuple(decode(data))
    if code != TENSOR:
        raise ValueError(f"unknown extension {code} in a call record: it was written by another version")
    name, shape, device, body = msgspec.msgpack.decode(data)
    if body is None:
        return TooLarge.tensor(name, shape)
    dtype = getattr(torch, name)
    tensor = torch.frombuffer(bytearray(body), dtype=dtype).view(shape) if body else torch.zeros(shape, dtype=dtype)
    return tensor if device == "cpu" else tensor.to(device)


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(ext_hook=_restore)


# ---- exceptions of saves


def encode_error(error: BaseException) -> dict[str, Any]:
    """Return the outcome of a call that raised `error`: plain data."""

    def plain(value: object) -> str:  # the name of a file may not be one that can be encoded
        return str(value)[:TEXT_MAX].encode(errors="backslashreplace").decode()

    kinds = [f"{kind.__module__}:{kind.__qualname__}" for kind in type(error).__mro__]
    arguments: list[Any] = [plain(error)]
    if isinstance(error, OSError) and isinstance(error.errno, int):
        arguments = [error.errno, plain(error.strerror)]
    return {RAISED: [kinds, plain(error), arguments]}


def decode_error(outcome: Any) -> BaseException | None:
    """Make the exception that `encode_error` was given, with its text; None for a call that returned."""
    # Its class is made here, below the nearest one of the original's that this process knows: `except` catches it as it
    # caught the original, and nothing of that class is run to make it.
    if not isinstance(outcome, dict) or RAISED not in outcome:
        return None
    kinds, text, arguments = outcome[RAISED]
    name = kinds[0].rpartition(":")[2].rpartition(".")[2]
    for kind in kinds:
        module, _, path = kind.partition(":")
        known: Any = sys.modules.get(module)
        for part in path.split("."):
            known = getattr(known, part, None)
        if not (isinstance(known, type) and issubclass(known, BaseException)):
            continue
        made: Any = type(name, (known,), {"__module__": known.__module__, "__str__": lambda self: text})
        builtin: Any = next(base for base in known.__mro__ if base.__module__ == "builtins")
        try:
            error: BaseException = builtin.__new__(made, *arguments)
            return error
        except TypeError:  # a group of exceptions is not made of a text
            continue
    raise AssertionError("BaseException itself is always known")
