"""The cost of one job of bench_control_plane.py: its start, while nothing happens, in steps, and in losses.

Rules of this file: what is measured is taken from the board and from the kernel; nothing is asked of an agent.
"""

from __future__ import annotations

import time
from functools import cached_property
from typing import Any

from deadpool_plugin.core.types import NEVER

from . import control_kernel
from .control_board import NONE
from .control_processes import Processes
from .control_shape import FIRST

START_S, PHASE_S = 900.0, 300.0
CALM_S, LOOK_S = 1.0, 0.25


class Job:
    """The measurements, `start` first, then in any order."""

    def __init__(self, processes: Processes) -> None:
        self._processes, self._board, self.shape = processes, processes.board, processes.shape
        self._pid_of = processes.pid_of
        self._lost_at = NEVER

    def start(self) -> dict[str, float]:
        """Until all ranks train and step 0 is safe everywhere; seconds, and CPU seconds of the agents."""
        began = time.monotonic()
        self._processes.fork()
        self._processes.wait("commit of step 0", lambda: min(self._board.column("committed")) >= 0, START_S)
        self._processes.wait("protection", lambda: self._board.column("protected_ns")[FIRST] != NONE, PHASE_S)
        cpu = {self._pid_of(node): ns for node, ns in self._cpu_ns().items()}
        return {"wall_s": time.monotonic() - began, "cpu_s": sum(cpu.values()) / 1e9}

    @property
    def living(self) -> list[int]:
        return [node for node in range(self.shape.nodes) if node not in self._processes.lost]

    @property
    def coordinator(self) -> int:
        return self.living[0]

    @cached_property
    def _shares(self) -> dict[int, int]:
        """Count the agents in each node's process."""
        return {node: len(nodes) for nodes in self.shape.processes for node in nodes}

    def _cpu_ns(self) -> dict[int, int]:
        """Read the CPU time of each node's process; those that have ended are left out."""
        return {node: control_kernel.cpu_ns(self._pid_of(node)) for node in self.living}

    def _sample(self) -> dict[str, Any]:
        """Everything that is counted, now."""
        return {"at_ns": time.monotonic_ns(), "cpu_ns": self._cpu_ns(), "counts": self._board.counts()}

    def _spent(self, before: dict[str, Any]) -> dict[str, Any]:
        """Count what every living node has done since the sample `before`: lists in the order of `living`."""
        after, living = self._sample(), self.living
        counts = {
            name: [column[node] - before["counts"][name][node] for node in living]
            for name, column in after["counts"].items()
        }
        cpu = [(after["cpu_ns"][node] - before["cpu_ns"][node]) / self._shares[node] for node in living]
        return {"wall_s": (after["at_ns"] - before["at_ns"]) / 1e9, "cpu_ns": cpu, "counts": counts}

    def idle(self, seconds: float) -> dict[str, Any]:
        """Heartbeats only."""
        before = self._sample()
        time.sleep(seconds)
        self._processes.look("the end of an idle time")
        return {**self._spent(before), "heartbeats": seconds / self._processes.party.config().heartbeat_interval_s}

    def steps(self, count: int) -> dict[str, Any]:
        """`count` steps, each staged everywhere as soon as the gate opens, until the last is committed everywhere."""
        before, last = self._sample(), max(self._board.column("committed")) + count
        self._processes.order(last)
        self._processes.wait(f"commit of step {last}", lambda: min(self._of_living("committed")) >= last, PHASE_S)
        return {**self._spent(before), "steps": count}

    def memory(self) -> dict[str, list[float]]:
        """MiB of each agent; of those that share a process, its mean. What the kernel keeps for all sockets besides."""
        found = [control_kernel.memory(self._pid_of(node), self._shares[node]) for node in self.living]
        per_agent = {name: [one[name] for one in found] for name in found[0]}
        return {**per_agent, "slab_growth_mib": [self._processes.slab_growth / control_kernel.MIB]}

    def calm_down(self) -> None:
        """Let so much time pass since the last loss that the next one is none of the same storm."""
        while time.monotonic() - self._lost_at < self._processes.party.patience_s + CALM_S:
            time.sleep(LOOK_S)
            self._processes.look("the end of a storm")

    def _of_living(self, name: str) -> list[int]:
        column = self._board.column(name)
        return [column[node] for node in self.living]

    def lose(self, victim: int) -> dict[str, Any]:
        """SIGKILL the node's agent; until everybody has the plan, and until everybody trains and is protected again."""
        was_coordinator, generation = victim == self.coordinator, max(self._board.column("generation"))
        before = self._sample()
        killed_ns = time.monotonic_ns()
        self._processes.kill(victim)
        self._processes.wait("plan", lambda: min(self._of_living("generation")) > max(generation, 0), PHASE_S)
        counted = self._spent(before)["counts"]
        self._processes.wait("protection", lambda: self._is_well_since(killed_ns), PHASE_S)
        self._lost_at = time.monotonic()
        return {
            "victim": "coordinator" if was_coordinator else "member",
            "to_plan": {"cpu_ns": self._cpu_to_plan(before), "counts": counted},
            "to_protection": self._spent(before),
            "seconds": self._since(killed_ns),
        }

    def _is_well_since(self, killed_ns: int) -> bool:
        return all(self._board.column(name)[self.coordinator] > killed_ns for name in ("training_ns", "protected_ns"))

    def _cpu_to_plan(self, before: dict[str, Any]) -> list[float]:
        """Seconds of CPU of each living node until it had the plan, or until the last node of its process had it."""
        after: dict[int, int] = {}
        for node, cpu_ns in zip(self.living, self._of_living("planned_cpu_ns"), strict=True):
            after[self._pid_of(node)] = max(cpu_ns, after.get(self._pid_of(node), 0))
        return [(after[self._pid_of(node)] - before["cpu_ns"][node]) / self._shares[node] for node in self.living]

    def _since(self, killed_ns: int) -> dict[str, Any]:
        """Seconds from the kill: when each node noticed and had the plan; when it was decided, and all was well."""
        found: dict[str, Any] = {
            name: [(at - killed_ns) / 1e9 for at in self._of_living(f"{name}_ns") if at > killed_ns]
            for name in ("noticed", "planned")  # whoever has the plan first no longer notices
        }
        for name in ("decided", "training", "protected"):
            found[name] = (self._board.column(f"{name}_ns")[self.coordinator] - killed_ns) / 1e9
        return found
