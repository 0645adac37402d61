"""Costs of mirroring every step: step time, and CPU time per mirrored GB, on emulated nodes of this machine.

    python scripts/bench_mirror.py --payload 32 --out bench-out

Two jobs run the same training at the same time, in turns of a few steps: one as it is, one under the real `deepspeed`
launcher and the plugin, two nodes of one rank. Variants, in an order drawn anew for each round:
  plain             the script alone
  plugin            the same, every step mirrored
  floor             the script alone; beside it one memcpy and one loopback transfer of a payload per step
  save-thread       the script alone, torch.distributed.checkpoint.async_save of its optimizer state every step
  save-process      the same with the checkpointer in a process of its own
and with --guards, compared with `plugin` beside them:
  counted           the plugin, which counts each collective as it does after a swap
  undigested        the plugin, which takes no digests of the batches that are read

With `--wire MIB` each agent sends snapshots no faster than that (the kernel paces its connections), as over a slow
network; the plugin's events then say which steps it mirrors.

With `--idle` the host sleeps that long in every step, as it does while a GPU computes; with 0 training takes all CPUs
there are, and whatever mirroring costs is taken from it. Every payload has to have arrived before the next turn begins.

Rules of this file: standard library only. CPU times are the kernel's, per thread (schedstat) or, for whole jobs, per
process. All raw samples are in the JSON file; bench/mirror_report.py makes numbers of them.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import random
import re
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import demo
import make_corpus
from bench import mirror_report as report
from bench.peers.ours import name_of
from clusters.demo_jobs import CACHE, JOBS
from clusters.launched import REPOSITORY, Cluster, configure

SCRIPTS = REPOSITORY / "scripts"
RANKS = 2
MICROBATCHES = 2
MODELS = {"tiny": (64, 2), "16": (192, 6), "32": (256, 7), "64": (384, 6), "128": (512, 7)}
"""--payload -> (hidden size, layers): some MiB of optimizer state per rank, with the distributed optimizer."""
GUARDS = ("counted", "undigested")
MESSAGE_BYTES_MAX = 1 << 20
QUIET_S = 0.06
BULK_NICE = 10
PATIENCE_S = 180.0


PACED = """
import socket

from deadpool_plugin.worker.patching import when_imported


def pace(wire):
    made = wire.BulkStream.__init__

    def init(self, sock, *args):
        sock.setsockopt(socket.SOL_SOCKET, {option}, {rate})
        made(self, sock, *args)

    wire.BulkStream.__init__ = init


when_imported("deadpool_plugin.mirror.wire", pace)
"""
SO_MAX_PACING_RATE = 47  # linux/asm-generic/socket.h


def every(text: str) -> int | str:
    return text if text == "auto" else int(text)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--payload", choices=MODELS, default="32", help="MiB of optimizer state per rank, about")
    parser.add_argument(
        "--tp", type=int, choices=(1, 2), default=1, help="2: one replica instead of two, more collectives"
    )
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--steps", type=int, default=6, help="per turn; the first of a turn is no sample")
    parser.add_argument("--idle", type=float, nargs="+", default=[0.0, 100.0], help="ms a step the host sleeps")
    parser.add_argument("--saves", nargs="*", choices=("thread", "process"), default=["process", "thread"])
    parser.add_argument("--guards", nargs="*", choices=GUARDS, default=[])
    parser.add_argument("--saves-to", type=Path, default=Path("/dev/shm"), help="where async_save writes")
    parser.add_argument("--wire", type=float, default=0.0, help="MiB/s that an agent sends snapshots with; 0: any")
    parser.add_argument("--mirror-every", type=every, default="auto", help="steps between snapshots")
    parser.add_argument("--seed", type=int, default=0, help="for the order of the turns")
    parser.add_argument("--out", type=Path, default=Path("bench-out"))
    args = parser.parse_args()
    args.out = args.out.resolve()
    return args


# The kernel's books


def thread_ns(pid: int, tid: int) -> int:
    return int(Path(f"/proc/{pid}/task/{tid}/schedstat").read_text().split()[0])


def process_cpu_s(pid: int) -> float:
    """User and system time, of threads that have ended too; 0 for a process that has ended."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return 0.0


def bulk_threads(pid: int) -> Iterator[int]:
    """An agent's threads that move payloads: those it has put behind everything else."""
    for task in os.listdir(f"/proc/{pid}/task"):
        if int(Path(f"/proc/{pid}/task/{task}/stat").read_text().rpartition(")")[2].split()[16]) == BULK_NICE:
            yield int(task)


class Job:
    """The ranks of one running job, and its processes."""

    def __init__(self, name: str, cluster: Cluster) -> None:
        self.name, self.cluster = name, cluster
        self.lines: dict[int, socket.socket] = {}
        self.hellos: dict[int, dict[str, Any]] = {}
        self.agents: list[int] = []

    def join(self, line: socket.socket, hello: dict[str, Any]) -> None:
        self.lines[hello["rank"]], self.hellos[hello["rank"]] = line, hello
        if len(self.lines) == RANKS:
            self.agents += [pid for pid in self.cluster.processes() if name_of(pid) == "agent"]

    def order(self, **fields: Any) -> None:
        for line in self.lines.values():
            line.send(json.dumps(fields).encode())

    def answers(self) -> list[dict[str, Any]]:
        return [json.loads(self.lines[rank].recv(MESSAGE_BYTES_MAX)) for rank in sorted(self.lines)]

    def threads_ns(self) -> dict[str, int]:
        """CPU time so far of main threads and of those that mirror, summed over ranks and agents."""
        found = {"main": 0, "stager": 0, "link": 0, "bulk": 0, "agents": 0}
        for hello in self.hellos.values():
            found["main"] += thread_ns(hello["pid"], hello["pid"])
            for title, tid in hello["threads"].items():  # that of an executor has a number behind its name
                if (name := title.removeprefix("deadpool-").removesuffix("_0")) in ("stager", "link"):
                    found[name] += thread_ns(hello["pid"], tid)
        for pid in self.agents:
            found["bulk"] += sum(thread_ns(pid, tid) for tid in bulk_threads(pid))
            found["agents"] += sum(thread_ns(pid, int(tid)) for tid in os.listdir(f"/proc/{pid}/task"))
        return found

    def cpu_s(self) -> float:
        return sum(process_cpu_s(pid) for pid in self.cluster.processes())

    def settle(self) -> None:
        """Return once nothing is copied or sent any more."""
        before: tuple[int, int] | None = None
        while True:
            now = self.threads_ns()
            if before == (now["stager"], now["bulk"]):
                return
            before = now["stager"], now["bulk"]
            time.sleep(QUIET_S)


class Floor:
    """bench/mirror_floor.py in a process of its own."""

    def __init__(self, payload_bytes: int) -> None:
        words = [sys.executable, str(SCRIPTS / "bench/mirror_floor.py"), str(payload_bytes)]
        self._process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.answer()

    def order(self, count: int, pause_s: float) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"count": count, "pause_s": pause_s}) + "\n")
        self._process.stdin.flush()

    def answer(self) -> Any:
        assert self._process.stdout is not None
        return json.loads(self._process.stdout.readline())

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


# Turns


class Bench:
    """Both jobs from start to end."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.variants = ["plain", "plugin", "floor", *(f"save-{kind}" for kind in args.saves), *args.guards]
        self.blocks: list[dict[str, Any]] = []
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._turns = args.out / "turns"
        self._listener.bind(os.path.relpath(self._turns))
        self._listener.listen()
        self._listener.settimeout(PATIENCE_S)
        clusters = {"plain": Cluster(args.out / "plain", 1, RANKS), "plugin": Cluster(args.out / "plugin", RANKS, 1)}
        self.jobs = {name: Job(name, cluster) for name, cluster in clusters.items()}

    def run(self) -> None:
        """Start both jobs, take turns, see both to a good end."""
        try:
            self._start()
            floor = Floor(self.payload_bytes)
            for number in range(-1, self.args.rounds):  # a first round warms everything up
                self._round(number, floor)
            floor.close()
            for job in self.jobs.values():
                job.order(steps=1, device_ms=0, save=None)
                codes = [process.wait(PATIENCE_S) for process in job.cluster.launchers]
                if any(codes):
                    raise demo.Failed(f"job {job.name} ended with {codes}; its output is in {job.cluster.folder}")
        finally:
            for job in self.jobs.values():
                job.cluster.close()

    @property
    def payload_bytes(self) -> int:
        return max(int(hello["payload_bytes"]) for hello in self.jobs["plugin"].hellos.values())

    def _start(self) -> None:
        command = {name: self._command(name) for name in self.jobs}
        runner = [sys.executable, str(SCRIPTS / "run_plain.py"), "--ranks", str(RANKS), "--logs"]
        self.jobs["plain"].cluster.start(0, [*runner, str(self.args.out / "plain" / "output"), "--", *command["plain"]])
        self._await("plain")
        out = self.args.out / "plugin"
        configure(
            out / "deadpool.yaml", out / "output", spares=0, preload=JOBS["megatron"].preload,
            mirror_every=self.args.mirror_every,
        )  # fmt: skip
        if self.args.wire:
            self._pace(out / "paced")
        config = ["--deadpool-config", str(out / "deadpool.yaml")]
        self.jobs["plugin"].cluster.launch(["--module", "deadpool_plugin.run", *command["plugin"], *config])
        self._await("plugin")

    def _pace(self, folder: Path) -> None:
        """Have every process that is started from now on send snapshots no faster than `--wire`."""
        folder.mkdir()
        rate = int(self.args.wire * (1 << 20))
        (folder / "sitecustomize.py").write_text(PACED.format(option=SO_MAX_PACING_RATE, rate=rate))
        os.environ["PYTHONPATH"] = os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])

    def said(self) -> list[dict[str, Any]]:
        """The plugin's events about which steps it mirrors, and how many of them were."""
        logs = (self.args.out / "plugin" / "output").glob("events.*.jsonl")
        events = [json.loads(line) for log in logs for line in log.read_text().splitlines()]
        committed = sorted({event["step"] for event in events if event["event"] == "StepCommitted"})
        return [{"committed": committed}, *(event for event in events if event["event"] == "MirroringPaced")]

    def _await(self, name: str) -> None:
        while len(self.jobs[name].lines) < RANKS:
            try:
                line, _ = self._listener.accept()
            except TimeoutError:
                raise demo.Failed(f"job {name} did not begin; its output is in {self.args.out / name}") from None
            line.settimeout(PATIENCE_S)
            self.jobs[name].join(line, json.loads(line.recv(MESSAGE_BYTES_MAX)))
        demo.tell(f"job {name} has made its first step")

    def _command(self, job: str) -> list[str]:
        hidden, layers = MODELS[self.args.payload]
        turns = (self.args.rounds + 1) * len(self.args.idle) * sum(self._job_of(v) == job for v in self.variants)
        words = {
            "--train-iters": 1 + turns * self.args.steps, "--dtype": "fp32", "--num-microbatches": MICROBATCHES,
            "--tp": self.args.tp, "--hidden": hidden, "--layers": layers, "--dropout": 0.0, "--eval-interval": 0,
            "--data-path": CACHE / "corpus", "--data-cache-path": self.args.out / job / "indices",
        }  # fmt: skip
        ours = ["--turns", self._turns, "--job", job, "--saves", self.args.saves_folder, "--"]
        training = ["--distributed-optimizer", *(word for pair in words.items() for word in pair)]
        return [str(word) for word in (SCRIPTS / "bench/mirror_job.py", *ours, *training)]

    def _job_of(self, variant: str) -> str:
        return "plugin" if variant in ("plugin", *GUARDS) else "plain"

    def _round(self, number: int, floor: Floor) -> None:
        for device_ms in self.args.idle:
            order = list(self.variants)
            random.Random(f"{self.args.seed} {number} {device_ms}").shuffle(order)
            step_s = 0.1 + device_ms / 1000
            for variant in order:
                block = self._turn(variant, device_ms, floor, step_s) | {"round": number}
                step_s = statistics.median(report.steps_s(block))
                if number >= 0:
                    self.blocks.append(block)
            demo.tell(f"round {number + 1} of {self.args.rounds}, idle {device_ms:g} ms: {1e3 * step_s:.0f} ms a step")

    def _turn(self, variant: str, device_ms: float, floor: Floor, step_s: float) -> dict[str, Any]:
        job, steps = self.jobs[self._job_of(variant)], self.args.steps
        block: dict[str, Any] = {"variant": variant, "device_ms": device_ms, "steps": steps, "ranks": RANKS}
        job.settle()
        if variant == "floor":
            floor.order(2, step_s)
            block["floor_quiet"] = floor.answer()
        block["load"], block["began"] = os.getloadavg(), time.time()
        threads, cpu_s = job.threads_ns(), job.cpu_s()
        save = variant.removeprefix("save-") if variant.startswith("save-") else None
        job.order(steps=steps, device_ms=device_ms / MICROBATCHES, save=save, guard=variant)
        if variant == "floor":
            floor.order(max(1, steps - 2), step_s)
            block["floor"] = floor.answer()
        answers = job.answers()
        job.settle()
        block["job_cpu_s"] = job.cpu_s() - cpu_s
        block["threads_ns"] = {name: ns - threads[name] for name, ns in job.threads_ns().items()}
        block["samples_ns"] = [answer["samples_ns"] for answer in answers]
        block["calls"] = [answer["calls"] for answer in answers]
        block["counted"] = [answer["counted"] for answer in answers]
        return block


def machine() -> dict[str, Any]:
    processor = re.findall(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())[:1]
    return {
        "processor": processor[0] if processor else platform.machine(),
        "cpus": os.cpu_count(),
        "kernel": platform.release(),
        "load": os.getloadavg(),
        "python": platform.python_version(),
        "versions": {name: version(name) for name in ("torch", "megatron-core", "deepspeed", "xxhash", "msgspec")},
    }


def summary(args: argparse.Namespace, bench: Bench) -> dict[str, Any]:
    shown = [variant for variant in bench.variants if variant not in ("floor", *GUARDS)]
    rows = [report.compare(bench.blocks, variant, idle) for idle in args.idle for variant in shown]
    rows += [report.compare(bench.blocks, guard, idle, "plugin") for idle in args.idle for guard in args.guards]
    costs = [report.cost(bench.blocks, idle, bench.payload_bytes) for idle in args.idle]
    parts = [report.parts(bench.blocks, idle) for idle in args.idle]
    return {"step_times": rows, "costs": costs, "parts": parts}


def main() -> int:
    args = parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    shutil.rmtree(args.out, ignore_errors=True)
    args.out.mkdir(parents=True)
    args.saves_folder = args.saves_to / f"deadpool-bench-{os.getpid()}"
    facts, began = machine(), time.time()
    try:
        make_corpus.ensure(CACHE / "corpus")
        bench = Bench(args)
        bench.run()
    except demo.Failed as problem:
        demo.tell(f"FAILED: {problem}")
        return 1
    finally:
        shutil.rmtree(args.saves_folder, ignore_errors=True)
    found = summary(args, bench)
    settings = {name: str(value) if isinstance(value, Path) else value for name, value in vars(args).items()}
    everything = {"settings": settings, "machine": facts, "began": began, "took_s": time.time() - began}
    everything |= {"payload_bytes": bench.payload_bytes, "summary": found, "said": bench.said()}
    everything["blocks"] = bench.blocks
    (args.out / "mirror.json").write_text(json.dumps(everything, indent=1))
    print(report.markdown(found), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
