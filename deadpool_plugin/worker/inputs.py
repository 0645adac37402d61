"""Arguments of a call and items it read, kept for doing it again.

Rules of this file: structures are torch's pytrees, so what a library has registered there (Hugging Face's ModelOutput)
is understood. Containers and small tensors are copied, those of a device to the host as long as there are not too many;
a large tensor is kept by reference, and refused by name rather than used if it is changed in place meanwhile.
Parameters are what the restore brings back; everything else goes by reference.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils import _pytree as pytree

from ..errors import Unsupported
from . import codec

COPIED_BYTES_MAX = 1 << 20
"""Size up to which a tensor is copied."""
ON_HOST_BYTES_MAX = 64 << 20
"""Most bytes of copies in page-locked memory: a long evaluation keeps all its batches until the next step is done."""


class Kept:
    """A structure as it was given, in containers of its own, small tensors copied."""

    on_host_bytes = 0
    """Size of all copies in page-locked memory."""

    def __init__(self, value: Any) -> None:
        self._on_host_bytes = 0
        leaves, self._spec = pytree.tree_flatten(value)
        self._leaves = [self._copied(leaf) if _is_small(leaf) else leaf for leaf in leaves]
        large = [leaf for leaf in leaves if _is_data(leaf) and not _is_small(leaf) and not leaf.is_inference()]
        self._versions = [(tensor, tensor._version) for tensor in large]

    def __del__(self) -> None:
        Kept.on_host_bytes -= self._on_host_bytes

    def _copied(self, tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.is_cuda or Kept.on_host_bytes + tensor.nbytes > ON_HOST_BYTES_MAX:
            return tensor.detach().clone()
        self._on_host_bytes += tensor.nbytes
        Kept.on_host_bytes += tensor.nbytes
        return codec.copied(tensor)

    def again(self) -> Any:
        leaves = [codec.copied_back(leaf) if _is_small(leaf) else leaf for leaf in self._leaves]
        return pytree.tree_unflatten(leaves, self._spec)

    def check(self, changed: Callable[[str], str], stays: str, remedy: str) -> None:
        """See that it is what it was (tensors made in inference mode cannot tell).

        Args: changed: what to say of a tensor of that shape that is not; stays: what is expected not to change.
        Raises: Unsupported.
        """
        for tensor, version in self._versions:
            if tensor._version != version:
                expected = f"{stays} to stay as they are until two steps later"
                raise Unsupported(changed(str(list(tensor.shape))), expected, remedy)


class Inputs:
    """Arguments as they were when the call was made. `user`: whose, for messages."""

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any], user: str) -> None:
        self._user, self._kept = user, Kept((args, kwargs))

    def check(self) -> None:
        """Raises: Unsupported if one is not what it was."""
        self._kept.check(
            lambda shape: f"an input of {shape} was changed in place after {self._user} had used it",
            f"inputs above {COPIED_BYTES_MAX} bytes",
            "make a new tensor for each batch",
        )

    def again(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments for doing the call again. Raises: Unsupported if one is not what it was."""
        self.check()
        args, kwargs = self._kept.again()
        return args, kwargs


def _is_small(leaf: Any) -> bool:
    return _is_data(leaf) and leaf.numel() * leaf.element_size() <= COPIED_BYTES_MAX


def _is_data(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and not isinstance(leaf, torch.nn.Parameter)
