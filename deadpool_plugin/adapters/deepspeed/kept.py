"""Inputs and outputs of calls: what is kept of them for a redo, and what is told to followers.

Rules of this file: structures are torch's pytrees, so what a library has registered there (Hugging Face's ModelOutput)
is understood. Followers get the values of small outputs; of large ones that lead to a loss, zeros:
the loss itself is told again where the script gives it to `engine.backward`. Other large ones have no values
(untold.py), and of objects beside tensors (a cache of keys and values) they know no more than the type.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from ...errors import WHOLE_STEP, Unsupported
from ...worker.codec import TENSOR_LIMIT_BYTES
from ...worker.copies import Inputs
from .untold import UntoldObject, guess, untold

PLAIN = (bool, int, float, str, bytes, type(None))
TOLD_BYTES_MAX = 1 << 16
"""Largest output that requires grad and whose values followers know. Of larger ones they know shape and dtype."""


def inputs(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Inputs:
    """Return the inputs of the engine's forward. Raises: Unsupported if it would go on in the script's graph."""
    leaves = pytree.tree_leaves((args, kwargs))
    if torch.is_grad_enabled() and any(isinstance(leaf, torch.Tensor) and leaf.requires_grad for leaf in leaves):
        raise Unsupported(
            "an input of the engine's forward requires grad",
            "inputs that are data",
            f"train what computes it as a part of the engine's model, or {WHOLE_STEP}",
        )
    return Inputs(args, kwargs, "the engine's forward")


def differentiable(value: Any) -> list[torch.Tensor]:
    """The tensors in `value` that require grad, each once."""
    leaves = [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
    return list({id(leaf): leaf for leaf in leaves}.values())


def replaced(value: Any, originals: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> Any:
    """`value` with each of `originals` replaced by its counterpart in `others`."""
    table = {id(original): other for original, other in zip(originals, others, strict=True)}
    return pytree.tree_map(lambda leaf: table.get(id(leaf), leaf), value)


def encode(value: Any) -> list[Any]:
    """`value` for a record: its structure, and for each leaf whether it requires grad, and what is known of it."""
    leaves, spec = pytree.tree_flatten(value)
    objects = [leaf for leaf in leaves if not isinstance(leaf, (torch.Tensor, *PLAIN))]
    if objects and not any(isinstance(leaf, torch.Tensor) for leaf in leaves):  # what is of use must be within
        raise _unknown(type(objects[0]))
    try:
        structure = pytree.treespec_dumps(spec)
    except NotImplementedError as error:  # a namedtuple, whose class followers could not find
        raise _unknown(type(value)) from error
    return [structure, [_encode_leaf(leaf) for leaf in leaves]]


def _unknown(kind: type) -> Unsupported:
    return Unsupported(
        f"a call of the engine returned a {_name(kind)}",
        "tensors and plain values, in dicts, lists and tuples, or in classes registered with torch's pytrees",
        f"return a dict, or {WHOLE_STEP}",
    )


def _name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _encode_leaf(leaf: Any) -> list[Any]:
    if isinstance(leaf, PLAIN):
        return [False, leaf]
    if not isinstance(leaf, torch.Tensor):
        return [False, None, _name(type(leaf))]
    limit = TOLD_BYTES_MAX if leaf.requires_grad else TENSOR_LIMIT_BYTES
    if leaf.numel() * leaf.element_size() > limit:
        return [leaf.requires_grad, None, str(leaf.dtype).removeprefix("torch."), list(leaf.shape)]
    return [leaf.requires_grad, leaf.detach()]


def decode(record: list[Any], device: torch.device) -> tuple[Any, list[torch.Tensor]]:
    """The value a record tells of, and those of its tensors that must require grad."""
    leaves, requiring = [], []
    for requires_grad, known, *form in record[1]:
        leaf = known.to(device) if isinstance(known, torch.Tensor) else known
        if len(form) == 1:
            leaf = UntoldObject(form[0])
        elif form:
            dtype, shape = getattr(torch, form[0]), form[1]
            leaf = (guess if requires_grad else untold)(dtype, shape, device)
        leaves.append(leaf)
        if requires_grad:
            requiring.append(leaf)
    return pytree.tree_unflatten(leaves, pytree.treespec_loads(record[0])), requiring
