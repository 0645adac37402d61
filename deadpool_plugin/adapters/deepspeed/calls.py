"""A script's requests to a DeepSpeed engine as calls: forward, backward, step, a pipeline's batches, and its reads.

Rules of this file: in a redo a forward makes its graph's outputs anew. The backward after it goes through the engine's
part with the gradients that the script's part gave the first time, or from the output that is the loss. A call may run
again before the script gets its value, so it has one each time until `outcome` is asked.
Source: DeepSpeed 0.19.8, runtime/engine.py, runtime/pipe/engine.py, utils/tensor_fragment.py, monitor/monitor.py.
"""

from __future__ import annotations

import functools
import types
import weakref
from collections import defaultdict, deque
from collections.abc import Callable
from typing import Any

import torch
from torch.utils import _pytree as pytree

from ...errors import WHOLE_STEP, Unsupported, present
from ...worker.calls import Call, CallHandler, CallKind
from ...worker.copies import Inputs
from ...worker.patching import around, replace
from ..common import REMEDY, Function, Nesting, in_place_of
from . import outputs
from .cut import Graph, Parts, ScriptsPart, at_rest, collect, cut, is_collecting, output_of, seed, through_engines_part
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

    state: EngineState
    """Since training has begun."""
    loss: torch.Tensor | None = None
    """The newest loss given to `engine.backward`."""

    def __init__(self, handler: CallHandler) -> None:
        self.handler = handler

    def install(self, engine_class: type, pipeline_class: type) -> None:
        """Wrap what scripts call. Once, before the engine is built."""
        for owner, kind, *names in (
            (engine_class, Forward, "forward"),
            (engine_class, Backward, "backward"),
            (engine_class, Step, "step", "zero_grad", "allreduce_gradients"),
            (pipeline_class, Batch, "train_batch", "eval_batch"),
        ):
            for name in names:
                in_place_of(owner, name)(functools.partial(self.make, kind, f"engine.{name}"))
        self._wrap_backward()
        self._wrap_reads()
        self._wrap_monitors()

        @in_place_of(engine_class, "_take_model_step")  # the update waits until no snapshot is being taken
        def update(original: Function, *args: Any, **kwargs: Any) -> Any:
            self.state.lasting.check()
            return self.handler(Call("engine._take_model_step", CallKind.UPDATE, original, args, kwargs))

    def make(self, kind: type[EngineCall], name: str, original: Function, /, *args: Any, **kwargs: Any) -> Any:
        """Make a call of `original`, or call it as a part of the one under way."""
        if self.busy:
            return original(*args, **kwargs)
        return self.handler(kind(self, name, original, *args, **kwargs))

    def _wrap_backward(self) -> None:
        """Hold a script's own `loss.backward()` to the rules of `engine.backward`; its engine's part is a call."""

        def backward(original: Function, tensors: Any, *args: Any, **kwargs: Any) -> Any:
            given = [tensors] if isinstance(tensors, torch.Tensor) else tensors
            losses = [loss for loss in given if isinstance(loss, torch.Tensor)]
            if self.busy or is_collecting() or not (part := ScriptsPart(losses)).reaches_cut:
                return original(tensors, *args, **kwargs)
            if any(loss.is_cuda for loss in losses):
                raise Unsupported(
                    "a script's own backward on a GPU, where it may end on another thread than the script's",
                    "engine.backward(loss)",
                    f"call that, or {WHOLE_STEP}",
                )
            part.check(self.state.has_parameter)
            parts = collect(lambda: original(tensors, *args, **kwargs))
            return self.handler(EngineCall(self, "loss.backward", through_engines_part, parts)) if parts else None

        replace({torch.autograd.backward: around(torch.autograd.backward, backward)})

    # ---- beside the engine

    def _wrap_reads(self) -> None:
        """Make reads of gradients, masters and optimizer state calls: followers have none of their own."""
        from deepspeed import utils

        for name in READS:  # scripts hold these functions since their first imports, so their code is replaced
            function: types.FunctionType = getattr(utils, name)
            original = types.FunctionType(function.__code__, function.__globals__, name, function.__defaults__)
            function.__globals__[f"deadpool_{name}"] = functools.partial(self._read, original)
            function.__code__ = _through.__code__.replace(co_name=name, co_names=(f"deadpool_{name}",))

    def _read(self, original: Function, *args: Any, **kwargs: Any) -> Any:
        if not self.is_training:
            return original(*args, **kwargs)
        return self.make(EngineCall, original.__name__, original, *args, **kwargs)

    def _wrap_monitors(self) -> None:
        """Write the events of a call once, also where it is redone."""
        from deepspeed.monitor.monitor import MonitorMaster

        written = defaultdict[str, deque[Any]](functools.partial(deque, maxlen=MONITORED_STEPS_MAX))

        @in_place_of(MonitorMaster, "write_events")
        def write_events(original: Function, master: Any, event_list: Any) -> None:
            if self.busy:  # what the script writes between calls is never redone
                event_list = [(name, value, step) for name, value, step in event_list if step not in written[name]]
                for name, _, step in event_list:
                    written[name].append(step)
            original(master, event_list)


def _through(*args: Any, **kwargs: Any) -> Any:
    return deadpool_call(*args, **kwargs)  # type: ignore[name-defined]  # noqa: F821 (in the functions' own module)


class EngineCall(Call):
    """A function of the engine, or beside it. Followers are told its value."""

    is_read = True

    def __init__(self, calls: EngineCalls, name: str, function: Function, /, *args: Any, **kwargs: Any) -> None:
        super().__init__(name, self.kind, function)
        self._calls = calls
        self.bind(*args, **kwargs)

    def bind(self, *args: Any, **kwargs: Any) -> None:
        """Take what the script gives `function`."""
        self.function = functools.partial(self.function, *args, **kwargs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with self._calls.inside():
            return self.function(*args, **kwargs, **self.kwargs)


class Step(EngineCall):
    """`engine.step`, and whatever else moves the engine's counters."""

    def bind(self, engine: Any, /, *args: Any, **kwargs: Any) -> None:
        super().bind(engine, *args, **kwargs)
        managed = getattr(engine, "managed_gradient_accumulation", lambda: True)
        if self.name == "engine.step" and (engine.is_gradient_accumulation_boundary() or not managed()):
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

    def bind(self, engine: Any, /, data_iter: Any = None, *args: Any, **kwargs: Any) -> None:
        run, trains = self.function, self.name == "engine.train_batch"
        self.function = lambda data_iterator: run(engine, data_iterator, *args, **kwargs)
        self.kind = CallKind.STEP if trains else CallKind.FORWARD
        self.kwargs = {"data_iterator": engine.data_iterator if trains and data_iter is None else data_iter}

    @property
    def evaluates(self) -> bool:
        return self.kind is CallKind.FORWARD

    def loss(self, value: Any, on_host: Callable[[Any], Any]) -> float | None:
        training = self._calls.state.engine.module.training
        return float(on_host(value)) if training and value is not None else None

    def outcome(self, value: Any) -> Any:
        return [outputs.encode(value), self._calls.state.visible()]

    told = outcome

    def skipped(self, outcome: Any) -> Any:
        value, visible = outcome
        self._calls.state.show(visible)
        return outputs.decode(value, self._calls.state.engine.device)


class Forward(EngineCall):
    """`engine.forward`: its outputs are given out behind a cut."""

    kind = CallKind.FORWARD

    def bind(self, engine: Any, /, *args: Any, **kwargs: Any) -> None:
        super().bind(engine)
        if torch.is_grad_enabled() and outputs.differentiable((args, kwargs)):
            raise Unsupported(
                "an input of the engine's forward requires grad",
                "inputs that are data",
                f"train what computes it as a part of the engine's model, or {WHOLE_STEP}",
            )
        self._engine, self._inputs = engine, Inputs(args, kwargs, "the engine's forward")
        self._graph: Callable[[], Graph | None] = lambda: None
        # A redo would keep activations on the device, and the hooks' owner would wait for those of the first time.
        if torch._C._autograd._top_saved_tensors_default_hooks(True):
            raise Unsupported(
                "engine.forward is called within saved-tensor hooks (activation offloading)",
                "a forward without them",
                f"recompute activations instead (activation checkpointing), {REMEDY}",
            )

    def __call__(self) -> Any:
        args, kwargs = self._inputs.take()
        return self._behind_cut(super().__call__(*args, **kwargs), is_made=True)

    def _behind_cut(self, value: Any, *, is_made: bool) -> Any:
        if not (tensors := outputs.differentiable(value)):
            return value
        graph = self._graph() or Graph(self._engine.global_steps, None)
        graph.outputs, self._graph = tensors if is_made else None, weakref.ref(graph)
        given = {id(tensor): behind for tensor, behind in zip(tensors, cut(graph, tensors), strict=True)}
        return pytree.tree_map(lambda leaf: given.get(id(leaf), leaf), value)

    def check(self) -> None:
        self._inputs.check()

    def outcome(self, value: Any) -> Any:
        return outputs.encode(value)

    def skipped(self, outcome: Any) -> Any:
        return self._behind_cut(outputs.decode(outcome, self._engine.device), is_made=False)


class Backward(EngineCall):
    """`engine.backward`: once through the script's part of the graph, as often as needed through the engine's."""

    def bind(self, engine: Any, loss: torch.Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True) -> None:
        super().bind(engine, retain_graph=retain_graph, scale_wrt_gas=scale_wrt_gas)
        self._engine, self._retain_graph, self._scale_wrt_gas = engine, retain_graph, scale_wrt_gas
        self._loss: torch.Tensor | None = loss
        self._value: torch.Tensor | None = None
        self._parts: Parts = []
        self._output: int | None = None
        """The number of the output that the loss is: the script has no part, and the engine gets its own output."""

    def __call__(self) -> Any:
        if self._loss is not None:
            self._begin(self._loss)
            self._calls.loss, self._loss = self._loss.detach(), None
        scalar = seed(self._parts) if self._output is None else self._parts[0][0].unused()[self._output]
        if not self._retain_graph:
            for graph, _ in self._parts:
                graph.outputs = None  # nobody needs them, and they may be logits
        value = super().__call__(scalar)
        self._parts = at_rest(self._parts)
        if self._output is None:
            return self._value
        return value.detach() if isinstance(value, torch.Tensor) else value

    def _begin(self, loss: torch.Tensor) -> None:
        """Go through the script's part of the graph. Raises: Unsupported unless the loss comes from this step."""
        output = None if self._retain_graph else output_of(loss)
        if output is not None:
            self._parts, self._output = [(output[0], [])], output[1]
        else:
            self._value = self._scaled(loss)
            given = loss if hasattr(self._engine, SCALES_GRADIENTS) else self._value
            ScriptsPart([given]).check(self._calls.state.has_parameter)
            scale = getattr(self._engine.optimizer, "scale_if_loss", lambda loss: loss)
            self._parts = collect(lambda: scale(given).backward(retain_graph=self._retain_graph))
        depends = self._output is not None or any(one is not None for _, gradients in self._parts for one in gradients)
        if not depends or any(graph.step != self._engine.global_steps for graph, _ in self._parts):
            raise Unsupported(
                "engine.backward was given a loss that does not come from this step's engine.forward",
                "a loss computed from what engine.forward returned since the last engine.step",
                WHOLE_STEP,
            )

    def _scaled(self, loss: torch.Tensor) -> torch.Tensor:
        return loss / self._engine.gradient_accumulation_steps() if self._scale_wrt_gas else loss

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
