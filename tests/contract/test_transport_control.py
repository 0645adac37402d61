"""Properties of the control mesh that the agent relies on."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import pytest
from support import expect

from deadpool_plugin.core.api import LinkLost
from deadpool_plugin.core.messages import AnyMessage, Goodbye, Status
from deadpool_plugin.errors import PeerRefused, TransportError
from deadpool_plugin.transport import handshake
from deadpool_plugin.transport.handshake import Credentials, shake_hands
from deadpool_plugin.transport.join_protocol import PURPOSE
from deadpool_plugin.transport.mesh import ControlMesh
from deadpool_plugin.transport.sockets import Address, connected, tune

WAIT_S = 20.0

T = TypeVar("T")


class Node:
    def __init__(self, node: int, secret: bytes = b"secret", job: str = "", **options: Any) -> None:
        self.messages: asyncio.Queue[tuple[int, AnyMessage]] = asyncio.Queue()
        self.lost: asyncio.Queue[LinkLost] = asyncio.Queue()
        self.credentials = Credentials(secret, job)
        self.transport = ControlMesh(
            node,
            self.credentials,
            "127.0.0.1",
            None,
            lambda peer, message: self.messages.put_nowait((peer, message)),
            self.lost.put_nowait,
            **options,
        )


def status(step: int) -> Status:
    return Status(0, step, True)


@asynccontextmanager
async def mesh(size: int, lowest: int | None = None) -> AsyncIterator[list[Node]]:
    """Nodes that are linked: all with each other, or all with the `lowest`."""
    nodes = [Node(index) for index in range(size)]
    table = {index: await node.transport.listen() for index, node in enumerate(nodes)}
    wanted = [None if lowest is None or index < lowest else range(lowest) for index in range(size)]
    await asyncio.gather(*(node.transport.connect(table, WAIT_S, w) for node, w in zip(nodes, wanted, strict=True)))
    try:
        yield nodes
    finally:
        await asyncio.gather(*(node.transport.close() for node in nodes))


async def soon(queue: asyncio.Queue[T]) -> T:
    return await asyncio.wait_for(queue.get(), WAIT_S)


def test_everyone_hears_everyone_in_order() -> None:
    async def scenario() -> None:
        async with mesh(3) as nodes:
            for sender in range(3):
                for receiver in {0, 1, 2} - {sender}:
                    for step in range(50):
                        nodes[sender].transport.send(receiver, status(100 * sender + step))
            for receiver in range(3):
                heard = [await soon(nodes[receiver].messages) for _ in range(100)]
                for sender in {0, 1, 2} - {receiver}:
                    steps = [expect(Status, message).committed for peer, message in heard if peer == sender]
                    assert steps == [100 * sender + step for step in range(50)]

    asyncio.run(scenario())


def test_a_node_begins_few_links_at_a_time_and_has_them_all_in_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    at_once: list[int] = []
    begun, dial = 0, handshake.dialled

    async def counted(address: Address, credentials: Credentials, purpose: str, node: int, *others: Any) -> Any:
        nonlocal begun
        if node != 9:
            return await dial(address, credentials, purpose, node, *others)
        begun += 1
        at_once.append(begun)
        found = await dial(address, credentials, purpose, node, *others)
        begun -= 1
        return found

    monkeypatch.setattr("deadpool_plugin.transport.mesh.DIALS_MAX", 2)
    monkeypatch.setattr("deadpool_plugin.transport.mesh.dialled", counted)

    async def scenario() -> None:
        async with mesh(10) as nodes:
            assert all(len(node.transport.linked) == 9 for node in nodes)

    asyncio.run(scenario())
    assert max(at_once) == 2 and len(at_once) == 9


def test_a_node_asks_few_at_a_time_for_a_first_link(monkeypatch: pytest.MonkeyPatch) -> None:
    at_once: list[int] = []
    begun, dial = 0, ControlMesh.dial

    async def counted(self: ControlMesh, node: int) -> None:
        nonlocal begun
        if node < self._node:
            return await dial(self, node)
        begun += 1
        at_once.append(begun)
        try:
            await dial(self, node)
        finally:
            begun -= 1

    monkeypatch.setattr("deadpool_plugin.transport.mesh.DIALS_MAX", 2)
    monkeypatch.setattr(ControlMesh, "dial", counted)

    async def scenario() -> None:
        async with mesh(10, lowest=1) as nodes:
            for node in range(2, 10):
                nodes[1].transport.send(node, status(node))
            for node in range(2, 10):
                assert await soon(nodes[node].messages) == (1, status(node))

    asyncio.run(scenario())
    assert max(at_once) == 2 and len(at_once) >= 8


@pytest.mark.parametrize("senders", [(1,), (2,), (1, 2)], ids=["the smaller", "the larger", "both"])
def test_a_link_is_made_for_the_first_message(senders: tuple[int, ...]) -> None:
    async def scenario() -> None:
        async with mesh(4, lowest=1) as nodes:
            for node in nodes[1:]:
                assert node.transport.linked == {0}
            for sender in senders:
                for step in range(50):
                    nodes[sender].transport.send(3 - sender, status(step))
            for sender in senders:
                heard = [await soon(nodes[3 - sender].messages) for _ in range(50)]
                assert heard == [(sender, status(step)) for step in range(50)]
            assert nodes[1].transport.linked == {0, 2} and nodes[2].transport.linked == {0, 1}
            assert nodes[3].transport.linked == {0} and all(node.lost.empty() for node in nodes)

    asyncio.run(scenario())


def test_a_link_is_kept_where_one_is_wanted_and_none_is_made_for_last_words() -> None:
    async def scenario() -> None:
        async with mesh(4, lowest=1) as nodes:
            nodes[2].transport.send(1, status(1), makes_link=False)
            nodes[3].transport.keep([1])
            nodes[3].transport.send(1, status(3), makes_link=False)
            assert await soon(nodes[1].messages) == (3, status(3))
            assert nodes[1].transport.linked == {0, 3} and nodes[2].transport.linked == {0}

    asyncio.run(scenario())


def test_the_end_of_a_node_without_a_link_is_found_by_who_needs_it() -> None:
    async def scenario() -> None:
        async with mesh(4, lowest=1) as nodes:
            await nodes[1].transport.close()
            lost = await soon(nodes[0].lost)
            assert lost.node == 1 and lost.reason.startswith("link lost: ")
            await nodes[2].transport.look_around([0, 1, 3])
            lost = await soon(nodes[2].lost)
            assert lost.node == 1 and not lost.silent
            assert lost.reason == "it was asked for a connection: nobody listens there any more"
            nodes[3].transport.send(1, status(1))
            lost = await soon(nodes[3].lost)
            assert lost.node == 1 and not lost.silent and lost.reason == "no link to it: nobody listens there"
            assert nodes[2].transport.linked == nodes[3].transport.linked == {0}
            assert all(node.lost.empty() for node in nodes)

    asyncio.run(scenario())


def test_a_lost_link_is_told_once_and_ends_nothing_else() -> None:
    async def scenario() -> None:
        async with mesh(3) as nodes:
            await nodes[2].transport.close()
            for node in nodes[:2]:
                assert (await soon(node.lost)).node == 2
                node.transport.send(2, status(1))
            nodes[0].transport.send(1, status(5))
            assert await soon(nodes[1].messages) == (0, status(5))
            assert all(node.lost.empty() for node in nodes)

    asyncio.run(scenario())


def test_after_a_goodbye_nothing_is_lost() -> None:
    async def scenario() -> None:
        async with mesh(2) as nodes:
            await nodes[1].transport.close(Goodbye(4))
            assert await soon(nodes[0].messages) == (1, Goodbye(4))
            assert nodes[0].lost.empty()

    asyncio.run(scenario())


def test_last_words_reach_a_peer_that_writes_all_the_time() -> None:
    async def scenario() -> None:
        async with mesh(2) as nodes:
            leaving = asyncio.create_task(nodes[1].transport.close(Goodbye(4)))
            while nodes[0].messages.empty() and nodes[0].lost.empty():
                nodes[0].transport.send(1, status(1))
                await asyncio.sleep(0)
            assert await soon(nodes[0].messages) == (1, Goodbye(4))
            assert nodes[0].lost.empty()
            await leaving

    asyncio.run(scenario())


def test_a_dropped_node_is_told_by_its_link_and_we_are_not() -> None:
    async def scenario() -> None:
        async with mesh(3) as nodes:
            nodes[0].transport.drop(2)
            assert (await soon(nodes[2].lost)).node == 0
            nodes[1].transport.send(0, status(1))
            await soon(nodes[0].messages)
            assert nodes[0].lost.empty()

    asyncio.run(scenario())


def test_a_missing_node_is_named() -> None:
    async def scenario() -> None:
        node = Node(0)
        table = {0: await node.transport.listen(), 1: ("127.0.0.1", 1)}
        with pytest.raises(TransportError, match="no control link to node 1 at"):
            await node.transport.connect(table, 0.05)
        await node.transport.close()

    asyncio.run(scenario())


@pytest.mark.parametrize("dead", [0, 2])
def test_a_node_that_dies_while_the_others_link_up_is_lost_and_they_do_not_wait_for_it(dead: int) -> None:
    """Both sides: the one that dials it, and the one that it was to dial."""

    async def scenario() -> None:
        nodes = [Node(index) for index in range(3)]
        table = {index: await node.transport.listen() for index, node in enumerate(nodes)}
        await nodes.pop(dead).transport.close()
        await asyncio.gather(*(node.transport.connect(table, WAIT_S) for node in nodes))
        for node in nodes:
            lost = await soon(node.lost)
            assert lost.node == dead and "nobody listens there any more" in lost.reason and not lost.silent
        await asyncio.gather(*(node.transport.close() for node in nodes))

    asyncio.run(scenario())


def test_where_most_cannot_be_reached_the_network_is_wrong_and_nobody_is_lost() -> None:
    async def scenario() -> None:
        node = Node(0)
        table = {0: await node.transport.listen(), 1: ("127.0.0.1", 1), 2: ("127.0.0.1", 1)}
        with pytest.raises(TransportError, match="no control link to node 1 at.*, 2 at.*firewall"):
            await node.transport.connect(table, 2.5)
        assert node.lost.empty()
        await node.transport.close()

    asyncio.run(scenario())


def test_a_wrong_secret_is_refused_on_both_sides_once() -> None:
    async def scenario() -> None:
        refused: asyncio.Queue[PeerRefused] = asyncio.Queue()
        node = Node(0, on_refused=refused.put_nowait)
        table = {0: await node.transport.listen()}
        for _ in range(2):
            stranger = Node(1, secret=b"other")
            with pytest.raises(PeerRefused, match="does not prove the job's secret"):
                await stranger.transport.connect(table, WAIT_S)
            await stranger.transport.close()
        assert "127.0.0.1" in str(await asyncio.wait_for(refused.get(), WAIT_S))
        await node.transport.close()
        assert refused.empty()

    asyncio.run(scenario())


def test_a_node_of_another_job_is_refused_on_both_sides_once() -> None:
    """A port that another job of the same user has now, whose secret is the same."""

    async def scenario() -> None:
        refused: asyncio.Queue[PeerRefused] = asyncio.Queue()
        node = Node(0, job="this", on_refused=refused.put_nowait)
        table = {0: await node.transport.listen()}
        for _ in range(2):
            stranger = Node(1, job="another")
            with pytest.raises(PeerRefused, match="it is of job this, this is job another"):
                await stranger.transport.connect(table, WAIT_S)
            await stranger.transport.close()
        assert "it is of job another, this is job this" in str(await asyncio.wait_for(refused.get(), WAIT_S))
        assert not node.transport.linked
        await node.transport.close()
        assert refused.empty()

    asyncio.run(scenario())


def test_who_has_met_the_others_first_tries_again_until_all_have() -> None:
    async def scenario() -> None:
        refused: asyncio.Queue[PeerRefused] = asyncio.Queue()
        late = Node(0, on_refused=refused.put_nowait)
        early = Node(1, job="this")
        table = {0: await late.transport.listen(), 1: await early.transport.listen()}
        linking = asyncio.create_task(early.transport.connect(table, WAIT_S))
        hung_up = asyncio.Event()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("deadpool_plugin.transport.first_links._log.info", lambda *_: hung_up.set())
            await asyncio.wait_for(hung_up.wait(), WAIT_S)
        assert not late.transport.linked and not linking.done()
        late.credentials.job = "this"
        await asyncio.gather(linking, late.transport.connect(table, WAIT_S))
        assert late.transport.linked == {1} and refused.empty()
        await asyncio.gather(early.transport.close(), late.transport.close())

    asyncio.run(scenario())


def test_a_link_that_its_dialler_gives_up_while_others_are_awaited_is_no_lost_node() -> None:
    async def scenario() -> None:
        nodes = [Node(index) for index in range(3)]
        table = {index: await node.transport.listen() for index, node in enumerate(nodes)}
        first = nodes[0]
        linking = asyncio.create_task(first.transport.connect(table, WAIT_S))
        with await connected(table[0]) as sock:
            await shake_hands(sock, Credentials(b"secret"), PURPOSE, 1, dialling=True)
            while not first.transport.linked:
                await asyncio.sleep(0)
        while first.transport.linked:
            await asyncio.sleep(0)
        await asyncio.gather(linking, *(node.transport.connect(table, WAIT_S) for node in nodes[1:]))
        assert first.transport.linked == {1, 2} and first.lost.empty()
        await nodes[1].transport.close()
        assert (await soon(first.lost)).node == 1
        await asyncio.gather(*(node.transport.close() for node in nodes))

    asyncio.run(scenario())


def test_a_handshake_that_its_dialler_gave_up_makes_no_link() -> None:
    async def scenario() -> None:
        first, second = Node(0), Node(1)
        table = {0: await first.transport.listen(), 1: await second.transport.listen()}
        linking = asyncio.create_task(first.transport.connect(table, WAIT_S))
        sock = await connected(table[0])
        await shake_hands(sock, Credentials(b"secret"), PURPOSE, 1, dialling=True)
        sock.close()
        await asyncio.gather(linking, second.transport.connect(table, WAIT_S))
        assert first.transport.linked == {1} and first.lost.empty()
        await asyncio.gather(first.transport.close(), second.transport.close())

    asyncio.run(scenario())


def test_a_peer_that_sends_rubbish_is_lost_with_the_reason() -> None:
    async def scenario() -> None:
        async with mesh(2) as nodes:
            nodes[0].transport.send(1, ["no", "message"])  # type: ignore[arg-type]
            lost = await soon(nodes[1].lost)
            assert lost.node == 0 and "cannot be read" in lost.reason

    asyncio.run(scenario())


def test_whoever_leaves_while_others_still_link_up_keeps_nobody_waiting() -> None:
    """Its last words (that the job is over, and why) are heard all the same."""

    async def scenario() -> None:
        nodes = [Node(index) for index in range(3)]
        table = {index: await node.transport.listen() for index, node in enumerate(nodes)}
        links_up = asyncio.create_task(nodes[1].transport.connect(table, WAIT_S))
        await nodes[0].transport.connect({0: table[0], 1: table[1]}, WAIT_S)
        nodes[0].transport.send(1, status(7))
        await nodes[0].transport.close(Goodbye(0))
        assert [message for _, message in [await soon(nodes[1].messages) for _ in range(2)]] == [status(7), Goodbye(0)]
        await nodes[2].transport.connect({1: table[1], 2: table[2]}, WAIT_S)
        await links_up
        assert nodes[1].transport.linked == {2} and nodes[1].lost.empty()
        for node in nodes[1:]:
            await node.transport.close()

    asyncio.run(scenario())


@pytest.mark.parametrize("silent_after_s", [0.1, 1.5, 3.0, 10.0, 60.0])
def test_an_idle_link_does_not_end_with_one_lost_probe(silent_after_s: float) -> None:
    """The kernel's rule (tcp_keepalive_timer): after the first probe it looks once an interval, and ends a connection
    whose other end has not been heard of for the user time-out."""
    with socket.socket() as sock:
        tune(sock, silent_after_s)
        options = (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_USER_TIMEOUT)
        idle_s, every_s, timeout_ms = (sock.getsockopt(socket.IPPROTO_TCP, option) for option in options)
    ends_s = next(after for after in range(idle_s + every_s, 10_000, every_s) if after * 1000 >= timeout_ms)
    assert (ends_s - idle_s) / every_s >= 3
    assert silent_after_s <= ends_s <= max(4, 1.3 * silent_after_s)
