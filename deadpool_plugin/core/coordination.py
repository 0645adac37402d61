"""The coordinator's work between swaps: start the job, commit steps, send spares rehearsing, end the job.

Rules of this file: every node keeps the book (it costs nothing), only the coordinator speaks from it; a book lives as
long as its generation; what has been committed stays so.
"""

from __future__ import annotations

from .chain import AUTO, Pace
from .contact import Contact
from .context import Context
from .events import Mirrored, MirroringPaced, Protected, StepCommitted, StepStored, SwapDone, TrainingStarted
from .ledger import Ledger
from .messages import Rehearse, Report, Start, Status, Verdict
from .pairing import Pairing
from .placement import rehearsals
from .stalls import Stalls
from .types import NEVER, NO_STEP, NodeId, Rank, Step, World, listed

# Per heartbeat interval. With only one, a Status about a step would delay the next beat, and with it what members are
# certain of.
BEATS_MAX = 4


class Coverage:
    """The hosts whose loss a spare could make up for: what "protected" needs beside mirrored snapshots."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._spares = frozenset(world.spares)
        self._unheard = Report(world.generation)
        self._reports: dict[NodeId, Report] = {}

    def report_of(self, member: NodeId) -> Report:
        """Return the newest one, an empty one of who has sent none."""
        return self._reports.get(member, self._unheard)

    def absorb(self, sender: NodeId, report: Report) -> bool:
        """Take in a report. Returns: whether it may change an answer. Costs the same in a job of any size."""
        before, self._reports[sender] = self.report_of(sender), report
        if sender not in self._spares:
            return report.pruned != before.pruned
        return (report.able, report.unable, report.rehearsed) != (before.able, before.unable, before.rehearsed)

    def uncovered(self) -> tuple[NodeId, ...]:
        able = [spare for spare in self._world.spares if self.report_of(spare).able]
        active = sorted(self._world.active)
        # Any able spare can take a host, but only one that has followed it if the host's call records are dropped.
        pruned = [node for node in active if self.report_of(node).pruned] if able else active
        return tuple(node for node in pruned if not any(self._follows(spare, node) for spare in able))

    def _follows(self, spare: NodeId, node: NodeId) -> bool:
        return {*self._world.ranks_of(node)} <= {rank for _, rank in self.report_of(spare).rehearsed}

    def why(self, uncovered: tuple[NodeId, ...]) -> str:
        """The reason that `uncovered` are, for people; "" if none is."""
        if not uncovered or not self._world.spares:
            return "no spare is left" if uncovered else ""
        every = len(uncovered) == len(self._world.active)
        hosts = "any node" if every and len(uncovered) > 4 else f"node {listed(uncovered)}"
        said = []
        for spare in self._world.spares:
            what = "cannot follow it: its call records no longer fit into history_limit_mib"
            if unable := self.report_of(spare).unable:
                what = f"cannot stand in: {unable}"
            elif not self.report_of(spare).able:
                what = "is not ready yet"
            said.append(f"spare node {spare} {what}")
        return f"no spare can take {hosts} ({'; '.join(said)})"


class Coordination:
    """The book of one generation, and what the coordinator says from it."""

    def __init__(self, context: Context, pairing: Pairing, stalls: Stalls) -> None:
        self._ctx, self._pairing, self._stalls = context, pairing, stalls
        self._ledger = Ledger()
        self._contact = Contact(context.world, context.policy.witness)
        self._coverage = Coverage(context.world)
        self._has_news = False  # the ledger has changed since a step was last looked for that it shows to be committed
        self._covers_anew = True  # a spare has said something since it was last looked which hosts are covered
        self._uncovered: tuple[NodeId, ...] | None = None  # the hosts last said to be; None while nothing is mirrored
        self._ready: set[Rank] = set()
        self._finished: set[Rank] = set()
        self._store = ""
        self._floor: Step = max(context.plan.restore_step, 0) if context.plan else 0
        self._committed: Step = NO_STEP
        self._committed_at = self._said_at = self._beat_at = context.now
        self._said = Status(context.world.generation, NO_STEP, False)  # which whoever enters the generation knows
        self._pace, self._chain = Pace(context.every), context.begun_chain()
        self._to_store = self._stored = NO_STEP  # the newest step that all are to write to disk, and that all have
        self._stored_at = NEVER  # a generation's first step is written: what was before it may not be whole

    @property
    def unready(self) -> tuple[Rank, ...]:
        """Ranks that have not reached training in this generation, as far as this node knows."""
        return tuple(rank for rank in range(len(self._ctx.world.node_of)) if rank not in self._ready)

    def hear(self, sender: NodeId, report: Report) -> None:
        """Take in a report of this generation; once that is fenced, only that `sender` lives in it."""
        ctx = self._ctx
        self._contact.hear(sender, report.sent_at, report.heard)
        if ctx.swapping:
            return
        own = ctx.world.ranks_of(sender)
        fresh = {rank for rank in report.ready if rank in own} - self._ready
        if fresh or report.moved > self._coverage.report_of(sender).moved:
            self._stalls.moved()
        self._ready |= fresh
        self._finished.update(rank for rank in report.finished if rank in own)
        ctx.learn_checkpoint(report.checkpoint)
        wanted, passed = ([step for step in said if step > self._committed] for said in (report.wanted, report.passed))
        self._chain.learn(wanted, passed)
        self._has_news = self._ledger.replace(sender, report.holdings) or self._has_news
        self._covers_anew = self._coverage.absorb(sender, report) or self._covers_anew
        if ctx.leads:
            self._advance()

    def tick(self) -> str:
        """Speak, and look at the deadlines. Returns: why all are to go on in a new generation, said once, else ""."""
        ctx = self._ctx
        if not ctx.leads:
            return ""
        if ctx.now - self._said_at >= ctx.timing.heartbeat_interval_s:
            self._say()
        self._pairing.judge()
        self._end_if_all_have()
        if ctx.ended or ctx.swapping:
            return ""
        if ctx.training:
            return self._stalls.tick(self._finished, self._ledger)
        if ctx.resuming and (reason := self._resumed()):
            return reason
        waited_s = self._stalls.waited_s
        if waited_s >= ctx.timing.start_timeout_s:
            ctx.stop(
                f"rank(s) {listed(self.unready)} have not reached training in generation {ctx.world.generation}; no "
                f"progress for {waited_s:.0f} s; raise start_timeout_s if the script needs more"
            )
        return ""

    def _resumed(self) -> str:
        """Return why all are to go on from the earlier job's step now, "" as long as somebody reads it."""
        ctx, reports = self._ctx, [self._coverage.report_of(node) for node in self._ctx.world.members]
        if not all(report.read for report in reports):
            return ""
        point = self._ledger.restore_point(ctx.world, ctx.world.members, committed=ctx.newest_committed)
        if isinstance(point, str):
            ctx.stop(f"the job cannot be resumed: {point}; its files are as they were")
        elif any(report.store for report in reports):
            return f"step {point.step} of the earlier job is in memory: all go on from there"
        return ""

    def _advance(self) -> None:
        ctx = self._ctx
        if ctx.begins_at_top and not self._store:
            # All workers may build their groups as soon as rank 0's node offers a store.
            self._store = self._coverage.report_of(ctx.world.node_of[0]).store
            if self._store:
                ctx.broadcast(Start(ctx.world, self._store))
        if not ctx.training and len(self._ready) == len(ctx.world.node_of):
            ctx.begin_training()
            if ctx.begins_at_top:
                ctx.emit(TrainingStarted())
            if ctx.plan is not None:
                ctx.emit(SwapDone(ctx.now - ctx.swap_since))
            for task in rehearsals(ctx.world, ctx.faults):
                if (task.local_slot, task.rank) not in self._coverage.report_of(task.spare).rehearsed:
                    ctx.send(task.spare, Rehearse(ctx.world.generation, task.local_slot, task.rank))
        if self._has_news and ctx.resuming:
            self._has_news = False
            self._stalls.moved()
        elif self._has_news:
            self._has_news = False
            step = self._ledger.committed(ctx.world, self._committed, ctx.policy.copies)
            if step > self._committed:
                ctx.step_s = ctx.now - self._committed_at if self._committed != NO_STEP else 0.0
                self._committed, self._committed_at = step, ctx.now
                self._stalls.committed(step, ctx.step_s)
                ctx.emit(StepCommitted(step))
                self._chain.forget_before(step)
                self._set_pace()
                if self._is_to_be_stored():
                    self._to_store, self._stored_at = step, ctx.now
            if self._ledger.unpaired > self._committed:
                self._pairing.ask(f"what the ranks had issued by step {self._ledger.unpaired} does not pair")
        if self._stored < self._to_store and self._all_have_written():
            self._stored = self._to_store
            ctx.emit(StepStored(self._stored))
        if self._covers_anew and not ctx.resuming and self._committed >= self._floor and len(ctx.world.members) > 1:
            self._covers_anew = False
            self._say_protection()
        self._choose()
        self._say(on_change_only=True)
        self._end_if_all_have()

    def _is_to_be_stored(self) -> bool:
        """Return whether a step that was just committed is to go to disk: not while somebody still writes one."""
        ctx, every_s = self._ctx, self._ctx.policy.store_every_s
        if every_s is None or (self._stored_at != NEVER and ctx.now - self._stored_at < every_s):
            return False
        reports = (self._coverage.report_of(node) for node in ctx.world.active)
        return all(report.stored_or_left >= self._to_store for report in reports)

    def _all_have_written(self) -> bool:
        return all(self._coverage.report_of(node).stored == self._to_store for node in self._ctx.world.active)

    def _set_pace(self) -> None:
        """Set how far snapshots are apart, by how many steps mirroring takes."""
        ctx = self._ctx
        if ctx.policy.mirror_every != AUTO or not ctx.chooses:
            return
        reports = [self._coverage.report_of(node) for node in ctx.world.active]
        most = min([ctx.policy.mirror_every_max, *(report.most for report in reports if report.most)])
        if self._pace.note(max(report.took_steps for report in reports), most):
            ctx.emit(MirroringPaced(self._pace.every, self._pace.steps))

    def _choose(self) -> None:
        """Choose snapshots until two are known after the committed one: the next commit must say one after it."""
        # Not at commits alone: a save adds one and a void takes one away, and with none left all ranks wait for ever.
        ctx, chain = self._ctx, self._chain
        if ctx.policy.mirror_every != AUTO or not ctx.chooses:
            return
        while len(known := chain.announced(self._committed)) < 2:
            chain.learn([max((self._committed, *known, *chain.voided())) + self._pace.every])

    def _end_if_all_have(self) -> None:
        """End the job well once all scripts have ended, and after a swap what they have issued pairs."""
        ctx = self._ctx
        if len(self._finished) < len(ctx.world.node_of) or ctx.cut_off or ctx.swapping or ctx.ended:
            return
        if ctx.plan is not None:  # the last steps need not be committed, and only those that are have been compared
            self._pairing.ask(ended=self._finished)
        if self._pairing.settled:
            ctx.conclude(Verdict(ctx.world.generation, 0, "finished"))

    def _say_protection(self) -> None:
        """Say once that every rank's state is mirrored, and whether the job is protected whenever that changes."""
        ctx, uncovered, spares_left = self._ctx, self._coverage.uncovered(), len(self._ctx.world.spares)
        if uncovered == self._uncovered:
            return
        if uncovered or self._uncovered is None:
            on_no_spare = "wait" if ctx.policy.wait_for_hosts else "stop"
            ctx.emit(Mirrored(self._committed, uncovered, self._coverage.why(uncovered), spares_left, on_no_spare))
        if not uncovered:
            ctx.emit(Protected(self._committed, spares_left))
        self._uncovered = uncovered

    def _say(self, on_change_only: bool = False) -> None:
        ctx = self._ctx
        known = ctx.world.generation, self._committed, ctx.training, ctx.waiting
        told: tuple[int, tuple[Step, ...], tuple[Step, ...]] = 1, (), ()  # of the chain, by who may
        if ctx.chooses:
            told = self._pace.every, self._chain.announced(self._committed), self._chain.voided()
        written = self._to_store, self._stored
        status = Status(*known, NEVER, NEVER, *told, *written)
        if on_change_only and status == self._said:
            return
        self._said, self._said_at = status, ctx.now
        if ctx.now - self._beat_at >= ctx.timing.heartbeat_interval_s / BEATS_MAX:
            self._beat_at = ctx.now
            self._contact.beat(ctx.now, ctx.timing.lease_s)
        for node in (*ctx.world.members, *sorted(ctx.candidates)):
            ctx.send(node, Status(*known, ctx.now, self._contact.certain(node), *told, *written))
