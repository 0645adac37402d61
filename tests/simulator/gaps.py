"""Why the simulation does not meet some (state, event) pairs: those that cannot be, and those that are rare.

Rules of this file: the first rule that fits a pair explains it; `test_coverage.py` holds that nothing of CANNOT ever
happens, and that nothing is missing from a long campaign that no rule explains.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from simulator.coverage import EVENTS, STATES

ANY = None


class Rule(NamedTuple):
    """Concerns these events in states of these phases and parts (ANY: all of them)."""

    events: str | None
    phases: str | None
    parts: tuple[str, ...] | None
    why: str

    def fits(self, state: str, event: str) -> bool:
        phase, _, part = state.partition(" ")
        return (
            (self.events is ANY or event in self.events.split())
            and (self.phases is ANY or phase in self.phases.split())
            and (self.parts is ANY or part in self.parts)
        )


OWN_RANKS = (
    "WorkerReady WorkerRestored WorkerFinished WorkerLost WorkerFailed WorkerMoved CheckpointSaved Wanted Passed"
)
PARKING = "SpareDropped SpareFull SpareShort"
OWN_PROCESSES = f"{OWN_RANKS} StoreOffered StoreLost SpareRehearsed SpareFailed {PARKING} HoldingsDropped"
TO_PROPOSERS = "Promise Accepted Refused Claimed"
OUTSIDE = "OUTSIDE JOINING"

CANNOT = (
    Rule(ANY, "STARTING RESTORING TRAINING", ("proposing",),
         "who proposes has promised itself, and so fenced its generation, in the same step"),
    Rule("HostAnswered Probe", OUTSIDE, ANY, "before a node is in a world it waits for nobody's word"),
    Rule("WorldFormed Joining", "JOINING STARTING RESTORING TRAINING FENCED WAITING", ANY,
         "a node meets the others once"),
    Rule("FilesRead", ANY, ANY, "no simulated job is resumed (tests/unit/core/test_resuming.py)"),
    Rule("StepWritten", ANY, ANY, "no simulated host has a disk (tests/unit/core/test_storing.py)"),
    Rule(OWN_PROCESSES, OUTSIDE, ANY, "before a node is in a world it has no processes that it could speak of"),
    Rule(TO_PROPOSERS, OUTSIDE, ANY, "it has asked nobody for anything yet"),
    Rule("SnapshotHeld", "JOINING", ANY, "nobody mirrors to a node before the generation has begun there"),
    Rule(OWN_RANKS, ANY, ("standing by",), "a spare runs no rank"),
    Rule(f"SpareRehearsed SpareFailed {PARKING}", ANY, ("member",), "who runs ranks rehearses none"),
    Rule("SpareUnable RecordsDropped", ANY, ANY, "simulated hosts have memory enough, for call records too"),
    Rule("WorkerReady", "RESTORING", ANY, "scripts begin in generations that begin at the top"),
    Rule("WorkerReady WorkerRestored", "TRAINING", ANY, "a generation is in training when all ranks have said so"),
    Rule("WorkerRestored WorkerFinished CheckpointSaved", "STARTING", ANY,
         "nothing is to be restored, and the gate lets no rank past its second step before all are in training"),
    Rule("HoldingsDropped", "STARTING", ANY, "nothing is held that a later world could drop"),
    Rule("Rehearse", "TRAINING", ("leading",), "spares rehearse"),
    Rule("Replace", OUTSIDE, ANY, "before a node is in a world it runs no rank"),
    Rule("Replace", ANY, ("standing by",), "a spare runs no rank"),
    Rule("Calls CallsRead ConnectionBroke", OUTSIDE, ANY, "before a node is in a world it runs no rank"),
    Rule("Compare", "OUTSIDE", ANY, "before a node is in a world it runs no rank"),
    Rule("ConnectionBroke CallsRead", ANY, ("standing by",), "a spare runs no rank"),
    Rule("SpareCommandEnded", OUTSIDE, ANY, "before a node is in a world it coordinates nobody"),
)  # fmt: skip

RARE = (
    Rule(ANY, "FENCED WAITING", ("leading",),
         "the moment between finding out that one coordinates and asking, or between two rounds"),
    Rule(ANY, "WAITING", ANY,
         "no spare is left, which ends most jobs: what takes a further loss, or a spare, then is met in FENCED"),
    Rule(TO_PROPOSERS, ANY, ANY,
         "an answer to a proposer that has been overtaken by another one, or is no coordinator any more"),
    Rule("Propose", ANY, ANY, "without the promise before it: said again to who has been told of the decision already"),
    Rule("Decided", ANY, ANY, "without having been asked: who was thought lost, or was cut off while others agreed"),
    Rule("Goodbye Verdict LinkLost NodeFailed NodeGivenUp StopRequested", ANY, ANY,
         "an end at a moment that lasts milliseconds of many simulated seconds, and which any state takes alike"),
    Rule("ConnectionBroke Compare CallsRead Calls Replace", ANY, ANY,
         "a connection that breaks, or calls that are compared, in a moment between a fence and a plan"),
    Rule("SpareCommandEnded", ANY, ("standing by", "member"),
         "a node that is the coordinator no more when its command ends"),
    Rule("Wanted", "STARTING RESTORING FENCED", ANY,
         "a rank that comes to a save before all are in training, or just as the fence falls"),
    Rule("Passed", ANY, ANY, "only ranks whose collectives do not pair go on from a step at which another one saves"),
    Rule("Rehearse", ANY, ANY, "an order that comes later than the loss that made another plan of its spare"),
    Rule("Start", ANY, ANY, "the word of a coordinator that was lost before its order was heard by all"),
    Rule("Report RankFailed", ANY, ANY, "said to a node that was the coordinator for the sender only"),
    Rule("Status", ANY, ANY, "of a coordinator that does not know yet that it is lost for the receiver"),
    Rule("Prepare", ANY, ANY, "two nodes that both take themselves for the coordinator"),
    Rule("SnapshotHeld HoldingsDropped CheckpointSaved", ANY, ANY, "what was written just before the fence fell"),
    Rule("SpareRehearsed SpareFailed StoreOffered StoreLost", ANY, ANY,
         "a spare begins to rehearse when all are in training, and is a spare still when that comes to an end"),
    Rule(OWN_RANKS, ANY, ANY, "what a process says, or its end, just as the fence falls"),
    Rule("SpareDropped", ANY, ANY, "more was lost than `copies` cover, and a spare is left that has followed too far"),
    Rule(PARKING, "STARTING FENCED", ANY, "a spare rehearses, and looks at its memory, while all are in training"),
    Rule("JoinRequest", "JOINING", ANY, "it has been taken in, which the next to join has heard before it"),
    Rule("JoinRequest SnapshotHeld Ticked", "OUTSIDE", ANY, "a node that forms its world much later than the others"),
)  # fmt: skip


def first_that_fits(rules: Iterable[Rule], state: str, event: str) -> str:
    """Why, "" if none of them says."""
    return next((rule.why for rule in rules if rule.fits(state, event)), "")


def all_pairs() -> list[tuple[str, str]]:
    return [(state, event) for state in STATES for event in EVENTS if event != "Received"]
