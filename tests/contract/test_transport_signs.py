"""Signs of life of other hosts' kernels, over real sockets: with a link, without one, and where nobody accepts."""

import asyncio
import math
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from deadpool_plugin.core.api import LinkLost
from deadpool_plugin.core.messages import Status
from deadpool_plugin.transport.framing import FrameProtocol
from deadpool_plugin.transport.handshake import Credentials
from deadpool_plugin.transport.mesh import PROBES_MAX, ControlMesh
from deadpool_plugin.transport.sockets import listen_tcp, unheard_s

WAIT_S = 20.0
LATELY_S = 2 * WAIT_S
"""A sign within half of it is one of the link's."""


class Node:
    def __init__(self, node: int) -> None:
        self.answers: asyncio.Queue[tuple[int, float]] = asyncio.Queue()
        self.heard: asyncio.Queue[int] = asyncio.Queue()
        self.lost: list[LinkLost] = []
        self.mesh = ControlMesh(
            node, Credentials(b"secret", "job"), "127.0.0.1", None, lambda peer, _: self.heard.put_nowait(peer),
            self.lost.append, on_answered=lambda other, ago_s: self.answers.put_nowait((other, ago_s)),
        )  # fmt: skip

    async def answered(self) -> tuple[int, float]:
        async with asyncio.timeout(WAIT_S):
            return await self.answers.get()


@asynccontextmanager
async def two() -> AsyncIterator[tuple[Node, Node]]:
    nodes = Node(0), Node(1)
    table = {number: await node.mesh.listen() for number, node in enumerate(nodes)}
    await asyncio.gather(*(node.mesh.connect(table, WAIT_S) for node in nodes))
    try:
        yield nodes
    finally:
        await asyncio.gather(*(node.mesh.close() for node in nodes))


def test_a_link_over_which_something_was_acknowledged_lately_is_a_sign_by_itself():
    async def scenario():
        async with two() as (one, other):
            one.mesh.send(1, Status(0, 1, True))
            async with asyncio.timeout(WAIT_S):
                await other.heard.get()
            one.mesh.ask(1, LATELY_S)
            node, ago_s = one.answers.get_nowait()
            assert node == 1 and 0.0 <= ago_s < WAIT_S

    asyncio.run(scenario())


def test_without_a_link_a_connection_is_asked_for_that_nobody_needs_to_accept():
    async def scenario():
        async with two() as (one, _):
            with listen_tcp("127.0.0.1") as accepts:
                one.mesh._addresses[9] = accepts.getsockname()[:2]
                one.mesh.ask(9, WAIT_S)
                assert (await one.answered())[0] == 9

    asyncio.run(scenario())


def test_a_kernel_that_refuses_a_connection_lives():
    async def scenario():
        async with two() as (one, _):
            with listen_tcp("127.0.0.1") as gone:
                address = gone.getsockname()[:2]
            one.mesh._addresses[9] = address
            one.mesh.ask(9, WAIT_S)
            assert (await one.answered())[0] == 9

    asyncio.run(scenario())


def test_no_sign_is_told_of_who_does_not_answer_and_no_more_than_so_many_are_asked_at_a_time():
    async def scenario():
        async with two() as (one, _):
            full = socket.create_server(("127.0.0.1", 0), backlog=0)
            waiting = []
            with full:
                for _ in range(8):  # what its queue has no room for is not answered
                    sock = socket.socket()
                    sock.setblocking(False)
                    sock.connect_ex(full.getsockname())
                    waiting.append(sock)
                one.mesh._addresses[9] = full.getsockname()[:2]
                for _ in range(2 * PROBES_MAX):
                    one.mesh.ask(9, WAIT_S)
                assert len(one.mesh._tasks._tasks) <= PROBES_MAX + 8 and one.answers.empty()
                for sock in waiting:
                    sock.close()

    asyncio.run(scenario())


def test_the_kernel_says_when_the_other_end_was_last_heard():
    with listen_tcp("127.0.0.1") as listener, socket.create_connection(listener.getsockname()[:2]) as here:
        there, _ = listener.accept()
        with there:
            there.send(b"x")
            here.recv(1)
            data_s, anything_s = unheard_s(here)
            assert 0.0 <= anything_s <= data_s < WAIT_S


@pytest.mark.parametrize("quiet_s", [0.0, math.inf])
def test_a_link_over_which_nothing_comes_is_made_again_if_its_host_answers(monkeypatch, quiet_s):
    """Nothing that was sent is lost with it."""

    async def scenario():
        async with two() as (one, other):
            before = one.mesh._links()[1]
            monkeypatch.setattr(FrameProtocol, "unheard_s", (math.inf, quiet_s))
            async with asyncio.timeout(WAIT_S):
                while one.mesh._links().get(1, before) is before:
                    one.mesh.send(1, Status(0, 1, True))
                    one.mesh.ask(1, 0.2)
                    await asyncio.sleep(0.01)
                assert await other.heard.get() == 0
            assert not one.lost

    asyncio.run(scenario())
