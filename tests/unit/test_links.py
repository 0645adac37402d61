"""agent/links.py, host/machine.py, transport/tasks.py: how long hosts wait for each other, and what they are called."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading

import pytest
from support.hosts import local_node
from support.stand_in import stand_in

from deadpool_plugin.agent import links as links_module
from deadpool_plugin.agent.links import Links
from deadpool_plugin.config import Config
from deadpool_plugin.errors import ConfigError, TransportError
from deadpool_plugin.host import machine
from deadpool_plugin.host.machine import Machine, reachable
from deadpool_plugin.transport.handshake import Credentials
from deadpool_plugin.transport.rendezvous import Hello
from deadpool_plugin.transport.sockets import connected, listen_tcp
from deadpool_plugin.transport.tasks import begin, call_at_multiple


class Met(Exception):
    pass


@pytest.mark.parametrize(("patience_s", "waits_s"), [(1.0, 300.0), (20.0, 600.0)])
def test_little_patience_with_a_lost_host_is_not_little_with_one_that_starts(monkeypatch, patience_s, waits_s):
    async def meet(*arguments):
        raise Met(arguments[-1])

    monkeypatch.setattr(links_module, "meet", meet)
    links = Links.__new__(Links)
    links._node = local_node(node=1, patience_s=patience_s)
    with pytest.raises(Met) as met:
        asyncio.run(links.meet(stand_in(Hello)))
    assert met.value.args == (waits_s,)


@pytest.mark.parametrize("now", [0.0, 0.01, 5 * 0.025, 9 * 0.025])  # of which a quotient is rounded down
def test_what_is_due_at_multiples_is_due_later_than_now(monkeypatch, now):
    loop = asyncio.new_event_loop()
    with contextlib.closing(loop), monkeypatch.context() as patch:
        patch.setattr(loop, "time", lambda: now)
        when = call_at_multiple(loop, 0.025, print).when()
    assert now < when <= now + 0.025 + 1e-9 and abs(when / 0.025 - round(when / 0.025)) < 1e-9


def looked_up(monkeypatch, fails, config=Config(), timeout_s=20.0):
    """Return a host's name while the first one's is unknown so many times, and the number of lookups."""
    asked, lookup = [], socket.getaddrinfo

    def resolve(host, *rest, **options):
        asked.append(host)
        if len(asked) <= fails:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return lookup("127.0.0.1", *rest, **options)

    with monkeypatch.context() as patch:
        patch.setattr(socket, "getaddrinfo", resolve)
        patch.setattr(machine, "_RESOLVE_RETRY_S", 0.0)
        return asyncio.run(reachable(config, ("pod-0.pods", 5), timeout_s)), asked


def test_a_first_host_whose_name_is_not_known_yet_is_asked_for_again(monkeypatch):
    where, asked = looked_up(monkeypatch, fails=2)
    assert where == ("", "pod-0.pods") and asked == ["pod-0.pods"] * 3


def test_a_name_that_nobody_knows_is_asked_for_no_longer_than_hosts_wait_for_each_other(monkeypatch):
    with pytest.raises(TransportError, match="no way to pod-0.pods: .*not known"):
        looked_up(monkeypatch, fails=2, timeout_s=0.0)


def test_an_address_this_host_does_not_have_is_said_at_once(monkeypatch):
    with pytest.raises(ConfigError, match="interface_address ib9 is no address of"):
        looked_up(monkeypatch, fails=2, config=Config(interface_address="ib9"))


def test_of_several_networks_the_first_is_for_all_but_snapshots():
    config = Config(interface_address="127.0.0.2,lo")
    where = asyncio.run(reachable(config, ("first", 29500), 0.0))
    assert where == ("127.0.0.2", "127.0.0.2", "127.0.0.1")


@pytest.mark.parametrize(
    ("found", "target", "where"),
    [
        ("10.0.0.3", "first", ("10.0.0.3", "10.0.0.3")),
        ("fd00::3", "first", ("fd00::3", "fd00::3")),
        ("127.0.1.1", "first", ("", "first")),
        ("::1", "first", ("", "first")),
        ("::1", "::1", ("::1", "::1")),
        ("127.0.0.1", "localhost", ("127.0.0.1", "127.0.0.1")),
    ],
)
def test_nobody_is_told_to_dial_an_address_that_means_himself(monkeypatch, found, target, where):
    monkeypatch.setattr(machine, "address_towards", lambda *target: found)
    assert asyncio.run(reachable(Config(), (target, 29500), 0.0)) == where


def test_another_network_of_the_frameworks_is_pointed_at():
    here = [("eth0", "192.168.3.4"), ("ib0", "10.1.7.9"), ("ib0", "fd00::9")]
    said = machine.other_network("192.168.3.4", {"NCCL_SOCKET_IFNAME": "=ib0"}, here)
    assert said.startswith("snapshots are mirrored over 192.168.3.4, NCCL_SOCKET_IFNAME names ib0 (10.1.7.9)")
    for environ in (
        {},
        {"GLOO_SOCKET_IFNAME": "eth0"},
        {"NCCL_SOCKET_IFNAME": "^docker"},
        {"NCCL_SOCKET_IFNAME": "ib"},
    ):
        assert machine.other_network("192.168.3.4", environ, here) == ""


def test_a_host_is_found_by_its_name_while_a_file_system_hangs(monkeypatch):
    """The lost host may have been the one that served the files."""
    for changes_this_process in ("reset_affinity", "come_first", "allow_many_files"):
        monkeypatch.setattr(machine, changes_this_process, lambda: None)
    let_go = threading.Event()

    async def scenario():
        here = ("127.0.0.1", "127.0.0.1")
        with socket.socket(socket.AF_UNIX) as local, listen_tcp("127.0.0.1") as there, contextlib.ExitStack() as ended:
            host = Machine(0, here, Config(), Credentials(b""), local, "nobody's tag.")
            ended.callback(host.processes.close)
            ended.callback(host.output.close)
            looks = [begin(host.at_files(let_go.wait)) for _ in range(100)]
            await asyncio.sleep(0)
            try:
                async with asyncio.timeout(5.0):
                    (await connected(("localhost", there.getsockname()[1]))).close()
            finally:
                let_go.set()
                await asyncio.gather(*looks)

    asyncio.run(scenario())
