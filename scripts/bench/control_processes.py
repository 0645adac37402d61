"""The processes of one job of bench_control_plane.py: agents and stub workers, forked from this one.

Rules of this file: every wait has a deadline, and ends at once if a process has ended, an agent has reported a trouble,
or memory runs short. Whatever way a job ends, `close` leaves no process. Not for a process that has threads.
"""

from __future__ import annotations

import functools
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from clusters.launched import free_port

from deadpool_plugin.transport.linux import die_with_parent

from . import control_agents, control_kernel
from .control_agents import Party
from .control_board import Board
from .control_shape import Failed, Shape
from .control_workers import ORDER_BYTES, Stage

STUB_NODES = 64
"""Nodes whose workers one process plays."""
_POLL_S = 0.005
_LOOK_S = 0.25


class Processes:
    """`folder` gets what they say; `lost` are the nodes whose agents have been killed."""

    def __init__(self, folder: Path, shape: Shape, patience_s: float, memory_bytes_max: int) -> None:
        self.shape, self._folder = shape, folder
        (folder / "said").mkdir(parents=True, exist_ok=True)
        name = f"deadpool-bench/{os.getpid()}/{shape.name}"
        self.party = Party(name, folder, shape.nodes, shape.slots, shape.spares, patience_s, free_port())
        self.board = Board(shape.nodes)
        self.lost: set[int] = set()
        self._pids: dict[int, int] = {}
        self._stubs: list[int] = []
        self._orders: list[int] = []
        self._reaped: set[int] = set()
        self._before = control_kernel.meminfo()
        self._memory_bytes_max = memory_bytes_max

    def fork(self) -> None:
        for nodes in self.shape.processes:
            play = functools.partial(control_agents.serve, self.party, nodes, self.board)
            self._pids |= dict.fromkeys(nodes, self._forked(f"agents{nodes[0]}", play))
        for first in range(0, self.shape.nodes, STUB_NODES):
            self._fork_stubs(range(first, min(first + STUB_NODES, self.shape.nodes)))

    def _fork_stubs(self, nodes: Sequence[int]) -> None:
        reading, writing = os.pipe()
        self._stubs.append(self._forked(f"stubs{nodes[0]}", lambda: Stage(self.party, nodes, reading).play()))
        os.close(reading)
        self._orders.append(writing)

    def _forked(self, name: str, play: Callable[[], object]) -> int:
        """A process that plays, its words in a file."""
        driver = os.getpid()
        pid = os.fork()
        if pid == 0:
            try:
                die_with_parent(signal.SIGKILL, driver)
                output = os.open(self._folder / "said" / f"{name}.txt", os.O_CREAT | os.O_APPEND | os.O_WRONLY, 0o644)
                os.dup2(output, 1)
                os.dup2(output, 2)
                play()
            except BaseException:
                sys.excepthook(*sys.exc_info())
            finally:
                os._exit(1)
        return pid

    def order(self, step: int) -> None:
        """All workers may train to `step`."""
        for descriptor in self._orders:
            os.write(descriptor, step.to_bytes(ORDER_BYTES, "big"))

    def pid_of(self, node: int) -> int:
        return self._pids[node]

    def kill(self, node: int) -> None:
        """SIGKILL the process of `node`'s agent, which must be its own."""
        self.lost.add(node)
        os.kill(self._pids[node], signal.SIGKILL)

    def close(self) -> None:
        left = {*self._pids.values(), *self._stubs} - self._reaped
        for pid in left:
            os.kill(pid, signal.SIGKILL)  # ours until it is waited for
        for pid in left:
            os.waitpid(pid, 0)
        for descriptor in self._orders:
            os.close(descriptor)

    @property
    def memory_taken(self) -> int:
        """Bytes less than before the start, by whoever runs on this machine."""
        return self._before["MemAvailable"] - control_kernel.meminfo()["MemAvailable"]

    @property
    def slab_growth(self) -> int:
        """Bytes of the kernel's own objects (sockets above all) more than before the start."""
        return control_kernel.meminfo()["Slab"] - self._before["Slab"]

    def wait(self, what: str, done: Callable[[], bool], timeout_s: float) -> None:
        deadline, look_at = time.monotonic() + timeout_s, 0.0
        while not done():
            now = time.monotonic()
            if now > deadline:
                raise Failed(f"no {what} within {timeout_s:g} s; see {self._folder}/said")
            if now > look_at:
                self.look(what)
                look_at = now + _LOOK_S
            time.sleep(_POLL_S)

    def look(self, what: str) -> None:
        """Raises: Failed if something has gone wrong meanwhile."""
        for pid in {pid for node, pid in self._pids.items() if node not in self.lost} | set(self._stubs):
            if os.waitpid(pid, os.WNOHANG)[0]:
                self._reaped.add(pid)
                raise Failed(f"process {pid} has ended while waiting for {what}; see {self._folder}/said")
        troubled = [node for node, count in enumerate(self.board.column("troubles")) if count and node not in self.lost]
        if troubled:
            raise Failed(f"nodes {troubled[:8]} report troubles; see {self._folder}/output/events.*.jsonl")
        if self.memory_taken > self._memory_bytes_max:
            allowed = self._memory_bytes_max >> 20
            raise Failed(f"{self.memory_taken >> 20} MiB of memory are gone, {allowed} are allowed")
