"""Handlers of the messages of one generation, the votes of a swap aside.

Rules of this file: whoever speaks of an older generation is told the newest, and nothing else comes of it (but that
it gives itself up); a word of a node that is counted as lost does not count. May import everything of core but the
controller.
"""

from __future__ import annotations

import msgspec

from .api import Commit, EndRank, ReadCalls, StartWorkers
from .context import Context
from .coordination import Coordination
from .failures import Failures
from .inventory import Inventory
from .messages import (
    Calls,
    Compare,
    Goodbye,
    NodeFailed,
    RankCalls,
    RankFailed,
    Replace,
    Report,
    Start,
    Status,
    Verdict,
)
from .partial_partition import PartialPartition
from .swaps import Swaps
from .types import EXIT_SIGNALLED, Generation, NodeId


class Hearing:
    """One method a message; a new object for each generation."""

    def __init__(
        self,
        context: Context,
        inventory: Inventory,
        failures: Failures,
        partition: PartialPartition,
        coordination: Coordination,
        swaps: Swaps,
    ) -> None:
        self._ctx, self._inventory, self._failures = context, inventory, failures
        self._partition, self._coordination, self._swaps = partition, coordination, swaps
        self._started = False
        self._ended: set[NodeId] = set()

    def report(self, sender: NodeId, message: Report) -> None:
        ctx = self._ctx
        if message.generation < ctx.world.generation:
            self._swaps.bring_up_to_date(sender)
        elif message.generation == ctx.world.generation:
            if not ctx.leads:
                self._say_that_it_lives(sender)
            self._coordination.hear(sender, message)
            if not ctx.swapping:
                self._coordination.absorb(sender, message)
                if message.stuck and not (message.broken and self._partition.broke(sender, message.broken[0])):
                    self._swaps.stuck(sender, message.stuck)

    def _say_that_it_lives(self, sender: NodeId) -> None:
        """`sender` takes this node for the coordinator: it knows already of losses that this node is yet to notice, and
        is not to take the silence meanwhile for one more."""
        ctx = self._ctx
        ctx.send(sender, Status(ctx.world.generation, ctx.committed, ctx.training, ctx.waiting, ctx.now))

    def status(self, sender: NodeId, message: Status) -> None:
        ctx = self._ctx
        if message.generation < ctx.world.generation:
            self._swaps.bring_up_to_date(sender)
        if message.generation != ctx.world.generation or sender in ctx.watch.evidence:
            return
        if sender in ctx.suspects:  # a rival of our coordinator, which is not to take the silence for a loss meanwhile
            ctx.send(sender, Report(ctx.world.generation))
            return
        ctx.echo = (sender, message.sent_at)
        ctx.contact_at = max(ctx.contact_at, message.certain)
        if ctx.swapping:
            if message.waiting:
                ctx.waiting, ctx.patient_since = True, ctx.now
        else:
            ctx.training = ctx.training or message.training
            ctx.has_trained = ctx.has_trained or message.training
            if message.committed > ctx.committed:
                ctx.committed = message.committed
                ctx.newest_committed = max(ctx.newest_committed, message.committed)
                ctx.act(Commit(message.committed))

    def start(self, sender: NodeId, message: Start) -> None:
        ctx = self._ctx
        is_ours = message.world.generation == ctx.world.generation and ctx.begins_at_top
        if is_ours and not (self._started or ctx.swapping):
            self._started = True
            self._inventory.consume(message.store)
            ctx.act(StartWorkers(message.world, message.store))

    def node_failed(self, sender: NodeId, message: NodeFailed) -> None:
        ctx = self._ctx
        suspects = ctx.suspects
        if message.generation < ctx.world.generation and message.node != sender:
            self._swaps.bring_up_to_date(sender)  # who was lost then has been seen to, or is told of again
        elif message.node == ctx.node and message.generation > ctx.world.generation:
            ctx.fence(message.reason)
        elif message.node == ctx.node and sender in ctx.watch.evidence:
            return  # each counts the other as lost: the one whose plan is decided goes on, else both would go
        elif message.node == ctx.node:
            self._swaps.voter.accused(sender, message.reason, message.silent)
        elif message.silent and ctx.watch.hears(message.node, ctx.now, ctx.timing):
            self._partition.hear(sender, message.node)
        elif sender in suspects and message.node != sender:
            ctx.send(sender, NodeFailed(ctx.world.generation, sender, suspects[sender], ctx.is_silent(sender)))
        elif message.node in ctx.world.members:
            ctx.watch.accuse(message.node, message.reason, message.silent)

    def rank_failed(self, sender: NodeId, message: RankFailed) -> None:
        if message.generation < self._ctx.world.generation:
            self._swaps.bring_up_to_date(sender)
        self._failures.hear(sender, message)

    def compare(self, message: Compare) -> None:
        if message.generation == self._ctx.world.generation:
            self._ctx.act(ReadCalls(message.generation))

    def read(self, generation: Generation, ranks: tuple[RankCalls, ...]) -> None:
        ctx = self._ctx
        if generation == ctx.world.generation:
            before = {rank for rank, ended_in in ctx.replaced.items() if ended_in < generation}
            told = (
                msgspec.structs.replace(one, newcomer=one.rank in ctx.unproven, again=one.rank in before)
                for one in ranks
            )
            ctx.send(ctx.coordinator, Calls(generation, tuple(told)))

    def replace(self, message: Replace) -> None:
        ctx = self._ctx
        if message.generation == ctx.world.generation and message.rank in ctx.world.ranks_of(ctx.node):
            ctx.replaced[message.rank] = message.generation
            if message.rank not in {failure.rank for failure in self._failures.own}:
                ctx.act(EndRank(message.rank, message.reason))

    def verdict(self, sender: NodeId, message: Verdict) -> None:
        ctx = self._ctx
        if message.exit_code > EXIT_SIGNALLED:
            ctx.conclude(message)  # a person wants the job to end, in whatever generation that was said
        elif message.generation < ctx.world.generation:
            self._ended_before(sender, message)
        elif sender not in ctx.suspects or self._is_good_end(message):
            ctx.conclude(message)

    def _is_good_end(self, message: Verdict) -> bool:
        """All scripts of this generation have ended well: true whoever saw it, and be it counted as lost by now; unless
        a plan has been accepted here, for others may live by that already."""
        return message.exit_code == 0 and self._swaps.voter.acceptor.accepted is None

    def _ended_before(self, sender: NodeId, message: Verdict) -> None:
        """`sender` had not heard of this generation. It is lost to it; so many that the rest could not decide any more
        have ended the job."""
        ctx = self._ctx
        ctx.watch.accuse(sender, f"it ended in generation {message.generation}: {message.reason}")
        self._ended |= {sender} & set(ctx.world.members)
        if not ctx.can_decide_without(self._ended):
            ctx.conclude(message)

    def goodbye(self, sender: NodeId, message: Goodbye) -> None:
        self._ctx.watch.accuse(sender, "it has left the job")
