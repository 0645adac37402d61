"""Emulated nodes as plain process trees on one machine, told apart by an environment variable.

The processes of a node are forks of its launcher, unless a cluster is told to execute each of them (stub_launch.py).
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from clusters.launched import free_port
from dist.stub_worker import digest, state_at

from deadpool_plugin import events
from deadpool_plugin.cli.jobview import Follower

E = TypeVar("E", bound=events.Event)
HERE = Path(__file__).parent
MARK = "DEADPOOL_TEST_NODE"


class NothingHappened(AssertionError):
    """Something expected did not happen."""


class StubCluster:
    """Starts `nodes` launchers; `directory` gets configuration, logs and outputs."""

    def __init__(
        self,
        directory: Path,
        nodes: int,
        local_size: int,
        *arguments: str,
        spares: int = 1,
        patience_s: float = 4.0,
        more: str = "memory_headroom_gib: 0\n",
        wrong_secret: int = -1,
        piped: Sequence[int] = (),
        executes: bool = False,
    ) -> None:
        self.directory, self.nodes, self.local_size = directory, nodes, local_size
        self.active = nodes - spares
        self.payload = 1 << 16
        secret = directory / "secret"
        secret.write_text("a secret of the test cluster\n")
        secret.chmod(0o600)
        text = f"spares: {spares}\npatience_s: {patience_s}\noutput_dir: {directory / 'logs'}\n{more}"
        config, other_config = directory / "deadpool.yaml", directory / "other.yaml"
        config.write_text(f"{text}secret_file: {secret}\n")
        other_secret = directory / "other_secret"
        other_secret.write_text("quite another secret\n")
        other_secret.chmod(0o600)
        other_config.write_text(f"{text}secret_file: {other_secret}\n")
        self.run = f"{os.getpid()}.{time.monotonic_ns()}"
        self.go = directory / "go"
        self.stay = directory / "go.stay"
        arguments = (*arguments, "--hold-file", str(self.go))
        port = free_port()
        root = HERE.parent.parent
        self.launchers: list[subprocess.Popen[bytes]] = []
        for node in range(nodes):
            env = {
                **os.environ,
                "PYTHONPATH": f"{root}:{root / 'tests'}",
                MARK: f"{self.run}.{node}",
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                "WORLD_SIZE": str(nodes * local_size),
                "LOCAL_SIZE": str(local_size),
                "CROSS_RANK": str(node),
                "CROSS_SIZE": str(nodes),
                **({"DEADPOOL_TEST_EXECUTES": "1"} if executes else {}),
            }
            chosen = other_config if node == wrong_secret else config
            command = [sys.executable, "-u", str(HERE / "stub_launch.py"), str(chosen), *arguments]
            with (directory / f"out.{node}").open("wb") as out:
                output = subprocess.PIPE if node in piped else out
                self.launchers.append(
                    subprocess.Popen(command, env=env, stdout=output, stderr=out, start_new_session=True)
                )

    # ---- looking

    def processes(self, node: int) -> dict[int, str]:
        """pid -> role of every living process of a node."""
        found = {}
        for name in os.listdir("/proc"):
            if not name.isdigit():
                continue
            try:
                environment = Path(f"/proc/{name}/environ").read_bytes()
                command = Path(f"/proc/{name}/cmdline").read_bytes().replace(b"\0", b" ").decode()
                called = Path(f"/proc/{name}/comm").read_text().strip()
                state = Path(f"/proc/{name}/stat").read_text().rpartition(") ")[2][0]
            except OSError:
                continue
            if state not in "ZX" and f"{MARK}={self.run}.{node}".encode() + b"\0" in environment:
                found[int(name)] = "agent" if "launch.agent" in command else called
        return found

    def pids(self, node: int, role: str) -> list[int]:
        return [pid for pid, found in self.processes(node).items() if found == role]

    def output(self, node: int) -> str:
        return (self.directory / f"out.{node}").read_text(errors="replace")

    def all_output(self) -> str:
        return "".join(f"--- node {node}\n{self.output(node)}" for node in range(self.nodes))

    def events(self, kind: type[E]) -> list[E]:
        follower = Follower(self.directory / "logs")
        found = [event for event in follower.poll() if isinstance(event, kind)]
        assert not follower.unreadable
        return found

    def wait_for(self, what: str, done: Callable[[], object], timeout_s: float = 60.0) -> None:
        deadline = time.monotonic() + timeout_s
        while not done():
            if time.monotonic() > deadline:
                shown = "\n".join(
                    str(event) for event in self.events(events.Event) if not isinstance(event, events.StepDone)
                )
                raise NothingHappened(f"no {what} within {timeout_s} s\n{self.all_output()}\n{shown}")
            time.sleep(0.02)

    def train(self) -> None:
        """Ranks go on from where they are held, and up to the last step: a test takes its time."""
        self.stay.touch()
        self.go.touch()

    def finish(self) -> None:
        self.stay.unlink(missing_ok=True)

    def wait_step(self, step: int, timeout_s: float = 60.0) -> None:
        self.wait_for(f"commit of step {step}", lambda: self.committed() >= step, timeout_s)

    def committed(self) -> int:
        return max((event.step for event in self.events(events.StepCommitted)), default=-1)  # type: ignore[attr-defined]

    def wait_gone(self, node: int, timeout_s: float = 60.0) -> None:
        deadline = time.monotonic() + timeout_s
        while left := self.processes(node):
            if time.monotonic() > deadline:
                raise NothingHappened(f"node {node} still has {left}\n{self.all_output()}")
            time.sleep(0.02)

    def wait_exit(self, node: int, timeout_s: float = 90.0) -> int:
        try:
            return self.launchers[node].wait(timeout_s)
        except subprocess.TimeoutExpired as error:
            raise NothingHappened(f"node {node} did not exit\n{self.all_output()}") from error

    def finals(self) -> dict[int, tuple[int, str]]:
        """rank -> (step, hash) as the ranks themselves said at their end, from all rank files."""
        found = {}
        for path in (self.directory / "logs").glob("rank*.log"):
            for rank, step, value in re.findall(r"rank (\d+) final step (\d+) hash (\w+)", path.read_text()):
                found[int(rank)] = (int(step), value)
        return found

    def expected_finals(self, steps: int) -> dict[int, tuple[int, str]]:
        ranks = range(self.active * self.local_size)
        return {rank: (steps, digest(state_at(rank, steps, self.payload))) for rank in ranks}

    # ---- breaking

    def kill(self, node: int, role: str, number: int = signal.SIGKILL) -> int:
        (pid,) = self.pids(node, role)
        os.kill(pid, number)
        return pid

    def kill_node(self, node: int) -> None:
        """The whole host at once."""
        self.signal_node(node, signal.SIGSTOP)
        self.signal_node(node, signal.SIGKILL)

    def signal_node(self, node: int, number: int) -> None:
        for pid in self.processes(node):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    @staticmethod
    def signal_pid(pid: int, number: int) -> None:
        os.kill(pid, number)

    def close(self) -> None:
        for node in range(self.nodes):
            self.signal_node(node, signal.SIGKILL)
        for launcher in self.launchers:
            launcher.wait()
