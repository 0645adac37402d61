"""The cut through autograd's graph between a script's own part and the engine's.

Rules of this file: what a script gets from the engine's forward is detached from the engine's graph and attached to a
`Cut`. A backward through the script's part ends there and leaves dL/d(outputs); with these, and outputs computed again
after a swap, the engine's part can be gone through as often as needed. The script's part is local and never redone.
Source: shown bit-exact for ZeRO 1, 2 and 3 with several forwards per backward, retained graphs, and losses computed
outside the model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch


class Graph:
    """One forward's part of the graph, from parameters to `outputs` (those that require grad, engine's own tensors).

    Alive as long as the script can still reach it, or a logged backward has gone through it. `outputs` is None once
    a backward has consumed them.
    """

    def __init__(self, step: int, outputs: list[torch.Tensor] | None) -> None:
        self.step, self.outputs = step, outputs


Arrived = Callable[[Graph, Sequence["torch.Tensor | None"]], None]
"""Called in the backward through the script's part: a graph, and the gradient of each of its outputs."""


class _Cut(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, graph: Graph, arrived: Arrived, *outputs: torch.Tensor) -> Any:
        ctx.graph, ctx.arrived = graph, arrived
        ctx.set_materialize_grads(False)
        return tuple(output.detach() for output in outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        ctx.arrived(ctx.graph, gradients)
        return (None, None, None, *(None for _ in gradients))


class _Seed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gradients: Sequence[torch.Tensor], *outputs: torch.Tensor) -> torch.Tensor:
        ctx.gradients = gradients
        return torch.zeros((), dtype=torch.float32, device=outputs[0].device)

    @staticmethod
    def backward(ctx: Any, *ignored: torch.Tensor | None) -> Any:
        return (None, *ctx.gradients)


CUT_NODE = "_CutBackward"


def cut(graph: Graph, arrived: Arrived, outputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """What the script gets instead of `outputs`: the same values, behind a cut."""
    anchor = torch.zeros((), requires_grad=True)
    detached = [output.detach() for output in outputs]
    return list(_Cut.apply(anchor, graph, arrived, *detached))  # type: ignore[no-untyped-call]


def seed(parts: Sequence[tuple[Graph, Sequence[torch.Tensor | None]]]) -> torch.Tensor:
    """A scalar in the place of the script's loss: whatever comes in, these gradients go out to the graphs' outputs."""
    outputs, gradients = pairs(parts)
    with torch.enable_grad():
        scalar: torch.Tensor = _Seed.apply(gradients, *outputs)  # type: ignore[no-untyped-call]
    return scalar


def pairs(
    parts: Sequence[tuple[Graph, Sequence[torch.Tensor | None]]],
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Outputs and gradients, where there is a gradient. Raises: RuntimeError if a graph was used up before."""
    outputs, gradients = [], []
    for graph, arrived in parts:
        if graph.outputs is None:
            raise RuntimeError("a second backward through a forward of the engine; the first needs retain_graph=True")
        for output, gradient in zip(graph.outputs, arrived, strict=True):
            if gradient is not None:
                outputs.append(output)
                gradients.append(gradient)
    return outputs, gradients


def leaves_of(loss: torch.Tensor) -> list[torch.Tensor]:
    """The tensors that a backward from `loss` would accumulate gradients in, on the script's side of all cuts."""
    found, seen, todo = [], set(), [loss.grad_fn]
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            found.append(node.variable)
        if node.name() != CUT_NODE:
            todo += [following for following, _ in node.next_functions]
    return found
