"""A script's requests to a DeepSpeed engine, made calls: forward, backward, step, and a pipeline's batches.

Rules of this file: it decides what is a call and of which kind; what each one does is in engine_calls.py. What an
engine asks of itself inside a call is none: `Calls.inside` says so.
Source: DeepSpeed 0.19.8, runtime/engine.py `forward`, `backward`, `step`.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from ...errors import WHOLE_STEP, Unsupported
from ...worker.adapter import CallHandler, CallKind
from . import refusals
from .cut import Graph, Parts, ScriptsPart
from .engine_calls import Backward, Batch, DirectBackward, Forward, Step
from .state import EngineState


class Calls:
    """State that the calls of one process share. `state_of`: the state of an engine, for records."""

    def __init__(self, handler: CallHandler, state_of: Callable[[Any], EngineState]) -> None:
        self.handler, self.state_of = handler, state_of
        self.is_training = False
        """Whether the state is laid out: training has begun."""
        self._depth = 0
        self._collected: Parts | None = None
        self._direct: Parts = []
        self.loss: torch.Tensor | None = None
        """The newest loss given to `engine.backward`."""

    def install(self, engine_class: type, pipeline_class: type) -> None:
        """Put ourselves in the place of the methods that scripts call; pipelines have some instead."""
        self._wrap(engine_class, "forward", self.forward)
        self._wrap(engine_class, "backward", self._backward)
        self._wrap(engine_class, "step", self._step)
        for name in ("zero_grad", "allreduce_gradients"):
            self._wrap(engine_class, name, functools.partial(self._plain, name))
        self._wrap_update(engine_class)
        self._wrap(pipeline_class, "train_batch", self._train_batch)
        self._wrap(pipeline_class, "eval_batch", self._eval_batch)
        self._wrap_tensor_backward()

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
        def update(engine: Any, *args: Any, **kwargs: Any) -> Any:
            self.state_of(engine).check_gradients()
            return self.handler("engine._take_model_step", CallKind.UPDATE, original, (engine, *args), kwargs)

        owner._take_model_step = update

    @property
    def busy(self) -> bool:
        """Return whether an engine's call is under way: what the engine asks of itself is no call."""
        return self._depth > 0

    @contextlib.contextmanager
    def inside(self) -> Iterator[None]:
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1

    # ---- one method each

    def forward(self, original: Callable[..., Any], engine: Any, *args: Any, **kwargs: Any) -> Any:
        refusals.check_hooks()
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

    def _wrap_tensor_backward(self) -> None:
        """A script's own `loss.backward()` is held to what `engine.backward` is."""
        owner: Any = torch.Tensor
        original = owner.backward

        @functools.wraps(original)
        def backward(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> None:
            if not self.busy and self._collected is None:
                part = ScriptsPart(tensor)
                if part.reaches_cut:
                    if tensor.is_cuda:
                        raise _refused()
                    part.check(self.state_of(None).has_parameter)
                    self._direct = []  # one that failed behind its cut may have left some
            original(tensor, *args, **kwargs)

        owner.backward = backward

    def _go_on(self) -> None:
        if threading.current_thread() is not threading.main_thread():  # on a GPU autograd ends on a thread of its own
            raise _refused()
        parts, self._direct = self._direct, []
        self.handler("loss.backward", CallKind.PLAIN, DirectBackward(self, parts), (), {})


def _refused() -> Unsupported:
    return Unsupported(
        "a script's own backward on a GPU, where it may end on another thread than the script's",
        "engine.backward(loss)",
        f"call that, or {WHOLE_STEP}",
    )


def at_boundary(engine: Any) -> bool:
    """Return whether the `engine.step` to come updates the parameters."""
    managed = getattr(engine, "managed_gradient_accumulation", None)
    return bool(engine.is_gradient_accumulation_boundary()) or (managed is not None and not managed())
