"""One seed from its start to its verdict: a safety phase with faults, then a liveness phase without.

Rules of this file: whatever goes wrong becomes a finding, a sentence with the invariant's name; the run itself never
raises.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import sys
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator

import msgspec

from deadpool_plugin.core.types import EXIT_FENCED, EXIT_SIGNALLED, NO_STEP

from .cluster import LONG_PAST, Cluster
from .coverage import named, state_of
from .loop import simulated
from .network import WAITING_MAX as QUEUE_MAX, faked
from .oracle import is_majority
from .schedule import Scenario
from .transcript import Transcript
from .violation import Violation

EVENTS_MAX = 100_000
"""For each host that a job begins with: an end that takes so many is none."""
LOOK_EVERY = 2_000
SAFETY_S = 250.0
"""Faults that wait for a step that does not come by then do not strike."""


class Finding(msgspec.Struct, frozen=True):
    """A violation: the invariant's name, a sentence, and when."""

    invariant: str
    sentence: str
    at_s: float


class Outcome(msgspec.Struct, frozen=True):
    """One run. `faults`: effective ones by kind; `verdict`: how the job ended; `pairs`: covered (state, event)."""

    seed: int
    nodes: int
    events: int
    simulated_s: float
    steps: int
    swaps: int
    faults: dict[str, int]
    verdict: str
    pairs: dict[str, int]
    finding: Finding | None = None


def run(scenario: Scenario, transcript: Transcript | None = None) -> Outcome:
    """Simulate `scenario`."""
    with simulation() as clusters:
        clusters.append(Cluster(scenario, transcript))
        return _run(clusters[0])


@contextlib.contextmanager
def simulation() -> Iterator[list[Cluster]]:
    """Clusters run meanwhile, and those in the list are forgotten at the end.

    A cluster is one knot that falls apart as a whole: looking for cycles while it runs finds none and takes a quarter
    of the time of 256 nodes. What is parked on its hosts ends with it, and what Python says of that is nobody's.
    """
    was_enabled, hook = gc.isenabled(), sys.unraisablehook
    clusters: list[Cluster] = []
    gc.disable()
    logging.disable()
    try:
        yield clusters
    finally:
        with simulated(), warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # coroutines that nobody comes to await
            while clusters:
                _forget(clusters.pop())
        sys.unraisablehook = lambda unraisable: None
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)
            gc.collect(0)
        sys.unraisablehook = hook
        logging.disable(logging.NOTSET)
        if was_enabled:
            gc.enable()


def _forget(cluster: Cluster) -> None:
    for node in cluster.nodes.values():
        node.loop.forget()


def _run(cluster: Cluster) -> Outcome:
    finding = None
    try:
        play(cluster)
    except Violation as violation:
        finding = Finding(violation.invariant, violation.sentence, cluster.timeline.now)
    except Exception as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        place = f"in {where.name}, {where.filename.rpartition('/')[2]}:{where.lineno}"
        finding = Finding("NO_ERROR", f"{type(error).__name__}: {error} ({place})", cluster.timeline.now)
    if finding is not None:
        cluster.note(f"{finding.invariant}: {finding.sentence}")
    return _outcome(cluster, finding)


def play(cluster: Cluster) -> None:
    """Let it go to its end. Raises: Violation, and what an agent has failed with."""
    with faked():
        _play(cluster)


def _play(cluster: Cluster) -> None:
    timeline, strikes = cluster.timeline, cluster.strikes
    while not (strikes.over or cluster.is_over or timeline.is_past(SAFETY_S)):
        timeline.run(SAFETY_S, LOOK_EVERY)
        _look(cluster)
    cluster.note("faults stop")
    strikes.stop()
    cluster.arrivals.supply_hosts()
    deadline = timeline.now + liveness_s(cluster)
    while not cluster.is_over:
        if timeline.is_past(deadline):
            raise Violation("LIVENESS", _why_not_live(cluster, deadline))
        timeline.halted = False
        timeline.run(deadline, LOOK_EVERY)
        _look(cluster)
    _judge_the_end(cluster)


def liveness_s(cluster: Cluster) -> float:
    """Once faults have stopped everybody has ended within this time: each fault may have left one loss nobody has
    noticed, which costs a silence or a stall, two phases and a newcomer's long past; the job begins and trains once
    more."""
    timing, scenario = cluster.timing, cluster.scenario
    notice = max(timing.silent_after_s, 2 * timing.start_timeout_s)  # of hangs that come back, the last limit included
    each = notice + 2 * timing.phase_timeout_s + LONG_PAST * timing.start_timeout_s
    train = 10 * scenario.steps * (scenario.compute_s + scenario.latency_s * 4)
    return timing.start_timeout_s + each * (len(scenario.faults) + 2) + train


def _look(cluster: Cluster) -> None:
    """Check what need not be checked after every event: messages that wait for a world, and whether there is an end."""
    if cluster.broken is not None:
        raise cluster.broken
    early = max((len(node.controller._early) for node in cluster.nodes.values() if node.agent is not None), default=0)
    if early > QUEUE_MAX:
        raise Violation("BOUNDED", f"{early} messages wait before a world is known")
    if cluster.timeline.events > EVENTS_MAX * len(cluster.world.members):
        raise Violation("LIVENESS", f"no end after {cluster.timeline.events} events")


def _why_not_live(cluster: Cluster, deadline: float) -> str:
    states = "; ".join(
        f"node {node.number} {state_of(node.controller)} in generation {node.controller.generation}, "
        f"committed {node.controller._ctx.committed}"
        for node in cluster.nodes.values()
        if node.up
    )
    return f"{cluster.timeline.now - deadline + liveness_s(cluster):.0f} s after the last fault: {states}"


def _judge_the_end(cluster: Cluster) -> None:
    """Everybody is told the same end, or that a person wants one; of the members, whoever ended well has trained to the
    end (a host that was replaced, or has lost its ranks, may hear of it before it hears of that)."""
    exits = {node.number: node.exit[0] for node in cluster.nodes.values() if node.exit is not None}
    for node in cluster.nodes.values():
        if exits.get(node.number) == 0 and node.number in cluster.newest_world.members:
            own = node.controller.world.ranks_of(node.number) if node.controller.world else ()
            for rank in set(own) & set(cluster.newest_world.ranks_of(node.number)):
                generation, step, state = node.ends.get(rank, (-1, NO_STEP, None))
                if (generation, step) != (node.controller.generation, cluster.last_step):
                    raise Violation("BIT_EXACT", f"the job ended well, and rank {rank} had not made its last step")
                if state is None or state.numbers != cluster.reference.state(rank, step).numbers:
                    raise Violation("BIT_EXACT", f"the job ended well, and rank {rank} has made its last step {state}")
    world, blamed = cluster.newest_world, cluster.blows.blamed
    codes = {exits[node] for node in world.members if node in exits and exits[node] <= EXIT_SIGNALLED} - {EXIT_FENCED}
    alone = {node for node in world.members if exits.get(node) not in (0, EXIT_FENCED)}
    could_decide = is_majority(world, set(world.members) - blamed, cluster.policy.witness)
    if len(codes) > 1 and could_decide and not blamed >= alone:
        raise Violation("RIGHT_VERDICT", f"one job ended in several ways: {exits}")


def _outcome(cluster: Cluster, finding: Finding | None) -> Outcome:
    exits = Counter(node.exit[0] for node in cluster.nodes.values() if node.exit is not None)
    return Outcome(
        seed=cluster.scenario.seed,
        nodes=len(cluster.world.members),
        events=cluster.timeline.events,
        simulated_s=cluster.timeline.now,
        steps=max(cluster.checkers.committed.values(), default=0),
        swaps=len(cluster.plans),
        faults=dict(cluster.strikes.effects),
        verdict=_verdict(exits),
        pairs={named(state, kind.__name__): count for (state, kind), count in cluster.coverage.pairs.items()},
        finding=finding,
    )


def _verdict(exits: Counter[int]) -> str:
    if exits[0]:
        return "finished"
    others = sorted(set(exits) - {EXIT_FENCED})
    return f"stopped with {others[0]}" if others else "everybody fenced"
