"""Inputs and outputs of calls: what is kept of them for a redo, and what is told to followers.

Rules of this file: structures are torch's pytrees, so what a library has registered there (Hugging Face's ModelOutput)
is understood. Small inputs are copied, large ones kept by reference, and one that the script has changed since is
refused by name rather than used. Followers get the values of small outputs; of large ones that lead to a loss, zeros:
the loss itself is told again where the script gives it to `engine.backward`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from ...errors import Unsupported

COPIED_BYTES_MAX = 1 << 20
"""Of an input. Larger ones are kept by reference."""
TOLD_BYTES_MAX = 1 << 16
"""Of an output that requires grad. Of larger ones followers know shape and dtype."""


class Inputs:
    """Arguments of a call as they were when it was made."""

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._leaves, self._spec = pytree.tree_flatten((args, kwargs))
        if torch.is_grad_enabled() and any(_is_tensor(leaf) and leaf.requires_grad for leaf in self._leaves):
            raise Unsupported(
                "an input of the engine's forward requires grad",
                "inputs that are data",
                "train what computes it as a part of the engine's model, or run this script without deadpool_plugin",
            )
        self._leaves = [leaf.detach().clone() if _is_small(leaf) else leaf for leaf in self._leaves]
        self._versions = [_version(leaf) for leaf in self._leaves]

    def again(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments for doing the call again. Raises: Unsupported if one is not what it was."""
        for leaf, version in zip(self._leaves, self._versions, strict=True):
            if _version(leaf) != version:
                raise Unsupported(
                    f"an input of {list(leaf.shape)} was changed in place after the engine's forward had used it",
                    f"inputs above {COPIED_BYTES_MAX} bytes to stay as they are until two steps later",
                    "make a new tensor for each batch",
                )
        fresh = [leaf.clone() if _is_small(leaf) else leaf for leaf in self._leaves]
        args, kwargs = pytree.tree_unflatten(fresh, self._spec)
        return args, kwargs


def differentiable(value: Any) -> list[torch.Tensor]:
    """The tensors in `value` that require grad, each once."""
    leaves = [leaf for leaf in pytree.tree_leaves(value) if _is_tensor(leaf) and leaf.requires_grad]
    return list({id(leaf): leaf for leaf in leaves}.values())


def replaced(value: Any, originals: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> Any:
    """`value` with each of `originals` replaced by its counterpart in `others`."""
    table = {id(original): other for original, other in zip(originals, others, strict=True)}
    return pytree.tree_map(lambda leaf: table.get(id(leaf), leaf), value)


def told(value: Any) -> list[Any]:
    """`value` for a record: its structure, and for each leaf whether it requires grad, and what is known of it."""
    leaves, spec = pytree.tree_flatten(value)
    for leaf in leaves:
        if not isinstance(leaf, (torch.Tensor, bool, int, float, str, bytes, type(None))):
            raise _unknown(type(leaf))
    try:
        structure = pytree.treespec_dumps(spec)
    except NotImplementedError as error:  # a namedtuple, whose class followers could not find
        raise _unknown(type(value)) from error
    return [structure, [_told(leaf) for leaf in leaves]]


def _unknown(kind: type) -> Unsupported:
    return Unsupported(
        f"a call of the engine returned a {kind.__module__}.{kind.__name__}",
        "tensors and plain values, in dicts, lists and tuples, or in classes registered with torch's pytrees",
        "return a dict, or run this script without deadpool_plugin",
    )


def _told(leaf: Any) -> list[Any]:
    if not _is_tensor(leaf):
        return [False, leaf]
    if leaf.requires_grad and leaf.numel() * leaf.element_size() > TOLD_BYTES_MAX:
        return [True, None, str(leaf.dtype).removeprefix("torch."), list(leaf.shape)]
    return [leaf.requires_grad, leaf.detach()]


def heard(record: list[Any], device: torch.device) -> tuple[Any, list[torch.Tensor]]:
    """The value a record tells of, and those of its tensors that must require grad."""
    leaves, requiring = [], []
    for requires_grad, known, *form in record[1]:
        leaf = torch.zeros(form[1], dtype=getattr(torch, form[0]), device=device) if form else known
        if isinstance(leaf, torch.Tensor):
            leaf = leaf.to(device)
        leaves.append(leaf)
        if requires_grad:
            requiring.append(leaf)
    return pytree.tree_unflatten(leaves, pytree.treespec_loads(record[0])), requiring


def _is_tensor(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor)


def _version(leaf: Any) -> int:
    """Changes with every change in place; what cannot tell (made in inference mode) or is our own copy has none."""
    if not _is_tensor(leaf) or _is_small(leaf) or leaf.is_inference():
        return 0
    return int(leaf._version)


def _is_small(leaf: Any) -> bool:
    return _is_tensor(leaf) and leaf.numel() * leaf.element_size() <= COPIED_BYTES_MAX
