"""The messages between agents (control connections), as msgspec structs.

Rules of this file: plain data, no pickle; every message but a JoinRequest carries the generation or ballot that
fences it. A message of an older generation is ignored by its receiver (invariant NO_STALE_WRITE).
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from .types import (
    NEVER,
    NO_STEP,
    Ballot,
    Checkpoint,
    Count,
    Digest,
    ExitCode,
    Failure,
    Generation,
    Holding,
    NodeId,
    Rank,
    Step,
    SwapPlan,
    Unrecoverable,
    World,
)


class Message(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Base of all control messages."""


class OfGeneration(Message, frozen=True):
    generation: Generation


class OfBallot(Message, frozen=True):
    ballot: Ballot


class Report(OfGeneration, frozen=True):
    """Member -> coordinator, on every change and at least once per heartbeat interval."""

    holdings: tuple[Holding, ...] = ()  # everything this node can serve
    ready: tuple[Rank, ...] = ()  # in training in this generation, or restored into it
    rehearsed: tuple[tuple[Count, Rank], ...] = ()  # what a spare has ready, each with its local slot
    finished: tuple[Rank, ...] = ()  # whose script has ended well
    store: str = ""  # where a worker of this node offers a fresh one for the *next* group build
    checkpoint: Checkpoint = Checkpoint()  # the newest one a rank of this node has finished saving
    stuck: str = ""  # why this generation cannot go on as it is although nobody is lost
    sent_at: float = NEVER  # by the sender's clock; for this and the next see contact.py
    heard: float = NEVER  # `sent_at` of the newest Status heard of that coordinator in this generation
    moved: Count = 0  # grows while processes of this node say that they get on
    able: bool = False  # this spare has rehearsed a host
    unable: str = ""  # why it could not take over all the same
    pruned: bool = False  # records of first steps of this node's ranks are dropped
    broken: tuple[NodeId, ...] = ()  # the other end of the training connection that is `stuck` (the sender: not known)
    took_steps: float = 0.0  # how many steps the newest mirroring known here took, of the ranks of this node
    most: Count = 0  # how many steps snapshots may be apart for want of memory on this node; 0: any
    wanted: tuple[Step, ...] = ()  # steps of which a rank of this node wants a snapshot, for a save to begin
    passed: tuple[Step, ...] = ()  # those announced of which a rank of this node can take none any more
    stored: Step = NO_STEP  # the newest step of this generation that this node has written to disk,
    stored_or_left: Step = NO_STEP  # or has left out
    read: bool = False  # what this node reads of an earlier job's files is in its memory, as far as it can be read


class Status(OfGeneration, frozen=True):
    """Coordinator -> every member, on every change and at least once per heartbeat interval."""

    committed: Step
    training: bool
    waiting: bool = False  # no spare is left for a loss: everyone holds what it has until a host joins
    sent_at: float = NEVER  # by the coordinator's clock; for this and the next see contact.py
    certain: float = NEVER  # `sent_at` of the receiver's newest report that a majority heard the coordinator after
    every: Count = 1  # how many steps snapshots are apart; for this and the next two see chain.py
    snapshots: tuple[Step, ...] = ()  # those after `committed` that no rule gives
    void: tuple[Step, ...] = ()  # those after `committed` that are no snapshots after all
    to_store: Step = NO_STEP  # the newest step of this generation that all are to write to disk
    stored: Step = NO_STEP  # the newest one that all have written


class Start(Message, frozen=True):
    """Coordinator -> every member: workers that begin their script may build their groups over `store`."""

    world: World
    store: str


class Rehearse(OfGeneration, frozen=True):
    local_slot: Count  # in which a spare's worker is to rehearse
    rank: Rank  # whose recording the node that runs it holds


class NodeFailed(OfGeneration, frozen=True):
    """Any member -> coordinator, and to `node` itself from whoever counts it as lost, or has a plan that does."""

    node: NodeId  # that is lost; perhaps the sender, before it leaves
    reason: str
    silent: bool = False  # for nothing but its silence


class Probe(OfGeneration, frozen=True):
    """Coordinator -> two members: does the host of `node`, which it does not hear, answer? And back, if it does."""

    node: NodeId
    answered: bool = False  # the sender's answer: its kernel does


class RankFailed(OfGeneration, frozen=True):
    failure: Failure  # of a process of the sender, which is well and replaces it


class GroupCalls(msgspec.Struct, frozen=True, array_like=True):
    key: str  # of the group in which a rank has issued these collectives in this generation (pairing.py)
    count: Count
    digest: Digest
    recent: tuple[Digest, ...]  # codes of the last ones, the newest last
    cuts: tuple[tuple[Step, Count, Digest], ...] = ()  # number and digest at the cuts of the newest steps


class Place(msgspec.Struct, frozen=True, array_like=True):
    """Where a rank's process is, as it wrote it down last (transport/flight_recorder.py)."""

    activity: Annotated[int, msgspec.Meta(ge=0, le=8)]  # of signatures.Activity
    call: str  # the training call that it is in, "" in the script's own code
    step: Step  # the last one that it has made
    longest_s: float = 0.0  # that it was in one of this activity before
    waits: bool = False  # for others, in `operation`
    operation: str = ""
    group: str = ""  # the key of the group in which it waits
    peer: Annotated[int, msgspec.Meta(ge=-1, le=1 << 24)] = -1  # the rank of a send or receive, -1 in a collective


class RankCalls(msgspec.Struct, frozen=True, array_like=True):
    rank: Rank
    groups: tuple[GroupCalls, ...]
    newcomer: bool = False  # it is unproven (context.py)
    again: bool = False  # the process before it was ended for what it had issued
    place: Place | None = None
    stack: tuple[str, ...] = ()  # the Python frames of its main thread, innermost first, if they were asked for


class Compare(OfGeneration, frozen=True):
    """The ranks of an active node are to say what they have issued, and where they are."""

    question: Count = 0  # comes back with the answer; 0: whether collectives pair (pairing.py), else stalls.py's
    stacks: tuple[Rank, ...] = ()  # whose Python stack is asked for, too


class Calls(OfGeneration, frozen=True):
    ranks: tuple[RankCalls, ...]  # the answer to Compare
    question: Count = 0


class Replace(OfGeneration, frozen=True):
    rank: Rank
    reason: str  # to end its process: it has issued other collectives than the others, or
    hung: bool = False  # it gets no further, and the others wait for it


class JoinRequest(Message, frozen=True):
    rack: str = ""  # of a host that is no member, and asks every member until a decided plan has it in its world


class Prepare(OfBallot, frozen=True):
    lost: tuple[NodeId, ...]  # as the proposer believes, which asks members to promise its ballot
    silent: tuple[NodeId, ...] = ()  # those of them that are for nothing but their silence


class Promise(OfBallot, frozen=True):
    """Member -> proposer, after the member has fenced the old generation."""

    accepted: tuple[Ballot, SwapPlan] | None  # the plan it has accepted for that generation
    holdings: tuple[Holding, ...]
    store: str
    failed: tuple[Failure, ...] = ()  # ranks of this node whose process is gone
    committed: Step = NO_STEP  # the newest step it knows to be committed, which no plan since has undone
    training: bool = False  # it knows that training has begun
    checkpoint: Checkpoint = Checkpoint()
    covers: tuple[tuple[Rank, bool], ...] = ()  # a spare's rehearsals, and whether each is done


class Propose(OfBallot, frozen=True):
    plan: SwapPlan


class Accepted(OfBallot, frozen=True):
    """Member -> proposer."""


class Refused(OfBallot, frozen=True):
    promised: Ballot  # a larger one


class Decided(Message, frozen=True):
    plan: SwapPlan  # that a majority has accepted; sent again to whoever is in an older generation
    ballot: Ballot


class Verdict(OfGeneration, frozen=True):
    exit_code: ExitCode  # of every process
    reason: str
    cause: Unrecoverable | None = None  # None for an orderly end


class Goodbye(OfGeneration, frozen=True):
    verdict: Verdict | None = None  # for hosts that are about to join: the sender has left and will not be back


AnyMessage = (
    Report | Status | Start | Rehearse | NodeFailed | Probe | RankFailed | Compare | Calls | Replace | JoinRequest
    | Prepare | Promise | Propose | Accepted | Refused | Decided | Verdict | Goodbye
)  # fmt: skip


def generation_of(message: AnyMessage) -> Generation:
    match message:
        case OfGeneration():
            return message.generation
        case OfBallot():
            return message.ballot.generation - 1
        case Start(world) | Decided(SwapPlan(world)):
            return world.generation
    return 0
