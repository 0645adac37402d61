"""Each call of an engine as an object: calling it does it (again).

Rules of this file: an object is made when the script calls, and kept by the call log. Order of a redo: a forward makes
its graph's outputs anew, the backward after it goes through the engine's part with the gradients that the script's
part gave the first time, or from the output that is the loss. A call that has run may have to run again before the
script gets its value (nobody knows what an interrupted collective left), so it has one every time until `outcome` is
asked. What is done inside `Calls.inside` is the engine's own and no call.
Source: DeepSpeed 0.19.8, runtime/engine.py and runtime/pipe/engine.py.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from ...errors import WHOLE_STEP, Unsupported, present
from ...worker.adapter import Adapter, Followed
from . import kept
from .cut import Graph, Output, Parts, ScriptsPart, at_rest, cut, pairs, seed

if TYPE_CHECKING:
    from .calls import Calls

SCALES_GRADIENTS = "_scale_wrt_gas"
"""An engine with this attribute divides the gradients of its outputs by the micro-batches of a step, in hooks on them,
instead of the loss: DeepSpeed 0.18.9, not 0.19."""


class Forward(Followed):
    """`engine.forward`: its outputs are given out behind a cut."""

    def __init__(
        self, calls: Calls, original: Callable[..., Any], engine: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        self._calls, self._original, self._engine = calls, original, engine
        self._inputs = kept.inputs(args, kwargs)
        self._given: tuple[tuple[Any, ...], dict[str, Any]] | None = (args, kwargs)
        self._graph: Callable[[], Graph | None] = lambda: None

    def __call__(self) -> Any:
        args, kwargs = self._given or self._inputs.again()
        self._given = None
        with self._calls.inside():
            value = self._original(self._engine, *args, **kwargs)
        outputs = kept.differentiable(value)
        if not outputs:
            return value
        graph = self._graph() or Graph(self._engine.global_steps, None)
        graph.outputs, self._graph = outputs, weakref.ref(graph)
        return kept.replaced(value, outputs, cut(graph, self._calls.arrived, outputs))

    def check(self) -> None:
        self._inputs.check()

    def outcome(self, value: Any) -> Any:
        return kept.encode(value)

    def skipped(self, outcome: Any) -> Any:
        value, differentiable = kept.decode(outcome, self._engine.device)
        if not differentiable:
            return value
        graph = Graph(self._engine.global_steps, None)
        return kept.replaced(value, differentiable, cut(graph, self._calls.arrived, differentiable))


class Backward(Followed):
    """`engine.backward`: once through the script's part of the graph, as often as needed through the engine's.

    A loss that is an output of the engine's forward has no such part: the engine gets its own output, as without us.
    """

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
        self._output: Output | None = None
        """The output, where the loss is that itself; else None."""

    def __call__(self) -> Any:
        if self._loss is not None:
            self._begin(self._loss)
            self._calls.loss, self._loss = self._loss.detach(), None
        if self._output is None:
            scalar, graphs = seed(self._parts), [graph for graph, _ in self._parts]
        else:
            scalar, graphs = self._output.tensor(), [self._output.graph]
        if not self._retain_graph:
            for graph in graphs:
                graph.outputs = None  # nobody needs them, and they may be logits
        with self._calls.inside():
            value = self._original(
                self._engine, scalar, retain_graph=self._retain_graph, scale_wrt_gas=self._scale_wrt_gas
            )
        self._parts = at_rest(self._parts)
        if self._output is None:
            return self._value
        return value.detach() if isinstance(value, torch.Tensor) else value

    def _begin(self, loss: torch.Tensor) -> None:
        """Come to the engine's part of the graph, with what the engine is to be given."""
        self._output = None if self._retain_graph else Output.of(loss)
        if self._output is None:
            self._value = self._scaled(loss)
            self._parts = self._through_scripts_part(loss if hasattr(self._engine, SCALES_GRADIENTS) else self._value)
        else:
            self._check_step([self._output.graph])

    def _scaled(self, loss: torch.Tensor) -> torch.Tensor:
        return loss / self._engine.gradient_accumulation_steps() if self._scale_wrt_gas else loss

    def _through_scripts_part(self, scaled: torch.Tensor) -> Parts:
        ScriptsPart(scaled).check(self._calls.state_of(self._engine).has_parameter)
        scale = getattr(self._engine.optimizer, "scale_if_loss", None)
        loss = scale(scaled) if scale is not None else scaled
        parts = self._calls.collect(lambda: loss.backward(retain_graph=self._retain_graph))
        depends = any(gradient is not None for _, gradients in parts for gradient in gradients)
        self._check_step([graph for graph, _ in parts] if depends else [])
        return parts

    def _check_step(self, graphs: list[Graph]) -> None:
        """Raises: Unsupported unless the loss comes from `graphs` of this step."""
        if not graphs or any(graph.step != self._engine.global_steps for graph in graphs):
            raise Unsupported(
                "engine.backward was given a loss that does not come from this step's engine.forward",
                "a loss computed from what engine.forward returned since the last engine.step",
                WHOLE_STEP,
            )

    def told(self, value: Any) -> Any:
        return self._calls.loss

    def outcome(self, value: Any) -> Any:
        self._value = None  # the log shall not keep the script's graph
        return self._calls.loss

    def skipped(self, outcome: torch.Tensor) -> Any:
        loss = present(self._loss, "a backward that was done is skipped")
        with torch.no_grad():
            loss.copy_(outcome)  # its inputs may have been stand-ins
        return self._scaled(loss).detach()


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


class OfEngine(Followed):
    """One of an engine's methods, `function`."""

    def __init__(self, calls: Calls, function: Callable[..., Any], engine: Any) -> None:
        self._calls, self._function, self._engine = calls, function, engine


class Step(OfEngine):
    """`engine.step`, and whatever else moves the engine's counters."""

    def __call__(self) -> Any:
        with self._calls.inside():
            return self._function()

    def told(self, value: Any) -> Any:
        return [self.outcome(value), self._calls.loss]

    def loss(self, value: Any, adapter: Adapter, on_host: Callable[[Any], Any]) -> float | None:
        """The newest loss, of which the call that steps need not wait another time."""
        return None if self._calls.loss is None else float(on_host(self._calls.loss))

    def outcome(self, value: Any) -> Any:
        return self._calls.state_of(self._engine).visible()

    def skipped(self, outcome: Any) -> Any:
        self._calls.state_of(self._engine).show(outcome)
        return None


class Batch(OfEngine):
    """A pipeline's `train_batch` or `eval_batch`: closed functions, given an iterator to pull micro-batches from."""

    def __call__(self, data_iterator: Any) -> Any:
        with self._calls.inside():
            return self._function(data_iterator)

    def told(self, value: Any) -> Any:
        return self.outcome(value)

    def loss(self, value: Any, adapter: Adapter, on_host: Callable[[Any], Any]) -> float | None:
        return float(on_host(value)) if self._engine.module.training and value is not None else None

    def outcome(self, value: Any) -> Any:
        return [kept.encode(value), self._calls.state_of(self._engine).visible()]

    def skipped(self, outcome: Any) -> Any:
        self._calls.state_of(self._engine).show(outcome[1])
        value, _ = kept.decode(outcome[0], self._engine.device)
        return value
