"""A cluster in memory: real controllers, toy agents and workers, links that keep order but mix at random.

Rules of this file: a toy worker trains in lock step, keeps two slots a rank and obeys the gate; what is restored is
compared, so a swap that mixes histories or reads an overwritten slot fails here. Every choice comes from one seed.
"""

from __future__ import annotations

import random
from collections import defaultdict, deque
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from support import expect

from deadpool_plugin.core import io
from deadpool_plugin.core.controller import Controller
from deadpool_plugin.core.ledger import may_stage
from deadpool_plugin.core.messages import AnyMessage, Goodbye, Propose, RankCalls
from deadpool_plugin.core.placement import buddies_of, needs_payload
from deadpool_plugin.core.policy import Policy
from deadpool_plugin.core.timing import Timing
from deadpool_plugin.core.types import NO_STEP, Holding, NodeId, Rank, Step, SwapPlan, World

TIMING = Timing(
    heartbeat_interval_s=0.5, silent_after_s=5.0, phase_timeout_s=5.0, decision_timeout_s=60.0, start_timeout_s=60.0,
    stall_timeout_s=90.0,
)  # fmt: skip


@dataclass
class Worker:
    """One rank: the step it has completed, in which history (`state`), and whether it runs."""

    rank: Rank
    step: Step = 0
    state: tuple[int, ...] = (0,)
    live: bool = False
    finished: bool = False


@dataclass
class Node:
    """A toy agent: its slots hold (step, state, payload); index is step % 2."""

    number: NodeId
    controller: Controller
    inputs: deque[io.Input] = field(default_factory=deque)
    slots: dict[tuple[Rank, int], tuple[Step, tuple[int, ...], bool]] = field(default_factory=dict)
    workers: dict[Rank, Worker] = field(default_factory=dict)
    world: World | None = None
    committed: Step = NO_STEP
    fence: int = 0
    frozen: bool = False
    deaths: list[tuple[Rank, int]] = field(default_factory=list)
    """Ranks without a process, and how it ended; noticed one by one."""
    dead: set[Rank] = field(default_factory=set)
    stores: dict[str, Rank] = field(default_factory=dict)
    """Each store offered and the rank whose process hosts it (-1: a standing-by one)."""
    exit: tuple[int, str] | None = None
    killed: bool = False
    paused: bool = False
    rehearsals: list[io.StartRehearsal] = field(default_factory=list)
    events: list[io.Emit] = field(default_factory=list)

    @property
    def up(self) -> bool:
        return not self.killed and self.exit is None

    @property
    def left(self) -> tuple[int, str]:
        """The exit code and the reason of a node that has left the job."""
        assert self.exit is not None, f"node {self.number} has not left"
        return self.exit

    @property
    def joined(self) -> World:
        """The world of a node that is in one."""
        assert self.world is not None, f"node {self.number} is in no world"
        return self.world

    def holds(self, rank: Rank, step: Step) -> tuple[Step, tuple[int, ...], bool] | None:
        found = self.slots.get((rank, step % 2))
        return found if found is not None and found[0] == step else None


class Cluster:
    """Nodes 0..n-1; `world` says which are active. `last_step`: the script ends after it."""

    def __init__(
        self,
        world: World,
        last_step: Step = 6,
        seed: int | None = None,
        replicas: Mapping[Rank, tuple[Rank, ...]] | None = None,
        policy: Policy = Policy(),
    ):
        self.world = world
        self.last_step = last_step
        self.rng = None if seed is None else random.Random(seed)
        self.replicas = replicas or {rank: (rank,) for rank in range(len(world.node_of))}
        self.now = 0.0
        self.policy = policy
        self.nodes = {n: Node(n, Controller(n, TIMING, policy)) for n in sorted(world.members)}
        self.links: dict[tuple[NodeId, NodeId], deque[AnyMessage | io.LinkLost]] = defaultdict(deque)
        self.dead_stores: set[str] = set()
        self.committed: dict[int, Step] = {}
        """The newest step that was committed in each generation."""
        self.bulk: deque[tuple[NodeId, NodeId, int, Rank, Step, tuple[int, ...], bool]] = deque()
        self.plans: dict[int, SwapPlan] = {}
        self.witness: dict[int, SwapPlan] = {}
        self.stores = 0
        self.turn = 0
        self.duplicates = False
        self.gone: set[tuple[NodeId, NodeId]] = set()
        """Links whose end both nodes have noticed."""
        self.silent: set[tuple[NodeId, NodeId]] = set()
        """Links that carry nothing for now, which nobody is told; what is said meanwhile arrives later."""
        self.clocks = {n: (1.0, 0.0) for n in self.nodes}
        """Each node's own clock: its rate and what it showed in the beginning."""
        self.hold = False
        """Workers do nothing (time can pass without the job ending)."""
        self.calls: dict[NodeId, tuple[RankCalls, ...]] = {}
        """The calls that each node's ranks have issued, where a test says so; `ended`: the processes ended for it."""
        self.paired: dict[Rank, int] = {}
        """The collectives in a rank's snapshots of steps after the newest restore."""
        self.ended: list[tuple[NodeId, Rank, str]] = []
        self.starts = {n: 0 for n in self.nodes}

    # -- running -----------------------------------------------------------------------------------------------

    def form(self) -> None:
        for node in self.nodes.values():
            node.inputs.append(io.WorldFormed(self.world))
            node.world = self.world
        self.offer(self.nodes[self.world.node_of[0]])

    def offer(self, node: Node) -> None:
        """The lowest process of `node` that lives hosts a store (a spare's standing-by process if it has no rank)."""
        ranks = (
            node.controller.world.ranks_of(node.number) if node.controller.world else self.world.ranks_of(node.number)
        )
        living = [rank for rank in ranks if rank not in node.dead]
        if ranks and not living:
            return
        self.stores += 1
        address = f"node{node.number}:{self.stores}"
        node.stores[address] = living[0] if living else -1
        node.inputs.append(io.StoreOffered(address))

    def join(self, number: NodeId) -> None:
        """A host that is no member asks to become one; it is linked with everybody who lives."""
        newest = self.plans[max(self.plans)].world if self.plans else self.world
        node = self.nodes[number] = Node(number, Controller(number, TIMING, self.policy))
        self.starts[number] = 0
        members = tuple(n for n in newest.members if self.nodes[n].up)
        self.feed(node, io.Joining(members))

    def run(self, until=None, events: int = 60_000) -> bool:
        """Run until `until()` or everybody is gone; False if neither happens within `events` events."""
        for _ in range(events):
            if until is not None and until():
                return True
            if not any(node.up and not node.frozen for node in self.nodes.values()):
                return until is None
            self.one_event()
        return False

    def one_event(self) -> None:
        choices: list[tuple[str, Any]] = [
            ("input", n) for n, node in self.nodes.items() if node.up and not node.frozen and node.inputs
        ]
        choices += [
            ("link", pair)
            for pair, queue in self.links.items()
            if queue and not self.nodes[pair[1]].frozen and pair not in self.silent
        ]
        choices += [("bulk", None)] if any(item[:2] not in self.silent for item in self.bulk) else []
        living = [n for n, node in self.nodes.items() if node.up and not node.frozen]
        choices += [("death", n) for n in living if self.nodes[n].deaths and self.nodes[n].controller.world]
        choices += [("work", (node.number, rank)) for node, rank in self.workers() if self.can_work(node, rank)]
        if not choices:
            self.advance(TIMING.heartbeat_interval_s / 4)
            return
        self.turn += 1
        if self.rng is None:
            kind, what = choices[self.turn % len(choices)]
        else:
            kind, what = self.rng.choice(choices)
        if kind == "input":
            self.feed(self.nodes[what], self.nodes[what].inputs.popleft())
        elif kind == "link":
            self.deliver(*what)
        elif kind == "bulk":
            self.deliver_bulk()
        elif kind == "death":
            self.notice(self.nodes[what])
        else:
            self.work(self.nodes[what[0]], what[1])
        if self.turn % 40 == 0:
            self.advance(TIMING.heartbeat_interval_s / 4)

    def advance(self, seconds: float) -> None:
        self.now += seconds
        for node in self.nodes.values():
            if node.up and not node.frozen:
                self.feed(node, io.Ticked())

    def deliver(self, source: NodeId, target: NodeId) -> None:
        item = self.links[source, target].popleft()
        node = self.nodes[target]
        if not node.up:
            return
        if isinstance(item, io.LinkLost):
            self.feed(node, item)
            return
        self.feed(node, io.Received(source, item))
        if self.duplicates and self.rng is not None and self.rng.random() < 0.2:
            self.feed(node, io.Received(source, item))

    def feed(self, node: Node, event: io.Input) -> None:
        if node.up:
            for action in node.controller.step(event, self.clock(node)):
                self.carry_out(node, action)

    def clock(self, node: Node) -> float:
        rate, offset = self.clocks.get(node.number, (1.0, 0.0))
        return offset + rate * self.now

    # -- faults ------------------------------------------------------------------------------------------------

    def kill(self, number: NodeId) -> None:
        """SIGKILL and a reset: some of what it has said is lost, then every link ends."""
        node = self.nodes[number]
        if not node.up:
            return
        node.killed = True
        for other in sorted(self.nodes.keys() - {number}):
            queue = self.links[number, other]
            cut = self.rng.randint(0, len(queue)) if self.rng is not None else len(queue)
            while len(queue) > cut:
                queue.pop()
            queue.append(io.LinkLost(number, "connection reset"))
        self.bulk = deque(item for item in self.bulk if number not in item[:2])

    def kill_rank(self, number: NodeId, rank: Rank, exit_code: int = -9) -> None:
        """The process of `rank` ends (with what it hosts); its node lives on and notices it some time later."""
        node = self.nodes[number]
        if not node.up or rank in node.dead:
            return
        if rank in node.workers:
            node.workers[rank].live = False
        node.dead.add(rank)
        node.deaths.append((rank, exit_code))
        self.dead_stores |= {address for address, host in node.stores.items() if host == rank}

    def notice(self, node: Node) -> None:
        rank, exit_code = node.deaths.pop(0)
        event = io.WorkerLost(rank, "signal 9") if exit_code < 0 else io.WorkerFailed(rank, exit_code, "ValueError")
        self.feed(node, event)
        gone = {address for address, host in node.stores.items() if host == rank}
        node.inputs = deque(e for e in node.inputs if not isinstance(e, io.StoreOffered) or e.address not in gone)
        for address in sorted(gone):
            self.feed(node, io.StoreLost(address))
        if node.fence > node.controller.generation:
            self.offer(node)

    def isolate(self, nodes: Collection[NodeId], both_ways: bool = True) -> None:
        """Nothing that `nodes` say reaches the others any more (nor the other way round), and nobody is told."""
        for inside in nodes:
            for outside in self.nodes.keys() - set(nodes):
                self.silent.add((inside, outside))
                if both_ways:
                    self.silent.add((outside, inside))

    def cut(self, a: NodeId, b: NodeId) -> None:
        """The connection between two nodes ends; both live on."""
        for pair in ((a, b), (b, a)):
            self.links[pair].append(io.LinkLost(pair[0], "cut"))
            self.gone.add(pair)

    # -- the toy agent -----------------------------------------------------------------------------------------

    def carry_out(self, node: Node, action: io.Action) -> None:
        if isinstance(action, io.Send):
            if (node.number, action.to) not in self.gone:
                self.links[node.number, action.to].append(action.message)
        elif isinstance(action, io.StartWorkers):
            self.starts[node.number] += 1
            for rank in action.world.ranks_of(node.number):
                if rank in node.dead:
                    continue
                worker = node.workers[rank] = Worker(rank, live=True)
                self.stage(node, worker)
                node.inputs.append(io.WorkerReady(rank))
            self.offer(node)
        elif isinstance(action, io.StartRehearsal):
            node.rehearsals.append(action)
            node.inputs.append(io.SpareRehearsed(action.local_slot, action.rank))
        elif isinstance(action, io.Commit):
            assert action.step > node.committed
            node.committed = action.step
        elif isinstance(action, io.AbortWorkers):
            assert action.generation > node.fence
            node.fence = action.generation
            for worker in node.workers.values():
                worker.live = False
            self.offer(node)
        elif isinstance(action, io.ReadCalls):
            node.inputs.append(io.CallsRead(action.generation, self.calls.get(node.number, ())))
        elif isinstance(action, io.EndRank):
            self.ended.append((node.number, action.rank, action.reason))
            self.kill_rank(node.number, action.rank)
        elif isinstance(action, (io.PauseWorkers, io.ResumeWorkers)):
            assert node.paused is isinstance(action, io.ResumeWorkers)
            node.paused = not node.paused
        elif isinstance(action, io.Reconfigure):
            self.reconfigure(node, action.plan)
        elif isinstance(action, io.Claim):
            kept = self.witness.setdefault(action.plan.world.generation, action.plan)
            node.inputs.append(io.Claimed(kept))
        elif isinstance(action, io.Look):
            if action.generation in self.witness:
                node.inputs.append(io.Claimed(self.witness[action.generation]))
        elif isinstance(action, io.Emit):
            node.events.append(action)
            if action.kind == "StepCommitted":
                generation = node.controller.generation
                self.committed[generation] = max(
                    self.committed.get(generation, NO_STEP), expect(int, action.fields["step"])
                )
        elif isinstance(action, io.Leave):
            node.exit = (action.exit_code, action.reason)
            for other in self.nodes:
                if other != node.number:
                    self.links[node.number, other].append(Goodbye(node.controller.generation, action.verdict))

    def reconfigure(self, node: Node, plan: SwapPlan) -> None:
        generation = plan.world.generation
        assert self.plans.setdefault(generation, plan) == plan, "ONE_WORLD_PER_GENERATION"
        assert node.fence == generation and not node.paused
        self.check_nothing_lost(plan)
        self.check_stopped(plan)
        assert plan.world.node_of != () and len(plan.world.node_of) == len(self.world.node_of)
        node.world, node.committed = plan.world, NO_STEP
        if plan.restore_step == NO_STEP:
            self.begin_again(node, plan)
            return
        node.dead = {rank for rank, _ in node.deaths}  # nobody has noticed these, so they are not replaced
        for key, (step, _, _) in list(node.slots.items()):
            if step > plan.restore_step:
                del node.slots[key]
        node.workers = {rank: Worker(rank, plan.restore_step) for rank in plan.world.ranks_of(node.number)}
        for source in plan.sources:
            if plan.world.node_of[source.rank] == node.number:
                self.fetch(node, plan, source)
        for rank, worker in node.workers.items():
            own = node.holds(rank, plan.restore_step)
            if own is None:
                continue  # the source is gone: another swap follows
            assert own[2], "a header is no snapshot to restore from"
            worker.state = own[1]
            if plan.store in self.dead_stores or rank in node.dead:
                continue  # the groups cannot be built: a death is told of, and another swap follows
            worker.live = True
            node.inputs.append(io.WorkerRestored(rank, generation))
            self.push(node, rank, plan.restore_step)

    def check_nothing_lost(self, plan: SwapPlan) -> None:
        """RESTORABLE: what was committed survives so many losses."""
        if len(plan.lost_nodes) <= self.policy.copies:
            assert plan.restore_step >= self.committed.get(plan.world.generation - 1, NO_STEP)
        if plan.restore_step == NO_STEP:
            assert not self.committed and not plan.sources and plan.store == ""

    def check_stopped(self, plan: SwapPlan) -> None:
        """Check that the replaced have stopped, unless their agent stood still till now or a link to it has ended."""
        for number in plan.lost_nodes:
            node = self.nodes[number]
            running = [] if node.paused else [rank for rank, worker in node.workers.items() if worker.live]
            slept_s = self.clock(node) - node.controller._ctx.now
            excused = not node.up or slept_s > TIMING.heartbeat_interval_s or any(number in pair for pair in self.gone)
            assert excused or not running, f"node {number} is replaced and still runs {running}"

    def begin_again(self, node: Node, plan: SwapPlan) -> None:
        """Every process of a rank is a new one that begins the script; what the old ones said counts no more."""
        node.workers = {}
        self.dead_stores |= node.stores.keys()
        node.dead.clear()
        node.deaths.clear()
        node.slots.clear()
        node.inputs = deque(e for e in node.inputs if not isinstance(e, (io.WorkerReady, io.StoreOffered)))
        if plan.world.node_of[0] == node.number:
            self.offer(node)

    def fetch(self, node: Node, plan: SwapPlan, source) -> None:
        header, payload = self.nodes[source.header_node], self.nodes[source.payload_node]
        if not (header.up and payload.up):
            return
        step = plan.restore_step
        head, body = header.holds(source.rank, step), payload.holds(source.payload_rank, step)
        assert head is not None and body is not None and body[2], "RESTORABLE: the source does not hold it"
        assert head[1] == body[1]
        node.slots[source.rank, step % 2] = (step, body[1], True)
        node.inputs.append(self.held(source.rank, step, True, plan.world.generation))

    def held(self, rank: Rank, step: Step, payload: bool, generation: int) -> io.SnapshotHeld:
        restored = generation == 0 or step <= self.plans[generation].restore_step
        paired = 0 if restored else self.paired.get(rank, 0)
        return io.SnapshotHeld(Holding(rank, step, payload, self.replicas[rank], paired), generation)

    def push(self, node: Node, rank: Rank, step: Step) -> None:
        copies = self.policy.copies
        for buddy in buddies_of(node.joined, node.number, copies):
            if self.nodes[buddy].up:
                payload = needs_payload(node.joined, rank, self.replicas[rank], copies)
                state = node.slots[rank, step % 2][1]
                self.bulk.append((node.number, buddy, node.joined.generation, rank, step, state, payload))

    def deliver_bulk(self) -> None:
        if self.rng is not None:
            self.bulk.rotate(self.rng.randrange(len(self.bulk)))
        item = self.bulk.popleft()
        source, target, generation, rank, step, state, payload = item
        node = self.nodes[target]
        if (source, target) in self.silent:
            self.bulk.append(item)
            return
        if node.frozen:
            self.bulk.append(item)
            self.advance(TIMING.heartbeat_interval_s / 4)
        elif node.up and self.nodes[source].up and generation >= node.fence:
            if generation > node.controller.generation:
                self.bulk.append(item)  # the receiver has not heard of it yet
                if not self.links_busy(target):
                    self.advance(TIMING.heartbeat_interval_s / 4)
                return
            if node.slots.get((rank, step % 2), (NO_STEP,))[0] > step:
                return  # overtaken: a real connection keeps the order
            node.slots[rank, step % 2] = (step, state, payload)
            node.inputs.append(self.held(rank, step, payload, generation))

    def links_busy(self, target: NodeId) -> bool:
        return any(queue for (_, to), queue in self.links.items() if to == target)

    # -- the toy worker ----------------------------------------------------------------------------------------

    def workers(self) -> list[tuple[Node, Rank]]:
        if self.hold:
            return []
        return [(node, rank) for node in self.nodes.values() if node.up and not node.frozen for rank in node.workers]

    def staged(self, node: Node, worker: Worker) -> bool:
        return node.holds(worker.rank, worker.step) is not None

    def can_work(self, node: Node, rank: Rank) -> bool:
        worker = node.workers[rank]
        if not worker.live or worker.finished or node.paused:
            return False
        if not self.staged(node, worker):
            return may_stage(worker.step, node.committed)
        return worker.step == self.last_step or all(
            peer is not None and peer.live and peer.step >= worker.step for peer in self.peers(node)
        )

    def peers(self, node: Node) -> Iterator[Worker | None]:
        for rank, home in enumerate(node.joined.node_of):
            other = self.nodes[home]
            same = other.up and not other.frozen and other.controller.generation == node.joined.generation
            yield other.workers.get(rank) if same else None

    def work(self, node: Node, rank: Rank) -> None:
        worker = node.workers[rank]
        if not self.staged(node, worker):
            self.stage(node, worker)
        elif worker.step < self.last_step:
            worker.step += 1
            worker.state += (node.joined.generation,)
        else:
            worker.finished = True
            node.inputs.append(io.WorkerFinished(rank))

    def stage(self, node: Node, worker: Worker) -> None:
        node.slots[worker.rank, worker.step % 2] = (worker.step, worker.state, True)
        node.inputs.append(self.held(worker.rank, worker.step, True, node.joined.generation))
        self.push(node, worker.rank, worker.step)

    # -- what tests look at ------------------------------------------------------------------------------------

    def knows_of_training(self) -> bool:
        return all(node.controller._ctx.has_trained for node in self.nodes.values())

    def newest(self) -> SwapPlan:
        return self.plans[max(self.plans)]

    def generation_protected(self) -> bool:
        """Return whether all who live are in the newest generation, and it is protected."""
        newest = max(self.plans, default=0)
        members = [self.nodes[number] for number in (self.plans[newest].world if newest else self.world).members]
        reached = all(node.controller.generation == newest and node.fence <= newest for node in members if node.up)
        floor = self.plans[newest].restore_step if newest else 0
        return reached and self.committed.get(newest, NO_STEP) >= floor

    def speaks(self, number: NodeId) -> bool:
        """Return whether anything `number` has said, or its end, is still on its way."""
        return any(queue for (source, to), queue in self.links.items() if source == number and self.nodes[to].up)

    def waits(self) -> bool:
        members = [node for node in self.nodes.values() if node.up and node.controller.world]
        return all(node.controller._ctx.waiting for node in members)

    def idle(self, seconds: float) -> None:
        """Everything that is under way arrives, and so much time passes."""
        end = self.now + seconds
        assert self.run(lambda: self.now >= end)

    def has_proposed(self, generation: int) -> bool:
        """Return whether a plan for `generation` is on its way to the voters."""
        messages = [item for queue in self.links.values() for item in queue if isinstance(item, Propose)]
        return any(message.plan.world.generation == generation for message in messages)

    def training(self) -> bool:
        return bool(self.said("TrainingStarted"))

    def at_step(self, step: Step) -> bool:
        return any(worker.step >= step for node in self.nodes.values() if node.up for worker in node.workers.values())

    def said(self, kind: str) -> list[dict[str, object]]:
        return [event.fields for node in self.nodes.values() for event in node.events if event.kind == kind]

    def exits(self) -> dict[NodeId, int | None]:
        return {n: node.exit[0] if node.exit else None for n, node in self.nodes.items()}
