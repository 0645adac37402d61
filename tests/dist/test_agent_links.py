"""Real agents whose connections with each other end while all of them live: nobody is lost, and nothing is."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import itertools
import os
import resource
import socket
from typing import Any

import hostile
import psutil
import pytest
from dist.stub_cluster import StubCluster

from deadpool_plugin import events
from deadpool_plugin.transport.linux import libc, pidfd_open

STEPS = 100
_PIDFD_GETFD = 438


def connections_between(one: int, other: int) -> list[Any]:
    """Process `one`'s ends of its TCP connections with process `other`."""
    theirs = {(seen.laddr, seen.raddr) for seen in _connections(other) if seen.raddr}
    return [seen for seen in _connections(one) if seen.raddr and (seen.raddr, seen.laddr) in theirs]


def _connections(pid: int) -> list[Any]:
    process: Any = psutil.Process(pid)
    listed = process.net_connections if hasattr(process, "net_connections") else process.connections  # before psutil 6
    found: list[Any] = listed("tcp4")
    return found


def end_connection(pid: int, seen: Any) -> None:
    """As if something between its ends had done it: each reads its end. Those for single questions come and go."""
    process = pidfd_open(pid)
    copy = libc.syscall(ctypes.c_long(_PIDFD_GETFD), process, seen.fd, 0)
    os.close(process)
    if copy < 0 and ctypes.get_errno() == errno.EBADF:
        return
    if copy < 0 and ctypes.get_errno() in (errno.EPERM, errno.ENOSYS):
        pytest.skip("this host lets nobody touch another process's descriptors")
    assert copy >= 0, os.strerror(ctypes.get_errno())
    try:
        sock = socket.socket(fileno=copy)
    except OSError:  # no socket has its number now
        os.close(copy)
        return
    with sock, contextlib.suppress(OSError):
        if sock.getpeername() == tuple(seen.raddr):
            sock.shutdown(socket.SHUT_RDWR)


def test_connections_that_end_cost_nobody_its_place(tmp_path) -> None:
    cluster = StubCluster(tmp_path, 4, 2, "--steps", str(STEPS), "--step-s", "0.05", patience_s=20.0)
    try:
        cluster.train()
        for step, (one, other) in enumerate(itertools.combinations(range(4), 2), 1):
            cluster.wait_step(10 * step)
            (agent,), (peer,) = cluster.pids(one, "agent"), cluster.pids(other, "agent")
            connections = connections_between(agent, peer)
            assert connections, f"agents {one} and {other} have no connection"
            for connection in connections:
                end_connection(agent, connection)
        cluster.finish()
        for node in range(4):
            assert cluster.wait_exit(node) == 0, cluster.all_output()
        assert cluster.finals() == cluster.expected_finals(STEPS)
        assert not cluster.events(events.SwapPlanned) and not cluster.events(events.NodeLost)
    finally:
        cluster.close()


def test_strangers_and_absurd_numbers_cost_the_job_nothing(tmp_path) -> None:
    """The short form of scripts/hostile.py: what agents hold is bounded, and every rank ends with the right bytes."""
    cluster = StubCluster(tmp_path, 2, 1, "--steps", str(STEPS), "--step-s", "0.02", patience_s=20.0, spares=0)
    try:
        cluster.train()
        cluster.wait_step(3)
        agents = [cluster.pids(node, "agent")[0] for node in range(2)]
        for pid in agents:
            resource.prlimit(pid, resource.RLIMIT_NOFILE, (hostile.FILES, hostile.FILES))
        attack = hostile.Attack(hostile.targets_of(agents), b"a secret of the test cluster", seed=3)
        most = dict.fromkeys(hostile.BOUNDS, 0.0)
        for _ in range(24):
            attack.run(50)
            for pid in agents:
                most = {name: max(most[name], now) for name, now in hostile.held_by(pid).items()}
        attack.close()
        assert set(attack.made) == {kind for _, kind, _ in attack._kinds}
        assert all(most[name] <= hostile.BOUNDS[name] for name in ("threads", "descriptors")), most
        cluster.finish()
        for node in range(2):
            assert cluster.wait_exit(node) == 0, cluster.all_output()
        assert cluster.finals() == cluster.expected_finals(STEPS)
        assert not cluster.events(events.SwapPlanned) and not cluster.events(events.NodeLost)
        assert "Traceback" not in cluster.all_output()
    finally:
        cluster.close()
