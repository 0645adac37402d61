"""A host that runs no rank: it asks the job to take it in, then rehearses what the coordinator tells it to. And the
command that brings one.

Rules of this file: a host asks every member, each heartbeat, until it is in or there is no hope left. A member
remembers who asks as long as the connection lasts; only the coordinator acts on it, and the host is nobody's voter.
A slot has one task, the newest. A rehearsal that fails is ordered again, at once and then after pauses that double,
within the same budget as a lost process; then the node gives up. What fails for want of a lost source does not count.
Only the coordinator runs `spare_command`.
"""

from __future__ import annotations

from .api import RunSpareCommand, SpareCommandEnded, StartRehearsal
from .context import Context
from .events import SpareCommandDone, SpareCommandExhausted, SpareCommandFailed, SpareCommandStarted, SpareReady
from .messages import AnyMessage, Decided, Goodbye, JoinRequest, Rehearse, Status, Verdict
from .policy import Budget
from .types import NEVER, NodeId, Rank

REASON_MAX = 200  # characters: it goes into every report
ATTEMPTS_MAX, ATTEMPTS_WINDOW_S = 10, 86400.0  # runs of spare_command within a day that bring no host
RETRY_MAX_S = 600.0  # between two of them


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
            self._expected, self._retry_at = 0, ctx.now + ctx.timing.silent_after_s
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
        pause_s = min(self._ctx.timing.silent_after_s * 2.0 ** max(0, self._attempt - 1), RETRY_MAX_S)
        self._retry_at = self._ctx.now + pause_s
        self._ctx.emit(SpareCommandFailed(reason, pause_s))


class Rehearsing:
    """The rehearsals that one spare was told to make, and their progress."""

    def __init__(self, context: Context) -> None:
        self._ctx = context
        self.rehearsed: dict[int, Rank] = {}
        self.able = False  # all that this node was told to rehearse is rehearsed, and nothing has failed since
        self.unable = ""  # why it could not take over, "" if nothing speaks against it
        self._tasks: dict[int, tuple[Rank, NodeId]] = {}  # each slot's rank, and the node that ran that then
        self._attempts = Budget(context.policy.restarts_max, context.policy.restarts_window_s)
        self._failed = 0  # attempts that have come to nothing within the window
        self._failed_at = NEVER
        self._retry_at: dict[int, float] = {}
        self._able_at: float | None = None  # who has failed before is able only if it has not failed again until then
        self._doubted = False  # the current rehearsal is of no use

    def ordered(self, message: Rehearse) -> None:
        ctx, slot = self._ctx, message.local_slot
        if message.generation != ctx.world.generation or ctx.swapping or ctx.node not in ctx.world.spares:
            return
        task = (message.rank, ctx.world.node_of[message.rank])
        if self.rehearsed.get(slot) != message.rank and self._tasks.get(slot) != task:
            self._start(slot, *task)

    def _start(self, slot: int, rank: Rank, source: NodeId) -> None:
        self._tasks[slot] = (rank, source)
        self._doubted = False
        self._retry_at.pop(slot, None)
        self.rehearsed.pop(slot, None)
        self._ctx.act(StartRehearsal(slot, rank, source))

    def done(self, slot: int, rank: Rank) -> None:
        if self.rehearsed.get(slot) != rank:
            self.rehearsed[slot] = rank
            self._retry_at.pop(slot, None)
            if self._is_ready:
                self._able_at = self._ctx.now + self._pause_s
                self.tick()
            self._ctx.note()

    @property
    def _is_ready(self) -> bool:
        """Return whether all that this node was told to rehearse is rehearsed."""
        wanted = {slot: rank for slot, (rank, _) in self._tasks.items()}
        return self._ctx.node in self._ctx.world.spares and bool(wanted) and self.rehearsed == wanted

    @property
    def _pause_s(self) -> float:
        """None after the first failure, then twice as much after each."""
        return self._ctx.timing.silent_after_s * 2.0 ** (self._failed - 2) if self._failed > 1 else 0.0

    def tick(self) -> None:
        """Begin what was put off, and believe a spare that has not failed again."""
        ctx = self._ctx
        for slot in [slot for slot, at in self._retry_at.items() if ctx.now >= at]:
            self._start_again(slot)
        if self._able_at is not None and ctx.now >= self._able_at and self._is_ready:
            self._able_at = None
            if not self._doubted:
                self._set_able(True)
                ctx.emit(SpareReady(ctx.node, tuple(self._tasks[slot][0] for slot in sorted(self._tasks))))

    def _set_able(self, able: bool, unable: str = "") -> None:
        self.able, self.unable = able, unable[:REASON_MAX]
        self._ctx.note()

    def doubt(self, reason: str) -> None:
        """Note that the rehearsal is of no use, and that another attempt would be of none either."""
        self._set_able(False, reason)
        self._doubted = True

    def failed(self, slot: int, rank: Rank, reason: str) -> None:
        ctx, task = self._ctx, self._tasks.get(slot)
        if task is not None and task[0] != rank:
            return  # of a task that has been overtaken
        is_fault = task is None or not self._is_lost(task[1])
        if task is None or (is_fault and not self._attempts.spend(slot, ctx.now)):
            ctx.resign(f"rehearsal of rank {rank} failed: {reason}")
            return
        self._able_at = None
        self.rehearsed.pop(slot, None)
        ctx.note()
        if is_fault:
            recent = ctx.now - self._failed_at < ctx.policy.restarts_window_s
            self._failed, self._failed_at = self._failed + 1 if recent else 1, ctx.now
            self._set_able(False, f"rank {rank}: {reason}")
        self._start_again(slot, self._pause_s if is_fault else 0.0)

    def _start_again(self, slot: int, pause_s: float = 0.0) -> None:
        """Order it again; while fenced leave that to the next generation, whose nodes may be other ones."""
        ctx, (rank, before) = self._ctx, self._tasks.pop(slot)
        self._retry_at.pop(slot, None)
        source = ctx.world.node_of[rank]
        if ctx.swapping or self._is_lost(source):
            return
        if pause_s > 0.0:
            self._tasks[slot], self._retry_at[slot] = (rank, before), ctx.now + pause_s
        else:
            self._start(slot, rank, source)

    def _is_lost(self, node: NodeId) -> bool:
        return node in self._ctx.suspects or node not in self._ctx.world.members

    def begin_generation(self) -> None:
        """Drop the rehearsals of a node that runs ranks now, and those of a start that did not happen."""
        ctx = self._ctx
        is_spare = ctx.node in ctx.world.spares
        if not is_spare or ctx.begins_at_top:
            self._tasks.clear()
            self._retry_at.clear()
            self.rehearsed.clear()
        if not is_spare:
            self._set_able(False)
