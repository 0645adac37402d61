"""The least a plan could cost here: the same bytes, to as many processes and back, over bare loopback sockets.

Rules of this file: a swap sends three rounds to everybody and back: one small, two with the plan in them (Prepare and
Promise, Propose and Accepted, Decided and what says that it has come). No protocol, no encoding, blocking sockets; as
many processes as there are agents' processes, each with as many sockets as there are agents in it.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import struct
import time
from collections.abc import Sequence
from typing import Any, NoReturn

import msgspec

from deadpool_plugin.core.messages import Decided
from deadpool_plugin.core.types import Ballot, Source, SwapPlan, World
from deadpool_plugin.transport.linux import die_with_parent

SMALL_BYTES = 100
_LENGTH = struct.Struct("!I")


def plan_bytes(nodes: int, slots: int, spares: int) -> int:
    """The size of a plan for a job of this shape that has lost a node."""
    active = nodes - spares
    world = World(1, tuple(node for node in range(active) for _ in range(slots)), tuple(range(active, nodes - 1)))
    sources = tuple(Source(rank, active - 1, active - 1, rank) for rank in range(slots))
    plan = SwapPlan(world, 0, (active,), sources, "127.0.0.1:12345")
    return len(msgspec.msgpack.encode(Decided(plan, Ballot(1, 1, 0))))


def measured(sockets: Sequence[int], plan_bytes: int, rounds: int) -> dict[str, Any]:
    """Wall and CPU time of the sending process for three rounds, each sample in seconds.

    Args: sockets: how many each answering process has.
    """
    with socket.create_server(("127.0.0.1", 0), backlog=1024) as listener:
        pids = [_forked(listener.getsockname(), count) for count in sockets]
        lines = [listener.accept()[0] for _ in range(sum(sockets))]
    try:
        for line in lines:
            line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        _three_rounds(lines, plan_bytes)  # warms everything up
        samples = [_three_rounds(lines, plan_bytes) for _ in range(rounds)]
    finally:
        for line in lines:
            line.close()
        for pid in pids:
            os.waitpid(pid, 0)
    return {"plan_bytes": plan_bytes, "wall_s": [wall for wall, _ in samples], "cpu_s": [cpu for _, cpu in samples]}


def _three_rounds(lines: Sequence[socket.socket], plan_bytes: int) -> tuple[float, float]:
    wall, cpu = time.perf_counter(), time.process_time()
    for size in (SMALL_BYTES, plan_bytes, plan_bytes):
        frame = _LENGTH.pack(size) + bytes(size)
        for line in lines:
            line.sendall(frame)
        for line in lines:
            line.recv(SMALL_BYTES, socket.MSG_WAITALL)
    return time.perf_counter() - wall, time.process_time() - cpu


def _forked(address: tuple[str, int], count: int) -> int:
    me = os.getpid()
    pid = os.fork()
    if pid == 0:
        try:
            die_with_parent(signal.SIGKILL, me)
            _answer([socket.create_connection(address) for _ in range(count)])
        finally:
            os._exit(1)
    return pid


def _answer(lines: Sequence[socket.socket]) -> NoReturn:
    """A small message for every one that comes, until the other end is closed."""
    by_fd, poll, answer = {line.fileno(): line for line in lines}, select.epoll(), bytes(SMALL_BYTES)
    for line in lines:
        line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        poll.register(line, select.EPOLLIN)
    while True:
        for fd, _ in poll.poll():
            head = by_fd[fd].recv(_LENGTH.size, socket.MSG_WAITALL)
            if not head:
                os._exit(0)
            by_fd[fd].recv(_LENGTH.unpack(head)[0], socket.MSG_WAITALL)
            by_fd[fd].sendall(answer)
