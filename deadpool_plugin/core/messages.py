"""The messages between agents (control connections), as msgspec structs.

Rules of this file: plain data, no pickle; every message but a JoinRequest carries the generation or ballot that
fences it. A message of an older generation is ignored by its receiver (invariant NO_STALE_WRITE).
"""

from __future__ import annotations

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


class Report(Message, frozen=True):
    """Member -> coordinator, on every change and at least once per heartbeat interval.

    `holdings`: everything this node can serve. `ready`: ranks that are in (or restored into) training in this
    generation. `rehearsed`: (local slot, rank) pairs a spare has ready. `finished`: ranks whose script has ended
    well. `store`: address of a fresh store a worker of this node offers for the *next* group build ("" if none).
    `checkpoint`: the newest one a rank of this node has finished saving. `stuck`: why this generation cannot go on as
    it is although nobody is lost, "" if it can. `sent_at`: now, by the sender's clock. `heard`: `sent_at` of the newest
    Status this node has heard of that coordinator in this generation (self_fencing.py has both). `moved`: grows while
    processes of this node say that they get on. `able`: this spare has rehearsed what it was told to; `unable`: why it
    could not take over all the same, "" if it could. `pruned`: records of first steps of this node's ranks are dropped.
    `broken`: what is `stuck` is a training connection, whose other end is this node (the sender itself if it is not
    known); () if it is something else.
    """

    generation: Generation
    holdings: tuple[Holding, ...] = ()
    ready: tuple[Rank, ...] = ()
    rehearsed: tuple[tuple[Count, Rank], ...] = ()
    finished: tuple[Rank, ...] = ()
    store: str = ""
    checkpoint: Checkpoint = Checkpoint()
    stuck: str = ""
    sent_at: float = NEVER
    heard: float = NEVER
    moved: Count = 0
    able: bool = False
    unable: str = ""
    pruned: bool = False
    broken: tuple[NodeId, ...] = ()


class Status(Message, frozen=True):
    """Coordinator -> every member, on every change and at least once per heartbeat interval.

    `sent_at`: now, by the coordinator's clock. `certain`: `sent_at` of the receiver's newest report after which a
    majority has heard of the coordinator (see self_fencing.py for both).
    """

    generation: Generation
    committed: Step
    training: bool
    waiting: bool = False
    """No spare is left for a loss: everyone holds what it has until a host joins."""
    sent_at: float = NEVER
    certain: float = NEVER


class Start(Message, frozen=True):
    """Coordinator -> every member: workers that begin their script (in the first generation, and after a loss before
    training) may build their groups over `store`."""

    world: World
    store: str


class Rehearse(Message, frozen=True):
    """Coordinator -> spare: your worker in `local_slot` rehearses `rank`, whose recording its node holds."""

    generation: Generation
    local_slot: Count
    rank: Rank


class NodeFailed(Message, frozen=True):
    """Any member -> coordinator: `node` (perhaps the sender itself, before it leaves) is lost, and why. To `node`
    itself from whoever counts it as lost, or has a plan of `generation` that does.

    `silent`: for nothing but its silence."""

    generation: Generation
    node: NodeId
    reason: str
    silent: bool = False


class RankFailed(Message, frozen=True):
    """Member -> coordinator: the process of a rank of this node is gone; the node itself is well and replaces it."""

    generation: Generation
    failure: Failure


class GroupCalls(msgspec.Struct, frozen=True, array_like=True):
    """The collectives of a rank in a group in this generation: their number, their digest, the codes of the last
    ones, the newest last; and number and digest at the cuts of its newest steps (pairing.py)."""

    key: str
    count: Count
    digest: Digest
    recent: tuple[Digest, ...]
    cuts: tuple[tuple[Step, Count, Digest], ...] = ()


class RankCalls(msgspec.Struct, frozen=True, array_like=True):
    """The collectives of one rank, group by group.

    `newcomer`: it is unproven (context.py). `again`: the process before it was ended
    for what it had issued."""

    rank: Rank
    groups: tuple[GroupCalls, ...]
    newcomer: bool = False
    again: bool = False


class Compare(Message, frozen=True):
    """Coordinator -> every active node: say what your ranks have issued."""

    generation: Generation


class Calls(Message, frozen=True):
    """The answer to Compare."""

    generation: Generation
    ranks: tuple[RankCalls, ...]


class Replace(Message, frozen=True):
    """Coordinator -> the node of `rank`: its process has issued other collectives than the others; end it."""

    generation: Generation
    rank: Rank
    reason: str


class JoinRequest(Message, frozen=True):
    """A host that is no member -> every member, until a decided plan has it in its world. `rack`: "" if it has none."""

    rack: str = ""


class Prepare(Message, frozen=True):
    """Proposer -> members: promise this ballot; `lost` is what the proposer believes lost, `silent` those of them for
    nothing but their silence."""

    ballot: Ballot
    lost: tuple[NodeId, ...]
    silent: tuple[NodeId, ...] = ()


class Promise(Message, frozen=True):
    """Member -> proposer. `accepted` is the plan this member has accepted for that generation, if any, with its
    ballot; `holdings` and `store` are as in Report, taken after the member has fenced the old generation. `failed`: the
    ranks of this node whose process is gone. `committed`: the newest step this member knows to be committed, which no
    plan since has undone; `training`: whether it knows that training has begun. `able`: it stands by and has
    rehearsed some rank."""

    ballot: Ballot
    accepted: tuple[Ballot, SwapPlan] | None
    holdings: tuple[Holding, ...]
    store: str
    failed: tuple[Failure, ...] = ()
    committed: Step = NO_STEP
    training: bool = False
    checkpoint: Checkpoint = Checkpoint()
    able: bool = False


class Propose(Message, frozen=True):
    ballot: Ballot
    plan: SwapPlan


class Accepted(Message, frozen=True):
    ballot: Ballot


class Refused(Message, frozen=True):
    """Member -> proposer: a larger ballot was promised already."""

    ballot: Ballot
    promised: Ballot


class Decided(Message, frozen=True):
    """Proposer -> all: the plan is durable at a majority, by `ballot`; act on it. Sent again to whoever is an older
    generation's."""

    plan: SwapPlan
    ballot: Ballot


class Verdict(Message, frozen=True):
    """Coordinator -> all: the job ends here. `exit_code` for every process; `cause` is None for an orderly end."""

    generation: Generation
    exit_code: ExitCode
    reason: str
    cause: Unrecoverable | None = None


class Goodbye(Message, frozen=True):
    """The sender has left and will not be back. Members have its `verdict`, if it leaves by one, from before; a host
    that is about to join has it from here."""

    generation: Generation
    verdict: Verdict | None = None


AnyMessage = (
    Report | Status | Start | Rehearse | NodeFailed | RankFailed | Compare | Calls | Replace | JoinRequest | Prepare
    | Promise | Propose | Accepted | Refused | Decided | Verdict | Goodbye
)  # fmt: skip


def generation_of(message: AnyMessage) -> Generation:
    """The generation `message` was sent in."""
    match message:
        case Report() | Status():  # nearly all are
            return message.generation
        case Decided():
            return message.plan.world.generation
        case JoinRequest():
            return 0
        case Prepare() | Promise() | Propose() | Accepted() | Refused():
            return message.ballot.generation - 1
        case Start():
            return message.world.generation
    return message.generation
