"""Rate of mirroring over one, two and four connections to a buddy, beside as many plain streams.

    python scripts/bench_lanes.py --out lanes-out                 # over loopback: what the CPUs give
    python scripts/bench_lanes.py --pace 100 --out lanes-out      # no connection is faster than 100 MiB/s

Two processes stand for two hosts. Four ranks' snapshots are pushed at once, by the plugin's transfers over so many
lanes; then as many plain streams carry the same bytes, without checksum, slots or answers but one byte at the end: what
iperf3 does. With `--pace` the kernel paces every connection, as a fast network does to one TCP stream (its window, one
queue of a card, one member of a bond). Lanes and kinds take turns, in an order drawn anew for each round.

The last line is one JSON object, OUT/lanes.json has all samples.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import random
import socket
import statistics
import sys
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

sys.path.insert(1, str(Path(__file__).resolve().parents[1]))

from bench.control_kernel import cpu_ns, machine

from deadpool_plugin.config import Config
from deadpool_plugin.core.types import NodeId
from deadpool_plugin.mirror import transfers, wire
from deadpool_plugin.mirror.store import SnapshotStore
from deadpool_plugin.mirror.transfers import BulkServer, BulkTransfers, SnapshotPush
from deadpool_plugin.transport.handshake import Credentials
from deadpool_plugin.transport.sockets import listen_tcp

RANKS = 4
HERE: NodeId = 0
BUDDY: NodeId = 1
HEADER_BYTES = 4096
PATIENCE_S = 60.0
SO_MAX_PACING_RATE = 47  # linux/asm-generic/socket.h
CREDENTIALS = Credentials(b"bench").of("")


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lanes", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--payload", type=int, default=64, help="MiB of a rank's snapshot")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--pace", type=float, default=0.0, help="MiB/s of one connection at most; 0: any")
    parser.add_argument("--seed", type=int, default=0, help="for the order of the turns")
    parser.add_argument("--out", type=Path, default=Path("lanes-out"))
    return parser.parse_args()


def pace(mib_per_s: float) -> None:
    """Have the kernel pace each bulk connection that this process makes from now on."""
    made = wire.BulkStream.__init__

    def init(self: wire.BulkStream, sock: socket.socket, silent_after_s: float) -> None:
        paced(sock, mib_per_s)
        made(self, sock, silent_after_s)

    wire.BulkStream.__init__ = init  # type: ignore[method-assign]


def paced(sock: socket.socket, mib_per_s: float) -> None:
    if mib_per_s:
        sock.setsockopt(socket.SOL_SOCKET, SO_MAX_PACING_RATE, int(mib_per_s * (1 << 20)))


# The buddy's process


def buddy(told: Connection, payload_bytes: int) -> None:
    """Serve as a host's agent does, and beside it take plain streams, until it is killed."""

    async def serve() -> None:
        store, sink = SnapshotStore(), socket.create_server(("127.0.0.1", 0))
        server = BulkServer(
            store, [listen_tcp("127.0.0.1", None)], CREDENTIALS, BUDDY, PATIENCE_S, lambda *mirrored: None, print
        )
        threading.Thread(target=take_streams, args=(sink, payload_bytes), daemon=True).start()
        told.send((server.addresses[0], sink.getsockname()))
        await asyncio.Event().wait()

    asyncio.run(serve())


def take_streams(sink: socket.socket, payload_bytes: int) -> None:
    while True:
        sock, _ = sink.accept()
        threading.Thread(target=take_stream, args=(sock, payload_bytes), daemon=True).start()


def take_stream(sock: socket.socket, payload_bytes: int) -> None:
    """Receive payloads one after the other into the same memory, each answered by a byte."""
    view = memoryview(bytearray(payload_bytes))
    while True:
        start = 0
        while start < payload_bytes:
            if not (count := sock.recv_into(view[start:], 0, socket.MSG_WAITALL)):
                return
            start += count
        sock.sendall(b".")


# This host's process


class Ours:
    """The plugin's transfers to the buddy, over `lanes` connections."""

    def __init__(self, store: SnapshotStore, address: tuple[str, int], lanes: int) -> None:
        self._lanes = lanes
        config = Config().model_copy(update={"patience_s": PATIENCE_S})
        self._transfers = BulkTransfers(HERE, CREDENTIALS, store, ["127.0.0.1"], config)
        self._transfers.know(BUDDY, [address])

    async def once(self, step: int) -> None:
        """Mirror `step` of all ranks."""
        transfers.LANES = self._lanes
        transfers_of = (SnapshotPush(rank, step, 0, True, (rank,), "bench", b"") for rank in range(RANKS))
        await asyncio.gather(*(self._transfers.push(BUDDY, push) for push in transfers_of))


class Plain:
    """As many sockets, which share the ranks' payloads out between them."""

    def __init__(self, payloads: list[memoryview], address: tuple[str, int], lanes: int, mib_per_s: float) -> None:
        self._streams = [socket.create_connection(address) for _ in range(lanes)]
        for sock in self._streams:
            paced(sock, mib_per_s)
        self._payloads = payloads

    def _send(self, lane: int) -> None:
        for payload in self._payloads[lane :: len(self._streams)]:
            self._streams[lane].sendall(payload)
            self._streams[lane].recv(1)

    async def once(self, step: int) -> None:
        await asyncio.gather(*(asyncio.to_thread(self._send, lane) for lane in range(len(self._streams))))


def staged(store: SnapshotStore, step: int) -> None:
    for rank in range(RANKS):
        pair = store.own(rank)
        assert pair is not None
        pair.seal(step, 0, "bench", b"")
        store.staged(rank, step, 0, (rank,))
        store.history(rank).append(step, b"")


async def measured(args: argparse.Namespace, addresses: Any, pid: int) -> list[dict[str, Any]]:
    size, draw, store = args.payload << 20, random.Random(args.seed), SnapshotStore()
    for rank in range(RANKS):
        pair = store.create_own(rank, HEADER_BYTES, size)
        for step in (0, 1):
            pair.payload(step)[:] = os.urandom(1 << 20) * args.payload
    staged(store, 0)
    payloads = [store.readable(rank, 0, payload=True).payload for rank in range(RANKS)]
    kinds: dict[tuple[str, int], Ours | Plain] = {}
    for lanes in args.lanes:
        kinds["plain", lanes] = Plain(payloads, addresses[1], lanes, args.pace)
        kinds["plugin", lanes] = Ours(store, addresses[0], lanes)
    samples, step = list[dict[str, Any]](), 0
    for turn in range(-1, args.rounds):  # the first turn touches the buddy's memory
        for kind, lanes in draw.sample(sorted(kinds), len(kinds)):
            step += 1
            staged(store, step)
            spent, began = cpu_ns(os.getpid()) + cpu_ns(pid), time.monotonic()
            await kinds[kind, lanes].once(step)
            took_s, spent = time.monotonic() - began, cpu_ns(os.getpid()) + cpu_ns(pid) - spent
            gb = RANKS * size / 1e9
            if turn >= 0:
                samples.append(
                    {"kind": kind, "lanes": lanes, "gb_per_s": gb / took_s, "cpu_s_per_gb": spent / 1e9 / gb}
                )
    return samples


def summary(samples: list[dict[str, Any]], lanes: list[int]) -> list[dict[str, Any]]:
    def middle(kind: str, count: int, of: Callable[[dict[str, Any]], float]) -> float:
        return round(statistics.median(of(one) for one in samples if (one["kind"], one["lanes"]) == (kind, count)), 3)

    rows = []
    for count in lanes:
        row: dict[str, Any] = {"lanes": count}
        for kind in ("plain", "plugin"):
            row[f"{kind}_gb_per_s"] = middle(kind, count, lambda one: one["gb_per_s"])
            row[f"{kind}_cpu_s_per_gb"] = middle(kind, count, lambda one: one["cpu_s_per_gb"])
        rows.append({**row, "share_of_plain": round(row["plugin_gb_per_s"] / row["plain_gb_per_s"], 3)})
    return rows


def main() -> int:
    args = parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    pace(args.pace)
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("fork").Process(target=buddy, args=(theirs, args.payload << 20), daemon=True)
    process.start()
    assert process.pid is not None
    samples = asyncio.run(measured(args, ours.recv(), process.pid))
    rows = summary(samples, args.lanes)
    settings = {name: str(value) if isinstance(value, Path) else value for name, value in vars(args).items()}
    result = {"settings": settings, "machine": machine(), "load": os.getloadavg(), "summary": rows}
    (args.out / "lanes.json").write_text(json.dumps({**result, "samples": samples}, indent=1) + "\n")
    for row in rows:
        print(", ".join(f"{name} {value}" for name, value in row.items()))
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
