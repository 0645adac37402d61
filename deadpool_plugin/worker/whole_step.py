"""A script's own step function under `@deadpool_plugin.step`, as one call: kept, redone and followed as a whole.

Rules of this file: what the framework is asked inside the function is no call of its own, but for the update, which
waits for the snapshot before it. The function must update once or more, or its work would be gone at the next cut.
Followers are told what it returned, and of the framework what a script can see.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from torch.utils import _pytree as pytree

from ..errors import Unsupported
from .adapter import Adapter
from .copies import Inputs
from .functions import Call, CallKind
from .iterators import POINTER, RewoundByItself

CallOf = Callable[[Adapter, Call], Any]
"""A `CallHandler` that is told whose framework the call is of."""


class WholeStep(Call):
    """One call of a step function."""

    def __init__(
        self, adapter: Adapter, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        super().__init__(f"step {function.__qualname__}", CallKind.STEP, function)
        self._adapter = adapter
        for leaf in pytree.tree_leaves((args, kwargs)):
            if isinstance(leaf, torch.Tensor) and leaf.requires_grad and not isinstance(leaf, torch.nn.Parameter):
                raise Unsupported(
                    f"{self.name} was given a tensor of {list(leaf.shape)} that requires grad",
                    "data: a graph that begins outside the function cannot be redone",
                    "do everything that leads to the loss inside it",
                )
            # what gives something else each time it is asked, and nobody rewinds; files are written to
            if hasattr(type(leaf), "__next__") and not isinstance(leaf, (RewoundByItself, io.IOBase)):
                raise Unsupported(
                    f"{self.name} was given a {type(leaf).__name__} to read data from, which a redo would read on",
                    "the data themselves, or a resumable loader",
                    POINTER,
                )
        self._inputs = Inputs(args, kwargs, self.name)
        self._given: tuple[tuple[Any, ...], dict[str, Any]] | None = (args, kwargs)

    def __call__(self) -> Any:
        args, kwargs = self._given or self._inputs.again()
        self._given = None
        with self._adapter.inside_step():
            return self.function(*args, **kwargs)

    def check(self) -> None:
        self._inputs.check()

    def told(self, value: Any) -> Any:
        return [value, self._adapter.state.visible()]

    def outcome(self, value: Any) -> Any:
        return self.told(value)

    def skipped(self, outcome: Any) -> Any:
        value, visible = outcome
        self._adapter.state.show(visible)
        return value

    def loss(self, value: Any, on_host: Callable[[Any], Any]) -> float | None:
        """Find the loss in the function's result: a number, the first, or the one so called."""
        value = on_host(value)
        if isinstance(value, dict):
            value = value.get("loss")
        elif isinstance(value, (list, tuple)):
            value = value[0] if value else None
        if isinstance(value, torch.Tensor):
            return float(value) if value.numel() == 1 else None
        return float(value) if isinstance(value, (int, float)) else None


class WholeSteps:
    """The place where decorated functions find a training process that is protected."""

    installed: ClassVar[WholeSteps | None] = None

    def __init__(self, adapters: Sequence[Adapter], call: CallOf) -> None:
        self._adapters, self._call = adapters, call

    def call(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Raises: Unsupported if there is nothing yet that a step could train."""
        adapter = next((adapter for adapter in self._adapters if adapter.is_used()), None)
        if adapter is None:
            raise Unsupported(
                f"{function.__qualname__}, which is under @deadpool_plugin.step, was called with nothing to train",
                "a DeepSpeed engine or a Megatron-core optimizer, imported before init_process_group",
                "build it before the first step",
            )
        return self._call(adapter, WholeStep(adapter, function, args, kwargs))
