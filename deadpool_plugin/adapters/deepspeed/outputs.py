"""Outputs of the engine's forward, recorded for followers.

Structures are torch's pytrees, to which libraries add theirs (Hugging Face's ModelOutput). Followers get the values of
small outputs, and stand-ins for others:
- for a large one that leads to a loss, zeros (`Guess`). `engine.backward` tells the loss itself again.
- for any other large one, a `Placeholder` without values, to pass around, slice and compute with. Taking values, or
  writing them into a tensor that has some, raises Divergence. A recorded collective fills it with values.
- for an object beside tensors (a cache of keys and values), a `PlaceholderObject`, only to pass around.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import torch
from torch.utils import _pytree as pytree

from ...errors import WHOLE_STEP, Divergence, Unsupported
from ...worker.codec import TENSOR_LIMIT_BYTES

PLAIN = (bool, int, float, str, bytes, type(None))
TOLD_BYTES_MAX = 1 << 16
"""Largest output that requires grad and whose values followers know. Of larger ones they know shape and dtype."""


def differentiable(value: Any) -> list[torch.Tensor]:
    """Return the tensors in `value` that require grad, each once."""
    leaves = [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
    return list({id(leaf): leaf for leaf in leaves}.values())


def encode(value: Any) -> list[Any]:
    """Make the record of `value`: its structure, and for each leaf whether it requires grad, and what is told of it."""
    leaves, spec = pytree.tree_flatten(value)
    objects = [leaf for leaf in leaves if not isinstance(leaf, (torch.Tensor, *PLAIN))]
    try:
        if not objects or any(isinstance(leaf, torch.Tensor) for leaf in leaves):  # else what is of use must be within
            return [pytree.treespec_dumps(spec), [_encode_leaf(leaf) for leaf in leaves]]
    except NotImplementedError:  # a namedtuple, whose class followers could not find
        objects = [value]
    raise Unsupported(
        f"a call of the engine returned a {_name(objects[0])}",
        "tensors and plain values, in dicts, lists and tuples, or in classes registered with torch's pytrees",
        f"return a dict, or {WHOLE_STEP}",
    )


def _name(value: Any) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"


def _encode_leaf(leaf: Any) -> list[Any]:
    if isinstance(leaf, PLAIN):
        return [False, leaf]
    if not isinstance(leaf, torch.Tensor):
        return [False, None, _name(leaf)]
    limit = TOLD_BYTES_MAX if leaf.requires_grad else TENSOR_LIMIT_BYTES
    if leaf.numel() * leaf.element_size() > limit:
        return [leaf.requires_grad, None, str(leaf.dtype).removeprefix("torch."), list(leaf.shape)]
    return [leaf.requires_grad, leaf.detach()]


def decode(record: list[Any], device: torch.device) -> Any:
    """Return the value that a record tells of."""
    leaves = []
    for requires_grad, known, *form in record[1]:
        leaf = known.to(device) if isinstance(known, torch.Tensor) else known
        if len(form) == 1:
            leaf = PlaceholderObject(form[0])
        elif form and requires_grad:
            leaf = torch.zeros(form[1], dtype=getattr(torch, form[0]), device=device).as_subclass(Guess)
        elif form:
            leaf = Placeholder(torch.empty(form[1], dtype=getattr(torch, form[0]), device="meta"), device)
        leaves.append(leaf.requires_grad_() if requires_grad else leaf)
    return pytree.tree_unflatten(leaves, pytree.treespec_loads(record[0]))


class Placeholder(torch.Tensor):
    """A tensor of known shape and dtype. `held`: the same on the meta device, or the values once they are known."""

    held: torch.Tensor

    @staticmethod
    def __new__(cls, held: torch.Tensor, device: torch.device) -> Placeholder:
        made: Placeholder = torch.Tensor._make_wrapper_subclass(
            cls, held.shape, strides=held.stride(), dtype=held.dtype, device=device
        )
        made.held = held
        return made

    @property
    def is_told(self) -> bool:
        return self.held.device.type != "meta"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten.copy_.default and isinstance(args[0], Placeholder):
            target, source = args[:2]
            if not isinstance(source, Placeholder) or source.is_told:
                target.held = torch.empty(target.shape, dtype=target.dtype, device=target.device).copy_(_held(source))
                return target
        placeholders = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Placeholder)]
        args, kwargs = pytree.tree_map(_held, (args, kwargs))
        if all(placeholder.is_told for placeholder in placeholders):
            return func(*args, **kwargs)
        known, device = {id(placeholder.held): placeholder for placeholder in placeholders}, placeholders[0].device
        given = dict(zip((one.name for one in func._schema.arguments), args, strict=False)) | kwargs
        in_place = [one.name for one in func._schema.arguments if one.alias_info and one.alias_info.is_write]
        written = pytree.tree_leaves([given.get(name) for name in in_place])
        if any(one is not None and id(one) not in known for one in written):
            raise _unknown(func)
        if kwargs.get("device") is not None:
            device, kwargs = torch.device(kwargs["device"]), {**kwargs, "device": torch.device("meta")}
        args, kwargs = pytree.tree_map_only(torch.Tensor, lambda held: held.to("meta"), (args, kwargs))
        try:
            value = func(*args, **kwargs)
        except (RuntimeError, NotImplementedError) as error:  # its shape, or a number, depends on the values
            raise _unknown(func) from error
        return pytree.tree_map_only(
            torch.Tensor, lambda made: known[id(made)] if id(made) in known else cls(made, device), value
        )

    def _values(self) -> torch.Tensor:
        if not self.is_told:
            raise _unknown("a conversion")
        return self.held

    def numpy(self, *args: Any, **kwargs: Any) -> Any:
        return self._values().numpy(*args, **kwargs)

    def tolist(self) -> Any:
        return self._values().tolist()

    def data_ptr(self) -> Any:
        return self._values().data_ptr()

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return repr(self.held)


def _held(leaf: Any) -> Any:
    return leaf.held if isinstance(leaf, Placeholder) else leaf


def _unknown(what: Any) -> Divergence:
    return Divergence(
        f"the script took numbers ({what}) from a large output of the engine's model, which followers are not told",
        "results that pass a collective, or small outputs of the model",
        f"compute what is needed of it inside the model, or {WHOLE_STEP}",
    )


_TAKES = frozenset({
    "item", "tolist", "numpy", "equal", "allclose", "is_nonzero", "__bool__", "__float__", "__int__", "__index__",
    "__array__", "__format__", "__repr__",
})  # fmt: skip
"""Functions by which numbers leave a tensor."""
_OURS = tuple(f"{os.path.dirname(module.__file__ or '')}{os.sep}" for module in (torch, sys.modules["deadpool_plugin"]))


class Guess(torch.Tensor):
    """A tensor of zeros in the place of an output that leads to a loss, or what the script computed of one."""

    first_taken = ""
    """Where the script first took a number from one that was not told."""
    is_told = False
    """It has the rank's own values: of a collective, or of the loss once `engine.backward` was given it."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        guesses = [one for one in pytree.tree_leaves((args, kwargs)) if isinstance(one, Guess)]
        are_told = all(one.is_told for one in guesses)
        if name in _TAKES and not are_told and not Guess.first_taken:
            Guess.first_taken = _place()
        if name in _TAKES or are_told:  # torch formats a number of a subclass otherwise
            with torch._C.DisableTorchFunctionSubclass():
                args, kwargs = pytree.tree_map_only(Guess, lambda one: one.as_subclass(torch.Tensor), (args, kwargs))
                return func(*args, **kwargs)
        value = super().__torch_function__(func, types, args, kwargs)  # type: ignore[no-untyped-call]
        if name == "copy_" and isinstance(args[0], Guess) and len(guesses) == 1:
            args[0].is_told = True
        return value


def _place() -> str:
    """Return the line of the script that is being executed."""
    frame: Any = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_OURS):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


class PlaceholderObject:
    """The placeholder for an object that is neither a tensor nor plain data. `kind`: its type."""

    kind = "object"

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def _refuse(self, *_: Any, **__: Any) -> Any:
        raise Divergence(
            f"the script used the {self.kind} that the engine's model returned, of which followers know the type only",
            "tensors and plain values to be used outside the model",
            f"compute what is needed of it inside the model, or {WHOLE_STEP}",
        )

    __getattr__ = __getitem__ = __iter__ = __len__ = __bool__ = __eq__ = __call__ = _refuse  # type: ignore[assignment]
