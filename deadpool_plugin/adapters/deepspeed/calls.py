"""What a script asks of a DeepSpeed engine, as calls that can be done again: forward, backward, step.

Rules of this file: an object here is one call; calling it does it (again). What an engine asks of itself inside a call
is none: `Calls.inside` says so. Order of a redo: a forward makes its graph's outputs anew, the backward after it goes
through the engine's part with the gradients that the script's part gave the first time.
Source: DeepSpeed 0.19.8, runtime/engine.py `forward`, `backward`, `step`.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from ...errors import Unsupported
from ...worker.adapter import CallHandler, CallKind
from . import kept
from .cut import Graph, cut, leaves_of, pairs, seed
from .state import EngineState

Parts = list[tuple[Graph, Sequence["torch.Tensor | None"]]]


class Calls:
    """What the calls of one process have in common. `state_of`: the state of an engine, for records."""

    def __init__(self, handler: CallHandler, state_of: Callable[[Any], EngineState]) -> None:
        self.handler, self.state_of = handler, state_of
        self._depth = 0
        self._collected: Parts | None = None
        self._direct: Parts = []
        self.loss: torch.Tensor | None = None
        """The newest loss given to `engine.backward`."""
        self.stepped_loss: torch.Tensor | None = None
        """The same, once the optimizer's step has waited for it anyway; for people to look at."""

    def install(self, engine_class: type) -> None:
        """Put ourselves in the place of the methods of `engine_class` that scripts call."""
        self._wrap(engine_class, "forward", self._forward)
        self._wrap(engine_class, "backward", self._backward)
        self._wrap(engine_class, "step", self._step)
        for name in ("zero_grad", "allreduce_gradients"):
            self._wrap(engine_class, name, functools.partial(self._plain, name))
        self._wrap_update(engine_class)

    def install_pipeline(self, engine_class: type) -> None:
        """The same for the methods that pipelines have instead."""
        self._wrap(engine_class, "train_batch", self._train_batch)
        self._wrap(engine_class, "eval_batch", self._eval_batch)

    def _wrap(self, owner: type, name: str, make: Callable[..., Any]) -> None:
        original = getattr(owner, name)

        @functools.wraps(original)
        def method(engine: Any, *args: Any, **kwargs: Any) -> Any:
            if self.busy:
                return original(engine, *args, **kwargs)
            return make(original, engine, *args, **kwargs)

        setattr(owner, name, method)

    def _wrap_update(self, owner: Any) -> None:
        """Snapshots are taken of a state that does not change: the update waits until there is none under way."""
        original = owner._take_model_step

        @functools.wraps(original)
        def update(*args: Any, **kwargs: Any) -> Any:
            return self.handler("engine._take_model_step", CallKind.UPDATE, original, args, kwargs)

        owner._take_model_step = update

    @property
    def busy(self) -> bool:
        """Whether an engine's call is under way: what it asks of itself is none."""
        return self._depth > 0

    @contextlib.contextmanager
    def inside(self) -> Iterator[None]:
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1

    # ---- one method each

    def _forward(self, original: Callable[..., Any], engine: Any, *args: Any, **kwargs: Any) -> Any:
        call = Forward(self, original, engine, args, kwargs)
        return self.handler("engine.forward", CallKind.FORWARD, call, (), {})

    def _backward(
        self,
        original: Callable[..., Any],
        engine: Any,
        loss: torch.Tensor,
        retain_graph: bool = False,
        scale_wrt_gas: bool = True,
    ) -> Any:
        call = Backward(self, original, engine, loss, retain_graph, scale_wrt_gas)
        return self.handler("engine.backward", CallKind.PLAIN, call, (), {})

    def _step(self, original: Callable[..., Any], engine: Any, *args: Any, **kwargs: Any) -> Any:
        kind = CallKind.UPDATE if at_boundary(engine) else CallKind.PLAIN
        call = Step(self, functools.partial(original, engine, *args, **kwargs), engine)
        return self.handler("engine.step", kind, call, (), {})

    def _plain(self, name: str, original: Callable[..., Any], engine: Any, *args: Any, **kwargs: Any) -> Any:
        call = Step(self, functools.partial(original, engine, *args, **kwargs), engine)
        return self.handler(f"engine.{name}", CallKind.PLAIN, call, (), {})

    def _train_batch(self, original: Callable[..., Any], engine: Any, data_iter: Any = None) -> Any:
        call = Batch(self, lambda data_iterator: original(engine, data_iter=data_iterator), engine)
        data = engine.data_iterator if data_iter is None else data_iter
        return self.handler("engine.train_batch", CallKind.STEP, call, (), {"data_iterator": data})

    def _eval_batch(self, original: Callable[..., Any], engine: Any, data_iter: Any, *args: Any, **kwargs: Any) -> Any:
        call = Batch(self, lambda data_iterator: original(engine, data_iterator, *args, **kwargs), engine)
        return self.handler("engine.eval_batch", CallKind.FORWARD, call, (), {"data_iterator": data_iter})

    # ---- a backward through the script's part of the graph

    def collect(self, backward: Callable[[], None]) -> Parts:
        """The cuts that `backward` arrives at."""
        self._collected = []
        try:
            backward()
            return self._collected
        finally:
            self._collected = None

    def arrived(self, graph: Graph, gradients: Sequence[torch.Tensor | None]) -> None:
        """A backward has come to a cut: one of `engine.backward`, or of the script's own `loss.backward()`."""
        if self._collected is not None:
            self._collected.append((graph, gradients))
            return
        if not self._direct:  # the engine's part follows when the script's is through
            torch.autograd.Variable._execution_engine.queue_callback(self._go_on)
        self._direct.append((graph, gradients))

    def _go_on(self) -> None:
        parts, self._direct = self._direct, []
        self.handler("loss.backward", CallKind.PLAIN, DirectBackward(self, parts), (), {})


def at_boundary(engine: Any) -> bool:
    """Whether the `engine.step` to come updates the parameters."""
    managed = getattr(engine, "managed_gradient_accumulation", None)
    return bool(engine.is_gradient_accumulation_boundary()) or (managed is not None and not managed())


class Forward:
    """`engine.forward`: its outputs are given out behind a cut."""

    def __init__(
        self, calls: Calls, original: Callable[..., Any], engine: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        self._calls, self._original, self._engine = calls, original, engine
        self._inputs = kept.Inputs(args, kwargs)
        self._given: tuple[tuple[Any, ...], dict[str, Any]] | None = (args, kwargs)
        self._is_done = False
        self._graph: Callable[[], Graph | None] = lambda: None

    def __call__(self) -> Any:
        args, kwargs = self._given or self._inputs.again()
        self._given = None
        with self._calls.inside():
            value = self._original(self._engine, *args, **kwargs)
        outputs = kept.differentiable(value)
        if self._is_done:
            graph = self._graph()
            if graph is not None:
                graph.outputs = outputs
            return None
        self._is_done = True
        if not outputs:
            return value
        graph = Graph(self._engine.global_steps, outputs)
        self._graph = weakref.ref(graph)
        return kept.replaced(value, outputs, cut(graph, self._calls.arrived, outputs))

    def outcome(self, value: Any) -> Any:
        return kept.told(value)

    def skipped(self, outcome: Any) -> Any:
        value, differentiable = kept.heard(outcome, self._engine.device)
        if not differentiable:
            return value
        graph = Graph(self._engine.global_steps, None)
        return kept.replaced(value, differentiable, cut(graph, self._calls.arrived, differentiable))


class Backward:
    """`engine.backward`: once through the script's part of the graph, as often as needed through the engine's."""

    def __init__(
        self,
        calls: Calls,
        original: Callable[..., Any],
        engine: Any,
        loss: torch.Tensor,
        retain_graph: bool,
        scale_wrt_gas: bool,
    ) -> None:
        self._calls, self._original, self._engine = calls, original, engine
        self._retain_graph, self._scale_wrt_gas = retain_graph, scale_wrt_gas
        self._loss: torch.Tensor | None = loss
        self._value: torch.Tensor | None = None
        self._parts: Parts = []

    def __call__(self) -> Any:
        if self._loss is not None:
            self._value = self._scaled(self._loss)
            self._parts = self._through_scripts_part(self._value)
            self._calls.loss, self._loss = self._loss.detach(), None
        with self._calls.inside():
            self._original(
                self._engine, seed(self._parts), retain_graph=self._retain_graph, scale_wrt_gas=self._scale_wrt_gas
            )
        if not self._retain_graph:
            for graph, _ in self._parts:
                graph.outputs = None
        value, self._value = self._value, None  # the log shall not keep the script's graph
        return value

    def _scaled(self, loss: torch.Tensor) -> torch.Tensor:
        return loss / self._engine.gradient_accumulation_steps() if self._scale_wrt_gas else loss

    def _through_scripts_part(self, scaled: torch.Tensor) -> Parts:
        self._calls.state_of(self._engine).refuse_own_parameters(leaves_of(scaled))
        scale = getattr(self._engine.optimizer, "scale_if_loss", None)
        loss = scale(scaled) if scale is not None else scaled
        parts = self._calls.collect(lambda: loss.backward(retain_graph=self._retain_graph))
        if not parts or any(graph.step != self._engine.global_steps for graph, _ in parts):
            raise Unsupported(
                "engine.backward was given a loss that does not come from this step's engine.forward",
                "a loss computed from what engine.forward returned since the last engine.step",
                "or run this script without deadpool_plugin",
            )
        return parts

    def outcome(self, value: Any) -> Any:
        return self._calls.loss

    def skipped(self, outcome: torch.Tensor) -> Any:
        assert self._loss is not None
        with torch.no_grad():
            self._loss.copy_(outcome)  # its inputs may have been stand-ins
        return self._scaled(self._loss)


class DirectBackward:
    """The engine's part of a script's own `loss.backward()`."""

    def __init__(self, calls: Calls, parts: Parts) -> None:
        self._calls, self._parts = calls, parts

    def __call__(self) -> None:
        outputs, gradients = pairs(self._parts)
        with self._calls.inside(), torch.enable_grad():
            torch.autograd.backward(outputs, gradients)
        for graph, _ in self._parts:
            graph.outputs = None


class Step:
    """`engine.step`, and whatever else moves the engine's counters."""

    def __init__(self, calls: Calls, function: Callable[[], Any], engine: Any) -> None:
        self._calls, self._function, self._engine = calls, function, engine

    def __call__(self) -> Any:
        with self._calls.inside():
            value = self._function()
        self._calls.stepped_loss = self._calls.loss
        return value

    def outcome(self, value: Any) -> Any:
        return self._calls.state_of(self._engine).visible()

    def skipped(self, outcome: Any) -> Any:
        self._calls.state_of(self._engine).show(outcome)
        return None


class Batch:
    """A pipeline's `train_batch` or `eval_batch`: closed functions, given an iterator to pull micro-batches from."""

    def __init__(self, calls: Calls, function: Callable[[Any], Any], engine: Any) -> None:
        self._calls, self._function, self._engine = calls, function, engine

    def __call__(self, data_iterator: Any) -> Any:
        with self._calls.inside():
            value = self._function(data_iterator)
        if self._engine.module.training:
            self._calls.stepped_loss = value
        return value

    def outcome(self, value: Any) -> Any:
        return [kept.told(value), self._calls.state_of(self._engine).visible()]

    def skipped(self, outcome: Any) -> Any:
        self._calls.state_of(self._engine).show(outcome[1])
        value, _ = kept.heard(outcome[0], self._engine.device)
        return value
