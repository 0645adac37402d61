"""Whole emulated clusters in seconds: real agents, supervisors, standby and worker processes, all of them forks.

What is bypassed is the deepspeed launcher alone. The driver imports torch and megatron-core once
(forked_node.preload); every node is a fork of it that plays launch.py (forked_node.Host).

Rules of this file: one cluster at a time, driven from the main thread of a process that has no other threads and no
children of its own (all of its children are reaped here). Whatever way a job ends, `close` leaves no process.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from clusters import processes
from clusters.forked_node import Host
from clusters.launched import configure, free_port

SETTINGS = {
    "patience_s": 6.0,
    "memory_headroom_gib": 0.1,
    "history_limit_mib": 64,
    "preload": [],
}
_EXITED = ("Z", "X")


@dataclass
class Node:
    """One emulated host: `exit_code` is its launcher's, as in subprocess; None while it runs."""

    index: int
    leader: int
    exit_code: int | None = None
    killed: bool = field(default=False)


class Cluster:
    """One job of `nodes` emulated hosts with `slots` ranks each, the last `spares` of them standing by.

    Args:
        folder: gets `launcher/node<k>.txt`, the configuration and the plugin's `output`.
        script: the training script and its arguments, as on the deepspeed command line.
        settings: fields of the plugin's configuration that differ from SETTINGS.
        before_agent: called in every agent's process before it begins (fault hooks).
    """

    def __init__(
        self,
        folder: Path,
        nodes: int,
        slots: int,
        script: Sequence[str],
        spares: int = 1,
        settings: dict[str, Any] | None = None,
        before_agent: Callable[[], None] = lambda: None,
    ) -> None:
        self.folder, self.slots, self.script = folder, slots, [str(word) for word in script]
        self.before_agent, self.size = before_agent, nodes
        self.output = folder / "output"
        self.nodes: list[Node] = []
        self.port = free_port()
        (folder / "launcher").mkdir(parents=True, exist_ok=True)
        self.config = folder / "deadpool.yaml"
        configure(self.config, self.output, **(SETTINGS | {"spares": spares} | (settings or {})))

    # ---- starting

    def start(self) -> None:
        for index in range(self.size):
            self._fork_node(self._host(index).launch)

    def _fork_node(self, play: Callable[[int], NoReturn]) -> Node:
        """A process that runs `play`, told who its parent is."""
        sys.stdout.flush()
        sys.stderr.flush()
        driver = os.getpid()
        pid = os.fork()
        if pid == 0:
            play(driver)
        self.nodes.append(Node(len(self.nodes), pid))
        return self.nodes[-1]

    def join(self) -> Node:
        """One more host, as `deadpool join` brings it: nobody waits here until it has become a member."""
        return self._fork_node(self._host(len(self.nodes)).join)

    def _host(self, index: int) -> Host:
        return Host(self.folder, index, self.size, self.slots, self.port, self.script, self.config, self.before_agent)

    # ---- looking

    def exit_codes(self) -> list[int | None]:
        """Per node, after reaping whatever has ended."""
        from deadpool_plugin.host.proc import reaped  # preload made it importable

        by_leader = {node.leader: node for node in self.nodes}
        for pid, exit_code in reaped():
            if pid in by_leader:
                by_leader[pid].exit_code = exit_code
        return [node.exit_code for node in self.nodes]

    def living(self) -> dict[int, int]:
        """Every living process of the job: pid -> node (-1: nobody knows whose it was)."""
        known = processes.table()
        found = dict.fromkeys(processes.descendants({os.getpid()}, known) - {os.getpid()}, -1)
        for node in self.nodes:
            found.update(dict.fromkeys(processes.members(node.leader, known) & set(found), node.index))
        return {pid: node for pid, node in found.items() if known[pid].state not in _EXITED}

    def dump_stacks(self, folder: Path) -> None:
        """One file per process: where each of its threads is."""
        folder.mkdir(parents=True, exist_ok=True)
        sibling = Path(sys.executable).with_name("py-spy")
        spy = str(sibling) if sibling.exists() else shutil.which("py-spy")
        for pid, node in self.living().items():
            if spy is None:
                processes.send(pid, signal.SIGUSR1)  # to the process's own output
                continue
            with open(folder / f"node{node}.{pid}.txt", "wb") as output:
                output.write(described(pid))
                output.flush()
                subprocess.run([spy, "dump", "--pid", str(pid)], stdout=output, stderr=subprocess.STDOUT, timeout=30)

    # ---- breaking

    def kill_node(self, index: int) -> None:
        """The host is gone: all of its processes at the same moment."""
        self.nodes[index].killed = True
        self._signal(index, signal.SIGKILL)

    def tell_node(self, index: int) -> None:
        """The host is told to end (SIGTERM), each of its processes but what plays its launcher; the supervisors last,
        as an agent waits only for a moment to be told, too."""
        leader = self.nodes[index].leader
        for pid in sorted(processes.living(leader) - {leader}, reverse=True):
            processes.send(pid, signal.SIGTERM)

    def wake_node(self, index: int) -> None:
        self._signal(index, signal.SIGCONT)

    def _signal(self, index: int, number: int) -> None:
        if index in self.living().values():  # else the leader's number may be another process's by now
            processes.signal_node(self.nodes[index].leader, number)

    # ---- ending

    def close(self, grace_s: float = 0.0) -> list[str]:
        """Kill what is left of the job. Returns what had to be killed after waiting `grace_s` for it."""
        deadline = time.monotonic() + grace_s
        while self.living() and time.monotonic() < deadline:
            self.exit_codes()
            time.sleep(0.05)
        left = {pid: f"node {node}: {described(pid).decode(errors='replace')}" for pid, node in self.living().items()}
        for node in self.nodes:
            self._signal(node.index, signal.SIGKILL)
        while remaining := self.living():
            for pid in remaining:
                processes.send(pid, signal.SIGKILL)
            self.exit_codes()
            time.sleep(0.02)
        self.exit_codes()
        return list(left.values())


def described(pid: int) -> bytes:
    """Describe a forked process, which has its parent's command line: its state and open threads."""
    try:
        status = Path(f"/proc/{pid}/status").read_text().splitlines()
        threads = [Path(path, "comm").read_text().strip() for path in Path(f"/proc/{pid}/task").iterdir()]
    except OSError:
        return f"process {pid} (gone)\n".encode()
    wanted = [line for line in status if line.startswith(("PPid", "State", "VmRSS"))]
    return f"process {pid} {' '.join(' '.join(wanted).split())} threads {sorted(set(threads))}\n".encode()
