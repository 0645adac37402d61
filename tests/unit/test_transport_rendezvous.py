import asyncio
import errno
import resource
import socket
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from deadpool_plugin.errors import ConfigError, PeerRefused, TransportError
from deadpool_plugin.transport import rendezvous
from deadpool_plugin.transport.framing import put, take
from deadpool_plugin.transport.handshake import Credentials, Listener
from deadpool_plugin.transport.rendezvous import Hello, meet
from deadpool_plugin.transport.sockets import (
    address_towards,
    allow_many_files,
    connected,
    listen_tcp,
    remote_name,
)
from deadpool_plugin.transport.tasks import Tasks

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))

from clusters.launched import free_port


def _has_both_families() -> bool:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return socket.has_dualstack_ipv6()


both_families = pytest.mark.skipif(not _has_both_families(), reason="this host has no IPv6")


def hello(node: int, host: str = "") -> Hello:
    return Hello(
        node, host or f"host{node}", ("127.0.0.1", 1000 + node), (("127.0.0.1", 2000 + node),), 2, {"torch": "2"}, "d"
    )


async def gather(
    port: int, total: int, *joins: tuple[int, bytes, float], hellos: dict[int, Hello] | None = None
) -> list[Any]:
    meets = [
        meet(total, ("127.0.0.1", port), hello(node), Credentials(secret), timeout_s)
        for node, secret, timeout_s in joins
    ]
    return await asyncio.wait_for(asyncio.gather(*meets, return_exceptions=True), 30)


def test_all_get_the_same_table_whoever_comes_first() -> None:
    port = free_port()
    tables = asyncio.run(gather(port, 3, (2, b"s", 10), (1, b"s", 10), (0, b"s", 10)))
    assert tables == [[hello(0), hello(1), hello(2)]] * 3


def test_missing_nodes_are_named_to_everyone() -> None:
    errors = asyncio.run(gather(free_port(), 4, (0, b"s", 2), (1, b"s", 20)))
    for error in errors:
        assert isinstance(error, TransportError) and "only 2 of 4 nodes met" in str(error)
        assert "missing: node 2, 3" in str(error)


def test_whoever_waits_for_long_says_so_once(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(rendezvous, "SAY_AFTER_S", 1.5)
    asyncio.run(gather(free_port(), 3, (0, b"s", 3), (1, b"s", 3)))
    assert [record.getMessage() for record in caplog.records if "waiting" in record.getMessage()] == [
        f"still waiting at 127.0.0.1:{port_of(caplog)} for node 2"
    ]
    caplog.clear()
    asyncio.run(gather(free_port(), 2, (1, b"s", 3)))
    (said,) = [record.getMessage() for record in caplog.records]
    assert "does not answer yet (" in said and said.endswith("an address of this host, too: give --master_addr")


def port_of(caplog: pytest.LogCaptureFixture) -> str:
    return caplog.records[0].getMessage().partition("127.0.0.1:")[2].partition(" ")[0]


def test_a_wrong_secret_is_told_on_both_sides() -> None:
    host, stranger = asyncio.run(gather(free_port(), 2, (0, b"s", 2), (1, b"other", 10)))
    assert isinstance(stranger, PeerRefused) and "does not prove the job's secret" in str(stranger)
    assert isinstance(host, TransportError) and "does not prove the job's secret" in str(host)


def test_a_host_that_is_not_there_is_named() -> None:
    (error,) = asyncio.run(gather(free_port(), 2, (1, b"s", 0.1)))
    assert isinstance(error, TransportError) and "node 0 at 127.0.0.1" in str(error)


@pytest.mark.parametrize("answer", [["_Table", []], [[0, "host0"]], 5])
def test_a_first_host_of_another_version_is_told_from_one_that_is_not_there(answer: object) -> None:
    async def tell(sock: socket.socket, peer: int) -> None:
        with sock:
            await take(sock, Hello)
            await put(sock, answer)

    async def scenario() -> None:
        there = listen_tcp("127.0.0.1")
        tasks, address = Tasks(), there.getsockname()[:2]
        tasks.start(Listener(there, rendezvous.PURPOSE, Credentials(b"s"), 0, tell, lambda error: None).serve(tasks))
        try:
            await meet(2, address, hello(1), Credentials(b"s"), 10)
        finally:
            await tasks.end()
            there.close()

    with pytest.raises(TransportError, match="cannot be read: .*use one version on all hosts"):
        asyncio.run(scenario())


def test_two_hosts_with_one_node_id_are_told() -> None:
    async def scenario() -> list[Any]:
        port = free_port()
        meets = [
            meet(3, ("127.0.0.1", port), hello(0), Credentials(b"s"), 2),
            meet(3, ("127.0.0.1", port), hello(1, "a"), Credentials(b"s"), 2),
            meet(3, ("127.0.0.1", port), hello(1, "b"), Credentials(b"s"), 2),
        ]
        return await asyncio.gather(*meets, return_exceptions=True)

    said = str(asyncio.run(scenario())[0])
    assert "node 1 is here already, from " in said
    assert "an earlier start still wait on " in said and "another --master_port" in said


def test_too_many_open_files_end_no_meeting() -> None:
    async def scenario() -> list[Any]:
        loop, port = asyncio.get_running_loop(), free_port()
        failed: list[OSError] = []
        accept = loop.sock_accept

        async def fails_once(sock: socket.socket) -> tuple[socket.socket, Any]:
            if not failed:
                failed.append(OSError(errno.EMFILE, "Too many open files"))
                raise failed[0]
            return await accept(sock)

        loop.sock_accept = fails_once
        tables = await gather(port, 2, (0, b"s", 10), (1, b"s", 10))
        assert failed
        return tables

    assert asyncio.run(scenario()) == [[hello(0), hello(1)]] * 2


def test_every_address_of_a_name_is_tried() -> None:
    async def scenario() -> None:
        with listen_tcp("127.0.0.1") as there:
            targets = [("127.0.0.1", free_port()), there.getsockname()[:2]]

            async def resolved(*name: object, **options: object) -> list[Any]:
                return [(socket.AF_INET, socket.SOCK_STREAM, 0, "", target) for target in targets]

            asyncio.get_running_loop().getaddrinfo = resolved
            with await connected(("name", 1)) as sock:
                assert sock.getpeername() == targets[1]
            targets.pop()
            with pytest.raises(ConnectionRefusedError):
                await connected(("name", 1))

    asyncio.run(scenario())


def test_as_many_files_may_be_open_as_the_host_allows() -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (64, before[1]))
        allow_many_files()
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (before[1], before[1])
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_the_address_towards_a_host() -> None:
    assert address_towards("127.0.0.1", 1) == "127.0.0.1"


# ---- both families


@both_families
def test_hosts_that_know_the_first_one_by_a_name_of_either_family_meet() -> None:
    async def scenario() -> list[Any]:
        port = free_port()
        dialled = enumerate(["first", "127.0.0.1", "::1"])
        meets = [meet(3, (host, port), hello(node), Credentials(b"s"), 10) for node, host in dialled]
        return await asyncio.wait_for(asyncio.gather(*meets), 30)

    assert asyncio.run(scenario()) == [[hello(0), hello(1), hello(2)]] * 3


@both_families
def test_who_listens_everywhere_is_reached_in_both_families_and_calls_a_host_by_one_name() -> None:
    with listen_tcp("") as listener:
        for host in ("127.0.0.1", "::1"):
            with socket.create_connection((host, listener.getsockname()[:2][1])) as dialler:
                accepted, _ = listener.accept()
                with accepted:
                    assert remote_name(accepted) == f"{host}:{dialler.getsockname()[1]}"


@both_families
def test_a_port_that_is_taken_in_one_family_is_taken() -> None:
    with socket.create_server(("0.0.0.0", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"all ports {port} to {port} of [*] are taken"):
            listen_tcp("", (port, port))


@pytest.mark.parametrize("refused", [False, True])
def test_a_host_without_ipv6_listens_all_the_same(monkeypatch: pytest.MonkeyPatch, refused: bool) -> None:
    create = socket.create_server

    def without(address: tuple[str, int], *, family: int = socket.AF_INET, **options: Any) -> socket.socket:
        if family == socket.AF_INET6:
            raise OSError(errno.EADDRNOTAVAIL, "Cannot assign requested address")
        return create(address, family=family, **options)

    monkeypatch.setattr(socket, "create_server", without)
    monkeypatch.setattr(socket, "has_dualstack_ipv6", lambda: refused)
    with listen_tcp("") as listener:
        assert listener.family == socket.AF_INET and listener.getsockname()[:2][0] == "0.0.0.0"


def of_launch(node: int, launch: str) -> Hello:
    return msgspec.structs.replace(hello(node), launch=launch)


def test_processes_of_an_earlier_launch_are_told_to_end(caplog: pytest.LogCaptureFixture) -> None:
    """Node 0 of the earlier one failed; its node 1 waits for it, and meets the next one's node 0."""

    async def scenario() -> tuple[object, object, object]:
        port, secret = free_port(), Credentials(b"s")
        first = asyncio.create_task(meet(2, ("127.0.0.1", port), of_launch(1, "1"), secret, 60))
        host = asyncio.create_task(meet(2, ("127.0.0.1", port), of_launch(0, "2"), secret, 60))
        ended = await asyncio.gather(first, return_exceptions=True)
        second = await meet(2, ("127.0.0.1", port), of_launch(1, "2"), secret, 60)
        return ended[0], second, await host

    ended, second, host = asyncio.run(asyncio.wait_for(scenario(), 60))
    assert isinstance(ended, TransportError) and "is of an earlier launch" in str(ended)
    assert host == second == [of_launch(0, "2"), of_launch(1, "2")]
    assert "processes of an earlier launch still wait at host1 (node 1)" in caplog.text


def test_an_earlier_launch_gives_its_port_to_a_later_one() -> None:
    """Both node 0s are on one host; the earlier one waits for a node that never comes."""

    async def scenario() -> tuple[list[Any], list[Any]]:
        port, secret = free_port(), Credentials(b"s")
        older = [asyncio.create_task(meet(3, ("127.0.0.1", port), of_launch(node, "1"), secret, 60)) for node in (0, 1)]
        while not listens(port):
            await asyncio.sleep(0)
        later = [asyncio.create_task(meet(2, ("127.0.0.1", port), of_launch(node, "2"), secret, 60)) for node in (0, 1)]
        return await asyncio.gather(*older, return_exceptions=True), await asyncio.gather(*later)

    older, later = asyncio.run(asyncio.wait_for(scenario(), 60))
    assert all(isinstance(error, TransportError) and "launch" in str(error) for error in older), older
    assert later == [[of_launch(0, "2"), of_launch(1, "2")]] * 2


def listens(port: int) -> bool:
    return f":{port:04X} " in "".join(Path(f"/proc/net/{name}").read_text() for name in ("tcp", "tcp6"))


def test_a_port_of_another_program_is_said() -> None:
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[:2][1]
        (error,) = asyncio.run(gather(port, 2, (0, b"s", 10)))
    assert isinstance(error, TransportError) and f"cannot listen at MASTER_PORT {port}" in str(error)
