"""A cluster in memory: real controllers, toy agents and workers, links that keep order but mix at random.

Rules of this file: a toy worker trains in lock step, keeps two slots a rank and obeys the gate; what is restored is
compared, so a swap that mixes histories or reads an overwritten slot fails here. Every choice comes from one seed.
"""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field

from deadpool_plugin.core import io
from deadpool_plugin.core.controller import Controller
from deadpool_plugin.core.ledger import may_stage
from deadpool_plugin.core.messages import Goodbye
from deadpool_plugin.core.placement import buddy_of, needs_payload
from deadpool_plugin.core.timing import Timing
from deadpool_plugin.core.types import NO_STEP, Holding, NodeId, Rank, Step, SwapPlan, World

TIMING = Timing(heartbeat_interval_s=0.5, silent_after_s=5.0, phase_timeout_s=5.0, start_timeout_s=60.0)


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
    exit: tuple[int, str] | None = None
    killed: bool = False
    rehearsals: list[io.StartRehearsal] = field(default_factory=list)
    events: list[io.Emit] = field(default_factory=list)

    @property
    def up(self) -> bool:
        return not self.killed and self.exit is None

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
        replicas: dict[Rank, tuple[Rank, ...]] | None = None,
    ):
        self.world = world
        self.last_step = last_step
        self.rng = None if seed is None else random.Random(seed)
        self.replicas = replicas or {rank: (rank,) for rank in range(len(world.node_of))}
        self.now = 0.0
        self.nodes = {n: Node(n, Controller(n, TIMING)) for n in sorted(world.members)}
        self.links: dict[tuple[NodeId, NodeId], deque[object]] = {
            (a, b): deque() for a in self.nodes for b in self.nodes if a != b
        }
        self.bulk: deque[tuple[NodeId, NodeId, int, Rank, Step, tuple[int, ...], bool]] = deque()
        self.plans: dict[int, SwapPlan] = {}
        self.stores = 0
        self.turn = 0
        self.duplicates = False
        self.gone: set[tuple[NodeId, NodeId]] = set()
        self.hold = False
        """Workers do nothing (time can pass without the job ending)."""
        self.starts = {n: 0 for n in self.nodes}

    # -- running -----------------------------------------------------------------------------------------------

    def form(self) -> None:
        for node in self.nodes.values():
            node.inputs.append(io.WorldFormed(self.world))
            node.world = self.world
        self.offer(self.nodes[self.world.node_of[0]])

    def offer(self, node: Node) -> None:
        self.stores += 1
        node.inputs.append(io.StoreOffered(f"node{node.number}:{self.stores}"))

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
        choices = [("input", n) for n, node in self.nodes.items() if node.up and not node.frozen and node.inputs]
        choices += [("link", pair) for pair, queue in self.links.items() if queue and not self.nodes[pair[1]].frozen]
        choices += [("bulk", None)] if self.bulk else []
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
            for action in node.controller.step(event, self.now):
                self.carry_out(node, action)

    # -- faults ------------------------------------------------------------------------------------------------

    def kill(self, number: NodeId) -> None:
        """SIGKILL and a reset: some of what it has said is lost, then every link ends."""
        node = self.nodes[number]
        if not node.up:
            return
        node.killed = True
        for (source, _), queue in self.links.items():
            if source == number:
                cut = self.rng.randint(0, len(queue)) if self.rng is not None else len(queue)
                while len(queue) > cut:
                    queue.pop()
                queue.append(io.LinkLost(source, "connection reset"))
        self.bulk = deque(item for item in self.bulk if number not in item[:2])

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
        elif isinstance(action, io.Reconfigure):
            self.reconfigure(node, action.plan)
        elif isinstance(action, io.Emit):
            node.events.append(action)
        elif isinstance(action, io.Leave):
            node.exit = (action.exit_code, action.reason)
            for (source, _), queue in self.links.items():
                if source == node.number:
                    queue.append(Goodbye(node.controller.generation))

    def reconfigure(self, node: Node, plan: SwapPlan) -> None:
        generation = plan.world.generation
        assert self.plans.setdefault(generation, plan) == plan, "ONE_WORLD_PER_GENERATION"
        assert node.fence == generation
        assert plan.world.node_of != () and len(plan.world.node_of) == len(self.world.node_of)
        node.world, node.committed = plan.world, NO_STEP
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
            worker.state, worker.live = own[1], True
            node.inputs.append(io.WorkerRestored(rank, generation))
            self.push(node, rank, plan.restore_step)

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
        return io.SnapshotHeld(Holding(rank, step, payload, self.replicas[rank]), generation)

    def push(self, node: Node, rank: Rank, step: Step) -> None:
        buddy = buddy_of(node.world, node.number)
        if buddy is not None and self.nodes[buddy].up:
            payload = needs_payload(node.world, rank, self.replicas[rank])
            state = node.slots[rank, step % 2][1]
            self.bulk.append((node.number, buddy, node.world.generation, rank, step, state, payload))

    def deliver_bulk(self) -> None:
        if self.rng is not None:
            self.bulk.rotate(self.rng.randrange(len(self.bulk)))
        item = self.bulk.popleft()
        source, target, generation, rank, step, state, payload = item
        node = self.nodes[target]
        if node.frozen:
            self.bulk.append(item)
            self.advance(TIMING.heartbeat_interval_s / 4)
        elif node.up and self.nodes[source].up and generation >= node.fence:
            if generation > node.controller.generation:
                self.bulk.append(item)  # the receiver has not heard of it yet
                if not self.links_busy(target):
                    self.advance(TIMING.heartbeat_interval_s / 4)
                return
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
        if not worker.live or worker.finished:
            return False
        if not self.staged(node, worker):
            return may_stage(worker.step, node.committed)
        return worker.step == self.last_step or all(
            peer is not None and peer.live and peer.step >= worker.step for peer in self.peers(node)
        )

    def peers(self, node: Node):
        for rank, home in enumerate(node.world.node_of):
            other = self.nodes[home]
            same = other.up and not other.frozen and other.world.generation == node.world.generation
            yield other.workers.get(rank) if same else None

    def work(self, node: Node, rank: Rank) -> None:
        worker = node.workers[rank]
        if not self.staged(node, worker):
            self.stage(node, worker)
        elif worker.step < self.last_step:
            worker.step += 1
            worker.state += (node.world.generation,)
        else:
            worker.finished = True
            node.inputs.append(io.WorkerFinished(rank))

    def stage(self, node: Node, worker: Worker) -> None:
        node.slots[worker.rank, worker.step % 2] = (worker.step, worker.state, True)
        node.inputs.append(self.held(worker.rank, worker.step, True, node.world.generation))
        self.push(node, worker.rank, worker.step)

    # -- what tests look at ------------------------------------------------------------------------------------

    def training(self) -> bool:
        return bool(self.said("TrainingStarted"))

    def at_step(self, step: Step) -> bool:
        return any(worker.step >= step for node in self.nodes.values() if node.up for worker in node.workers.values())

    def said(self, kind: str) -> list[dict[str, object]]:
        return [event.fields for node in self.nodes.values() for event in node.events if event.kind == kind]

    def exits(self) -> dict[NodeId, int | None]:
        return {n: node.exit[0] if node.exit else None for n, node in self.nodes.items()}
