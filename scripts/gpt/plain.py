"""The small GPT in plain torch, and its data: what train_deepspeed.py trains.

Rules of this file: torch and numpy only. The corpus is the one of make_corpus.py; a sample is a window of it, the same
for the same index. Bitwise deterministic from run to run on a CPU.
"""

from __future__ import annotations

import argparse
import math
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

VOCABULARY = 272
"""257 bytes and marks, padded."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    model = parser.add_argument_group("model")
    model.add_argument("--layers", type=int, default=2)
    model.add_argument("--hidden", type=int, default=64)
    model.add_argument("--heads", type=int, default=4)
    model.add_argument("--dropout", type=float, default=0.1)
    model.add_argument("--seq-length", type=int, default=64)
    model.add_argument("--recompute", action="store_true", help="activations of blocks are computed again in backwards")


class Windows(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """`samples` windows of the corpus at `prefix`.bin, spread over it; `first` tells data sets of one corpus apart."""

    def __init__(self, prefix: str, samples: int, seq_length: int, first: int = 0) -> None:
        self._tokens = np.memmap(f"{prefix}.bin", dtype=np.uint16, mode="r")
        self._samples, self._seq_length, self._first = samples, seq_length, first

    def __len__(self) -> int:
        return self._samples

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        start = (self._first + index) * 7919 % (len(self._tokens) - self._seq_length - 1)
        window = torch.from_numpy(self._tokens[start : start + self._seq_length + 1].astype(np.int64))
        return {"tokens": window[:-1], "labels": window[1:]}


class Embedding(nn.Module):
    """Tokens [batch, time] -> activations [batch, time, hidden]. Its weight is the output's, too."""

    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(VOCABULARY, args.hidden) * 0.02)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return functional.embedding(tokens, self.weight)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden @ self.weight.t()


class Positions(nn.Module):
    """Adds a learned vector for each place. [batch, time, hidden] -> the same."""

    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__()
        self.places = nn.Embedding(args.seq_length, args.hidden)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + self.places(torch.arange(hidden.shape[1], device=hidden.device))  # type: ignore[no-any-return]


class Block(nn.Module):
    """Attention and a perceptron, each behind a norm and beside a residual. [batch, time, hidden] -> the same."""

    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__()
        self.heads = args.heads
        self.norms = nn.ModuleList(nn.LayerNorm(args.hidden) for _ in range(2))
        self.mixed = nn.Linear(args.hidden, 3 * args.hidden)
        self.projection = nn.Linear(args.hidden, args.hidden)
        self.perceptron = nn.Sequential(
            nn.Linear(args.hidden, 4 * args.hidden), nn.GELU(), nn.Linear(4 * args.hidden, args.hidden)
        )
        self.dropout = nn.Dropout(args.dropout)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        hidden = hidden + self.dropout(self.attend(self.norms[0](hidden)))
        return hidden + self.dropout(self.perceptron(self.norms[1](hidden)))  # type: ignore[no-any-return]

    def attend(self, hidden: torch.Tensor) -> torch.Tensor:
        batch, time, width = hidden.shape
        parts = self.mixed(hidden).view(batch, time, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        scores = parts[0] @ parts[1].transpose(-1, -2) / math.sqrt(width // self.heads)
        later = torch.ones(time, time, dtype=torch.bool, device=hidden.device).triu(1)
        mixed = scores.masked_fill(later, float("-inf")).softmax(-1) @ parts[2]
        return self.projection(mixed.transpose(1, 2).reshape(batch, time, width))  # type: ignore[no-any-return]


def loss_of(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Mean cross entropy. logits [batch, time, vocabulary], labels [batch, time]."""
    return functional.cross_entropy(logits.float().flatten(0, 1), labels.flatten())


class Gpt(nn.Module):
    """Tokens, and labels if there are any -> loss, or logits [batch, time, vocabulary] without them."""

    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__()
        self.embedding = Embedding(args)
        self.positions = Positions(args)
        self.blocks = nn.ModuleList(Block(args) for _ in range(args.layers))
        self.norm = nn.LayerNorm(args.hidden)
        self.recompute = args.recompute
        self.temperature = 1.25
        self.seen: torch.Tensor
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        if self.training:
            self.seen = self.seen + tokens.numel()  # a new tensor, as running means of people's models often are
            self.temperature = 1.0 + 0.99 * (self.temperature - 1.0)  # annealed, as people do it, in an attribute
        hidden = self.positions(self.embedding(tokens))
        for block in self.blocks:
            again = self.recompute and self.training
            hidden = checkpoint(block, hidden, use_reentrant=False) if again else block(hidden)
        logits = self.embedding.logits(self.norm(hidden)) / self.temperature
        return logits if labels is None else loss_of(logits, labels)


def pipeline(args: argparse.Namespace) -> Any:
    """The same model, without its buffer, as a deepspeed.pipe.PipelineModule of `args.pipeline` stages."""
    from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec

    layers = [
        TiedLayerSpec("embedding", Embedding, args),
        LayerSpec(Positions, args),
        *(LayerSpec(Block, args) for _ in range(args.layers)),
        LayerSpec(nn.LayerNorm, args.hidden),
        TiedLayerSpec("embedding", Embedding, args, forward_fn=Embedding.logits),
    ]
    return PipelineModule(layers, num_stages=args.pipeline, loss_fn=loss_of, partition_method="uniform")
