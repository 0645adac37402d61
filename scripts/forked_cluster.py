"""Whole emulated clusters in seconds: real agents, supervisors, standby and worker processes, all of them forks.

What is bypassed is the deepspeed launcher alone. The driver imports torch and megatron-core once; every node is a fork
of it in a session of its own that plays launch.py: it forks a supervisor per slot with the launcher's environment,
these fork the agent and the standby processes, and those the workers.

Rules of this file: one cluster at a time, driven from the main thread of a process that has no other threads and no
children of its own (all of its children are reaped here). Whatever way a job ends, `close` leaves no process.
"""

from __future__ import annotations

import asyncio
import faulthandler
import importlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import node_processes
from demo_cluster import REPOSITORY, free_port

PRELOAD = (
    "torch.distributed",
    "patches.cpu.applied",
    "megatron.core.models.gpt.gpt_layer_specs",
    "megatron.core.datasets.gpt_dataset",
    "megatron.core.datasets.blended_megatron_dataset_builder",
    "megatron.core.dist_checkpointing.strategies.async_utils",
    "megatron.core.optimizer",
    "megatron.core.pipeline_parallel",
    "deadpool_plugin.agent.process",
    "deadpool_plugin.launch.supervisor",
    "deadpool_plugin.worker.live",
    "deadpool_plugin.worker.follow",
    "deadpool_plugin.adapters.megatron.adapter",
)
SETTINGS = {
    "patience_s": 6.0,
    "interface_address": "127.0.0.1",
    "memory_headroom_gib": 0.1,
    "history_limit_mib": 64,
    "preload": [],
}
LAUNCHER_POLL_S = 0.1
_EXITED = ("Z", "X")


def preload(names: Sequence[str] = PRELOAD) -> None:
    """Import what all processes of a cluster need. Raises: RuntimeError if that has started a thread."""
    warnings.filterwarnings("ignore")
    os.environ.update(launcher_environment())
    if str(REPOSITORY) not in sys.path:
        sys.path.insert(1, str(REPOSITORY))
    import_all(names)
    threads = len(os.listdir("/proc/self/task"))
    if threads > 1:
        raise RuntimeError(f"{threads} threads after the imports: forked processes could hang; set OMP_NUM_THREADS=1")
    node_processes.become_subreaper()


def import_all(names: Sequence[str] = PRELOAD) -> None:
    for name in names:
        importlib.import_module(name)


def launcher_environment() -> dict[str, str]:
    """Emulated nodes compute on the CPU also where there is a GPU: several ranks would share it."""
    return {
        "OMP_NUM_THREADS": "1",
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "DS_ACCELERATOR": "cpu",
        "GLOO_SOCKET_IFNAME": "lo",
        "PYTHONUNBUFFERED": "1",
    }


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
        self.config = self._write_config({"spares": spares, **(settings or {})})

    def _write_config(self, settings: dict[str, Any]) -> Path:
        secret, config = self.folder / "secret", self.folder / "deadpool.yaml"
        secret.touch(mode=0o600)
        secret.write_text("a secret of an emulated cluster\n")
        fields = {**SETTINGS, "secret_file": str(secret), "output_dir": str(self.output), **settings}
        config.write_text("".join(f"{name}: {json.dumps(value)}\n" for name, value in fields.items()))
        return config

    # ---- starting

    def start(self) -> None:
        for index in range(self.size):
            self._fork_node(index, lambda index=index: self._launch(index))

    def _fork_node(self, index: int, play: Callable[[], NoReturn]) -> Node:
        """A process in a session of its own, with its output in a file, that runs `play`."""
        sys.stdout.flush()
        sys.stderr.flush()
        driver = os.getpid()
        pid = os.fork()
        if pid == 0:
            try:
                self._become_node(index, driver)
                play()
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(1)
        self.nodes.append(Node(index, pid))
        return self.nodes[-1]

    def _become_node(self, index: int, driver: int) -> None:
        from deadpool_plugin.launch.processes import die_with_parent

        os.setsid()
        die_with_parent(signal.SIGKILL, driver)
        output = os.open(self.folder / "launcher" / f"node{index}.txt", os.O_CREAT | os.O_APPEND | os.O_WRONLY, 0o644)
        nothing = os.open(os.devnull, os.O_RDONLY)
        for source, target in ((nothing, 0), (output, 1), (output, 2)):
            os.dup2(source, target)
        sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
        sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
        faulthandler.register(signal.SIGUSR1, all_threads=True)  # inherited by all that is forked from here
        os.chdir(REPOSITORY)
        os.environ.update(
            DEMO_NODE=str(index),
            DEMO_LEADER=str(os.getpid()),
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=str(self.port),
            WORLD_SIZE=str(self.size * self.slots),
            CROSS_SIZE=str(self.size),
            CROSS_RANK=str(index),
            LOCAL_SIZE=str(self.slots),
        )

    def join(self) -> Node:
        """One more host, as `deadpool join` brings it: nobody waits here until it has become a member."""
        index = len(self.nodes)
        return self._fork_node(index, lambda: self._join(index))

    def _join(self, index: int) -> NoReturn:
        from deadpool_plugin.launch import join

        invitation = join.find(join.Wish(config=str(self.config)))
        node = asyncio.run(join.reserve(invitation))
        if node != index:
            raise RuntimeError(f"the job calls this host node {node}, expected {index}")
        self._launch(index, lambda slot: join.environment(invitation.description, node, slot, os.environ))

    def _from_launcher(self, index: int, local_rank: int) -> dict[str, str]:
        """What launch.py tells one child and not the others."""
        return {"LOCAL_RANK": str(local_rank), "RANK": str(index * self.slots + local_rank)}

    def _launch(self, index: int, environment: Callable[[int], dict[str, str]] | None = None) -> NoReturn:
        """As launch.py: a child for each slot; if one ends badly, the others are ended."""
        children = {}
        for local_rank in range(self.slots):
            pid = os.fork()
            if pid == 0:
                os.environ.update(environment(local_rank) if environment else self._from_launcher(index, local_rank))
                self._supervise(local_rank)
            children[pid] = local_rank
        signal.signal(signal.SIGTERM, lambda *_: end_all(children, 1))
        while children:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                time.sleep(LAUNCHER_POLL_S)
                continue
            code = os.waitstatus_to_exitcode(status)
            if children.pop(pid, None) is not None and code != 0:
                end_all(children, code)
        os._exit(0)

    def _supervise(self, local_rank: int) -> NoReturn:
        from deadpool_plugin.launch import argv, roles, standby
        from deadpool_plugin.launch.supervisor import supervise

        try:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            words = [f"--local_rank={local_rank}", *self.script, argv.FLAG, str(self.config)]
            line = argv.parse(words)
            supervise(
                roles.from_environment(), line.command, line.config,
                standby=lambda: standby.main(line.command), agent=lambda fd: lambda: self._agent(fd),
            )  # fmt: skip
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)

    def _agent(self, descriptor: int) -> None:
        from deadpool_plugin.launch.agent import serve

        self.before_agent()
        serve(descriptor)

    # ---- looking

    def exit_codes(self) -> list[int | None]:
        """Per node, after reaping whatever has ended."""
        by_leader = {node.leader: node for node in self.nodes}
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                break
            if pid == 0:
                break
            if pid in by_leader:
                by_leader[pid].exit_code = os.waitstatus_to_exitcode(status)
        return [node.exit_code for node in self.nodes]

    def living(self) -> dict[int, int]:
        """Every living process of the job: pid -> node (-1: nobody knows whose it was)."""
        known = node_processes.table()
        found = dict.fromkeys(node_processes.descendants({os.getpid()}, known) - {os.getpid()}, -1)
        for node in self.nodes:
            found.update(dict.fromkeys(node_processes.members(node.leader, known) & set(found), node.index))
        return {pid: node for pid, node in found.items() if known[pid].state not in _EXITED}

    def dump_stacks(self, folder: Path) -> None:
        """One file per process: where each of its threads is."""
        folder.mkdir(parents=True, exist_ok=True)
        sibling = Path(sys.executable).with_name("py-spy")
        spy = str(sibling) if sibling.exists() else shutil.which("py-spy")
        for pid, node in self.living().items():
            if spy is None:
                node_processes.send(pid, signal.SIGUSR1)  # to the process's own output
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

    def silence_node(self, index: int) -> None:
        """The host still has its connections and says nothing any more."""
        self._signal(index, signal.SIGSTOP)

    def wake_node(self, index: int) -> None:
        self._signal(index, signal.SIGCONT)

    def _signal(self, index: int, number: int) -> None:
        if index in self.living().values():  # else the leader's number may be another process's by now
            node_processes.signal_node(self.nodes[index].leader, number)

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
                node_processes.send(pid, signal.SIGKILL)
            self.exit_codes()
            time.sleep(0.02)
        self.exit_codes()
        return list(left.values())


def end_all(children: dict[int, int], code: int) -> NoReturn:
    """As launch.py ends its children: one after the other, each with its time."""
    for pid in children:
        node_processes.send(pid, signal.SIGTERM)
    for pid in children:
        try:
            os.waitpid(pid, 0)
        except ChildProcessError:
            continue
    os._exit(code if code >= 0 else 128 - code)


def described(pid: int) -> bytes:
    """What can be said of a forked process, which has its parent's command line: its state and open threads."""
    try:
        status = Path(f"/proc/{pid}/status").read_text().splitlines()
        threads = [Path(path, "comm").read_text().strip() for path in Path(f"/proc/{pid}/task").iterdir()]
    except OSError:
        return f"process {pid} (gone)\n".encode()
    wanted = [line for line in status if line.startswith(("PPid", "State", "VmRSS"))]
    return f"process {pid} {' '.join(' '.join(wanted).split())} threads {sorted(set(threads))}\n".encode()
