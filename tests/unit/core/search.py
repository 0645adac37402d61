"""Every order of events instead of a sample: breadth-first search over the real controllers of a small job.

Rules of this file: what a node does of its own (fetch, mirror, restore) happens at once; messages come in every
order that links allow, or in that in which they were sent but for so many overtakings; at any time a node or a process
is lost, or a link ends, with all or none of what was still under way on each link. Time passes only when nothing else
can happen. Reports and Status that say nothing to their receiver's generation that a swap depends on are left out.

A controller's state is compared by value, so two orders that come to the same are one; each step of each controller is
made once, however many states of the whole job it is part of.
"""

from __future__ import annotations

import pickle
from collections import Counter, deque
from collections.abc import Iterator
from itertools import combinations, permutations, product
from typing import NamedTuple

import msgspec

from deadpool_plugin.core import api, local
from deadpool_plugin.core.controller import Controller
from deadpool_plugin.core.ledger import Ledger
from deadpool_plugin.core.messages import AnyMessage, Rehearse, Report, Status
from deadpool_plugin.core.placement import buddies_of, world_after
from deadpool_plugin.core.policy import Policy, Timing
from deadpool_plugin.core.types import Generation, Holding, NodeId, Rank, Step, SwapPlan, World

TIMING = Timing(
    heartbeat_interval_s=1.0,
    silent_after_s=20.0,
    slow_after_s=20.0,
    phase_timeout_s=40.0,
    decision_timeout_s=600.0,
    start_timeout_s=600.0,
)
JUMPS_MAX = 8
"""LIVENESS: so many phases may time out on one way to an end."""
GONE = ANYBODY = -1


class Violation(AssertionError):
    """An invariant does not hold; the arguments are which, and the way there."""


class State(NamedTuple):
    """`nodes`: which state each node's controller is in, GONE if there is none. `links`: what is under way, by pair.
    `codes`: how nodes left of their own accord. `losses`, `cuts`: faults still to come."""

    nodes: tuple[int, ...]
    links: tuple[tuple[int, ...], ...]
    plans: tuple[SwapPlan, ...]
    codes: tuple[int, ...]
    losses: int
    cuts: int
    was_cut: bool
    jumps: int
    order: tuple[int, ...]
    """Whose message was sent first, by link; () if it makes no difference."""
    overtakings: int
    last: NodeId
    """The node that did something last. Only that node is lost now: its loss at a later time, when others have done
    something meanwhile, comes to the same as that other order."""


class View(NamedTuple):
    """A controller's state as far as it matters to others."""

    generation: Generation
    swapping: bool
    holdings: tuple[Holding, ...]

    def holds(self, rank: Rank, step: Step) -> bool:
        return any((one.rank, one.step) == (rank, step) for one in self.holdings)


class Controllers:
    """Every state that any controller was ever in, and every step between them."""

    def __init__(self) -> None:
        self._pickles: list[bytes] = []
        self._numbers: dict[object, int] = {}
        self._steps: dict[tuple[int, int, float], tuple[int, tuple[api.Action, ...]]] = {}
        self.views: list[View] = []
        self.items: list[AnyMessage | api.Input] = []
        self._items: dict[object, int] = {}

    def item(self, what: AnyMessage | api.Input) -> int:
        """A number for a message, or an input."""
        if what not in self._items:
            self._items[what] = len(self.items)
            self.items.append(what)
        return self._items[what]

    def add(self, controller: Controller) -> int:
        value = value_of(controller, {})
        if value not in self._numbers:
            self._numbers[value] = len(self._pickles)
            self._pickles.append(pickle.dumps(controller))
            ctx = controller._ctx
            self.views.append(View(ctx.world.generation, ctx.swapping, controller._processes.holdings))
        return self._numbers[value]

    def step(self, number: int, event: api.Input, now: float) -> tuple[int, tuple[api.Action, ...]]:
        key = (number, self.item(event), now)
        if key not in self._steps:
            controller = pickle.loads(self._pickles[number])
            actions = tuple(controller.step(event, now))
            self._steps[key] = (self.add(controller), actions)
        return self._steps[key]


def value_of(item: object, seen: dict[int, int]) -> object:
    """`item` by value, whatever parts of it are shared."""
    if isinstance(item, msgspec.Struct):
        return (type(item), *(value_of(getattr(item, name), seen) for name in item.__struct_fields__))
    if isinstance(item, dict):
        return frozenset((key, value_of(one, seen)) for key, one in item.items())
    if isinstance(item, (set, frozenset)):
        return frozenset(item)
    if isinstance(item, (tuple, list, deque)):
        return tuple(value_of(one, seen) for one in item)
    if not hasattr(item, "__dict__") or isinstance(item, type):
        return item
    if id(item) in seen:
        return seen[id(item)]
    seen[id(item)] = len(seen)
    return tuple(value_of(one, seen) for _, one in sorted(vars(item).items()))


class Search:
    """All that can become of a job in training that holds `holdings`, with so many faults.

    `overtakings`: how often a message may arrive before one that was sent earlier to or by others; None: any number.
    `states` and `ends` count what was seen.
    """

    def __init__(
        self,
        world: World,
        holdings: dict[NodeId, list[Holding]],
        losses: int,
        cuts: int = 0,
        overtakings: int | None = None,
    ) -> None:
        self.world, self.nodes = world, tuple(sorted(world.members))
        self.pairs = {pair: place for place, pair in enumerate(permutations(self.nodes, 2))}
        self.controllers = Controllers()
        self.states = 0
        self.ends: dict[str, int] = {}
        self.now = 0.0
        self._ordered = overtakings is not None
        self.start = State(
            nodes=self._trained(holdings), links=((),) * len(self.pairs), plans=(), codes=(), losses=losses, cuts=cuts,
            was_cut=False, jumps=0, order=(), overtakings=overtakings or 0, last=ANYBODY,
        )  # fmt: skip

    def _trained(self, holdings: dict[NodeId, list[Holding]]) -> tuple[int, ...]:
        live = {node: Controller(node, TIMING, Policy()) for node in self.nodes}
        first = self.world.node_of[0]
        queue: deque[tuple[NodeId, api.Input]] = deque((node, api.WorldFormed(self.world)) for node in live)
        queue.append((first, api.StoreOffered(f"{first}:start")))
        queue += [(node, api.SnapshotHeld(one, 0, one.step - 1)) for node, held in holdings.items() for one in held]
        queue += [(node, api.WorkerReady(rank)) for rank, node in enumerate(self.world.node_of)]
        queue += [(node, api.StoreOffered(f"{node}:0")) for node in live]
        queue += [(node, api.Ticked()) for _ in range(12) for node in live]
        while queue:
            node, event = queue.popleft()
            self.now += 0.1 if isinstance(event, api.Ticked) else 0.0
            for action in live[node].step(event, self.now):
                if isinstance(action, api.Send):
                    queue.append((action.to, api.Received(node, action.message)))
        for controller in live.values():
            assert controller._ctx.training and controller._ctx.in_contact
            controller.step(api.LinkLost(99, "all at the same time from now on"), self.now)
        return tuple(self.controllers.add(live[node]) for node in self.nodes)

    def run(self, states_max: int) -> None:
        """Raises: Violation with the shortest way to it."""
        before: dict[State, tuple[State, str] | None] = {self.start: None}
        waiting = deque([self.start])
        while waiting:
            state = waiting.popleft()
            self.states += 1
            try:
                assert self.states <= states_max, f"more than {states_max} states"
                for what, after in self.nexts(state):
                    if after not in before:
                        before[after] = (state, what)
                        waiting.append(after)
            except Violation as violation:
                raise Violation(*violation.args, *self._way(before, state)) from None

    def _way(self, before: dict[State, tuple[State, str] | None], state: State) -> list[str]:
        way = []
        while (step := before[state]) is not None:
            state, what = step
            way.append(what)
        return way[::-1]

    # -- what can happen ---------------------------------------------------------------------------------------

    def nexts(self, state: State) -> Iterator[tuple[str, State]]:
        settled = self._is_settled(state)
        there = [node for node, number in zip(self.nodes, state.nodes, strict=True) if number != GONE]
        under_way = [pair for pair, place in self.pairs.items() if state.links[place] and pair[1] in there]
        if settled and not (under_way or state.losses or state.cuts):
            return self._count(state, "goes on")
        if not there:
            return self._count(state, "nobody is left")
        for pair in under_way:
            early = self._ordered and self.pairs[pair] != state.order[0]
            if state.overtakings or not early:
                yield self._deliver(state._replace(overtakings=state.overtakings - early), pair)
        if state.losses:
            for node in there if state.last == ANYBODY else {state.last}.intersection(there):
                yield from self._lose(state, node, [other for other in there if other != node])
                yield from self._lose_process(state, node)
        if state.cuts:
            for pair in combinations(there, 2):
                if state.last in (ANYBODY, *pair):
                    yield from self._cut(state, pair)
        if not (under_way or settled):
            yield self._pass_time(state, there)

    def _is_settled(self, state: State) -> bool:
        """Return whether all members of the newest world are there and in it."""
        newest = state.plans[-1].world if state.plans else self.world
        views = [self.controllers.views[number] for number in state.nodes if number != GONE]
        in_it = all(view.generation == newest.generation and not view.swapping for view in views)
        return in_it and len(views) == len(newest.members)

    def _count(self, state: State, how: str) -> None:
        name = f"{how}, left: {sorted(state.codes)}"
        self.ends[name] = self.ends.get(name, 0) + 1

    def _deliver(self, state: State, pair: tuple[NodeId, NodeId]) -> tuple[str, State]:
        item, *rest = state.links[self.pairs[pair]]
        faults = state.losses or state.cuts
        happening = Happening(self, state._replace(last=pair[1] if faults else ANYBODY))
        happening.links[self.pairs[pair]] = tuple(rest)
        what = self.controllers.items[item]
        happening.feed(pair[1], what if isinstance(what, api.Input) else api.Received(pair[0], what))
        return f"{pair[0]} -> {pair[1]}: {what}", happening.state()

    def _end_of(self, node: NodeId) -> int:
        return self.controllers.item(api.LinkLost(node, "ended"))

    def _lose(self, state: State, node: NodeId, others: list[NodeId]) -> Iterator[tuple[str, State]]:
        said = [self.pairs[node, other] for other in others]
        choices = [(True, False) if state.links[place] else (True,) for place in said]
        for kept in product(*choices):
            happening = Happening(self, state._replace(losses=state.losses - 1))
            happening.remove(node)
            for place, keeps in zip(said, kept, strict=True):
                happening.links[place] = (*(state.links[place] if keeps else ()), self._end_of(node))
            yield f"lose {node} {kept}", happening.state()

    def _lose_process(self, state: State, node: NodeId) -> Iterator[tuple[str, State]]:
        newest = state.plans[-1].world if state.plans else self.world
        for rank in newest.ranks_of(node):
            happening = Happening(self, state._replace(losses=state.losses - 1))
            happening.feed(node, api.WorkerLost(rank, "signal 9"))
            yield f"lose the process of rank {rank} on {node}", happening.state()

    def _cut(self, state: State, pair: tuple[NodeId, NodeId]) -> Iterator[tuple[str, State]]:
        for keeps in (True, False):
            happening = Happening(self, state._replace(cuts=state.cuts - 1, was_cut=True))
            for a, b in (pair, pair[::-1]):
                place = self.pairs[a, b]
                happening.links[place] = (*(state.links[place] if keeps else ()), self._end_of(a))
            yield f"cut {pair} {keeps}", happening.state()

    def _pass_time(self, state: State, there: list[NodeId]) -> tuple[str, State]:
        if state.jumps >= JUMPS_MAX:
            raise Violation("LIVENESS")
        happening = Happening(self, state._replace(jumps=state.jumps + 1, last=ANYBODY))
        for node in there:
            happening.feed(node, api.Ticked())
        return "time", happening.state()


class Happening:
    """One event, and all that nodes do about it at once."""

    def __init__(self, search: Search, state: State) -> None:
        self._search, self._from, self._all = search, state, search.controllers
        self._numbers = dict(zip(search.nodes, state.nodes, strict=True))
        self.links = list(state.links)
        self._plans, self._codes = state.plans, state.codes
        self._inputs: deque[tuple[NodeId, api.Input]] = deque()

    def state(self) -> State:
        return self._from._replace(
            nodes=tuple(self._numbers.values()),
            links=tuple(self.links),
            plans=self._plans,
            codes=self._codes,
            order=self._order() if self._search._ordered else (),
        )

    def _order(self) -> tuple[int, ...]:
        """Messages leave a link at its front and join it at its back."""
        before, kept = self._from.order, []
        left = Counter(before)
        for place in before:
            if left[place] <= len(self.links[place]):
                kept.append(place)
            left[place] -= 1
        fresh = Counter({place: len(queue) for place, queue in enumerate(self.links)}) - Counter(kept)
        return (*kept, *fresh.elements())

    def remove(self, node: NodeId) -> None:
        self._numbers[node] = GONE
        for pair, place in self._search.pairs.items():
            if pair[1] == node:
                self.links[place] = ()

    def feed(self, node: NodeId, event: api.Input) -> None:
        """As the agent does: an input that comes while another's actions are carried out waits."""
        self._inputs.append((node, event))
        if len(self._inputs) > 1:
            return
        now = self._search.now + self._from.jumps * TIMING.phase_timeout_s
        while self._inputs:
            node, event = self._inputs[0]
            if self._numbers[node] != GONE:
                self._numbers[node], actions = self._all.step(self._numbers[node], event, now)
                for action in actions:
                    self._carry_out(node, action)
            self._inputs.popleft()

    def _carry_out(self, node: NodeId, action: api.Action) -> None:
        if isinstance(action, api.Send):
            self._send(node, action)
        elif isinstance(action, api.Reconfigure):
            self._reconfigure(node, action.plan)
        elif isinstance(action, api.Leave):
            self._leave(node, action)

    def _send(self, node: NodeId, action: api.Send) -> None:
        if self._numbers.get(action.to, GONE) == GONE or not self._matters(action):
            return
        place = self._search.pairs[node, action.to]
        if self._search._end_of(node) not in self.links[place]:
            self.links[place] = (*self.links[place], self._all.item(action.message))

    def _matters(self, action: api.Send) -> bool:
        message = action.message
        if isinstance(message, (Report, Status)):
            same = message.generation == self._view(action.to).generation
            return not same or (isinstance(message, Report) and bool(message.stuck))
        return not isinstance(message, Rehearse)

    def _view(self, node: NodeId) -> View:
        return self._all.views[self._numbers[node]]

    def _holds(self, node: NodeId, rank: Rank, step: Step) -> bool:
        return self._numbers[node] != GONE and self._view(node).holds(rank, step)

    def _leave(self, node: NodeId, action: api.Leave) -> None:
        passed_on = 86 in self._codes
        if action.exit_code == 86 and not passed_on and not self._from.was_cut and "a tie" not in action.reason:
            self._check_verdict(action.reason)
        self._codes = (*self._codes, action.exit_code)
        self.remove(node)
        for other, number in self._numbers.items():
            if number != GONE:
                place = self._search.pairs[node, other]
                self.links[place] = (*self.links[place], self._search._end_of(node))

    def _check_verdict(self, reason: str) -> None:
        """Check that an observer of everything agrees that the job could not go on."""
        world = self._plans[-1].world if self._plans else self._search.world
        there = [node for node in world.members if self._numbers[node] != GONE]
        ledger = Ledger({node: self._view(node).holdings for node in there})
        lost = set(world.members) - set(there)
        if not isinstance(ledger.restore_point(world, there), str) and world_after(world, lost) is not None:
            raise Violation(f"wrong verdict: {reason}")

    def _reconfigure(self, node: NodeId, plan: SwapPlan) -> None:
        world, step, generation = plan.world, plan.restore_step, plan.world.generation
        known = [one for one in self._plans if one.world.generation == generation]
        if known and known[0] != plan:
            raise Violation("ONE_WORLD_PER_GENERATION", str(known[0]), str(plan))
        if not known:
            self._plans = (*self._plans, plan)
        sources = {source.rank: source for source in plan.sources}
        for rank in world.ranks_of(node):
            source, held = sources.get(rank), Holding(rank, step, True, (rank,))
            if source is not None:
                if not (self._holds(source.header_node, rank, step) and self._holds(source.payload_node, rank, step)):
                    continue  # it is lost by now: another swap follows
                self.feed(node, api.SnapshotHeld(held, generation, step - 1))
            elif not self._holds(node, rank, step):
                raise Violation(f"RESTORABLE: node {node} does not hold rank {rank}, step {step}", str(plan))
            for buddy in buddies_of(world, node, 1):
                self.feed(buddy, api.SnapshotHeld(held, generation, step - 1))
            if self._numbers[int(plan.store.partition(":")[0])] != GONE:
                self.feed(node, local.WorkerRestored(rank, generation))
        self.feed(node, api.StoreOffered(f"{node}:{generation}"))
