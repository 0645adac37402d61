"""Handlers of the messages of one generation, the decision that ends it aside.

Rules of this file: whoever speaks of an older generation is told the newest, and nothing else comes of it (but that
it gives itself up); a word of a node that is counted as lost does not count. May import everything of core but the
controller.
"""

from __future__ import annotations

from .api import Commit, ReadCalls, StartWorkers
from .context import Context
from .coordination import Coordination
from .messages import (
    Accepted,
    AnyMessage,
    Calls,
    Compare,
    Goodbye,
    NodeFailed,
    Prepare,
    Promise,
    Propose,
    RankFailed,
    Refused,
    Rehearse,
    Replace,
    Report,
    Start,
    Status,
    Verdict,
)
from .pairing import Pairing
from .partial_partition import PartialPartition
from .processes import Failures, Inventory
from .rehearsing import Rehearsing
from .swaps import Swaps
from .types import EXIT_SIGNALLED, NodeId


class MessageHandlers:
    """One method a message, where it takes more than a line; a new object for each generation."""

    def __init__(
        self,
        context: Context,
        inventory: Inventory,
        failures: Failures,
        rehearsing: Rehearsing,
        partition: PartialPartition,
        pairing: Pairing,
        coordination: Coordination,
        swaps: Swaps,
    ) -> None:
        self._ctx, self._inventory, self._failures, self._rehearsing = context, inventory, failures, rehearsing
        self._partition, self._pairing, self._coordination, self._swaps = partition, pairing, coordination, swaps
        self._started = False
        self._ended: set[NodeId] = set()

    def handle(self, sender: NodeId, message: AnyMessage) -> None:
        ctx, swaps = self._ctx, self._swaps
        match message:
            case Report():
                self._report(sender, message)
            case Status():
                self._status(sender, message)
            case NodeFailed():
                self._node_failed(sender, message)
            case RankFailed(generation):
                if generation < ctx.world.generation:
                    swaps.bring_up_to_date(sender)
                self._failures.hear(sender, message)
            case Start(world, store):
                is_ours = world.generation == ctx.world.generation and ctx.begins_at_top
                if is_ours and not (self._started or ctx.swapping):
                    self._started = True
                    self._inventory.consume(store)
                    ctx.act(StartWorkers(world, store))
            case Rehearse():
                self._rehearsing.ordered(message)
            case Compare(generation):
                if generation == ctx.world.generation:
                    ctx.act(ReadCalls(generation))
            case Calls():
                self._pairing.hear(sender, message)
            case Replace():
                self._pairing.replace(message, {failure.rank for failure in self._failures.own})
            case Prepare():
                swaps.voter.prepare(sender, message)
            case Promise():
                swaps.proposer.promise(sender, message)
            case Propose():
                swaps.voter.propose(sender, message)
            case Accepted():
                swaps.proposer.accepted(sender, message)
            case Refused():
                swaps.proposer.refused(message)
            case Verdict():
                self._verdict(sender, message)
            case Goodbye():
                ctx.suspect(sender, "it has left the job")

    def _report(self, sender: NodeId, message: Report) -> None:
        ctx = self._ctx
        if message.generation < ctx.world.generation:
            self._swaps.bring_up_to_date(sender)
        elif message.generation == ctx.world.generation:
            if not ctx.leads:
                # `sender` takes this node for the coordinator: it knows already of losses that this node is yet to
                # notice, and is not to take the silence meanwhile for one more.
                ctx.send(sender, Status(ctx.world.generation, ctx.committed, ctx.training, ctx.waiting, ctx.now))
            self._coordination.hear(sender, message)
            if not ctx.swapping:
                self._coordination.absorb(sender, message)
                if message.stuck and not (message.broken and self._partition.broke(sender, message.broken[0])):
                    self._swaps.stuck(sender, message.stuck)

    def _status(self, sender: NodeId, message: Status) -> None:
        ctx = self._ctx
        if message.generation < ctx.world.generation:
            self._swaps.bring_up_to_date(sender)
        if message.generation != ctx.world.generation or sender in ctx.watch.evidence:
            return
        if sender in ctx.suspects:  # a rival of our coordinator, which is not to take the silence for a loss meanwhile
            ctx.send(sender, Report(ctx.world.generation))
        elif ctx.follow(sender, message):
            ctx.act(Commit(message.committed))

    def _node_failed(self, sender: NodeId, message: NodeFailed) -> None:
        ctx = self._ctx
        suspects = ctx.suspects
        if message.generation < ctx.world.generation and message.node != sender:
            self._swaps.bring_up_to_date(sender)  # who was lost then has been seen to, or is told of again
        elif message.node == ctx.node and message.generation > ctx.world.generation:
            ctx.fence(message.reason)
        elif message.node == ctx.node and sender in ctx.watch.evidence:
            return  # each counts the other as lost: the one whose plan is decided goes on, else both would go
        elif message.node == ctx.node:
            self._swaps.voter.suspected(sender, message.reason, message.silent)
        elif message.silent and ctx.watch.hears(message.node, ctx.now):
            self._partition.hear(sender, message.node)
        elif sender in suspects and message.node != sender:
            ctx.send(sender, NodeFailed(ctx.world.generation, sender, suspects[sender], ctx.is_silent(sender)))
        elif message.node in ctx.world.members:
            ctx.suspect(message.node, message.reason, message.silent)

    def _verdict(self, sender: NodeId, message: Verdict) -> None:
        ctx = self._ctx
        if message.exit_code > EXIT_SIGNALLED:
            ctx.conclude(message)  # a person wants the job to end, in whatever generation that was said
        elif message.generation < ctx.world.generation:
            # `sender` had not heard of this generation and is lost to it; so many that the rest could not decide any
            # more have ended the job.
            ctx.suspect(sender, f"it ended in generation {message.generation}: {message.reason}")
            self._ended |= {sender} & set(ctx.world.members)
            if not ctx.can_decide_without(self._ended):
                ctx.conclude(message)
        # That all scripts have ended well is true even from a suspected node, unless we accepted a plan that others
        # may already be executing.
        elif sender not in ctx.suspects or (message.exit_code == 0 and self._swaps.voter.acceptor.accepted is None):
            ctx.conclude(message)
