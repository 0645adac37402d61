"""The cut through the graph: gradients are those without it, and the engine's side can be gone through again."""

import pytest
import torch
from torch.utils import _pytree as pytree

from deadpool_plugin.adapters.deepspeed import kept
from deadpool_plugin.adapters.deepspeed.cut import Graph, cut, leaves_of, seed


def model():
    torch.manual_seed(3)
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))


def script(output):
    return (output.exp() * output).mean() + output.pow(3).sum()


def test_gradients_behind_a_cut_are_those_without_one():
    plain, ours, data = model(), model(), torch.linspace(-1, 1, 12).view(3, 4)
    script(plain(data)).backward()
    parts = []
    output = ours(data)
    graph = Graph(0, [output])
    (given,) = cut(graph, lambda *part: parts.append(part), [output])
    script(given).backward()
    assert all(parameter.grad is None for parameter in ours.parameters())
    for _ in range(2):  # a redo: the engine's forward again, its backward with the same gradients
        graph.outputs = [ours(data)]
        for parameter in ours.parameters():
            parameter.grad = None
        seed(parts).backward()
        for mine, its in zip(ours.parameters(), plain.parameters(), strict=True):
            assert torch.equal(mine.grad, its.grad)


def test_a_graph_is_used_up_once():
    graph = Graph(0, None)
    with pytest.raises(RuntimeError, match="retain_graph"):
        seed([(graph, [torch.ones(1)])])


def test_leaves_are_those_on_the_scripts_side():
    weight, inner = torch.nn.Parameter(torch.ones(3)), torch.nn.Parameter(torch.ones(3))
    output = inner * 2
    (given,) = cut(Graph(0, [output]), lambda *part: None, [output])
    assert [id(leaf) for leaf in leaves_of((given * weight).sum()) if leaf.numel() == 3] == [id(weight)]


def test_what_followers_are_told():
    loss = torch.tensor(2.5, requires_grad=True) * 1
    logits = torch.zeros(kept.TOLD_BYTES_MAX, requires_grad=True) + 1
    value = {"loss": loss, "rest": (torch.arange(3), None, 7), "logits": logits}
    heard, requiring = kept.heard(kept.told(value), torch.device("cpu"))
    assert heard["loss"].item() == 2.5 and torch.equal(heard["rest"][0], torch.arange(3))
    assert heard["rest"][1:] == (None, 7)
    assert heard["logits"].shape == logits.shape and not heard["logits"].any()
    assert {id(one) for one in requiring} == {id(heard["loss"]), id(heard["logits"])}
    assert pytree.tree_structure(heard) == pytree.tree_structure(value)
