"""The cut through autograd's graph between a script's own part and the engine's.

Rules of this file: what a script gets from the engine's forward is detached from the engine's graph and attached to a
`_Cut`. A backward through the script's part ends there and leaves dL/d(outputs); with these, and outputs computed again
after a swap, the engine's part can be gone through as often as needed. The script's part is local and never redone.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ...errors import WHOLE_STEP, Unsupported, invariant
from ...worker.copies import to_host


class Graph:
    """One forward's part of the graph, from parameters to `outputs` (the engine's own); None once they are consumed."""

    def __init__(self, step: int, outputs: list[torch.Tensor] | None) -> None:
        self.step, self.outputs = step, outputs

    def unused(self) -> list[torch.Tensor]:
        """Raises: RuntimeError if a backward has consumed the outputs."""
        if self.outputs is None:
            raise RuntimeError("a second backward through a forward of the engine; the first needs retain_graph=True")
        return self.outputs


Parts = list[tuple[Graph, Sequence["torch.Tensor | None"]]]
"""Graphs that a backward through the script's part has reached, each with the gradients of its outputs."""
AT_REST_BYTES_MIN = 1 << 20
CUT_NODE = "_CutBackward"
_collecting: list[Parts] = []
"""The cuts reached so far by each backward through the script's part that is under way."""


class _Cut(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, graph: Graph, *outputs: torch.Tensor) -> Any:
        ctx.graph = graph
        ctx.set_materialize_grads(False)
        return tuple(output.detach() for output in outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        invariant(_collecting, "a backward through the script's part past torch.autograd.backward")
        _collecting[-1].append((ctx.graph, gradients))
        return (None, None, *(None for _ in gradients))


class _Seed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gradients: Sequence[torch.Tensor], *outputs: torch.Tensor) -> torch.Tensor:
        ctx.gradients = gradients
        return torch.zeros((), dtype=torch.float32, device=outputs[0].device)

    @staticmethod
    def backward(ctx: Any, *ignored: torch.Tensor | None) -> Any:
        return (None, *ctx.gradients)


def cut(graph: Graph, outputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return the same values as `outputs`, behind a cut: for the script."""
    anchor = torch.zeros((), requires_grad=True)
    return list(_Cut.apply(anchor, graph, *(output.detach() for output in outputs)))  # type: ignore[no-untyped-call]


def collect(backward: Callable[[], None]) -> Parts:
    """Return the cuts that `backward` arrives at."""
    _collecting.append([])
    try:
        backward()
    finally:
        parts = _collecting.pop()
    return parts


def is_collecting() -> bool:
    return bool(_collecting)


def at_rest(parts: Parts) -> Parts:
    """Move large gradients (of logits, say) to host memory, where they wait for a redo. Blocks: never."""
    return [
        (graph, [_in_host_memory(one) if one is not None and _is_far(one) else one for one in gradients])
        for graph, gradients in parts
    ]


def _is_far(gradient: torch.Tensor) -> bool:
    return not gradient.is_cpu and gradient.numel() * gradient.element_size() >= AT_REST_BYTES_MIN


_stream_beside = functools.cache(torch.cuda.Stream)


def _in_host_memory(gradient: torch.Tensor) -> torch.Tensor:
    beside = _stream_beside(gradient.device)
    beside.wait_stream(torch.cuda.current_stream(gradient.device))
    with torch.cuda.stream(beside):
        host = to_host(gradient)
    gradient.record_stream(beside)
    return host


def seed(parts: Parts) -> torch.Tensor:
    """Return a scalar in the place of the script's loss: its backward gives the graphs' outputs these gradients."""
    outputs, gradients = pairs(parts)
    with torch.enable_grad():
        scalar: torch.Tensor = _Seed.apply(gradients, *outputs)  # type: ignore[no-untyped-call]
    return scalar


def through_engines_part(parts: Parts) -> None:
    """Give the graphs' outputs these gradients without a loss, and consume them."""
    torch.autograd.backward(*pairs(parts))
    for graph, _ in parts:
        graph.outputs = None


def pairs(parts: Parts) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return the outputs that have a gradient, and those gradients on the device. Raises: as `Graph.unused`."""
    arrived = [pair for graph, gradients in parts for pair in zip(graph.unused(), gradients, strict=True)]
    found = [(output, gradient) for output, gradient in arrived if gradient is not None]
    return [output for output, _ in found], [one.to(output.device, non_blocking=True) for output, one in found]


def output_of(loss: torch.Tensor) -> tuple[Graph, int] | None:
    """Return the output that `loss` is, by its number; None if the script has done anything to it, or hooked it."""
    node: Any = loss.grad_fn
    if node is None or node.name() != CUT_NODE or loss._backward_hooks or loss.retains_grad:
        return None
    return node.graph, loss.output_nr


class ScriptsPart:
    """The part of the graph that a backward from `losses` would go through on the script's side of all cuts."""

    def __init__(self, losses: Sequence[torch.Tensor]) -> None:
        self.leaves, self.communicates, self.reaches_cut = list[torch.Tensor](), list[str](), False
        """Leaves in which that backward accumulates gradients; names of functions of torch.distributed."""
        seen, todo = {None}, list[Any](loss.grad_fn for loss in losses)
        while todo:
            node = todo.pop()
            if node in seen:
                continue
            seen.add(node)
            if node.name() == CUT_NODE:
                self.reaches_cut = True
                continue
            if hasattr(node, "variable"):
                self.leaves.append(node.variable)
            made_by = getattr(type(node), "_forward_cls", None)
            if made_by is not None and made_by.__module__.startswith("torch.distributed."):
                self.communicates.append(made_by.__name__)
            todo += [following for following, _ in node.next_functions]

    def check(self, owns: Callable[[torch.Tensor], bool]) -> None:
        """Raises: Unsupported for work that a redo would leave out. `owns`: whether a leaf is the engine's."""
        for leaf in self.leaves:
            if owns(leaf):
                raise Unsupported(
                    "the loss uses parameters of the engine's model beside what engine.forward returned",
                    "all uses of parameters inside the model's forward",
                    f"compute such a term (a penalty on weights, say) in the model's forward, or {WHOLE_STEP}",
                )
            raise Unsupported(
                f"the loss trains a parameter of the script's own ({list(leaf.shape)}) outside the engine",
                "all trained parameters in the engine's model: others are not mirrored",
                "make it a part of the model given to deepspeed.initialize",
            )
        if self.communicates:
            raise Unsupported(
                f"the loss is computed with {self.communicates[0]} of torch.distributed outside the engine",
                "no communication in the script's own part of a backward, which is not redone",
                f"compute it in the model's forward, or {WHOLE_STEP}",
            )
