"""Plain data and small tensors to bytes and back, without pickle.

Rules of this file: what cannot be encoded is refused by name; decoding never runs code. Tuples keep being
tuples. A tensor is (dtype, shape, kind of device, bytes) and comes back where it was; of one above the limit only dtype
and shape are kept, and it comes back as a `TooLarge`: never as made-up numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import torch

from ..errors import Unsupported

TUPLE, TENSOR, LACKING = 1, 2, 3
TENSOR_LIMIT_BYTES = 1 << 20
INTEGER_BITS_MAX = 63
_INTEGER_END = 1 << INTEGER_BITS_MAX
PLAIN = frozenset({bool, float, str, bytes, type(None)})


class TooLarge:
    """Stands for a tensor, or a result, that was not recorded."""

    def __init__(self, description: str) -> None:
        self.description = description

    @classmethod
    def tensor(cls, dtype: str, shape: list[int]) -> TooLarge:
        return cls(f"a tensor of {dtype} {shape}, above the limit of {TENSOR_LIMIT_BYTES} bytes")


def too_large(value: Any) -> TooLarge | None:
    """Find the stand-in, in a record, for the first tensor in `value` above the limit."""
    if isinstance(value, TooLarge):
        return value
    if isinstance(value, torch.Tensor):
        return TooLarge.tensor(*_form(value)) if not is_recorded(value) else None
    items = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    return next(filter(None, map(too_large, items)), None)


def is_plain(value: Any) -> bool:
    """Return whether nothing in `value` can change any more: no tensors, and nothing unknown."""
    if isinstance(value, (dict, list, tuple)):
        return all(map(is_plain, value.values() if isinstance(value, dict) else value))
    return type(value) in PLAIN or isinstance(value, int)


def to_host(tensor: torch.Tensor) -> torch.Tensor:
    """Copy `tensor` from its device into page-locked memory; whole once the current stream is synchronized.

    The copy is encoded like `tensor` itself, and allocates nothing on the device.
    """
    host = torch.empty_like(tensor, device="cpu", pin_memory=True)  # strides and all: NCCL sums in memory's order
    host.copy_(tensor.detach(), non_blocking=True)
    host.came_from = tensor.device  # type: ignore[attr-defined]
    return host


def copied(tensor: torch.Tensor) -> torch.Tensor:
    """Copy `tensor`; a small one of a device into host memory, whole once the current stream is synchronized."""
    is_known = type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.layout is torch.strided
    return to_host(tensor) if is_known and tensor.is_cuda and is_recorded(tensor) else tensor.detach().clone()


def copied_back(copy: torch.Tensor) -> torch.Tensor:
    """Copy what `copied` has made, to where it came from."""
    device = device_of(copy)
    return copy.clone() if device == copy.device else copy.to(device)


def device_of(tensor: torch.Tensor) -> torch.device:
    """Return where `tensor` is, or was before `to_host`."""
    device: torch.device = getattr(tensor, "came_from", tensor.device)
    return device


class HostCopies:
    """Copies in host memory of the tensors in what a call tells, where they are recorded: one wait for all."""

    def __init__(self, value: Any) -> None:
        self._copies: dict[Any, tuple[torch.Tensor, torch.Tensor]] = {}
        """By place and form, with the tensor itself: as long as it lives no other has its place."""
        self._copy(value)

    def _copy(self, value: Any) -> None:
        if isinstance(value, (dict, list, tuple)):
            for item in value.values() if isinstance(value, dict) else value:
                self._copy(item)
        elif type(value) is torch.Tensor and value.is_cuda and is_recorded(value):
            self._copies.setdefault(_place(value), (value, to_host(value)))

    def of(self, value: Any) -> Any:
        """Put the copies in the places of their tensors in `value`."""
        if not self._copies:
            return value
        if isinstance(value, torch.Tensor):
            found = self._copies.get(_place(value)) if type(value) is torch.Tensor and value.is_cuda else None
            return value if found is None else found[1]
        if type(value) is dict:
            return {key: self.of(item) for key, item in value.items()}
        return type(value)(map(self.of, value)) if type(value) in (list, tuple) else value


def _place(tensor: torch.Tensor) -> Any:
    """Name memory and form of `tensor`, which its detached views share."""
    return tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()


def encode(value: Any) -> bytes:
    """Bytes of `value`.

    Raises:
        Unsupported: names the type that is neither plain data nor a tensor.
    """
    return msgspec.msgpack.encode(_prepare(value))


def decode(data: bytes | memoryview) -> Any:
    return msgspec.msgpack.decode(data, ext_hook=_restore)


def _prepare(value: Any) -> Any:
    kind = type(value)
    if kind in PLAIN:
        return value
    if isinstance(value, dict):
        return {key: _prepare(item) for key, item in value.items()}
    if isinstance(value, list):
        return _prepare_items(value)
    if isinstance(value, torch.Tensor):
        return msgspec.msgpack.Ext(TENSOR, _tensor_bytes(value))
    if isinstance(value, tuple):
        return msgspec.msgpack.Ext(TUPLE, msgspec.msgpack.encode(_prepare_items(value)))
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
    """Many small integers (the order of an epoch) go as they are: a tenth of the time."""
    if set(map(type, items)) == {int} and max(items) < _INTEGER_END and min(items) > -_INTEGER_END:
        return items
    return [_prepare(item) for item in items]


def _tensor_bytes(tensor: torch.Tensor) -> bytes:
    body = None
    if is_recorded(tensor):
        body = tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
    return msgspec.msgpack.encode((*_form(tensor), device_of(tensor).type, body))


def is_recorded(tensor: torch.Tensor) -> bool:
    """Return whether the content of `tensor` is, not its form alone."""
    return tensor.numel() * tensor.element_size() <= TENSOR_LIMIT_BYTES


def _form(tensor: torch.Tensor) -> tuple[str, list[int]]:
    return str(tensor.dtype).removeprefix("torch."), list(tensor.shape)


def _restore(code: int, data: memoryview) -> Any:
    if code == LACKING:
        return TooLarge(bytes(data).decode())
    if code == TUPLE:
        return tuple(msgspec.msgpack.decode(data, ext_hook=_restore))
    if code == TENSOR:
        name, shape, device, body = msgspec.msgpack.decode(data)
        dtype = getattr(torch, name)
        if body is None:
            return TooLarge.tensor(name, shape)
        tensor = torch.frombuffer(bytearray(body), dtype=dtype).view(shape) if body else torch.zeros(shape, dtype=dtype)
        return tensor if device == "cpu" else tensor.to(device)
    raise ValueError(f"unknown extension {code} in a call record: it was written by another version")
