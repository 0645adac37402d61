"""Attack the agents of a running job from this host, and look whether the job computes what it would have computed.

Rounds follow each other until there were `--connections`: each is a job of the demonstration (two nodes of one rank, a
spare) whose processes may open 1,024 files, and a seed from which every connection to its agents is drawn: ones that
say nothing, or a byte now and then, or rubbish, or a greeting without a proof; ones that know the secret and send
numbers that cannot be; on the TCP ports and on the node's local socket. A connection counts only while the job trains.
Losses, norms and final state are compared with an undisturbed run; memory, threads and descriptors of each agent are
sampled, and hosts and ranks that are lost are counted.

Rules of this file: 127.0.0.0/8 and this host's own sockets only. What is done is kept in `--out` and not done again.
The last line is one JSON object; exit code 0 only if every round was bit-exact and nothing was lost or grew unbounded.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import contextlib
import json
import os
import random
import resource
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
from clusters.events import Tail
from clusters.launched import REPOSITORY, read_json_lines

sys.path.insert(0, str(REPOSITORY))

from deadpool_plugin.core.messages import Status
from deadpool_plugin.errors import DeadpoolError
from deadpool_plugin.mirror import wire
from deadpool_plugin.transport import join_protocol
from deadpool_plugin.transport.framing import CONTROL_FRAME_BYTES_MAX, LENGTH, pack_frame
from deadpool_plugin.transport.handshake import ANY_JOB, Credentials, shake_hands
from deadpool_plugin.transport.rendezvous import Hello

HELD = 1500
"""Connections that are left open at a time to each port and each local socket, more than an agent may have
descriptors."""
FILES = 1024
MAGIC = b"deadpl-4"
SHAKE_S = 2.0
BOUNDS = {"rss_mib": 64.0, "threads": 64, "descriptors": FILES - 64}
"""By how much an agent's memory may grow, and how many threads and descriptors it may have."""


class Attack:
    """Connections to the agents of one job, drawn from `seed`.

    Args:
        targets: per agent its TCP ports and the names of its local sockets.
        secret: of the job, for those that know it.
    """

    def __init__(self, targets: dict[int, tuple[list[int], list[str]]], secret: bytes, seed: int) -> None:
        self._ports = [port for ports, _ in targets.values() for port in ports]
        self._names = [name for _, names in targets.values() for name in names]
        self._secret, self._draw = Credentials(secret, ANY_JOB), random.Random(seed)
        self._held: collections.defaultdict[int | str, collections.deque[socket.socket]] = collections.defaultdict(
            collections.deque
        )
        self.made: collections.Counter[str] = collections.Counter()
        self.most_held = 0
        self._kinds: list[tuple[int, str, Callable[[], None]]] = [
            (30, "silent", self._silent), (20, "a byte", self._byte), (20, "rubbish", self._rubbish),
            (10, "reset", self._reset), (10, "greeting without a proof", self._unproven),
            (4, "announced too long", self._long), (2, "absurd bulk request", self._bulk),
            (2, "absurd question", self._question), (2, "local", self._local),
        ]  # fmt: skip

    def run(self, count: int) -> None:
        """Make `count` connections, whatever becomes of them; none is counted that nobody listens for. Blocks: until
        then."""
        weights = [weight for weight, _, _ in self._kinds]
        for _, kind, make in self._draw.choices(self._kinds, weights, k=count):
            try:
                make()
            except ConnectionRefusedError:
                continue
            except (OSError, EOFError, DeadpoolError):
                pass
            self.made[kind] += 1
        held = [sock for at_one in self._held.values() for sock in at_one]
        self.most_held = max(self.most_held, len(held))
        for sock in self._draw.sample(held, min(20, len(held))):
            with contextlib.suppress(OSError):
                sock.send(MAGIC[:1])

    def close(self) -> None:
        for at_one in self._held.values():
            while at_one:
                at_one.popleft().close()

    def _dial(self) -> socket.socket:
        """From any address of this host: what is kept for each is bounded, too."""
        sock = socket.socket()
        sock.settimeout(SHAKE_S)
        try:
            sock.bind(
                (f"127.{self._draw.randrange(1, 255)}.{self._draw.randrange(255)}.{self._draw.randrange(1, 255)}", 0)
            )
            sock.connect(("127.0.0.1", self._draw.choice(self._ports)))
        except OSError:
            sock.close()
            raise
        return sock

    def _hold(self, sock: socket.socket, at: int | str) -> None:
        self._held[at].append(sock)
        if len(self._held[at]) > HELD:
            self._held[at].popleft().close()

    def _dial_and_hold(self) -> socket.socket:
        sock = self._dial()
        self._hold(sock, sock.getpeername()[1])
        return sock

    def _silent(self) -> None:
        self._dial_and_hold()

    def _byte(self) -> None:
        sock = self._dial_and_hold()
        sock.send(self._draw.choice([MAGIC[:1], b"\0"]))

    def _rubbish(self) -> None:
        with self._dial() as sock:
            sock.send(self._draw.randbytes(self._draw.randrange(1, 4096)))

    def _reset(self) -> None:
        with self._dial() as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))

    def _unproven(self) -> None:
        sock = self._dial_and_hold()
        sock.send(MAGIC + self._draw.randbytes(52))
        if self._draw.random() < 0.5:
            sock.send(self._draw.randbytes(32))

    def _long(self) -> None:
        with self._dial() as sock:
            sock.send(LENGTH.pack(self._draw.randrange(CONTROL_FRAME_BYTES_MAX, 1 << 32)) * 16)

    def _absurd(self) -> int:
        return self._draw.choice([-1, -(1 << 62), (1 << 62) + 1, -2])

    def _shake(self, sock: socket.socket, purpose: str, identity: int) -> None:
        async def shake() -> None:
            async with asyncio.timeout(SHAKE_S):
                await shake_hands(sock, self._secret, purpose, identity, dialling=True)

        sock.setblocking(False)
        asyncio.run(shake())
        sock.settimeout(SHAKE_S)

    def _bulk(self) -> None:
        with self._dial() as sock:
            self._shake(sock, wire.PURPOSE, 1)
            n, m = self._absurd(), self._absurd()
            stream = wire.BulkStream(sock, SHAKE_S)
            junk = self._draw.randbytes(99)
            stream.send(self._draw.choice([
                wire.Push(0, 1, 0, (0,), n, b"", True), wire.Push(n, 1, 0, (m,), 1, b"", True),
                wire.Push(0, 1, 0, (0,), 1, junk, True), wire.PushRecording(0, n, b""), wire.GetRecording(n),
                wire.GetHistory(0, n, m), wire.GetHeader(n, m), wire.GetPayload(0, n, "", m),
            ]))  # fmt: skip
            sock.recv(1)

    def _question(self) -> None:
        with self._dial() as sock:
            self._shake(sock, join_protocol.PURPOSE, join_protocol.GUEST)
            n, address = self._absurd(), ("127.0.0.1", self._absurd())
            hello = Hello(n, "nobody", address, (address,), n, {}, "")
            body = msgspec.msgpack.encode(
                self._draw.choice([join_protocol.Announce(hello), Status(n, n, True), [n], {"a": n}])
            )
            sock.send(pack_frame(body, CONTROL_FRAME_BYTES_MAX))
            sock.recv(1)

    def _local(self) -> None:
        sock = socket.socket(socket.AF_UNIX)
        sock.settimeout(SHAKE_S)
        name = self._draw.choice(self._names)
        self._hold(sock, name)
        sock.connect("\0" + name)
        if self._draw.random() < 0.7:
            sock.send(LENGTH.pack(self._draw.randrange(1 << 32)) + self._draw.randbytes(64))


# ---- what is attacked


def targets_of(pids: list[int]) -> dict[int, tuple[list[int], list[str]]]:
    """Find where each of these processes listens: TCP ports, and names of abstract sockets."""
    ports, names = dict[str, int](), dict[str, str]()
    for table in ("tcp", "tcp6"):
        for line in Path("/proc/net", table).read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A":
                ports[fields[9]] = int(fields[1].rpartition(":")[2], 16)
    for line in Path("/proc/net/unix").read_text().splitlines()[1:]:
        fields = line.split()
        if len(fields) > 7 and fields[3] == "00010000":
            names[fields[6]] = fields[7].removeprefix("@")
    found = {}
    for pid in pids:
        inodes = {os.readlink(f"/proc/{pid}/fd/{fd}")[8:-1] for fd in os.listdir(f"/proc/{pid}/fd")}
        found[pid] = [ports[one] for one in ports if one in inodes], [names[one] for one in names if one in inodes]
    return found


def held_by(pid: int) -> dict[str, float]:
    """An agent's memory, threads and descriptors now."""
    status = dict(line.partition(":")[::2] for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    memory = int(status["RssAnon"].split()[0]) / 1024
    return {
        "rss_mib": round(memory, 1),
        "threads": int(status["Threads"]),
        "descriptors": len(os.listdir(f"/proc/{pid}/fd")),
    }


# ---- rounds


def one_round(args: argparse.Namespace, number: int, left: int) -> dict[str, Any]:
    """A job, and as many of `left` connections as fit into it; what became of both."""
    folder = args.out / f"round{number}"
    demo = [sys.executable, str(REPOSITORY / "scripts/demo.py"), "--no-kill", "--nodes", "2", "--ranks-per-node", "1"]
    demo += ["--tp", "1", "--pp", "1", "--steps", str(args.steps), "--out", str(folder)]
    limit = (FILES, FILES)
    with (args.out / f"round{number}.txt").open("w") as output:
        process = subprocess.Popen(
            demo, stdout=output, preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, limit)
        )
    samples: dict[int, list[dict[str, float]]] = {}
    seconds = 0.0
    attack: Attack | None = None
    told, attacked = Tail(folder / "output"), list[int]()
    try:
        while process.poll() is None:
            told.read()
            if attack is None:
                attack = attack_on(folder, told, args.seed + number, samples)
                time.sleep(0.2)
                continue
            before, step = sum(attack.made.values()), max((done["step"] for done in told.of("StepDone")), default=-1)
            if before >= left or step >= args.steps:  # enough, or the job is at its end
                time.sleep(0.2)
                continue
            attacked.append(step)
            began = time.monotonic()
            attack.run(min(100, left - before))
            seconds += time.monotonic() - began
            for pid, found in samples.items():
                with contextlib.suppress(OSError, KeyError):  # the job has ended
                    found.append(held_by(pid))
    finally:
        if attack is not None:
            attack.close()
    told.read()
    summary = json.loads((args.out / f"round{number}.txt").read_text().splitlines()[-1])
    lines = [line for path in (folder / "launcher").iterdir() for line in path.read_text(errors="replace").splitlines()]
    return {
        "seed": args.seed + number,
        "attacked_from_step": min(attacked, default=-1),
        "attacked_until_step": max(attacked, default=-1),
        "attacked_s": round(seconds),
        "held": attack.most_held if attack is not None else 0,
        "lost": len(told.of("NodeLost", "RankLost")),
        "connections": dict(attack.made) if attack is not None else {},
        "bit_exact": summary["bit_exact"],
        "steps": summary["steps"],
        "exit_code": process.returncode,
        "lines_printed": len(lines),
        "lines_of_ours": sum("[deadpool]" in line for line in lines),
        "agents": [
            {"first": found[0], "most": {name: max(one[name] for one in found) for name in found[0]}, "last": found[-1]}
            for found in samples.values()
        ],
        "curve": [[max(one[i][name] for one in samples.values() if len(one) > i) for name in BOUNDS]
                  for i in range(0, max(map(len, samples.values()), default=0), 10)],
    }  # fmt: skip


def attack_on(folder: Path, told: Tail, seed: int, samples: dict[int, list[dict[str, float]]]) -> Attack | None:
    """Once the job trains and every agent can be found; `samples` gets their processes."""
    found = [path for path in (folder / "output" / "nodes").glob("*.json")]
    if len(found) < 3 or not told.of("SpareReady"):
        return None
    pids = [json.loads(path.read_text())["pid"] for path in found]
    samples |= {pid: [held_by(pid)] for pid in pids}
    return Attack(targets_of(pids), (folder / "secret").read_text().strip().encode(), seed)


def judged(rounds: list[dict[str, Any]]) -> tuple[dict[str, Any], list[str]]:
    """(all rounds in one, what does not hold)"""
    made: collections.Counter[str] = collections.Counter()
    problems = []
    for one in rounds:
        made.update(one["connections"])
        if not one["bit_exact"] or one["exit_code"]:
            problems.append(f"seed {one['seed']}: bit_exact {one['bit_exact']}, exit code {one['exit_code']}")
        if one["lost"]:
            problems.append(f"seed {one['seed']}: {one['lost']} hosts or ranks lost")
        for agent in one["agents"]:
            grown = agent["most"]["rss_mib"] - agent["first"]["rss_mib"]
            found = {**agent["most"], "rss_mib": grown}
            problems += [f"seed {one['seed']}: {name} {found[name]}" for name in BOUNDS if found[name] > BOUNDS[name]]
    most = {name: max((a["most"][name] for one in rounds for a in one["agents"]), default=0) for name in BOUNDS}
    first = {name: max((a["first"][name] for one in rounds for a in one["agents"]), default=0) for name in BOUNDS}
    total = {
        "connections": sum(made.values()),
        "kinds": dict(made),
        "rounds": len(rounds),
        "first": first,
        "most": most,
    }
    total |= {
        "steps": sum(one["steps"] for one in rounds),
        "steps_attacked": [[one["attacked_from_step"], one["attacked_until_step"]] for one in rounds],
        "attacked_s": sum(one["attacked_s"] for one in rounds),
        "held": max((one["held"] for one in rounds), default=0),
        "lost": sum(one["lost"] for one in rounds),
        "lines_of_ours": sum(one["lines_of_ours"] for one in rounds),
        "lines_printed": sum(one["lines_printed"] for one in rounds),
    }
    return total | {"bit_exact": all(one["bit_exact"] for one in rounds), "problems": problems}, problems


def draw(path: Path, rounds: list[dict[str, Any]]) -> None:
    """Memory, threads and descriptors of the agent that has most, round after round."""
    from clusters.demo_report import pyplot

    plt = pyplot()
    curve = [point for one in rounds for point in one["curve"]]
    total = sum(sum(one["connections"].values()) for one in rounds) / 1000
    figure, panels = plt.subplots(len(BOUNDS), 1, sharex=True, figsize=(8, 6))
    for panel, name, values in zip(
        panels, ("memory, MiB", "threads", "descriptors"), zip(*curve, strict=True), strict=True
    ):
        panel.plot([made * total / len(values) for made in range(len(values))], values, linewidth=0.8)
        panel.set_ylabel(name)
        panel.set_ylim(bottom=0)
    panels[-1].set_xlabel("connections, thousands")
    figure.savefig(path, dpi=100)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--connections", type=int, default=100_000)
    parser.add_argument("--steps", type=int, default=400, help="of each job")
    parser.add_argument("--rounds", type=int, default=20, help="at most so many")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("hostile-out"))
    args = parser.parse_args()
    args.out = args.out.resolve()
    args.out.mkdir(parents=True, exist_ok=True)
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (files, files))
    log = args.out / "rounds.jsonl"
    while len(rounds := read_json_lines(log)) < args.rounds:
        left = args.connections - sum(sum(one["connections"].values()) for one in rounds)
        if left <= 0:
            break
        found = one_round(args, len(rounds), left)
        with log.open("a") as file:
            file.write(json.dumps(found) + "\n")
        print(
            f"round {len(rounds)}: {sum(found['connections'].values())} connections, bit_exact {found['bit_exact']}",
            flush=True,
        )
    total, problems = judged(rounds)
    if sum(len(one["curve"]) for one in rounds):
        draw(args.out / "hostile.png", rounds)
    exit_code = 1 if problems or total["connections"] < args.connections else 0
    total |= {"seed": args.seed, "exit_code": exit_code}
    (args.out / "hostile.json").write_text(json.dumps(total, indent=1) + "\n")
    print(json.dumps(total), flush=True)
    return exit_code


if __name__ == "__main__":
    sys.exit(main())
