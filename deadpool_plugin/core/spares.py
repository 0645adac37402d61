"""A host that runs no rank: it asks the job to take it in, then rehearses what the coordinator tells it to. And the
command that brings one.

Rules of this file: a host asks every member, each heartbeat, until it is in or there is no hope left. A member
remembers who asks as long as the connection lasts; only the coordinator acts on it, and the host is nobody's voter.
A spare begins with the host it is told to rehearse. Then it goes on with the others by itself, WAYS hosts at once,
while there is room. A rehearsal that fails is ordered again, at once and then after pauses that double, within the same
budget as a lost process; then the node leaves it at the hosts that it has rehearsed, and gives up if there are none.
What fails for want of a lost source does not count. Only the coordinator runs `spare_command`.
"""

from __future__ import annotations

from . import api
from .api import EndRehearsal, RunSpareCommand, SpareCommandEnded, StartRehearsal
from .context import Context
from .events import (
    CoverLost,
    SpareCommandDone,
    SpareCommandExhausted,
    SpareCommandFailed,
    SpareCommandStarted,
    SpareFull,
    SpareReady,
)
from .messages import AnyMessage, Decided, Goodbye, JoinRequest, Rehearse, Status, Verdict
from .placement import rehearsal_order
from .policy import Budget
from .types import NEVER, NodeId, Rank

REASON_MAX = 200  # characters: it goes into every report
ATTEMPTS_MAX, ATTEMPTS_WINDOW_S = 10, 86400.0  # runs of spare_command within a day that bring no host
RETRY_MAX_S = 600.0  # between two of them
WAYS = 4  # hosts that a spare rehearses at the same time, after its first: a start-up waits for storage, too


class JoinAttempt:
    """The requests of one host, until a decided plan has it in its world."""

    def __init__(self, context: Context, members: tuple[NodeId, ...], rack: str) -> None:
        self._ctx, self._rack = context, rack
        self._members = dict.fromkeys(members)
        self._verdict: Verdict | None = None  # how the job has ended, says a member that left before it heard of us
        self.first_asked_at = context.now  # the plan that takes this host in was decided later
        context.be_patient()
        self._ask()

    def _ask(self) -> None:
        self._asked_at = self._ctx.now
        for node in self._members:
            self._ctx.send(node, JoinRequest(self._rack))

    def tick(self) -> None:
        ctx = self._ctx
        waited_s = ctx.awake - ctx.patient_since
        if waited_s >= ctx.timing.decision_timeout_s:
            ctx.fence(f"the job has not taken this host in within {waited_s:.0f} s")
        elif ctx.now - self._asked_at >= ctx.timing.heartbeat_interval_s:
            self._ask()

    def link_lost(self, node: NodeId, reason: str) -> None:
        """Go on without it: that member may be the one loss this host is needed for; the others decide."""
        self._members.pop(node, None)
        if not self._members and self._verdict is not None:  # while others are there it may be that of a part cut off
            self._ctx.conclude(self._verdict)
        elif not self._members:
            self._ctx.fence(f"no member of the job can be reached any more ({reason})")

    def hear(self, sender: NodeId, message: AnyMessage) -> bool:
        """Hear a member. Returns: whether that was all there is to do about `message` now."""
        ctx = self._ctx
        match message:
            case Verdict():
                ctx.conclude(message)
            case Goodbye():
                self._verdict = message.verdict or self._verdict
                self.link_lost(sender, "it has left")
            case Status():
                ctx.be_patient()  # the job lives and knows of this host: a long swap may be under way
            case Decided(plan) if ctx.node not in plan.world.members:
                ctx.fence(f"taken in, and counted as lost again by generation {plan.world.generation}")
            case _:
                return False
        return True


class SpareSupply:
    """The runs of `spare_command`, while the job has fewer hosts than it was given."""

    def __init__(self, context: Context) -> None:
        self._ctx = context
        self._running = 0  # actions that have not been answered
        self._expected = 0  # hosts that runs are to bring and that have not joined
        self._expected_until = NEVER
        self._retry_at = NEVER
        self._begin_anew()

    def _begin_anew(self) -> None:
        self._attempt, self._exhausted = 0, False
        self._attempts = Budget(ATTEMPTS_MAX, ATTEMPTS_WINDOW_S)

    def tick(self) -> None:
        """Run it for the hosts that are missing and that no earlier run is to bring."""
        ctx = self._ctx
        if not ctx.policy.spare_command:
            return
        if not ctx.leads:  # the first time that this node does, the one before it may just have run it
            self._expected, self._retry_at = 0, ctx.now + ctx.timing.slow_after_s
            return
        if ctx.cut_off or (not ctx.waiting and (ctx.swapping or ctx.suspects)):
            return  # who is lost is not decided, or not by this node
        given = len(ctx.world.active) + ctx.policy.spares
        missing = given - len(ctx.living) - len(ctx.joinable)
        if self._expected and not self._running and ctx.now >= self._expected_until:
            self._expected = 0
            if missing > 0:
                self._put_off(f"none has joined within {ctx.policy.spare_command_limit_s:g} s of its end")
        hosts = missing - self._expected
        if hosts <= 0 or ctx.now < self._retry_at:
            return
        if not self._attempts.spend("", ctx.now):
            if not self._exhausted:
                self._exhausted = True
                ctx.emit(SpareCommandExhausted(ATTEMPTS_MAX, ATTEMPTS_WINDOW_S))
            return
        self._exhausted = False
        self._attempt += 1
        self._running += 1
        self._expected += hosts
        ctx.emit(SpareCommandStarted(hosts, self._attempt))
        ctx.act(RunSpareCommand(hosts))

    def ended(self, event: SpareCommandEnded) -> None:
        self._running -= 1
        if not (self._ctx.leads and self._expected):
            return  # its hosts have joined already
        self._expected = max(0, self._expected - event.failed)
        self._expected_until = self._ctx.now + self._ctx.policy.spare_command_limit_s
        if event.failed:
            self._put_off(event.said)
        else:
            self._ctx.emit(SpareCommandDone(event.said, self._ctx.policy.spare_command_limit_s))

    def joined(self, hosts: int) -> None:
        """Count hosts that a plan has taken in, whoever brought them."""
        if hosts:
            self._expected = max(0, self._expected - hosts)
            self._begin_anew()

    def _put_off(self, reason: str) -> None:
        pause_s = min(self._ctx.timing.slow_after_s * 2.0 ** max(0, self._attempt - 1), RETRY_MAX_S)
        self._retry_at = self._ctx.now + pause_s
        self._ctx.emit(SpareCommandFailed(reason, pause_s))


class Rehearsing:
    """The rehearsals of one spare, and their progress. Each is named by its local slot and rank."""

    def __init__(self, context: Context) -> None:
        self._ctx = context
        self.rehearsed: set[tuple[int, Rank]] = set()
        self.able = False  # some host is rehearsed here, and nothing has failed since that would speak against it
        self.unable = ""  # why it could not take over, "" if nothing speaks against it
        self._tasks: dict[tuple[int, Rank], NodeId] = {}  # done or under way, and the node that ran that rank then
        self._attempts = Budget(context.policy.restarts_max, context.policy.restarts_window_s)
        self._failed = 0  # attempts that have come to nothing within the window
        self._failed_at = NEVER
        self._retry_at: dict[tuple[int, Rank], float] = {}
        self._ready_at: dict[NodeId, float] = {}
        """When a host counts as rehearsed: where one has failed, only if it has not failed again until then."""
        self._doubted = False  # the rehearsals are of no use
        self._is_full = False  # in this generation there is no room for another host
        self._is_through = True  # since all was found rehearsed, or under way, nothing of that has changed

    @property
    def covers(self) -> tuple[tuple[Rank, bool], ...]:
        """The ranks whose rehearsal is done (True) or under way."""
        return tuple(sorted((rank, (slot, rank) in self.rehearsed) for slot, rank in self._tasks))

    def ordered(self, message: Rehearse) -> None:
        ctx, task = self._ctx, (message.local_slot, message.rank)
        if message.generation != ctx.world.generation or ctx.swapping or ctx.node not in ctx.world.spares:
            return
        source = ctx.world.node_of[message.rank]
        if task not in self.rehearsed and self._tasks.get(task) != source:
            self._start(*task)

    def _start(self, slot: int, rank: Rank) -> None:
        source = self._tasks[slot, rank] = self._ctx.world.node_of[rank]
        self._doubted = False
        self._retry_at.pop((slot, rank), None)
        self._uncover((slot, rank))
        self._ctx.act(StartRehearsal(slot, rank, source))

    def take_in(self, event: api.Input) -> None:
        """Take in what becomes of the rehearsals of this node."""
        match event:
            case api.SpareRehearsed(local_slot, rank):
                self.done(local_slot, rank)
            case api.SpareFailed(local_slot, rank, reason):
                self.failed(local_slot, rank, reason)
            case api.SpareUnable(reason):
                self.doubt(reason)
            case api.SpareDropped(local_slot, rank):
                self.dropped(local_slot, rank)
            case api.SpareFull(local_slot, rank):
                self.full(local_slot, rank)
            case api.SpareShort():
                self.short()

    def done(self, slot: int, rank: Rank) -> None:
        ctx = self._ctx
        if (slot, rank) not in self._tasks or (slot, rank) in self.rehearsed or ctx.node not in ctx.world.spares:
            return
        self.rehearsed.add((slot, rank))
        self._retry_at.pop((slot, rank), None)
        if (node := ctx.world.node_of[rank]) in self._covered:
            self._ready_at[node] = ctx.now + self._pause_s
            self.tick()
        ctx.note()

    @property
    def _covered(self) -> list[NodeId]:
        """The hosts of which every rank is rehearsed here."""
        world, ranks = self._ctx.world, {rank for _, rank in self.rehearsed}
        return [node for node in world.active if ranks.issuperset(world.ranks_of(node))]

    @property
    def _pause_s(self) -> float:
        """None after the first failure, then twice as much after each."""
        return self._ctx.timing.slow_after_s * 2.0 ** (self._failed - 2) if self._failed > 1 else 0.0

    def tick(self) -> None:
        """Begin what was put off, believe a spare that has not failed again, and go on with the next hosts."""
        ctx = self._ctx
        for task in [task for task, at in self._retry_at.items() if ctx.now >= at]:
            self._start_again(task)
        for node in [node for node, at in self._ready_at.items() if ctx.now >= at]:
            del self._ready_at[node]
            if not self._doubted and node in self._covered:
                self._set_able(True)
                ctx.emit(SpareReady(ctx.node, ctx.world.ranks_of(node), len(self._covered), len(ctx.world.active)))
                self._is_through = False
        if not (self._is_through or self._is_full) and self.able and ctx.training and not ctx.swapping:
            self._go_on()

    def _go_on(self) -> None:
        """Rehearse the likeliest hosts that are not rehearsed here."""
        ctx = self._ctx
        under_way = {ctx.world.node_of[rank] for _, rank in self._tasks.keys() - self.rehearsed}
        self._is_through = True
        for node in rehearsal_order(ctx.world, ctx.node, ctx.faults):
            missing = [task for task in enumerate(ctx.world.ranks_of(node)) if task not in self.rehearsed]
            if missing and node not in under_way and len(under_way) < WAYS:
                under_way.add(node)
                for task in missing:
                    self._start(*task)

    def _set_able(self, able: bool, unable: str = "") -> None:
        self.able, self.unable = able, "" if able else unable[:REASON_MAX]
        self._ctx.note()

    def doubt(self, reason: str) -> None:
        """Note that the rehearsals are of no use, and that another attempt would be of none either."""
        self._set_able(False, reason)
        self._doubted = True

    def failed(self, slot: int, rank: Rank, reason: str) -> None:
        ctx, task = self._ctx, (slot, rank)
        if (source := self._tasks.get(task)) is None:
            return  # it has been given up
        node, is_fault = ctx.world.node_of[rank], not self._is_lost(source)
        self._ready_at.pop(node, None)
        self._uncover(task)
        self._is_through = False
        if is_fault and not self._attempts.spend(task, ctx.now):
            if not self._covered:
                return ctx.resign(f"rehearsal of rank {rank} failed: {reason}")
            return self._stop_at(node)
        if is_fault:
            recent = ctx.now - self._failed_at < ctx.policy.restarts_window_s
            self._failed, self._failed_at = self._failed + 1 if recent else 1, ctx.now
            self._set_able(bool(self._covered), f"rank {rank}: {reason}")
        self._start_again(task, self._pause_s if is_fault else 0.0)

    def dropped(self, slot: int, rank: Rank) -> None:
        if (slot, rank) in self._tasks:
            self._uncover((slot, rank))
            self._start_again((slot, rank))

    def full(self, slot: int, rank: Rank) -> None:
        """Make room for a host by giving up one that is less likely to be lost, or stop at what is rehearsed."""
        ctx = self._ctx
        if (slot, rank) not in self._tasks.keys() - self.rehearsed or ctx.swapping:
            return
        node, order = ctx.world.node_of[rank], rehearsal_order(ctx.world, ctx.node, ctx.faults)
        least = max((ctx.world.node_of[one] for _, one in self._tasks), key=order.index)
        if least == node:
            self._stop_at(node)
        else:
            self._give_up(least)
            self._start(slot, rank)

    def short(self) -> None:
        """Give up the host that is least likely lost, but never the only one that is covered."""
        ctx, covered = self._ctx, set(self._covered)
        others = {ctx.world.node_of[rank] for _, rank in self._tasks} - (covered if len(covered) == 1 else set())
        if covered and others and ctx.node in ctx.world.spares and not ctx.swapping:
            order = rehearsal_order(ctx.world, ctx.node, ctx.faults)
            self._stop_at(max(others, key=order.index))

    def _give_up(self, node: NodeId) -> None:
        """End all rehearsals of a host."""
        given_up = [task for task in sorted(self._tasks) if self._ctx.world.node_of[task[1]] == node]
        self._uncover(*given_up)
        for task in given_up:
            del self._tasks[task]
            self._retry_at.pop(task, None)
            self._ctx.act(EndRehearsal(*task))

    def _stop_at(self, node: NodeId) -> None:
        """Give up `node`, and begin with no other host in this generation."""
        self._give_up(node)
        self._is_full = True
        self._ctx.emit(SpareFull(self._ctx.node, len(self._covered), len(self._ctx.world.active)))

    def _uncover(self, *ended: tuple[int, Rank]) -> None:
        """Say that these are rehearsed no more, if they were."""
        if lost := self.rehearsed.intersection(ended):
            self.rehearsed -= lost
            self._ctx.note()
            self._ctx.emit(CoverLost(self._ctx.node, tuple(sorted(rank for _, rank in lost))))

    def _start_again(self, task: tuple[int, Rank], pause_s: float = 0.0) -> None:
        """Order it again; while fenced leave that to the next generation, whose nodes may be other ones."""
        ctx, before = self._ctx, self._tasks.pop(task)
        self._retry_at.pop(task, None)
        if ctx.swapping or self._is_lost(ctx.world.node_of[task[1]]):
            return
        if pause_s > 0.0:
            self._tasks[task], self._retry_at[task] = before, ctx.now + pause_s
        else:
            self._start(*task)

    def _is_lost(self, node: NodeId) -> bool:
        return node in self._ctx.suspects or node not in self._ctx.world.members

    def begin_generation(self) -> None:
        """Drop the rehearsals of a node that runs ranks now, and those of a start that did not happen."""
        ctx = self._ctx
        is_spare = ctx.node in ctx.world.spares
        self._is_full = self._is_through = False
        if not is_spare or ctx.begins_at_top:
            for of_before in (self._tasks, self._retry_at, self._ready_at, self.rehearsed):
                of_before.clear()
        if not is_spare:
            self._set_able(False)
