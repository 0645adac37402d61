"""Where a store listens, and what others are told of it."""

from __future__ import annotations

import socket

import pytest

from deadpool_plugin.comm import store


def test_a_store_is_where_the_agent_says_its_node_is_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.setenv("DEADPOOL_ADDRESS", "127.0.0.2")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    server, address = store.host_store()
    assert address.startswith("127.0.0.2:")
    store.connect(address).set("key", "value")
    assert server.get("key") == b"value"


def test_gloos_interface_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    monkeypatch.setenv("DEADPOOL_ADDRESS", "127.0.0.2")
    assert store.host_store()[1].startswith("127.0.0.1:")


@pytest.mark.parametrize(
    ("address", "bound"),
    [("node0", ""), ("node1", "node1"), ("localhost", "localhost"), ("127.0.0.1", "127.0.0.1"), ("fe80::1", "fe80::1")],
)
def test_a_name_that_means_loopback_on_its_own_host_is_listened_for_everywhere(
    monkeypatch: pytest.MonkeyPatch, address: str, bound: str
) -> None:
    known = {"node0": "127.0.1.1", "node1": "10.0.0.2", "localhost": "127.0.0.1"}
    monkeypatch.setattr(socket, "gethostbyname", lambda name: known.get(name, name))
    assert store._bound(address) == bound
