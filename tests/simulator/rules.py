"""Faults of the network as rules: each says of one attempt to cross from node to node whether it passes.

Rules of this file: a rule answers PASS, DROP, TWICE or `late(seconds)`, and what several say is combined (one DROP
drops); a rule counts how often it had an effect. What a DROP means is the transport's: see network.py.
"""

from __future__ import annotations

import math
import random
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from deadpool_plugin.core.types import NodeId


class Passage(NamedTuple):
    """How often something arrives, and how much later."""

    copies: int = 1
    delay_s: float = 0.0


PASS = Passage()
DROP = Passage(copies=0)
TWICE = Passage(copies=2)


def late(seconds: float) -> Passage:
    return Passage(delay_s=seconds)


@dataclass
class Rule:
    """Concerns crossings from `sources` to `targets` until `until`. `kind` is its name in summaries."""

    kind: str
    sources: Collection[NodeId]
    targets: Collection[NodeId]
    until: float
    since: float = 0.0
    effects: int = 0

    def judge(self, source: NodeId, target: NodeId, rng: random.Random) -> Passage:
        if source not in self.sources or target not in self.targets:
            return PASS
        passage = self.answer(rng)
        self.effects += passage != PASS
        return passage

    def answer(self, rng: random.Random) -> Passage:
        raise NotImplementedError


@dataclass
class Cut(Rule):
    """Nothing passes: two of these, one each way, are a two-way partition."""

    def answer(self, rng: random.Random) -> Passage:
        return DROP


@dataclass
class Loss(Rule):
    """Every attempt is lost with this probability."""

    probability: float = 0.3

    def answer(self, rng: random.Random) -> Passage:
        return DROP if rng.random() < self.probability else PASS


@dataclass
class Delay(Rule):
    """Every crossing takes up to `delay_s` longer."""

    delay_s: float = 1.0

    def answer(self, rng: random.Random) -> Passage:
        return late(rng.random() * self.delay_s)


@dataclass
class Duplicate(Rule):
    """A message arrives twice with this probability, the second time right behind the first."""

    probability: float = 0.3

    def answer(self, rng: random.Random) -> Passage:
        return TWICE if rng.random() < self.probability else PASS


class Rules:
    """The rules of a network. `in_force`: all of them, or some that are over."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self.in_force: list[Rule] = []

    def add(self, now: float, rules: Sequence[Rule]) -> None:
        for rule in rules:
            rule.since = now
        self.in_force = [rule for rule in self.in_force if now < rule.until] + list(rules)

    def judge(self, now: float, source: NodeId, target: NodeId) -> Passage:
        passage = PASS
        for rule in self.in_force:
            answer = rule.judge(source, target, self._rng) if now < rule.until else PASS
            if answer is not PASS:
                passage = Passage(min(passage.copies * answer.copies, 2), passage.delay_s + answer.delay_s)
        return passage

    def is_cut(self, now: float, source: NodeId, target: NodeId, for_s: float = 0.0, but: str = "") -> bool:
        """Return whether nothing at all passes now, nor has for `for_s`, by rules of any kind `but` one."""
        for rule in self.in_force:
            if (
                isinstance(rule, Cut)
                and rule.kind != but
                and rule.since + for_s <= now < rule.until
                and source in rule.sources
                and target in rule.targets
            ):
                return True
        return False

    def clear(self) -> None:
        """The faults stop, but for what is for good."""
        self.in_force = [rule for rule in self.in_force if rule.until == math.inf]
