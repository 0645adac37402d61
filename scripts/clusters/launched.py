"""Emulated nodes on one machine: one real `deepspeed` launcher per node, and nothing left behind afterwards.

Rules of this file: standard library only; every process of a job is found by the `DEMO_JOB` in its environment,
never by its name; whatever way a job ends, `Cluster.close` leaves no process.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[2]
ERROR = re.compile(
    r"^(?:\[\w+\]: ?)?[\w.]*(?:Error|Exception)\b.*$|^.*\bexit code\b.*$|^\[deadpool\] .*; to do: .*$", re.MULTILINE
)
"""A line that names an error: the last of a traceback (one that was cut off has none), or the plugin's own."""


class Cluster:
    """One job: a launcher process per emulated node, each in a session of its own.

    Args:
        folder: gets `hostfile` and one output file per node (`launcher/node<k>.txt`).
        nodes: how many hosts, spares included.
        slots: ranks per host.
    """

    def __init__(self, folder: Path, nodes: int, slots: int) -> None:
        self.folder, self.nodes, self.slots = folder, nodes, slots
        self.job = uuid.uuid4().hex
        self.launchers: list[subprocess.Popen[bytes]] = []
        (folder / "launcher").mkdir(parents=True, exist_ok=True)
        hosts = "".join(f"node{k} slots={slots}\n" for k in range(nodes))
        (folder / "hostfile").write_text(hosts)

    def launch(self, arguments: list[str]) -> None:
        """`deepspeed ... <arguments>` once for every node, as its launcher over ssh would run it there."""
        script = Path(sys.executable).with_name("deepspeed")
        start = [str(script)] if script.exists() else ["-m", "deepspeed.launcher.runner"]
        where = ["--hostfile", str(self.folder / "hostfile"), "--no_ssh", "--master_addr", "127.0.0.1"]
        where += ["--master_port", str(free_port())]
        for node in range(self.nodes):
            self.start(node, [sys.executable, *start, *where, "--node_rank", str(node), *arguments])

    def start(self, node: int, words: list[str]) -> None:
        """Run `words` on `node`, in a session of its own."""
        with open(self.folder / "launcher" / f"node{node}.txt", "wb") as output:
            process = subprocess.Popen(
                words,
                env=self.environment(node),
                cwd=REPOSITORY,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.launchers.append(process)

    def environment(self, node: int) -> dict[str, str]:
        """The demonstration runs on the CPU also where there is a GPU: several ranks would share it."""
        path = os.pathsep.join([str(REPOSITORY), *filter(None, [os.environ.get("PYTHONPATH")])])
        return os.environ | {
            "DEMO_NODE": str(node),
            "DEMO_JOB": self.job,
            "PYTHONPATH": path,
            "PYTHONUNBUFFERED": "1",
            "OMP_NUM_THREADS": "1",
            "CUDA_VISIBLE_DEVICES": "",
            "DS_ACCELERATOR": "cpu",
            "GLOO_SOCKET_IFNAME": "lo",
        }

    def exit_codes(self) -> list[int | None]:
        """Per node: its launcher's exit code, None while it runs, negative for a signal."""
        return [process.poll() for process in self.launchers]

    def processes(self) -> dict[int, int]:
        """Every living process of the job: pid -> node."""
        return dict(tagged_processes(self.job))

    def dump_stacks(self, folder: Path) -> None:
        """One file per Python process with its stacks."""
        folder.mkdir(parents=True, exist_ok=True)
        sibling = Path(sys.executable).with_name("py-spy")
        spy = str(sibling) if sibling.exists() else shutil.which("py-spy")
        for pid, node in self.processes().items():
            if spy is None:
                with open(f"/proc/{pid}/cmdline", "rb") as words:
                    if b"inject.py" in words.read():  # it registers faulthandler for this signal
                        os.kill(pid, signal.SIGUSR1)
                continue
            with open(folder / f"node{node}.{pid}.txt", "wb") as output:
                subprocess.run([spy, "dump", "--pid", str(pid)], stdout=output, stderr=subprocess.STDOUT, timeout=30)

    def close(self, grace_s: float = 0.0) -> list[int]:
        """Kill what is left of the job. Returns the pids that had to be killed after waiting `grace_s` for them."""
        deadline = time.monotonic() + grace_s
        while self.processes() and time.monotonic() < deadline:
            time.sleep(0.1)
        killed: list[int] = []
        while left := self.processes():
            for pid in left:
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    continue
                killed.append(pid)
            time.sleep(0.05)
        for process in self.launchers:
            process.wait()
        return sorted(set(killed))


def tagged_processes(job: str) -> Iterator[tuple[int, int]]:
    """(pid, node) of every process whose environment names `job`."""
    tag = f"DEMO_JOB={job}".encode()
    for entry in os.scandir("/proc"):
        if not entry.name.isdigit():
            continue
        try:
            words = Path(entry.path, "environ").read_bytes().split(b"\0")
        except (FileNotFoundError, PermissionError, ProcessLookupError):
            continue
        if tag in words:
            node = next((word for word in words if word.startswith(b"DEMO_NODE=")), b"DEMO_NODE=-1")
            yield int(entry.name), int(node.split(b"=")[1])


def free_port() -> int:
    """A port that nobody listens at, and that the kernel gives nobody who takes any: so it is free still when
    who is told of it comes to listen there."""
    first_given = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    for port in random.SystemRandom().sample(range(1024, first_given), 100):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("", port))
            return port
    raise OSError(f"100 ports below {first_given}, drawn by lot, are all taken")


def commit_of(tree: Path = REPOSITORY) -> str:
    """The commit that is checked out there, short; "" of a folder without git."""
    words = ["git", "-C", str(tree), "rev-parse", "--short", "HEAD"]
    return subprocess.run(words, capture_output=True, text=True, check=False).stdout.strip()


def configure(file: Path, output: Path, **fields: Any) -> None:
    """Write the plugin's configuration of a job on this machine, and beside it the secret that it names."""
    secret = file.with_name("secret")
    secret.touch(mode=0o600)
    secret.write_text(f"{random.SystemRandom().getrandbits(256):064x}\n")
    own = {"secret_file": str(secret), "output_dir": str(output)}
    here = {"interface_address": "127.0.0.1", "memory_headroom_gib": 0.25}
    lines = [f"{name}: {json.dumps(value)}\n" for name, value in (here | fields | own).items()]
    file.write_text("".join(lines))  # YAML reads JSON, so no YAML library is needed here


def last_error(logs: Path) -> str:
    """Quote the last line that names an error, of a log or of the logs in a folder: ` (FILE: LINE)`, or ""."""
    files = sorted(path for path in logs.rglob("*") if path.suffix in (".log", ".txt")) if logs.is_dir() else [logs]
    for path in files:
        text = path.read_text(errors="replace") if path.exists() else ""
        if found := ERROR.findall(text):
            return f" ({path.name}: {found[-1].strip()[:300]})"
    return ""


def read_json_lines(path: Path) -> list[dict[str, Any]]:
    """The complete lines of a file that may still be written to, or that a killed process left half a line in."""
    found = []
    for line in path.read_text(errors="replace").splitlines() if path.exists() else []:
        try:
            found.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return found


def read_events(folder: Path) -> list[dict[str, Any]]:
    """All nodes' events in order of time."""
    events = [event for path in folder.glob("events.*.jsonl") for event in read_json_lines(path)]
    return sorted(events, key=lambda event: event["time"])


def folder_size(folder: Path) -> int:
    """Bytes of all files below `folder`: as long as it grows, a job makes progress."""
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.stat().st_size
        except FileNotFoundError:
            continue
    return total
