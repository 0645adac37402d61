"""Tests of where a store listens, and of what others are told of it."""

from __future__ import annotations

import socket
import threading
from typing import Any, cast

import pytest
import torch.distributed as dist

from deadpool_plugin.comm import gloo, groups


def test_a_store_is_where_the_agent_says_its_node_is_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.setenv("DEADPOOL_ADDRESS", "127.0.0.2")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    server, address = groups.host_store()
    assert address.startswith("127.0.0.2:")
    client = groups.connect_store(address)
    client.set("key", "value")
    assert server.get("key") == b"value"
    assert cast(Any, client).timeout.days == 30, "whoever was to set a key may have a long way to it"


def test_gloos_interface_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    monkeypatch.setenv("DEADPOOL_ADDRESS", "127.0.0.2")
    assert groups.host_store()[1].startswith("127.0.0.1:")


@pytest.mark.parametrize(
    ("address", "bound"),
    [
        ("node0", ""),
        ("node1", "10.0.0.2"),
        ("node2", ""),
        ("node3", "fd00::3"),
        ("localhost", "localhost"),
        ("127.0.0.1", "127.0.0.1"),
        ("fe80::1", "fe80::1"),
    ],
)
def test_a_name_that_means_loopback_on_its_own_host_is_listened_for_everywhere(
    monkeypatch: pytest.MonkeyPatch, address: str, bound: str
) -> None:
    known = {"node0": ["127.0.1.1"], "node1": ["fd00::2", "10.0.0.2"], "node2": ["::1"], "node3": ["fd00::3"]}

    def lookup(name: str, port: None, type: int) -> list[tuple[int, int, int, str, tuple[str, int]]]:
        found = known.get(name, [name])
        return [(socket.AF_INET6 if ":" in one else socket.AF_INET, type, 6, "", (one, 0)) for one in found]

    monkeypatch.setattr(socket, "getaddrinfo", lookup)
    assert groups._bound(address) == bound


def test_a_store_that_listens_everywhere_is_reached_in_whichever_family_its_name_has(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(groups, "_bound", lambda address: "")
    server, address = groups.host_store("localhost")
    for host in ("127.0.0.1", "::1") if socket.has_dualstack_ipv6() else ("127.0.0.1",):
        with socket.create_connection((host, int(address.rpartition(":")[2]))):
            pass
    groups.connect_store(address).set("key", "value")
    assert server.get("key") == b"value"


class Turnstile:
    """A lock that says when somebody comes to it."""

    def __init__(self) -> None:
        self.lock, self.came = threading.Lock(), threading.Event()

    def __enter__(self) -> None:
        self.came.set()
        self.lock.acquire()

    def __exit__(self, *error: object) -> None:
        self.lock.release()


def test_a_store_is_not_hosted_while_gloos_listeners_are_told_from_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "")
    monkeypatch.setenv("DEADPOOL_ADDRESS", "127.0.0.1")
    turnstile, hosted = Turnstile(), []
    create_device, create_server = dist.ProcessGroupGloo.create_default_device, socket.create_server

    def open_listener(*arguments: Any, **named: Any) -> socket.socket:
        listener = create_server(*arguments, **named)
        hosted.append(listener.getsockname())
        turnstile.came.set()
        return listener

    def create_while_a_store_is_hosted(**named: object) -> object:
        turnstile.came.clear()
        hosting.start()
        assert turnstile.came.wait(20) and not hosted
        return create_device(**named)

    for module in (groups, gloo):
        monkeypatch.setattr(module, "listening", turnstile)
    monkeypatch.setattr(socket, "create_server", open_listener)
    monkeypatch.setattr(dist.ProcessGroupGloo, "create_default_device", staticmethod(create_while_a_store_is_hosted))
    kept: list[object] = []
    hosting = threading.Thread(target=lambda: kept.append(groups.host_store()))
    devices, listeners, loops = gloo._create_devices()
    hosting.join(20)
    assert len(devices) == len(listeners) == len(kept) == 1 and loops and listeners[0] not in hosted
