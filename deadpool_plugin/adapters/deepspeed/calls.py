"""A script's requests to a DeepSpeed engine as calls: forward, backward, step, a pipeline's batches, and its reads.

Rules of this file: a call is made when the script calls, and kept by the call log. Order of a redo: a forward makes its
graph's outputs anew, the backward after it goes through the engine's part with the gradients that the script's part
gave the first time, or from the output that is the loss. A call may have to run again before the script gets its value,
so it has one every time until `outcome` is asked. Requests of the engine to itself, inside a call, are no calls.
Source: DeepSpeed 0.19.8, runtime/engine.py, runtime/pipe/engine.py, utils/tensor_fragment.py, monitor/monitor.py.
"""

from __future__ import annotations

import functools
import threading
import types
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ...errors import WHOLE_STEP, Unsupported, present
from ...worker.functions import Call, CallHandler, CallKind
from ..common import Function, Nesting, in_place_of
from . import outputs, refusals
from .cut import Graph, Parts, ScriptsPart, at_rest, cut, output_of, pairs, seed
from .state import EngineState

SCALES_GRADIENTS = "_scale_wrt_gas"
"""An engine with this attribute divides the gradients of its outputs by the micro-batches of a step, in hooks on them,
instead of the loss: DeepSpeed 0.18.9, not 0.19."""
READS = ("safe_get_full_grad", "safe_get_full_optimizer_state", "safe_get_full_fp32_param", "safe_get_local_grad",
         "safe_get_local_optimizer_state", "safe_get_local_fp32_param")  # fmt: skip
MONITORED_STEPS_MAX = 16
"""Newest steps of each monitored name that are remembered. A redo goes back by two and the current one."""


class EngineCalls(Nesting):
    """The calls of one process, and the state they share."""

    def __init__(self, handler: CallHandler) -> None:
        self.handler = handler
        self._state: EngineState | None = None
        self._collected: Parts | None = None
        self._direct: Parts = []
        self.loss: torch.Tensor | None = None
        """The newest loss given to `engine.backward`."""

    def begin_training(self, state: EngineState) -> None:
        self._state = state

    @property
    def is_training(self) -> bool:
        return self._state is not None

    @property
    def state(self) -> EngineState:
        return present(self._state, "attach() comes first")

    def install(self, engine_class: type, pipeline_class: type) -> None:
        """Wrap what scripts call. Once, before the engine is built."""
        self._wrap(engine_class, "forward", Forward)
        self._wrap(engine_class, "backward", Backward)
        for name in ("step", "zero_grad", "allreduce_gradients"):
            self._wrap(engine_class, name, functools.partial(Step, name))
        for name in ("train_batch", "eval_batch"):
            self._wrap(pipeline_class, name, functools.partial(Batch, name))
        self._wrap_tensor_backward()
        self._wrap_reads()
        self._wrap_monitors()

        @in_place_of(engine_class, "_take_model_step")  # the update waits until no snapshot is being taken
        def update(original: Function, *args: Any, **kwargs: Any) -> Any:
            self.state.lasting.check()
            return self.handler(Call("engine._take_model_step", CallKind.UPDATE, original, args, kwargs))

    def _wrap(self, owner: type, name: str, make: Callable[..., EngineCall]) -> None:
        @in_place_of(owner, name)
        def method(original: Function, /, *args: Any, **kwargs: Any) -> Any:
            return original(*args, **kwargs) if self.busy else self.handler(make(self, original, *args, **kwargs))

    # ---- a backward through the script's part of the graph

    def collect(self, backward: Callable[[], None]) -> Parts:
        """Return the cuts that `backward` arrives at."""
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

    def _wrap_tensor_backward(self) -> None:
        @in_place_of(torch.Tensor, "backward")  # a script's own is held to the rules of `engine.backward`
        def backward(original: Function, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> None:
            if not self.busy and self._collected is None:
                part = ScriptsPart(tensor)
                if part.reaches_cut:
                    if tensor.is_cuda:
                        raise _on_device()
                    part.check(self.state.has_parameter)
                    self._direct = []  # one that failed behind its cut may have left some
            original(tensor, *args, **kwargs)

    def _go_on(self) -> None:
        if threading.current_thread() is not threading.main_thread():  # on a GPU autograd ends on a thread of its own
            raise _on_device()
        parts, self._direct = self._direct, []
        self.handler(Call("loss.backward", CallKind.PLAIN, self._engines_part, (parts,)))

    def _engines_part(self, parts: Parts) -> None:
        tensors, gradients = pairs(parts)
        with self.inside(), torch.enable_grad():
            torch.autograd.backward(tensors, gradients)
        for graph, _ in parts:
            graph.outputs = None

    # ---- beside the engine

    def _wrap_reads(self) -> None:
        """Make reads of gradients, masters and optimizer state calls.

        A follower makes no gradients and no updates, so it is told the results; in a redo a rank takes part in the
        communication again. Scripts hold these functions since their first imports, so their code is replaced.
        """
        from deepspeed import utils

        for name in READS:
            function: types.FunctionType = getattr(utils, name)
            original = types.FunctionType(function.__code__, function.__globals__, name, function.__defaults__)
            function.__globals__[f"deadpool_{name}"] = functools.partial(self._read, original)
            function.__code__ = _through.__code__.replace(co_name=name, co_names=(f"deadpool_{name}",))

    def _read(self, original: Function, *args: Any, **kwargs: Any) -> Any:
        if self.busy or not self.is_training:
            return original(*args, **kwargs)
        return self.handler(EngineCall(self, original.__name__, functools.partial(original, *args, **kwargs)))

    def _wrap_monitors(self) -> None:
        """Write the events of a call once, also where it is redone."""
        from deepspeed.monitor.monitor import MonitorMaster

        written: dict[str, deque[Any]] = {}

        def is_new(name: str, step: Any) -> bool:
            steps = written.setdefault(name, deque(maxlen=MONITORED_STEPS_MAX))
            if step in steps:
                return False
            steps.append(step)
            return True

        @in_place_of(MonitorMaster, "write_events")
        def write_events(original: Function, master: Any, event_list: Any) -> None:
            if self.busy:  # what the script writes between calls is never redone
                event_list = [event for event in event_list if is_new(event[0], event[2])]
            original(master, event_list)


def _on_device() -> Unsupported:
    return Unsupported(
        "a script's own backward on a GPU, where it may end on another thread than the script's",
        "engine.backward(loss)",
        f"call that, or {WHOLE_STEP}",
    )


def _through(*args: Any, **kwargs: Any) -> Any:
    return deadpool_call(*args, **kwargs)  # type: ignore[name-defined]  # noqa: F821 (in the functions' own module)


class EngineCall(Call):
    """A function of the engine, or beside it. Followers are told its value."""

    is_read = True

    def __init__(self, calls: EngineCalls, name: str, function: Function) -> None:
        self._calls, self.name, self.function = calls, name, function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with self._calls.inside():
            return self.function(*args, **kwargs)


class Step(EngineCall):
    """`engine.step`, and whatever else moves the engine's counters."""

    def __init__(
        self, name: str, calls: EngineCalls, original: Function, engine: Any, *args: Any, **kwargs: Any
    ) -> None:
        super().__init__(calls, f"engine.{name}", functools.partial(original, engine, *args, **kwargs))
        managed = getattr(engine, "managed_gradient_accumulation", None)
        if name == "step" and (engine.is_gradient_accumulation_boundary() or (managed is not None and not managed())):
            self.kind = CallKind.UPDATE

    def told(self, value: Any) -> Any:
        return [self.outcome(value), self._calls.loss]

    def loss(self, value: Any, on_host: Callable[[Any], Any]) -> float | None:
        """Return the newest loss, of which the call that steps need not wait another time."""
        return None if self._calls.loss is None else float(on_host(self._calls.loss))

    def outcome(self, value: Any) -> Any:
        return self._calls.state.visible()

    def skipped(self, outcome: Any) -> Any:
        self._calls.state.show(outcome)
        return None


class Batch(EngineCall):
    """A pipeline's `train_batch` or `eval_batch`: given an iterator to pull micro-batches from."""

    def __init__(
        self,
        name: str,
        calls: EngineCalls,
        original: Function,
        engine: Any,
        data_iter: Any = None,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        super().__init__(
            calls, f"engine.{name}", lambda data_iterator: original(engine, data_iterator, *args, **kwargs)
        )
        trains = name == "train_batch"
        self.kind = CallKind.STEP if trains else CallKind.FORWARD
        self.kwargs = {"data_iterator": engine.data_iterator if trains and data_iter is None else data_iter}

    def __call__(self) -> Any:
        return super().__call__(**self.kwargs)

    def loss(self, value: Any, on_host: Callable[[Any], Any]) -> float | None:
        training = self._calls.state.engine.module.training
        return float(on_host(value)) if training and value is not None else None

    def told(self, value: Any) -> Any:
        return self.outcome(value)

    def outcome(self, value: Any) -> Any:
        return [outputs.encode(value), self._calls.state.visible()]

    def skipped(self, outcome: Any) -> Any:
        self._calls.state.show(outcome[1])
        value, _ = outputs.decode(outcome[0], self._calls.state.engine.device)
        return value


class Forward(EngineCall):
    """`engine.forward`: its outputs are given out behind a cut."""

    kind = CallKind.FORWARD

    def __init__(self, calls: EngineCalls, original: Function, engine: Any, /, *args: Any, **kwargs: Any) -> None:
        super().__init__(calls, "engine.forward", functools.partial(original, engine))
        refusals.check_hooks()
        self._engine, self._inputs = engine, outputs.inputs(args, kwargs)
        self._graph: Callable[[], Graph | None] = lambda: None

    def __call__(self) -> Any:
        args, kwargs = self._inputs.take()
        value = super().__call__(*args, **kwargs)
        tensors = outputs.differentiable(value)
        if not tensors:
            return value
        graph = self._graph() or Graph(self._engine.global_steps, None)
        graph.outputs, self._graph = tensors, weakref.ref(graph)
        return outputs.replaced(value, tensors, cut(graph, self._calls.arrived, tensors))

    def check(self) -> None:
        self._inputs.check()

    def outcome(self, value: Any) -> Any:
        return outputs.encode(value)

    def skipped(self, outcome: Any) -> Any:
        value, tensors = outputs.decode(outcome, self._engine.device)
        if not tensors:
            return value
        graph = Graph(self._engine.global_steps, None)
        return outputs.replaced(value, tensors, cut(graph, self._calls.arrived, tensors))


class Backward(EngineCall):
    """`engine.backward`: once through the script's part of the graph, as often as needed through the engine's.

    A loss that is an output of the engine's forward has no such part: the engine gets its own output, as without us.
    """

    def __init__(
        self,
        calls: EngineCalls,
        original: Function,
        engine: Any,
        loss: torch.Tensor,
        retain_graph: bool = False,
        scale_wrt_gas: bool = True,
    ) -> None:
        options = {"retain_graph": retain_graph, "scale_wrt_gas": scale_wrt_gas}
        super().__init__(calls, "engine.backward", functools.partial(original, engine, **options))
        self._engine, self._retain_graph, self._scale_wrt_gas = engine, retain_graph, scale_wrt_gas
        self._loss: torch.Tensor | None = loss
        self._value: torch.Tensor | None = None
        self._parts: Parts = []
        self._output: tuple[Graph, int] | None = None
        """The output, where the loss is that itself; else None."""

    def __call__(self) -> Any:
        if self._loss is not None:
            self._begin(self._loss)
            self._calls.loss, self._loss = self._loss.detach(), None
        if self._output is None:
            scalar, graphs = seed(self._parts), [graph for graph, _ in self._parts]
        else:
            graph, number = self._output
            scalar, graphs = graph.unused()[number], [graph]
        if not self._retain_graph:
            for graph in graphs:
                graph.outputs = None  # nobody needs them, and they may be logits
        value = super().__call__(scalar)
        self._parts = at_rest(self._parts)
        if self._output is None:
            return self._value
        return value.detach() if isinstance(value, torch.Tensor) else value

    def _begin(self, loss: torch.Tensor) -> None:
        """Go through the script's part of the graph. Raises: Unsupported unless the loss comes from this step."""
        self._output = None if self._retain_graph else output_of(loss)
        if self._output is not None:
            graphs = [self._output[0]]
        else:
            self._value = self._scaled(loss)
            self._parts = self._through_scripts_part(loss if hasattr(self._engine, SCALES_GRADIENTS) else self._value)
            depends = any(gradient is not None for _, gradients in self._parts for gradient in gradients)
            graphs = [graph for graph, _ in self._parts] if depends else []
        if not graphs or any(graph.step != self._engine.global_steps for graph in graphs):
            raise Unsupported(
                "engine.backward was given a loss that does not come from this step's engine.forward",
                "a loss computed from what engine.forward returned since the last engine.step",
                WHOLE_STEP,
            )

    def _scaled(self, loss: torch.Tensor) -> torch.Tensor:
        return loss / self._engine.gradient_accumulation_steps() if self._scale_wrt_gas else loss

    def _through_scripts_part(self, loss: torch.Tensor) -> Parts:
        ScriptsPart(loss).check(self._calls.state.has_parameter)
        scale = getattr(self._engine.optimizer, "scale_if_loss", None)
        scaled = scale(loss) if scale is not None else loss
        return self._calls.collect(lambda: scaled.backward(retain_graph=self._retain_graph))

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
