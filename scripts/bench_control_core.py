"""The protocol of jobs too big for this machine: controllers without agents, what each sends, and its CPU time.

    python scripts/bench_control_core.py --sizes 64 512 2048 --out control-core.json

All controllers live in this process. A message is encoded once, as an agent does, and decoded by each that gets it; it
arrives at once. Nobody waits: a node hears of another's end as its agent would, over the links that it has (those of
the lowest members, agent/links.py). CPU time is that of deciding, encoding and decoding; sockets and wake-ups come on
top of it (bench_control_plane.py). Bytes are bodies of messages, each with 20 bytes of framing.

Rules of this file: nothing of the protocol is replaced; what is measured is written once at the end.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import time
from collections import Counter, deque
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec

sys.path.insert(1, str(Path(__file__).resolve().parents[1]))

from bench import control_kernel

from deadpool_plugin.agent.links import LOWEST
from deadpool_plugin.core import api, local
from deadpool_plugin.core.controller import Controller, Phase
from deadpool_plugin.core.messages import AnyMessage
from deadpool_plugin.core.placement import buddies_of
from deadpool_plugin.core.policy import Policy, Timing
from deadpool_plugin.core.types import Holding, NodeId, Step, SwapPlan, World

SPARES, STEPS, BEATS, TICKS = 4, 3, 3, 4
FRAMING_BYTES = 20
FIRST_STEP_S = 0.01
_decoder = msgspec.msgpack.Decoder(AnyMessage)


class Job:
    """Controllers of `nodes` hosts with a rank each. `now`: the time of all of them."""

    def __init__(self, nodes: int) -> None:
        self.world = World(0, tuple(range(nodes - SPARES)), tuple(range(nodes - SPARES, nodes)))
        self.now = 0.0
        self._controllers = {node: Controller(node, Timing(), Policy(spares=SPARES)) for node in range(nodes)}
        self._queue: deque[tuple[NodeId, NodeId, bytes]] = deque()
        self._plans: dict[NodeId, SwapPlan] = {}
        self._rehearsals: list[tuple[NodeId, api.StartRehearsal]] = []
        self.forget()

    def forget(self) -> None:
        """Count anew."""
        self._sent, self._bytes, self._cpu_ns = (Counter[NodeId]() for _ in range(3))
        self._kinds = Counter[str]()

    def figures(self) -> dict[str, Any]:
        """Return the counts of the coordinator, of a member (the median of all) and of everybody."""
        coordinator, *members = sorted(self._controllers)
        found: dict[str, Any] = {"kinds": dict(self._kinds.most_common())}
        for name, counts in (("sent", self._sent), ("sent_bytes", self._bytes), ("cpu_us", self._cpu_ns)):
            unit = 1000 if counts is self._cpu_ns else 1
            found[name] = {
                "coordinator": counts[coordinator] / unit,
                "member": statistics.median(counts[node] for node in members) / unit,
                "all": sum(counts.values()) / unit,
            }
        return found

    def feed(self, node: NodeId, event: api.Input) -> None:
        """Give a controller an input, and send what it says."""
        if node in self._controllers:
            began = time.thread_time_ns()
            self._step(node, event)
            self._cpu_ns[node] += time.thread_time_ns() - began

    def _step(self, node: NodeId, event: api.Input) -> None:
        newest: tuple[AnyMessage | None, bytes] = (None, b"")
        for action in self._controllers[node].step(event, self.now):
            match action:
                case api.Send(to, message):
                    if message is not newest[0]:
                        newest = message, msgspec.msgpack.encode(message)
                    self._sent[node] += 1
                    self._bytes[node] += FRAMING_BYTES + len(newest[1])
                    self._kinds[type(message).__name__] += 1
                    self._queue.append((node, to, newest[1]))
                case api.Reconfigure(plan):
                    self._plans[node] = plan
                case api.StartRehearsal():
                    self._rehearsals.append((node, action))

    def settle(self) -> None:
        """Deliver everything, and have spares rehearse what they are to."""
        while self._queue or self._rehearsals:
            while self._queue:
                sender, to, body = self._queue.popleft()
                if to in self._controllers:
                    began = time.thread_time_ns()
                    self._step(to, api.Received(sender, _decoder.decode(body)))
                    self._cpu_ns[to] += time.thread_time_ns() - began
            ordered, self._rehearsals = self._rehearsals[:SPARES], []  # their first hosts
            for spare, order in ordered:
                self.feed(spare, api.SpareRehearsed(order.local_slot, order.rank))

    def start(self) -> None:
        for node in list(self._controllers):
            self.feed(node, api.WorldFormed(self.world))
        self._each_rank(lambda rank, node: self.feed(node, api.StoreOffered(f"host{node}:1", 0)))
        self._each_rank(lambda rank, node: self.feed(node, api.WorkerReady(rank)))
        self.stage(0)

    def _each_rank(self, work: Any) -> None:
        for rank, node in enumerate(self.world.node_of):
            work(rank, node)
        self.settle()

    def stage(self, step: Step) -> None:
        """Have every rank's snapshot of `step` at home, then on its buddy."""
        self.now += FIRST_STEP_S

        def held(rank: int, node: NodeId) -> None:
            for holder in (node, *buddies_of(self.world, node, 1)):
                self.feed(holder, api.SnapshotHeld(Holding(rank, step, True, (rank,)), self.world.generation))

        self._each_rank(held)

    def beat(self) -> None:
        """Let one heartbeat interval pass."""
        for _ in range(TICKS):
            self.now += Timing().heartbeat_interval_s / TICKS
            for node in list(self._controllers):
                self.feed(node, api.Ticked())
            self.settle()

    def lose(self, lost: NodeId) -> SwapPlan:
        """End a node at once; until everybody has the plan."""
        del self._controllers[lost]
        lowest = sorted(self._controllers)[:LOWEST]
        linked: Iterable[NodeId] = list(self._controllers) if lost < lowest[-1] else lowest
        for node in linked:
            self.feed(node, api.LinkLost(lost, "the peer closed the connection"))
        self.settle()
        plans = {self._plans.pop(node) for node in list(self._controllers)}
        (plan,) = plans
        self.world = plan.world
        return plan

    def restore(self, plan: SwapPlan) -> None:
        """Carry a plan out; until all train and what they went back to is mirrored again."""
        self._each_rank(lambda rank, node: self.feed(node, local.WorkerRestored(rank, plan.world.generation)))
        self.stage(plan.restore_step)
        assert all(one.phase is Phase.TRAINING for one in self._controllers.values())


def measured(nodes: int) -> dict[str, Any]:
    job, found = Job(nodes), dict[str, Any]()

    def note(name: str, times: int = 1) -> None:
        found[name] = {"times": times, **job.figures()}
        job.forget()

    job.start()
    note("start")
    for step in range(1, STEPS + 1):
        job.stage(step)
    note("steps", STEPS)
    for _ in range(BEATS):
        job.beat()
    note("heartbeats", BEATS)
    job.now += 2 * Timing().silent_after_s  # else the losses are a storm
    for name, lost in (("member", nodes // 2), ("coordinator", 0)):
        plan = job.lose(lost)
        note(f"{name}_to_plan")
        job.restore(plan)
        note(f"{name}_to_protection")
    return {"nodes": nodes, **found}


def line_of(found: dict[str, Any], name: str) -> str:
    one = found[name]
    shown = [f"{who} {one['sent'][who] / one['times']:.0f} messages, {one['sent_bytes'][who] / one['times']:.0f} bytes"
             f", {one['cpu_us'][who] / one['times']:.0f} us" for who in ("coordinator", "member")]  # fmt: skip
    return f"[core] {found['nodes']} hosts, {name}: {'; '.join(shown)}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", type=int, nargs="+", default=[64, 128, 256, 512, 1024, 2048])
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    gc.disable()  # the garbage of thousands of controllers is nobody's cost
    records = []
    for nodes in args.sizes:
        records.append(measured(nodes))
        for name in filter("nodes".__ne__, records[-1]):
            print(line_of(records[-1], name), flush=True)
        gc.collect()
    if args.out is not None:
        args.out.write_text(json.dumps({"machine": control_kernel.machine(), "sizes": records}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
