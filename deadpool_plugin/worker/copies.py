"""Copies of what a call was given or has told, kept for doing it again and for its record.

Rules of this file: structures are torch's pytrees, so what a library has registered there (Hugging Face's ModelOutput)
is understood. Containers and small tensors are copied, those of a device to the host as long as there are not too many.
All else goes by reference: parameters, which the restore brings back, and large tensors, which must not change.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from torch.utils import _pytree as pytree

from ..comm.collective import tensors
from ..errors import Unsupported
from .codec import is_recorded

COPIED_BYTES_MAX = 1 << 20  # of one tensor
ON_HOST_BYTES_MAX = 64 << 20  # in page-locked memory: a long evaluation keeps its batches until the next step is done


def to_host(tensor: torch.Tensor) -> torch.Tensor:
    """Copy `tensor` from its device into page-locked memory; whole once the current stream is synchronized."""
    host = torch.empty_like(tensor, device="cpu", pin_memory=True)  # strides and all: NCCL sums in memory's order
    host.copy_(tensor.detach(), non_blocking=True)
    host.came_from = tensor.device  # type: ignore[attr-defined]  # it is encoded like `tensor` itself
    return host


def copied(tensor: torch.Tensor) -> torch.Tensor:
    """Copy `tensor`; a small one of a device into host memory, whole once the current stream is synchronized."""
    is_known = type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.layout is torch.strided
    return to_host(tensor) if is_known and tensor.is_cuda and is_recorded(tensor) else tensor.detach().clone()


def copied_back(copy: torch.Tensor) -> torch.Tensor:
    """Copy what `copied` has made, to where it came from."""
    device = getattr(copy, "came_from", copy.device)
    return copy.clone() if device == copy.device else copy.to(device)


def replaced(value: Any, other: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Copy `value` into plain containers, each tensor replaced by `other` of it; all else goes by reference."""
    # Not a pytree's map: that leaves alone what is of a class below list or dict, tensors and all.
    if isinstance(value, torch.Tensor):
        return other(value)
    if isinstance(value, dict):
        return {key: replaced(item, other) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        items = [replaced(item, other) for item in value]
        return items if isinstance(value, list) else tuple(items)
    return value


def on_host(value: Any = None) -> Callable[[Any], Any]:
    """Copy the tensors that a call tells to the host; the result puts the copies in their places in anything."""

    def place(tensor: torch.Tensor) -> Any:  # on a device: its memory and form, which its detached views share
        is_on_device = type(tensor) is torch.Tensor and tensor.is_cuda
        return (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()) if is_on_device else None

    # Each copy with the tensor itself: as long as that lives no other has its place.
    copies = {at: (one, to_host(one)) for one in tensors(value) if is_recorded(one) and (at := place(one))}
    return lambda other: replaced(other, lambda one: copies.get(place(one), (one, one))[1]) if copies else other


class Kept:
    """A structure as it was given, in containers of its own, small tensors copied."""

    on_host_bytes = 0  # of all copies in page-locked memory
    nbytes = {False: 0, True: 0}  # of all tensors that are kept: on the host, and on a device

    def __init__(self, value: Any) -> None:
        self._on_host_bytes, self._nbytes = 0, {False: 0, True: 0}
        self._leaves, self._spec = pytree.tree_flatten(value)
        self._copies: dict[int, torch.Tensor] = {}  # of small ones, by their places among the leaves
        self._versions: list[tuple[torch.Tensor, int]] = []
        for at, leaf in enumerate(self._leaves):
            if not isinstance(leaf, torch.Tensor) or isinstance(leaf, torch.nn.Parameter):
                continue
            fits = False
            if leaf.numel() * leaf.element_size() <= COPIED_BYTES_MAX:
                if fits := leaf.is_cuda and Kept.on_host_bytes + leaf.nbytes <= ON_HOST_BYTES_MAX:
                    self._on_host_bytes += leaf.nbytes
                    Kept.on_host_bytes += leaf.nbytes
                self._leaves[at], self._copies[at] = None, copied(leaf) if fits else leaf.detach().clone()
            elif not leaf.is_inference():  # which cannot tell that it was changed
                self._versions.append((leaf, leaf._version))
            self._nbytes[leaf.is_cuda and not fits] += leaf.nbytes
        for where, nbytes in self._nbytes.items():
            Kept.nbytes[where] += nbytes

    def __del__(self) -> None:
        Kept.on_host_bytes -= self._on_host_bytes
        for where, nbytes in self._nbytes.items():
            Kept.nbytes[where] -= nbytes

    def again(self) -> Any:
        leaves = [copied_back(self._copies[at]) if at in self._copies else leaf for at, leaf in enumerate(self._leaves)]
        return pytree.tree_unflatten(leaves, self._spec)

    def changed(self) -> list[int] | None:
        """Return the shape of a large tensor that was changed in place since; None if there is none."""
        return next((list(tensor.shape) for tensor, version in self._versions if tensor._version != version), None)


class Inputs(Kept):
    """Arguments of a call, and as they were when it was made. `user`: whose they are, for messages."""

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any], user: str) -> None:
        super().__init__((args, kwargs))
        self._given: Any = args, kwargs
        self._user = user

    def take(self) -> Any:
        """Return positional and named arguments: once those given, later as they were. Raises: as `check`."""
        given, self._given = self._given, None
        return given or self.again()

    def check(self) -> None:
        """Raises: Unsupported if one is not what it was."""
        if (shape := self.changed()) is not None:
            raise Unsupported(
                f"an input of {shape} was changed in place after {self._user} had used it",
                f"inputs above {COPIED_BYTES_MAX} bytes to stay as they are until two snapshots later",
                "make a new tensor for each batch; if it is kept for two steps at least, mirror_every: 1 will do",
            )

    def again(self) -> Any:
        self.check()
        return super().again()


def structure(value: Any, copies: dict[int, Any] | None = None) -> Any:
    """Copy the plain containers in `value`; all else (tensors, the script's own containers) goes by reference."""
    # Saving functions change the dicts and shard descriptions they are given; doing it again needs them as they were.
    # `copies`: of what was met before, so that what is shared stays shared.
    copies = {} if copies is None else copies
    if id(value) in copies:
        return copies[id(value)]
    kind, is_data = type(value), dataclasses.is_dataclass(value) and not isinstance(value, type)
    made: Any
    if kind is tuple:
        made = tuple(structure(item, copies) for item in value)
        return copies.setdefault(id(value), made)  # it may hold itself, in a list
    if kind is list:
        made = copies[id(value)] = []
        made.extend(structure(item, copies) for item in value)
    elif kind is dict or kind is OrderedDict:
        made = copies[id(value)] = kind()
        made.update((key, structure(item, copies)) for key, item in value.items())
    elif kind is argparse.Namespace or (is_data and hasattr(value, "__dict__")):
        made = copies[id(value)] = object.__new__(kind)  # Megatron-LM's arguments count what has been consumed
    else:
        return value
    for name, item in getattr(value, "__dict__", {}).items():
        is_kept = is_data and not isinstance(item, (dict, list, tuple))
        vars(made)[name] = item if is_kept else structure(item, copies)
    return made
