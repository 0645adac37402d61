"""Arguments of a call, kept for doing it again.

Rules of this file: structures are torch's pytrees, so what a library has registered there (Hugging Face's ModelOutput)
is understood. Small tensors are copied, large ones kept by reference, and one that the script has changed since is
refused by name rather than used. Parameters are what the restore brings back; everything else goes by reference.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils import _pytree as pytree

from ..errors import Unsupported

COPIED_BYTES_MAX = 1 << 20


class Inputs:
    """Arguments as they were when the call was made. `user`: whose, for messages."""

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any], user: str) -> None:
        self._user = user
        leaves, self._spec = pytree.tree_flatten((args, kwargs))
        self._leaves = [leaf.detach().clone() if _is_copied(leaf) else leaf for leaf in leaves]
        self._versions = [_version(leaf) for leaf in self._leaves]

    def again(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments for doing the call again. Raises: Unsupported if one is not what it was."""
        for leaf, version in zip(self._leaves, self._versions, strict=True):
            if _version(leaf) != version:
                raise Unsupported(
                    f"an input of {list(leaf.shape)} was changed in place after {self._user} had used it",
                    f"inputs above {COPIED_BYTES_MAX} bytes to stay as they are until two steps later",
                    "make a new tensor for each batch",
                )
        fresh = [leaf.clone() if _is_copied(leaf) else leaf for leaf in self._leaves]
        args, kwargs = pytree.tree_unflatten(fresh, self._spec)
        return args, kwargs


def _is_copied(leaf: Any) -> bool:
    return _is_data(leaf) and leaf.numel() * leaf.element_size() <= COPIED_BYTES_MAX


def _is_data(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and not isinstance(leaf, torch.nn.Parameter)


def _version(leaf: Any) -> int:
    """Changes with every change in place; what cannot tell (made in inference mode) or is our own copy has none."""
    if not _is_data(leaf) or _is_copied(leaf) or leaf.is_inference():
        return 0
    return int(leaf._version)
