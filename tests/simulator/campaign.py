"""Many seeds in several processes, and what they came to.

Rules of this file: a seed's outcome depends on nothing but the seed and the ranges, so it does not matter which process
runs it; what is counted is counted here and nowhere else.
"""

from __future__ import annotations

import multiprocessing
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from .run import Outcome, run
from .schedule import Ranges, scenario

CHUNK_MAX = 8
FAULTS_MIN = 3
"""A seed with fewer effective faults is counted as a thin one."""


@dataclass
class Summary:
    """Over all seeds so far. `findings` are the outcomes that broke an invariant."""

    seeds: int = 0
    thin: int = 0
    events: int = 0
    steps: int = 0
    swaps: int = 0
    faults: Counter[str] = field(default_factory=Counter)
    verdicts: Counter[str] = field(default_factory=Counter)
    pairs: Counter[str] = field(default_factory=Counter)
    findings: list[Outcome] = field(default_factory=list)

    def add(self, outcome: Outcome) -> None:
        self.seeds += 1
        self.thin += sum(outcome.faults.values()) < FAULTS_MIN
        self.events += outcome.events
        self.steps += outcome.steps
        self.swaps += outcome.swaps
        self.faults.update(outcome.faults)
        self.verdicts[outcome.verdict] += 1
        self.pairs.update(outcome.pairs)
        if outcome.finding is not None:
            self.findings.append(outcome)
            self.findings.sort(key=lambda one: one.seed)

    def merge(self, other: Summary) -> None:
        """Count the other's seeds, too."""
        for name in ("seeds", "thin", "events", "steps", "swaps"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.faults.update(other.faults)
        self.verdicts.update(other.verdicts)
        self.pairs.update(other.pairs)
        self.findings += other.findings


def outcome_of(seed: int, ranges: Ranges, fixed: Mapping[str, Any]) -> Outcome:
    return run(scenario(seed, ranges, fixed))


def outcomes(
    seeds: range, ranges: Ranges = Ranges(), fixed: Mapping[str, Any] | None = None, jobs: int = 1
) -> Iterator[Outcome]:
    """The outcome of every seed, in any order."""
    one = partial(outcome_of, ranges=ranges, fixed=fixed or {})
    if jobs == 1:
        yield from map(one, seeds)
        return
    with multiprocessing.get_context("fork").Pool(jobs) as pool:
        chunk = min(CHUNK_MAX, max(1, len(seeds) // (8 * jobs)))
        yield from pool.imap_unordered(one, seeds, chunksize=chunk)


def campaign(
    seeds: range,
    ranges: Ranges = Ranges(),
    fixed: Mapping[str, Any] | None = None,
    jobs: int = 1,
    progress: Callable[[Summary], None] = lambda summary: None,
    until_broken: bool = False,
) -> Summary:
    """Run `seeds`, or until one breaks an invariant; `progress` is told after each."""
    summary = Summary()
    for outcome in outcomes(seeds, ranges, fixed, jobs):
        summary.add(outcome)
        progress(summary)
        if until_broken and summary.findings:
            break
    return summary
