"""A stall of training: for how long nothing may get on, who never arrived, and what is done about it, step by step.

The coordinator sees when anything got on last (`Stalls.moved`). After seconds without that it asks all nodes where
their ranks are, and says so. At the limit it is a hang, unless the Python stack of whoever the others wait for changes:
then the limit doubles and nothing else happens. README.md ("A stall") has the limits and the order of the cures.

Rules of this file: a rank is blamed only if others wait for it and it waits for nobody; an activity with a limit of its
own is asked for before anything is done; what was done for a hang is forgotten with its coordinator.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import NamedTuple

from .context import Context
from .events import Stalled
from .ledger import Ledger
from .messages import Calls, Compare, GroupCalls, NodeFailed, Place, RankCalls, Replace
from .pairing import Pairing
from .signatures import DEVICE, Activity, decoded
from .types import NEVER, NO_STEP, NodeId, Rank, Step, listed

FLOOR_S = 30.0  # the least limit of any step
TIMES_LONGEST, STEPS_KEPT = 8, 32  # the limit of a step: so often the longest of the last ones
AGAIN_TIMES = 2  # the limit of the first step since a swap, in ordinary limits: communicators are built in it
NOTICE_S, NOTICE_TIMES = 5.0, 4  # said after so long, and so often the longest of the last steps
PATIENT_NOTICE_S = 30.0  # where whoever is waited for is in what takes long as a rule
FIRST_LOOK = 0.8  # of the limit: the stack is taken then and at the limit
SAME_WITHIN_STEPS = 2  # a hang that comes back before more steps (snapshots, if apart) were committed is the same one
UNKNOWN_MAX = 3  # hangs within few steps of which nobody knows whose they are: the last of them ends the job
ANSWER_S = 2.0  # for nodes to say where their ranks are; a stack takes one
UNKNOWN_PATIENCES = 5  # until then two hosts that do not hear each other have been told apart (contact.py)
HANGS_MAX = 12  # the same, whoever is blamed for them
NEVER_S = float("inf")
RANKS_SHOWN = 4
FRAMES_MAX = 12  # of a stack, in the event

PATIENT = frozenset(Activity) - {Activity.STEP, Activity.SCRIPT}


class Cure(IntEnum):
    """The cures for a hang, in the order in which they are tried."""

    NOTHING = 0
    INTERRUPT = 1
    REPLACE = 2
    LEAVE = 3
    STOP = 4


class Finding(NamedTuple):
    """Whom all others wait for in a stall (nobody if that is not clear), and a sentence about who is where."""

    ranks: tuple[Rank, ...]
    what: str


@dataclass
class Hang:
    """Hangs that follow each other within few steps, and what was done so far for those of each rank."""

    since: float = 0.0  # when the first of them began
    patience: int = 1  # doubles the limit once every cure has been tried
    steps: list[Step] = field(default_factory=list)  # the newest committed one at each of them
    tried: dict[Rank, Cure] = field(default_factory=dict)


# ---- who never arrived


def find(answers: Iterable[RankCalls], node_of: Sequence[NodeId] = ()) -> Finding:
    """Lay side by side what all ranks have issued, and where they are."""
    ranks = {one.rank: one for one in answers}
    behind = _behind(ranks.values())
    some_say = any(one.place is not None and one.place.waits for one in ranks.values())
    waits_for: dict[Rank, set[Rank]] = {}
    for rank, one in ranks.items():
        place, groups = one.place, [calls.key for calls in one.groups]
        if place is not None and place.waits and place.operation != DEVICE:
            groups = [place.group]
        elif some_say and not (place is not None and place.waits):
            groups = []  # it does not wait, whatever others have not issued yet
        others = {peer for key in groups for peer, by in behind.get(key, {}).items() if by and not behind[key][rank]}
        waits_for[rank] = {place.peer} & ranks.keys() if place is not None and place.peer >= 0 else others
    awaited = set[Rank]().union(*waits_for.values())
    waiting = {rank for rank, one in ranks.items() if waits_for[rank] or (one.place is not None and one.place.waits)}
    late = awaited - waiting or _most_awaited(waits_for.values()) or (ranks.keys() - waiting)
    if len(late) == 1 and (odd := _unproven_behind(ranks, *late)):
        late, waits_for = odd, waits_for | {rank: odd for rank in late}
    if len(late) == len(ranks) > 1:
        late = set()
    table = _Table(ranks, behind, waits_for, node_of)
    return Finding(tuple(sorted(late)), table.about(sorted(late)) if late else table.about_nobody())


def _most_awaited(waits_for: Iterable[Collection[Rank]]) -> set[Rank]:
    """Choose, of ranks that wait for each other, the one that has passed the others by: most of them wait for it."""
    times = Counter(rank for its in waits_for for rank in its).most_common(2)
    return {times[0][0]} if len(times) == 1 or (times and times[0][1] > times[1][1]) else set()


def _unproven_behind(ranks: Mapping[Rank, RankCalls], first: Rank) -> set[Rank]:
    """If `first` waits for its step to be committed, return the newcomers that have not made it: they issued more in it
    than the process before them, and the others wait in the same place of the next step."""
    place = ranks[first].place
    if place is None or not place.waits or place.group or place.operation == DEVICE:
        return set()
    return {rank for rank, one in ranks.items() if one.newcomer and one.place and one.place.step < place.step}


def _behind(ranks: Iterable[RankCalls]) -> dict[str, dict[Rank, int]]:
    """Count by how many collectives each member of each group is behind the first of them.

    They are counted from the newest step that all members have made: not in every script all ranks begin alike."""
    groups: defaultdict[str, dict[Rank, GroupCalls]] = defaultdict(dict)
    for one in ranks:
        for calls in one.groups:
            groups[calls.key][one.rank] = calls
    found = {}
    for key, members in groups.items():
        cuts = {rank: {step: count for step, count, _ in calls.cuts} for rank, calls in members.items()}
        since = max(set.intersection(*(set(steps) for steps in cuts.values())), default=NO_STEP)
        counts = {rank: calls.count - cuts[rank].get(since, 0) for rank, calls in members.items()}
        found[key] = {rank: max(counts.values()) - count for rank, count in counts.items()}
    return found


class _Table(NamedTuple):
    """The answers of all ranks, for sentences about them."""

    ranks: Mapping[Rank, RankCalls]
    behind: Mapping[str, Mapping[Rank, int]]
    waits_for: Mapping[Rank, Collection[Rank]]
    node_of: Sequence[NodeId]

    def about(self, late: Sequence[Rank]) -> str:
        """Describe where those are that the others wait for."""
        said = [self._about(rank) for rank in late[:RANKS_SHOWN]]
        return "; ".join([*said, *([f"{len(late) - RANKS_SHOWN} more ranks alike"] if len(said) < len(late) else [])])

    def _about(self, rank: Rank) -> str:
        who = f"rank {rank} on node {self.node_of[rank]}" if rank < len(self.node_of) else f"rank {rank}"
        where = _at(self.ranks[rank].place)
        waiting = sorted(other for other, its in self.waits_for.items() if rank in its)
        for key, by in self.behind.items():
            if there := [other for other in waiting if by.get(rank) and by.get(other) == 0]:
                wait = f"rank(s) {_listed(there)} wait{'s' if len(there) == 1 else ''}"
                return f"{who} has not come to {self._newest(key, there[0])}, in which {wait}; it is {where}"
        if waiting and (place := self.ranks[waiting[0]].place) is not None:
            return f"rank {waiting[0]} waits for {who} in {place.operation}; that is {where}"
        return f"{who}, for which nobody is seen to wait, is {where}"

    def about_nobody(self) -> str:
        """Describe a stall in which everybody waits, or nobody does."""
        for key, by in self.behind.items():
            newest = {rank: self._newest(key, rank) for rank in sorted(by)} if not any(by.values()) else {}
            if len({*newest.values()}) > 1:
                first, other = next((a, b) for a in newest for b in newest if newest[a] != newest[b])
                return f"rank {first} is in {newest[first]}, and rank {other} in {newest[other]}"
        places = defaultdict[str, list[Rank]](list)
        for rank, one in sorted(self.ranks.items()):
            places[_at(one.place)].append(rank)
        said = [f"rank(s) {_listed(of_place)} {where}" for where, of_place in places.items()]
        return f"nobody is seen to be late: {'; '.join(said[:RANKS_SHOWN])}"

    def _newest(self, key: str, rank: Rank) -> str:
        calls = next(calls for calls in self.ranks[rank].groups if calls.key == key)
        what = f" ({decoded(calls.recent[-1])})" if calls.recent else ""
        return f"collective {calls.count} of the group of ranks {_listed(sorted(self.behind[key]))}{what}"


def _listed(ranks: Sequence[Rank]) -> str:
    more = f" and {len(ranks) - RANKS_SHOWN} more" if len(ranks) > RANKS_SHOWN else ""
    return f"{listed(ranks[:RANKS_SHOWN])}{more}"


def _at(place: Place | None) -> str:
    if place is None:
        return "where nobody knows"
    activity = Activity(place.activity)
    name = place.call if activity is Activity.STEP else f"{place.call} ({activity})"
    where = f"in {name if place.call else activity}, after step {place.step}"
    peer = f" with rank {place.peer}" if place.peer >= 0 else ""
    return f"{where}, and waits for {place.operation}{peer}" if place.waits else where


# ---- how long it may take, and what is done


class Stalls:
    """The stalls of a job, as its coordinator sees them; it outlives generations."""

    def __init__(self, context: Context) -> None:
        self._ctx = context
        self._steps: deque[float] = deque(maxlen=STEPS_KEPT)  # the seconds of the last ones
        self._first_step_s = 0.0  # the longest first step of a generation
        self._factor, self._steps_since = 1, 0  # of the limit; the steps committed since it doubled
        self._hang = Hang()
        self._hangs_of: defaultdict[NodeId, list[float]] = defaultdict(list)  # when processes of a node hung
        self._was_interrupted = False  # for a hang, and nothing more was done
        self._question = 0
        self._finished: frozenset[Rank] = frozenset()  # whose scripts had ended when it was asked

    def begin_generation(self, pairing: Pairing) -> None:
        plan = self._ctx.plan
        self._pairing = pairing
        self._is_first = True  # no step was committed in this generation yet
        self._acted_at = NEVER
        if plan is not None and (plan.lost_ranks or plan.lost_nodes):
            self._factor = 1
        elif self._was_interrupted:  # it may have been a slow step
            self._double()
        self._was_interrupted = False
        self.moved()

    def _double(self) -> None:
        self._factor, self._steps_since = 2 * self._factor, 0

    def moved(self) -> None:
        """Note that a process has got on, or a rank is ready."""
        self._moved_at, self._asked_at = self._ctx.awake, NEVER
        self._look_s, self._said_s = self._notice_s, 0.0
        self._asked_about: tuple[Rank, ...] = ()  # whose stacks the newest question asked for
        self._found: Finding | None = None
        self._first_stacks: tuple[Finding, dict[Rank, tuple[str, ...]]] | None = None
        self._answers: dict[NodeId, tuple[RankCalls, ...]] = {}

    @property
    def waited_s(self) -> float:
        """The seconds since anything got on."""
        return self._ctx.awake - self._moved_at

    def committed(self, step: Step, took_s: float) -> None:
        """Note a committed step. `took_s`: since the one before it in this generation, 0 if it is the first one."""
        plan = self._ctx.plan
        if step > (max(plan.restore_step, 0) if plan is not None else 0):  # else it is mirrored only
            if self._is_first:
                self._first_step_s = max(self._first_step_s, took_s or self.waited_s)
            else:
                self._steps.append(took_s)
            self._is_first = False
            self._steps_since += 1
            if self._steps_since >= STEPS_KEPT:
                self._factor = 1
        self.moved()

    # -- limits ------------------------------------------------------------------------------------------------

    @property
    def _ordinary_s(self) -> float:
        longest_s = TIMES_LONGEST * max(self._steps, default=0.0)
        return max(FLOOR_S, longest_s) * self._factor * self._hang.patience

    @property
    def _notice_s(self) -> float:
        notice_s = max(NOTICE_S, NOTICE_TIMES * max(self._steps, default=0.0))
        fixed_s = self._ctx.timing.stall_timeout_s
        return notice_s if fixed_s is None else min(notice_s, fixed_s / 2)

    def _limit_s(self, found: Finding) -> float:
        """Return after how long it is a hang, by what those do that are waited for, or all if nobody is known."""
        timing = self._ctx.timing
        if timing.stall_timeout_s is not None:
            return timing.stall_timeout_s
        least_s = 0.0 if found.ranks else UNKNOWN_PATIENCES * timing.slow_after_s
        return max([self._ordinary_s, least_s, *map(self._limit_at, self._places(found.ranks))])

    def _limit_at(self, place: Place) -> float:
        timing, by_longest_s = self._ctx.timing, TIMES_LONGEST * place.longest_s
        match Activity(place.activity):
            case Activity.STEP:
                return self._ordinary_s
            case Activity.STEP_AGAIN:
                return AGAIN_TIMES * self._ordinary_s
            case Activity.FIRST_STEP if self._first_step_s:
                return min(timing.start_timeout_s, TIMES_LONGEST * self._first_step_s)
            case Activity.EVALUATION:
                return by_longest_s
            case Activity.SAVE:
                return max(timing.saving_timeout_s, by_longest_s)
        return timing.start_timeout_s

    # -- the course of a stall ---------------------------------------------------------------------------------

    def tick(self, finished: Collection[Rank], ledger: Ledger) -> str:
        """Look at the deadlines of a job in training. Returns: why all are to go on in a new generation, or ""."""
        ctx = self._ctx
        if self._acted_at != NEVER:
            in_vain = ctx.awake - self._acted_at >= ctx.timing.phase_timeout_s
            return "nothing has come of what was done for a hang: all ranks are interrupted" if in_vain else ""
        if self._asked_at != NEVER:
            return self._look(ledger) if self._is_answered else ""
        if self.waited_s >= self._look_s:
            self._ask(finished)
        return ""

    def _ask(self, finished: Collection[Rank]) -> None:
        ctx, found = self._ctx, self._found
        self._finished = frozenset(finished)
        self._asked_about = ()
        if found is not None and self.waited_s >= FIRST_LOOK * self._limit_s(found):
            self._asked_about = found.ranks or tuple(range(len(ctx.world.node_of)))
        self._question += 1
        self._asked_at, self._answers = ctx.awake, {}
        for node in ctx.world.active:
            own = tuple(rank for rank in ctx.world.ranks_of(node) if rank in self._asked_about)
            ctx.send(node, Compare(ctx.world.generation, self._question, own))

    def hear(self, sender: NodeId, message: Calls) -> None:
        ctx = self._ctx
        if ctx.leads and message.generation == ctx.world.generation and message.question == self._question:
            self._answers[sender] = message.ranks

    @property
    def _is_answered(self) -> bool:
        ctx = self._ctx
        limit_s = max(ANSWER_S, 4 * ctx.timing.heartbeat_interval_s)
        return not self._unheard or ctx.awake - self._asked_at >= limit_s

    @property
    def _unheard(self) -> list[NodeId]:
        """The nodes that have not answered yet."""
        return [node for node in self._ctx.world.active if node not in self._answers]

    def _places(self, ranks: Collection[Rank]) -> list[Place]:
        told = [one for one in self._told if not ranks or one.rank in ranks]
        return [one.place for one in told if one.place is not None]

    @property
    def _told(self) -> list[RankCalls]:
        return [one for of_node in self._answers.values() for one in of_node]

    def _look(self, ledger: Ledger) -> str:
        """Find who never arrived; say it, and act on it if it is time to."""
        ctx, waited_s = self._ctx, self.waited_s
        self._asked_at = NEVER
        if ctx.plan is not None and self._pairing.compare(self._answers, self._finished):
            self._look_s = waited_s + ctx.timing.slow_after_s
            return ""  # they do not pair: whoever is new among them goes
        if self._finished:  # a rank that has finished may leave the others work to do without it
            self._look_s = 2 * waited_s
            return ""
        told = self._told
        found = find(told, ctx.world.node_of)
        if unheard := self._unheard:
            found = Finding((), f"node {listed(unheard)} has not said where its processes are")
        elif not found.ranks and (lacks := ledger.lacking(ctx.world, ctx.next_snapshot, ctx.policy.copies)):
            found = Finding((), f"{found.what}; {lacks}")
        self._found = found
        places, stacks = self._places(found.ranks), {one.rank: one.stack for one in told if one.stack}
        limit_s = self._limit_s(found)
        if self._asked_about:
            if self._first_stacks is None or self._first_stacks[0].ranks != found.ranks:
                self._first_stacks = (found, stacks)
            elif waited_s >= limit_s:
                return self._judge(found, limit_s, self._first_stacks[1] | stacks, self._changed(stacks))
        patient = bool(places) and all(place.activity in PATIENT for place in places)
        if waited_s >= max(self._notice_s, 2 * self._said_s, PATIENT_NOTICE_S if patient else 0.0):
            self._said_s = waited_s
            self._say(found, limit_s, stacks)
        self._look_s = 2 * waited_s if self._said_s else min(2 * waited_s, max(PATIENT_NOTICE_S, waited_s + NOTICE_S))
        for due_s in (FIRST_LOOK * limit_s, limit_s):
            if waited_s < due_s:
                self._look_s = min(self._look_s, due_s)
                break
        else:
            self._look_s = waited_s + ctx.timing.heartbeat_interval_s
        return ""

    def _changed(self, stacks: dict[Rank, tuple[str, ...]]) -> bool:
        """Return whether whoever is waited for has come to another line since the first look."""
        found, before = self._first_stacks or (Finding((), ""), {})
        return any(rank in stacks and before.get(rank, stacks[rank]) != stacks[rank] for rank in found.ranks)

    def _judge(self, found: Finding, limit_s: float, stacks: dict[Rank, tuple[str, ...]], changed: bool) -> str:
        timing = self._ctx.timing
        if changed and timing.stall_timeout_s is None and 2 * limit_s <= timing.start_timeout_s:
            self._double()
            self._first_stacks = None
            longer_s = self._limit_s(found)
            self._look_s = max(FIRST_LOOK * longer_s, self.waited_s + timing.heartbeat_interval_s)
            slow = "; its stack changes, so it is slow and does not hang"
            self._say(Finding(found.ranks, found.what + slow), longer_s, stacks)
            return ""
        return self._act(found, limit_s, stacks)

    def _say(self, found: Finding, limit_s: float, stacks: Mapping[Rank, tuple[str, ...]], cure: str = "") -> None:
        ctx, ranks = self._ctx, found.ranks
        hosts = tuple(dict.fromkeys(ctx.world.node_of[rank] for rank in ranks))
        stack = next((stacks[rank] for rank in ranks if stacks.get(rank)), ())
        known_s = limit_s if limit_s < NEVER_S else -1.0
        step, waited_s = ctx.newest_committed, self.waited_s
        ctx.emit(Stalled(step, waited_s, known_s, ranks, hosts, found.what, stack[:FRAMES_MAX], cure))

    # -- cures -------------------------------------------------------------------------------------------------

    def _act(self, found: Finding, limit_s: float, stacks: Mapping[Rank, tuple[str, ...]]) -> str:
        """Do what comes next for this hang. Returns: why all are to go on in a new generation, or ""."""
        ctx, newest, ranks = self._ctx, self._ctx.newest_committed, found.ranks
        if self._hang.steps and newest - self._hang.steps[-1] > SAME_WITHIN_STEPS * ctx.every:
            self._hang = Hang()
        hang, nodes = self._hang, {ctx.world.node_of[rank] for rank in ranks}
        hang.since = hang.since if hang.steps else self._moved_at
        hang.steps.append(newest)
        cure = self._next(ranks, nodes)
        is_early = ctx.timing.stall_timeout_s is None and ctx.awake - hang.since < ctx.timing.start_timeout_s
        if cure is Cure.STOP and is_early:
            # It may be storage or a network that is out for everybody; a job without this plugin would sit that out.
            cure, hang.patience = Cure.INTERRUPT, 2 * hang.patience
        hang.tried |= {rank: max(cure, hang.tried.get(rank, cure)) for rank in ranks}
        reason = f"no step after {newest} was committed, and no rank got any further, for {self.waited_s:.0f} s"
        self._acted_at = ctx.awake
        if cure is Cure.INTERRUPT:
            self._was_interrupted = True
            done = "all ranks are interrupted and go on from there"
            self._say(found, limit_s, stacks, done)
            return f"{reason}: {done}"
        if cure is Cure.REPLACE:
            done = f"the process of rank {listed(ranks)} is replaced"
            self._say(found, limit_s, stacks, done)
            for rank in ranks:
                why = f"it hung after step {newest}, again after all ranks had been interrupted"
                ctx.send(ctx.world.node_of[rank], Replace(ctx.world.generation, rank, why, hung=True))
        elif cure is Cure.LEAVE:
            (node,) = nodes
            done = f"node {node} is asked to leave, whose processes hang again"
            self._say(found, limit_s, stacks, done)
            ctx.send(node, NodeFailed(ctx.world.generation, node, f"its processes hang again: {found.what}"))
        else:
            self._say(found, limit_s, stacks, "the job ends")
            again = f"again (stalls after steps {listed(hang.steps)})"
            auto = ctx.timing.stall_timeout_s is None
            advice = f"raise {'start' if auto else 'stall'}_timeout_s if steps take longer"
            ctx.stop(f"{reason}, {again}, after all that can be done about it: {found.what}; {advice}")
        return ""

    def _next(self, ranks: Collection[Rank], nodes: Collection[NodeId]) -> Cure:
        """Choose: interrupt all; replace the process that never arrived; its host; the end of the job."""
        ctx, hang = self._ctx, self._hang
        most = HANGS_MAX if ranks else UNKNOWN_MAX
        if len(hang.steps) >= most:
            return Cure.STOP
        node, can_leave = -1, False
        if len(nodes) == 1:
            (node,) = nodes
            can_leave = bool(ctx.world.spares or ctx.policy.wait_for_hosts)
        tried = max((hang.tried.get(rank, Cure.NOTHING) for rank in ranks), default=Cure.NOTHING)
        if tried is Cure.NOTHING:
            recent = [when for when in self._hangs_of[node] if ctx.now - when < ctx.policy.restarts_window_s]
            self._hangs_of[node] = [*recent, ctx.now]
            return Cure.LEAVE if recent and can_leave else Cure.INTERRUPT
        if tried is Cure.INTERRUPT:
            return Cure.REPLACE
        return Cure.LEAVE if tried is Cure.REPLACE and can_leave else Cure.STOP
