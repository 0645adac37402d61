"""False alarms: jobs whose hosts are only loaded, swapping, or behind a bad network or disk. Is one taken for dead?

    python scripts/false_alarms.py --out alarms --trials 100             # resumable; as root
    python scripts/false_alarms.py --out alarms --trials 100 --for-s 280    # go on with it for so long
    python scripts/false_alarms.py --out cut --only cut --trials 10     # what a silent host costs: its cable is pulled

Three hosts of one rank train a tiny GPT, a fourth stands by, each in a network namespace of its own. A trial is drawn
from its seed: what happens, for how long, how strongly, to which host. Then all is made well again, and the job must
have lost nobody. Its line in OUT/trials.jsonl says which hosts and processes were lost, how often agents missed their
certainty (processes paused for a moment), and how many steps were done meanwhile. A job that has lost somebody is
replaced by a new one.

    load      1 to 60 processes that compute, on all of this machine's CPUs
    memory    the job's memory is limited to 35 to 80 % of what it uses: the rest is swapped
    loss      30 % of the packets are lost, in both directions of one host, or between any two
    delay     300 ms later, in each direction of one host, or between any two
    disk      the file system of output_dir is frozen (fsfreeze)
    stop      an agent stands still (SIGSTOP) for up to four fifths of `slow_after_s`
    quiet     nothing

Rules of this file: nothing is drawn but from the seed; whatever way it ends, nothing of it is left on the machine. The
last line is one JSON object; the exit code is 0 only without a false alarm.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import errno
import json
import math
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import make_corpus
from clusters import forked_node, processes
from clusters.events import Tail
from clusters.forked import Cluster
from clusters.launched import REPOSITORY, commit_of, read_json_lines
from clusters.netns import Network

NODES, SPARES = 4, 1
CORPUS = REPOSITORY / ".cache" / "demo" / "corpus"
SCRIPT = [
    str(REPOSITORY / "scripts" / "train_gpt.py"), "--tp", "1", "--pp", "1", "--train-iters", "20000",
    "--eval-interval", "0", "--data-path", str(CORPUS),
]  # fmt: skip
LOST = ("NodeLost", "RankLost", "SwapPlanned", "JobStopped", "NodeFenced")
WEIGHTS = {"load": 4, "memory": 2, "loss": 4, "delay": 2, "disk": 2, "stop": 2, "quiet": 1}
START_S, SETTLE_S, SWAP_S = 120.0, 3.0, 90.0
DISK_MIB, SWAP_MIB = 512, 2048
CLONE_NEWNET = 0x40000000
MEMORY = Path("/sys/fs/cgroup/memory")


@dataclass(frozen=True)
class Trial:
    seed: int
    kind: str
    seconds: float
    strength: float
    """Processes, percent lost, milliseconds, or the share of the job's memory that it keeps."""
    host: int
    """Which is struck; -1: all."""


def drawn(seed: int, only: str) -> Trial:
    draw = random.Random(f"false alarm {seed}")
    kind = draw.choices(list(WEIGHTS), list(WEIGHTS.values()))[0]
    kind, host = only or kind, draw.randrange(NODES)
    host = -1 if kind in ("loss", "delay") and draw.random() < 0.4 else host
    strength = {
        "load": float(draw.choice((1, 2, 4, 8, 15, 30, 60))), "memory": round(draw.uniform(0.35, 0.8), 2),
        "loss": 30.0, "delay": 300.0,
    }.get(kind, 0.0)  # fmt: skip
    seconds = 10.0 if kind in ("loss", "load") else round(draw.uniform(3.0, 12.0), 1)
    return Trial(seed, kind, seconds if kind != "stop" else round(draw.uniform(1.0, 8.0), 1), strength, host)


@dataclass(frozen=True)
class NamespacedHost(forked_node.Host):
    """A host whose processes are in a network namespace."""

    namespace: str = ""
    address: str = ""
    first_address: str = ""

    def _become(self, driver: int) -> None:
        super()._become(driver)
        with open(self.namespace) as file:
            if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), "setns")
        os.environ.update(MASTER_ADDR=self.first_address, GLOO_SOCKET_IFNAME="eth0")


class NamespacedCluster(Cluster):
    """A forked cluster whose hosts are those of `network`."""

    def __init__(self, network: Network, folder: Path, settings: dict[str, Any]) -> None:
        self._network = network
        super().__init__(folder, NODES, 1, SCRIPT, SPARES, settings)

    def _host(self, index: int) -> forked_node.Host:
        plain, hosts = super()._host(index), list(self._network.hosts.values())
        host = hosts[index]
        return NamespacedHost(
            **vars(plain), namespace=f"/proc/{host.pid}/ns/net", address=host.address, first_address=hosts[0].address
        )

    def living(self) -> dict[int, int]:
        makers = processes.descendants(self._network.makers, processes.table())
        return {pid: node for pid, node in super().living().items() if pid not in makers | self._network.makers}

    def agent(self, node: int) -> int:
        contact = json.loads((self.output / "nodes" / f"{node}.json").read_text())
        return int(contact["pid"])


class Disk:
    """A file system of its own, which can be frozen; and swap space. Both are gone at its end."""

    def __init__(self, folder: Path) -> None:
        self._folder, self.mounted = folder, folder / "disk"
        self._swap = folder / "swap"
        self._frozen = False

    def __enter__(self) -> Disk:
        image = self._folder / "disk.img"
        self.mounted.mkdir(exist_ok=True)
        for file, size in ((image, DISK_MIB), (self._swap, SWAP_MIB)):
            file.touch(mode=0o600)
            with file.open("wb") as opened:
                os.posix_fallocate(opened.fileno(), 0, size << 20)
        run("mkfs.ext4", "-q", "-F", str(image))
        run("mount", "-o", "loop,noatime", str(image), str(self.mounted))
        run("mkswap", str(self._swap))
        run("swapon", str(self._swap))
        return self

    def __exit__(self, *_: object) -> None:
        self.thaw()
        subprocess.run(["umount", "-l", str(self.mounted)])
        subprocess.run(["swapoff", str(self._swap)])
        self._swap.unlink()
        (self._folder / "disk.img").unlink()

    def freeze(self) -> None:
        run("fsfreeze", "-f", str(self.mounted))
        self._frozen = True

    def thaw(self) -> None:
        if self._frozen:
            run("fsfreeze", "-u", str(self.mounted))
        self._frozen = False


def run(*words: str) -> None:
    subprocess.run(words, check=True, stdout=subprocess.DEVNULL)


class Group:
    """A control group (version 1) of the job's memory."""

    def __init__(self) -> None:
        own = next(
            line.split(":")[2] for line in Path("/proc/self/cgroup").read_text().splitlines() if ":memory:" in line
        )
        self._home = MEMORY / own.lstrip("/")
        self._path = self._home / f"false-alarms-{os.getpid()}"
        self._path.mkdir()

    @contextlib.contextmanager
    def beginning(self) -> Iterator[None]:
        """Take in what is started meanwhile, with all the memory that it takes."""
        (self._path / "cgroup.procs").write_text(str(os.getpid()))
        try:
            yield
        finally:
            (self._home / "cgroup.procs").write_text(str(os.getpid()))

    @property
    def killed(self) -> int:
        """How many processes the kernel has ended for want of memory: a real loss."""
        return int((self._path / "memory.oom_control").read_text().split()[-1])

    def keep(self, share: float) -> None:
        used = int((self._path / "memory.usage_in_bytes").read_text())
        with contextlib.suppress(OSError):  # EBUSY: as far as the kernel got
            (self._path / "memory.limit_in_bytes").write_text(str(int(share * used)))

    def release(self) -> None:
        (self._path / "memory.limit_in_bytes").write_text("-1")

    def close(self) -> None:
        deadline = time.monotonic() + SETTLE_S
        while True:
            for pid in (self._path / "cgroup.procs").read_text().split():
                with contextlib.suppress(OSError):
                    (self._home / "cgroup.procs").write_text(pid)
            try:
                return self._path.rmdir()
            except OSError as error:  # the last of its processes is being ended
                if error.errno != errno.EBUSY or time.monotonic() > deadline:
                    raise
                time.sleep(0.1)


@contextlib.contextmanager
def busy(count: int) -> Iterator[None]:
    """Let this many processes compute meanwhile."""
    pids, parent = [], os.getpid()
    for _ in range(count):
        if (pid := os.fork()) == 0:
            from deadpool_plugin.transport.linux import die_with_parent

            for number in (signal.SIGINT, signal.SIGTERM):  # what is to be undone is the parent's
                signal.signal(number, signal.SIG_DFL)
            os.setsid()  # the kernel may share the CPUs out by sessions: each is to count
            die_with_parent(signal.SIGKILL, parent)
            while True:
                math.sqrt(2.0)
        pids.append(pid)
    try:
        yield
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        for pid in pids:
            os.waitpid(pid, 0)


class Runs:
    """A job after the other, on the same hosts."""

    def __init__(self, network: Network, disk: Disk, group: Group, settings: dict[str, Any]) -> None:
        self._network, self._disk, self._group, self._settings = network, disk, group, settings
        self._number = 0
        self.cluster: NamespacedCluster | None = None

    def ready(self) -> NamespacedCluster:
        """Return a job that trains and is protected; a new one if there is none. Raises: TimeoutError."""
        if self.cluster is None:
            self._number += 1
            shutil.rmtree(self._disk.mounted / "job", ignore_errors=True)
            self.cluster = NamespacedCluster(self._network, self._disk.mounted / "job", self._settings)
            with self._group.beginning():
                self.cluster.start()
            self.told = Tail(self.cluster.output)
            if not self._until(lambda: self.told.protected and bool(self.told.of("SpareReady")), START_S):
                output = self.cluster.folder / "launcher"
                said = "\n".join(path.read_text(errors="replace")[-2000:] for path in sorted(output.iterdir()))
                raise TimeoutError(f"the job was not protected within {START_S:g} s\n{said}")
        return self.cluster

    def _until(self, done: Callable[[], bool], within_s: float) -> bool:
        assert self.cluster is not None
        deadline = time.monotonic() + within_s
        while time.monotonic() < deadline and None in self.cluster.exit_codes():
            self.told.read()
            if done():
                return True
            time.sleep(0.1)
        return False

    def end(self) -> None:
        if self.cluster is not None:
            self.cluster.close()
        self.cluster = None

    def try_it(self, trial: Trial) -> dict[str, Any]:
        cluster = self.ready()
        self.told.read()
        began, first = time.time(), self._step
        load, killed = os.getloadavg()[0], self._group.killed
        self._strike(cluster, trial)
        self._until(lambda: False, SETTLE_S)
        lost = [line for line in self.told.of(*LOST, since=began)]
        if not lost:
            self._until(lambda: self._step > first, SWAP_S)
        line = {
            **vars(trial), "false_alarm": (bool(lost) or self._step <= first) and self._group.killed == killed,
            "killed_for_memory": self._group.killed - killed, "load_before": round(load, 1),
            "load_after": round(os.getloadavg()[0], 1), "steps": self._step - first,
            "paused": len(self.told.of("ContactLost", since=began)),
            "lost": [{**event, "time": round(event["time"] - began, 3)} for event in lost][:6],
        }  # fmt: skip
        if lost or line["false_alarm"] or line["killed_for_memory"]:
            line["exit_codes"] = cluster.exit_codes()
            self.end()
            kept = self._disk.mounted.parent / f"seed{trial.seed}"  # all that it said, for whoever looks into it
            shutil.rmtree(kept, ignore_errors=True)
            shutil.copytree(cluster.folder, kept)
        return line

    @property
    def _step(self) -> int:
        return max((int(event["step"]) for event in self.told.of("StepCommitted")), default=-1)

    def _strike(self, cluster: NamespacedCluster, trial: Trial) -> None:
        hosts = list(self._network.hosts)
        struck = hosts if trial.host < 0 else [hosts[trial.host]]
        # Each end does half of a path between two hosts that are both struck.
        shares = 1 if trial.host >= 0 else 2
        loss = 100 * (1 - (1 - trial.strength / 100) ** (1 / shares)) if trial.kind == "loss" else 0.0
        delay_ms = trial.strength / shares if trial.kind == "delay" else 0.0
        with contextlib.ExitStack() as heals:
            if trial.kind == "load":
                heals.enter_context(busy(int(trial.strength)))
            elif trial.kind == "memory":
                heals.callback(self._group.release)
                self._group.keep(trial.strength)
            elif trial.kind in ("loss", "delay"):
                for host in struck:
                    heals.callback(self._network.heal, host)
                    self._network.degrade(host, loss, delay_ms)
            elif trial.kind == "disk":
                heals.callback(self._disk.thaw)
                self._disk.freeze()
            elif trial.kind == "stop":
                pid = cluster.agent(trial.host)
                heals.callback(processes.send, pid, signal.SIGCONT)
                processes.send(pid, signal.SIGSTOP)
            time.sleep(trial.seconds)

    def cut(self, trial: Trial) -> dict[str, Any]:
        """Pull the cable of an active host: seconds until it is lost, until a plan is decided, until all train."""
        self.ready()
        trial, began = replace(trial, host=trial.host % (NODES - SPARES)), time.time()
        host = list(self._network.hosts)[trial.host]
        began = time.time()
        self._network.cut(host)
        try:
            self._until(lambda: bool(self.told.of("SwapDone", since=began)), SWAP_S)
        finally:
            self.end()
            self._network.heal(host)
        at = {kind: [event["time"] for event in self.told.of(kind, since=began)] for kind in ("NodeLost", "SwapDone")}
        line: dict[str, Any] = {"seed": trial.seed, "kind": "cut", "host": trial.host}
        return line | {
            name: round(min(at[kind]) - began, 3) if at[kind] else None
            for name, kind in (("lost_s", "NodeLost"), ("swapped_s", "SwapDone"))
        }


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("false-alarms-out"))
    parser.add_argument("--trials", type=int, default=100)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--for-s", type=float, default=math.inf, help="end after so many seconds; call it again")
    parser.add_argument("--only", choices=[*WEIGHTS, "cut"], default="", help="one kind; cut: a real silence, timed")
    parser.add_argument("--patience", type=float, help="patience_s; default: the plugin's")
    args = parser.parse_args()
    args.out = args.out.resolve()
    return args


def main() -> int:
    args = parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    make_corpus.ensure(CORPUS)
    forked_node.preload()
    from deadpool_plugin.config import Config

    signal.signal(signal.SIGTERM, signal.default_int_handler)
    patience_s = args.patience or Config().patience_s
    log, commit, ends = args.out / "trials.jsonl", commit_of(), time.monotonic() + args.for_s
    done = {line["seed"] for line in read_json_lines(log)}
    seeds = [seed for seed in range(args.first_seed, args.first_seed + args.trials) if seed not in done]
    with contextlib.ExitStack() as stack:
        network = stack.enter_context(Network(args.out / "network", NODES, logins=False))
        disk, group = stack.enter_context(Disk(args.out)), Group()
        stack.callback(group.close)
        runs = Runs(network, disk, group, {"patience_s": patience_s, "interface_address": "10.77.0.0/24"})
        stack.callback(runs.end)
        for seed in seeds:
            if time.monotonic() >= ends:
                break
            trial = drawn(seed, args.only if args.only != "cut" else "")
            line = runs.cut(trial) if args.only == "cut" else runs.try_it(trial)
            line |= {"patience_s": patience_s, "commit": commit, "at": round(time.time())}
            with log.open("a") as file:
                file.write(json.dumps(line) + "\n")
            print(json.dumps(line), flush=True)
    lines = read_json_lines(log)
    alarms = [line for line in lines if line.get("false_alarm")]
    total = {"trials": len(lines), "kinds": Counter(line["kind"] for line in lines), "false_alarms": len(alarms)}
    total |= {"seeds_of_alarms": [line["seed"] for line in alarms], "left": len(seeds) - (len(lines) - len(done))}
    print(json.dumps(total), flush=True)
    return 1 if alarms else 0


if __name__ == "__main__":
    sys.exit(main())
