"""Stand-ins for outputs that a follower is not told: shape and dtype without values, objects without anything.

Rules of this file: a script may pass such a tensor around, slice it, and compute with it, which gives further
stand-ins. An object it may only pass around. Where it asks for values, or would put them into a tensor that has some,
it cannot be followed, and is told so by name: there are never made-up numbers. What a recorded collective gave fills a
stand-in with values. Outputs that lead to a loss are an exception (`Guess`): zeros, of which it is noted where the
script first took a number.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import torch
from torch.utils import _pytree as pytree

from ...errors import WHOLE_STEP, Divergence


class Untold(torch.Tensor):
    """A tensor of known shape and dtype. `held`: the same on the meta device, or with the values once they are known.

    Raises: Divergence, from whatever needs the values as long as they are not.
    """

    held: torch.Tensor

    @staticmethod
    def __new__(cls, held: torch.Tensor, device: torch.device) -> Untold:
        made: Untold = torch.Tensor._make_wrapper_subclass(
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
        function, kwargs = func, kwargs or {}
        leaves = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        strangers = [leaf for leaf in leaves if isinstance(leaf, Untold)]
        if function is torch.ops.aten.copy_.default and isinstance(args[0], Untold) and _are_told(args[1:2]):
            args[0].held = torch.empty(args[0].shape, dtype=args[0].dtype, device=args[0].device).copy_(_held(args[1]))
            return args[0]
        if all(stranger.is_told for stranger in strangers):
            args, kwargs = pytree.tree_map(_held, (args, kwargs))
            return function(*args, **kwargs)
        if any(written is not None and not isinstance(written, Untold) for written in _written(function, args, kwargs)):
            raise _unknown(function)
        return cls._shapes(function, args, kwargs, strangers[0].device)

    @classmethod
    def _shapes(cls, function: Any, args: Any, kwargs: Any, device: torch.device) -> Any:
        """Return what `function` would give, without values."""
        known = {id(leaf.held): leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Untold)}
        if kwargs.get("device") is not None:
            device, kwargs = torch.device(kwargs["device"]), {**kwargs, "device": torch.device("meta")}
        args, kwargs = pytree.tree_map(_shape_of, (args, kwargs))
        try:
            value = function(*args, **kwargs)
        except (RuntimeError, NotImplementedError) as error:  # its shape, or a number, depends on the values
            raise _unknown(function) from error
        return pytree.tree_map_only(
            torch.Tensor, lambda given: known[id(given)] if id(given) in known else cls(given, device), value
        )

    def _values(self, *_: Any, **__: Any) -> Any:
        raise _unknown("a conversion")

    def numpy(self, *args: Any, **kwargs: Any) -> Any:
        return self.held.numpy(*args, **kwargs) if self.is_told else self._values()

    def tolist(self) -> Any:
        return self.held.tolist() if self.is_told else self._values()

    def data_ptr(self) -> Any:
        return self.held.data_ptr() if self.is_told else self._values()

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return repr(self.held)


_TAKES = frozenset({
    "item", "tolist", "numpy", "equal", "allclose", "is_nonzero", "__bool__", "__float__", "__int__", "__index__",
    "__array__", "__format__", "__repr__",
})  # fmt: skip
"""Functions by which numbers leave a tensor."""
_OURS = tuple(f"{os.path.dirname(module.__file__ or '')}{os.sep}" for module in (torch, sys.modules["deadpool_plugin"]))


class Guess(torch.Tensor):
    """A tensor of zeros in the place of an output that leads to a loss, or what the script computed of one.

    `is_told`: it has the rank's own values: those of a collective, or of the loss once `engine.backward` was given it.
    """

    first_taken = ""
    """Where the script first took a number from one that was not told."""
    is_told = False

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        guesses = [one for one in pytree.tree_leaves((args, kwargs)) if isinstance(one, Guess)]
        if all(one.is_told for one in guesses):
            return cls._plainly(func, args, kwargs)
        if name in _TAKES and not Guess.first_taken:
            Guess.first_taken = _place()
        if name in _TAKES:  # torch formats a number of a subclass otherwise
            return cls._plainly(func, args, kwargs)
        propagate: Any = super().__torch_function__
        value = propagate(func, types, args, kwargs)
        if name == "copy_" and isinstance(args[0], Guess) and len(guesses) == 1:
            args[0].is_told = True
        return value

    @classmethod
    def _plainly(cls, func: Any, args: Any, kwargs: Any) -> Any:
        """Call `func` as with tensors that are no subclass's."""
        with torch._C.DisableTorchFunctionSubclass():
            args, kwargs = pytree.tree_map_only(Guess, lambda one: one.as_subclass(torch.Tensor), (args, kwargs))
            return func(*args, **kwargs)


def _place() -> str:
    """The line of the script that is being executed."""
    frame: Any = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_OURS):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def guess(dtype: torch.dtype, shape: list[int], device: torch.device) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype, device=device).as_subclass(Guess)


class UntoldObject:
    """Stand-in for something that is neither a tensor nor plain data. `kind`: its type.

    Raises: Divergence, from whatever the script does with it.
    """

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


def untold(dtype: torch.dtype, shape: list[int], device: torch.device) -> torch.Tensor:
    return Untold(torch.empty(shape, dtype=dtype, device="meta"), device)


def _are_told(values: Any) -> bool:
    return all(not isinstance(value, Untold) or value.is_told for value in values)


def _held(leaf: Any) -> Any:
    return leaf.held if isinstance(leaf, Untold) else leaf


def _shape_of(leaf: Any) -> Any:
    held = _held(leaf)
    return held.to("meta") if isinstance(held, torch.Tensor) else held


def _written(function: Any, args: Any, kwargs: Any) -> list[Any]:
    """The arguments that `function` changes in place."""
    arguments = function._schema.arguments
    given = [*zip(arguments, args, strict=False), *((one, kwargs.get(one.name)) for one in arguments[len(args) :])]
    changed = [value for one, value in given if one.alias_info is not None and one.alias_info.is_write]
    return pytree.tree_leaves(changed)


def _unknown(what: Any) -> Divergence:
    return Divergence(
        f"the script took numbers ({what}) from a large output of the engine's model, which followers are not told",
        "results that pass a collective, or small outputs of the model",
        f"compute what is needed of it inside the model, or {WHOLE_STEP}",
    )
