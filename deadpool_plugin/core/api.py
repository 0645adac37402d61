"""The inputs of the controller (past tense) and its actions (imperative).

What workers say that is an input as it is stands in local.py.
"""

from __future__ import annotations

import msgspec

from .events import Event
from .messages import AnyMessage, RankCalls, Verdict
from .types import NO_STEP, Generation, Holding, NodeId, Rank, Step, SwapPlan, World


class Input(msgspec.Struct, frozen=True):
    """Base of all that happens."""


class WorldFormed(Input, frozen=True):
    world: World  # of generation 0: rendezvous is over, control connections to every member are up
    resumes: Step = NO_STEP  # the step of an earlier job that this one goes on from, whose snapshots come as holdings


class Joining(Input, frozen=True):
    members: tuple[NodeId, ...]  # to which this host is linked: it asks their job to take it in, with no WorldFormed
    rack: str = ""  # "" if that matters to nobody


class FilesRead(Input, frozen=True):
    """The snapshots of the step from which the job is resumed are held, as far as this node has and can read them."""


class StepWritten(Input, frozen=True):
    step: Step  # all that this node holds of it is on disk
    generation: Generation
    well: bool = True  # else it could not be written, and is left out


class Ticked(Input, frozen=True):
    """Time passed (at least four times per heartbeat interval)."""


class Received(Input, frozen=True):
    sender: NodeId
    message: AnyMessage


class LinkLost(Input, frozen=True):
    node: NodeId  # to which the control connection ended without a Goodbye
    reason: str
    silent: bool = False  # given up, for nobody answered any more: no more evidence than any silence
    still: bool = False  # that was said before; the node was asked for a connection since, and did not answer


class HostAnswered(Input, frozen=True):
    node: NodeId  # whose kernel has answered, in which its agent need have no part: an AskHost has found it
    ago_s: float = 0.0  # so long ago at most


class StoreOffered(Input, frozen=True):
    address: str  # of a fresh one for the next group build
    local_slot: int = 0  # whose process hosts it, in place of the one before
    stand_in: bool = False  # it only rehearses its rank so far: its store is the last choice


class StoreLost(Input, frozen=True):
    address: str  # where a process of this node that is gone hosted one


class WorkerReady(Input, frozen=True):
    rank: Rank  # at its first call, in a generation that began from the top; its arena is in place


class SnapshotHeld(Input, frozen=True):
    """A snapshot is complete and verified in this node's arena; of older ones of its rank it has `before` at most."""

    holding: Holding
    generation: Generation  # in which it was written, never one that this node is not in yet (mirror/store.py)
    before: Step = NO_STEP
    took_steps: float = 0.0  # as in Report; 0 where this is a mirror, as is the next one
    most: int = 0


class HoldingsDropped(Input, frozen=True):
    rank: Rank
    newer_than: Step  # held here no more: a swap rolled back, or a slot is being rewritten


class WorkerLost(Input, frozen=True):
    rank: Rank  # whose process died by a signal, stands still or cannot be brought back; this node is well
    reason: str


class WorkerFailed(Input, frozen=True):
    rank: Rank  # whose script ended by itself with an error
    exit_code: int  # > 0
    reason: str


class NodeGivenUp(Input, frozen=True):
    reason: str  # its launcher ended it, its supervisor is gone, or it was told to end


class CallsRead(Input, frozen=True):
    generation: Generation
    ranks: tuple[RankCalls, ...]  # what those of this node had issued in it when ReadCalls was carried out
    question: int = 0  # as in ReadCalls


class SpareRehearsed(Input, frozen=True):
    """A process here has rehearsed the rank, has gone through its steps so far, and is parked."""

    local_slot: int
    rank: Rank


class SpareFailed(Input, frozen=True):
    local_slot: int
    rank: Rank
    reason: str


class SpareUnable(Input, frozen=True):
    reason: str  # why the rehearsal lives on but cannot take over; another attempt would change nothing


class SpareDropped(Input, frozen=True):
    """A rehearsal is over although nothing has failed: it has followed further than the world went back."""

    local_slot: int
    rank: Rank


class SpareFull(Input, frozen=True):
    """No memory is left for a rehearsal that was ordered, and that has not begun."""

    local_slot: int
    rank: Rank


class SpareShort(Input, frozen=True):
    """The memory of a spare runs short: a host is to be given up, but not the only one that is covered."""


class RecordsDropped(Input, frozen=True):
    """Records of the first steps of a rank of this node are dropped: only who has followed it can take it over."""


class StopRequested(Input, frozen=True):
    reason: str  # of a person or the launcher, for the whole job to end
    exit_code: int


class Claimed(Input, frozen=True):
    plan: SwapPlan  # which the witness has for that generation, in answer to a Claim or Look


class SpareCommandEnded(Input, frozen=True):
    """A RunSpareCommand is over: its command has ended, or was ended for its time-out."""

    failed: int  # of its hosts none is to come for so many
    said: str  # why it has failed; else its last line of output


class Action(msgspec.Struct, frozen=True):
    """Base of all that the agent is to do."""


class Send(Action, frozen=True):
    to: NodeId
    message: AnyMessage


class AskHost(Action, frozen=True):
    """Find out whether the kernel of a late node still answers: feed HostAnswered if it does. Nobody else is told."""

    node: NodeId


class StartWorkers(Action, frozen=True):
    world: World
    store: str  # over which the workers of this node may build their groups


class StartRehearsal(Action, frozen=True):
    local_slot: int
    rank: Rank
    source: NodeId


class EndRehearsal(Action, frozen=True):
    """End a rehearsal, done or under way, to make room."""

    local_slot: int
    rank: Rank


class Commit(Action, frozen=True):
    step: Step  # every rank's snapshot of it is safe: open the gate for workers and mirrors; spares follow to it
    snapshots: tuple[Step, ...] = ()  # as in Status, for workers; so is the next one
    void: tuple[Step, ...] = ()


class Announce(Action, frozen=True):
    """Tell workers what Status says of snapshots; nothing more was committed."""

    snapshots: tuple[Step, ...]
    void: tuple[Step, ...]


class WriteStep(Action, frozen=True):
    step: Step  # committed: write what is held of it to disk


class StepStored(Action, frozen=True):
    step: Step  # every node has written it to disk: files of older ones may go


class AbortWorkers(Action, frozen=True):
    generation: Generation  # fence the one before: interrupt the workers, stop mirroring, accept no older byte


class ReadCalls(Action, frozen=True):
    """Read what our ranks have issued in `generation`, and where they are, without asking their processes; have those
    of `stacks` written by a signal's handler. Feed CallsRead, within seconds whatever their state is."""

    generation: Generation
    question: int = 0
    stacks: tuple[Rank, ...] = ()


class LookAround(Action, frozen=True):
    """Find out which of `nodes` this one cannot reach, among those that it has no link with; feed LinkLost of those."""

    nodes: tuple[NodeId, ...]


class EndRank(Action, frozen=True):
    rank: Rank
    reason: str  # why its process can be brought back no more: end it, and feed WorkerLost


class PauseWorkers(Action, frozen=True):
    """Stop every process that runs a rank (SIGSTOP) until ResumeWorkers, also if it is told to abort or to end."""


class ResumeWorkers(Action, frozen=True):
    """Let them go on: nobody has replaced them, or a plan has been decided (Reconfigure follows)."""


class Reconfigure(Action, frozen=True):
    """Act on a decided plan: fetch what `plan.sources` says, hand workers the plan, mirror along the new ring.

    A rank of this node that has no living process gets one, whether the plan names it or not. With `restore_step`
    NO_STEP every process of a rank is ended and a new one begins the script."""

    plan: SwapPlan


class Claim(Action, frozen=True):
    plan: SwapPlan  # for the witness to keep, unless it has one for that generation: feed Claimed with what it has then


class Look(Action, frozen=True):
    generation: Generation  # feed Claimed with the plan that the witness has for it, if it has one


class RunSpareCommand(Action, frozen=True):
    hosts: int  # that `spare_command` is to bring; feed SpareCommandEnded once, whatever becomes of it


class Emit(Action, frozen=True):
    event: Event  # with the time, this node and its generation to be filled in


class Leave(Action, frozen=True):
    exit_code: int  # with which to end every process of this node
    reason: str
    verdict: Verdict | None = None  # of the whole job, for hosts linked to this one that have not asked to join yet
