"""The cheapest way to move the same bytes: one memcpy, and one loopback TCP transfer, in processes of their own.

    (by bench_mirror.py)  mirror_floor.py PAYLOAD_BYTES     then orders on standard input, answers on its output

Rules of this file: blocking sockets, whole payloads, no checksum, nothing else; copy and transfer at the trainers'
priority (the agents' bulk threads run at nice 10). Memory is as the plugin's: two slots per end, in a memfd, touched
before, used in turn, so that caches help neither more nor less. An order is one JSON line
`{"count": n, "pause_s": p}`: n times a copy and a transfer, with a pause before each as long as a training step; the
answer has the CPU time of each in nanoseconds.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import socket
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import torch


def slots(payload_bytes: int) -> memoryview:
    """Two payloads of mapped, touched memory."""
    fd = os.memfd_create("floor", os.MFD_CLOEXEC)
    os.ftruncate(fd, 2 * payload_bytes)
    view = memoryview(mmap.mmap(fd, 2 * payload_bytes, mmap.MAP_SHARED))
    torch.frombuffer(view, dtype=torch.uint8).fill_(1)
    return view


def receive(sock: socket.socket, payload_bytes: int) -> None:
    """The other end: fill the slots in turn, tell the CPU time of each payload; until end of file."""
    view, turn = slots(payload_bytes), 0
    while True:
        part, began = view[turn * payload_bytes : (turn + 1) * payload_bytes], time.thread_time_ns()
        start = 0
        while start < payload_bytes:
            count = sock.recv_into(part[start:], 0, socket.MSG_WAITALL)
            if not count:
                return
            start += count
        turn = 1 - turn
        sock.sendall((time.thread_time_ns() - began).to_bytes(8, "big"))


class Floor:
    """The sending end. `sock` leads to a process in `receive`."""

    def __init__(self, sock: socket.socket, payload_bytes: int) -> None:
        self._sock, self._payload_bytes = sock, payload_bytes
        self._view = slots(payload_bytes)
        self._live = torch.ones(payload_bytes, dtype=torch.uint8)
        whole = torch.frombuffer(self._view, dtype=torch.uint8)
        self._sender = ThreadPoolExecutor(1)
        self._slots = [whole[:payload_bytes], whole[payload_bytes:]]

    def once(self, turn: int) -> dict[str, int]:
        """One copy and one transfer of slot `turn`."""
        began = time.thread_time_ns()
        ctypes.memmove(self._slots[turn].data_ptr(), self._live.data_ptr(), self._payload_bytes)
        copied = time.thread_time_ns()
        sent, received = self._sender.submit(self._transfer, turn).result()
        return {"memcpy_ns": copied - began, "send_ns": sent, "receive_ns": received}

    def _transfer(self, turn: int) -> tuple[int, int]:
        began = time.thread_time_ns()
        self._sock.sendall(self._view[turn * self._payload_bytes : (turn + 1) * self._payload_bytes])
        sent = time.thread_time_ns() - began
        return sent, int.from_bytes(self._sock.recv(8, socket.MSG_WAITALL), "big")


def connected() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        near = socket.create_connection(listener.getsockname())
        far, _ = listener.accept()
    return near, far


def main() -> None:
    payload_bytes = int(sys.argv[1])
    near, far = connected()
    if os.fork() == 0:
        near.close()
        receive(far, payload_bytes)
        os._exit(0)
    far.close()
    floor = Floor(near, payload_bytes)
    for turn in (0, 1, 0, 1):
        floor.once(turn)
    print(json.dumps("ready"), flush=True)
    for line in sys.stdin:
        order, found = json.loads(line), []
        for count in range(order["count"]):
            time.sleep(order["pause_s"])
            found.append(floor.once(count % 2))
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
