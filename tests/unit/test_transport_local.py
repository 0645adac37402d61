import asyncio
import errno
import os
import socket
import threading
import typing
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from deadpool_plugin.core import local
from deadpool_plugin.core.local import (
    AnyLocalMessage,
    ArenaHandOver,
    Committed,
    History,
    LocalMessage,
    Staged,
    WorkerHello,
)
from deadpool_plugin.transport import unix
from deadpool_plugin.transport.framing import ConnectionClosed, pack_frame
from deadpool_plugin.transport.unix import LocalConnection, LocalPeer, LocalServer, listen_unix

WAIT_S = 20.0


class Agent:
    """A LocalServer whose callbacks fill queues."""

    def __init__(self) -> None:
        self.name = f"deadpool-test-{os.getpid()}-{id(self)}"
        self.messages: asyncio.Queue[tuple[LocalPeer, object, list[int]]] = asyncio.Queue()
        self.closed: asyncio.Queue[LocalPeer] = asyncio.Queue()
        self._listener = listen_unix(self.name)
        self._heard: set[LocalPeer] = set()
        self.server = LocalServer(self._listener, self._hear, self.closed.put_nowait)

    def _hear(self, peer: LocalPeer, message: object, fds: list[int]) -> None:
        self._heard.add(peer)
        self.messages.put_nowait((peer, message, fds))

    async def next(self) -> tuple[LocalPeer, object, list[int]]:
        return await asyncio.wait_for(self.messages.get(), WAIT_S)

    def close(self) -> None:
        asyncio.get_running_loop().remove_reader(self._listener)
        self._listener.close()
        for peer in (*self._heard, *self.server.unheard):
            peer.close()


@asynccontextmanager
async def greeted() -> AsyncIterator[tuple[Agent, LocalConnection, LocalPeer]]:
    """An agent, a worker that has said hello to it, and the agent's end of their connection."""
    agent = Agent()
    worker = await asyncio.to_thread(LocalConnection.to, agent.name)
    worker.send(WorkerHello(0, 1, 3, False))
    peer, _, _ = await agent.next()
    yield agent, worker, peer
    worker.close()
    agent.close()


def test_every_message_can_be_read_at_the_other_end() -> None:
    assert set(LocalMessage.__subclasses__()) == set(typing.get_args(AnyLocalMessage))


def test_messages_and_descriptors_both_ways() -> None:
    async def scenario() -> None:
        agent = Agent()
        worker = await asyncio.to_thread(LocalConnection.to, agent.name)
        worker.send(WorkerHello(0, 42, 3, False))
        peer, message, _ = await agent.next()
        assert message == WorkerHello(0, 42, 3, False) and peer.pid == os.getpid()
        read_end, write_end = os.pipe()
        peer.send(Committed(3))
        peer.send(ArenaHandOver(0, 1, 2), [write_end])
        os.close(write_end)
        assert await asyncio.to_thread(worker.recv) == (Committed(3), [])
        handed, (fd,) = await asyncio.to_thread(worker.recv)
        assert handed == ArenaHandOver(0, 1, 2) and not os.get_inheritable(fd)
        os.write(fd, b"through")
        os.close(fd)
        assert os.read(read_end, 100) == b"through" and os.read(read_end, 1) == b""
        os.close(read_end)
        worker.close()
        assert await asyncio.wait_for(agent.closed.get(), WAIT_S) is peer
        agent.close()

    asyncio.run(scenario())


def test_large_messages_do_not_block_the_agent() -> None:
    async def scenario() -> None:
        async with greeted() as (agent, worker, peer):
            history = History([os.urandom(1 << 20)] * 20)
            peer.send(history)
            peer.send(Committed(1))
            assert (await asyncio.to_thread(worker.recv))[0] == history
            assert (await asyncio.to_thread(worker.recv))[0] == Committed(1)
            staged = Staged(0, 1, 0, [os.urandom(5 << 20)])
            await asyncio.to_thread(worker.send, staged)
            assert (await agent.next())[1] == staged

    asyncio.run(scenario())


def test_who_waits_for_a_reader_waits_until_it_has_read_or_has_gone() -> None:
    async def scenario() -> None:
        async with greeted() as (agent, worker, peer):
            await peer.drained()
            for reads in (True, False):
                peer.send(History([os.urandom(1 << 20)] * 20))
                waiting = asyncio.create_task(peer.drained())
                done, _ = await asyncio.wait([waiting], timeout=0)
                assert not done
                await asyncio.to_thread(worker.recv if reads else worker.close)
                await asyncio.wait_for(waiting, WAIT_S)
            assert peer.closed

    asyncio.run(scenario())


def test_what_has_arrived_can_be_handled_before_the_loop_comes_to_it() -> None:
    async def scenario() -> None:
        async with greeted() as (agent, worker, peer):
            peer.read_rest()
            assert agent.messages.empty() and not peer.closed
            large = Staged(0, 1, 0, [os.urandom(100_000)])
            worker.send(large)
            worker.send(Committed(1))
            worker.close()
            peer.read_rest()
            assert [agent.messages.get_nowait()[1] for _ in range(2)] == [large, Committed(1)]
            assert agent.closed.get_nowait() is peer
            peer.read_rest()

    asyncio.run(scenario())


def test_what_was_said_before_an_end_is_heard_although_it_could_not_be_answered() -> None:
    async def scenario() -> None:
        async with greeted() as (agent, worker, peer):
            worker.send(Committed(7))
            worker.close()
            for _ in range(2):
                peer.send(History([bytes(1 << 20)]))
            assert (await agent.next())[1] == Committed(7)
            assert await asyncio.wait_for(agent.closed.get(), WAIT_S) is peer and peer.closed
            await asyncio.wait_for(peer.drained(), WAIT_S)

    asyncio.run(scenario())


def test_senders_of_many_threads_do_not_mix() -> None:
    async def scenario() -> None:
        agent = Agent()
        worker = await asyncio.to_thread(LocalConnection.to, agent.name)

        def send(rank: int) -> None:
            for step in range(50):
                worker.send(Staged(rank, step, 0, [bytes(5000)]))

        threads = [threading.Thread(target=send, args=(rank,)) for rank in range(4)]
        for thread in threads:
            thread.start()
        steps: dict[int, list[int]] = {rank: [] for rank in range(4)}
        for _ in range(200):
            _, message, _ = await agent.next()
            assert isinstance(message, Staged)
            steps[message.rank].append(message.step)
        assert all(seen == list(range(50)) for seen in steps.values())
        for thread in threads:
            thread.join(WAIT_S)
        worker.close()
        agent.close()

    asyncio.run(scenario())


@pytest.mark.parametrize(
    "rubbish",
    [pack_frame(b"\xc1", 10), b"\xff" * 8, pack_frame(b"\x94\xadArenaHandOver\x00\x01\x02", 100)],
    ids=["not msgpack", "absurd length", "descriptor missing"],
)
def test_a_peer_that_breaks_the_protocol_is_cut_off(rubbish: bytes, caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        agent = Agent()
        sock = socket.socket(socket.AF_UNIX)
        sock.connect("\0" + agent.name)
        sock.sendall(rubbish)
        assert (await asyncio.wait_for(agent.closed.get(), WAIT_S)).closed
        assert len(caplog.records) == 1 and not agent.server.unheard
        sock.close()
        agent.close()

    asyncio.run(scenario())


def test_the_end_of_the_agent_is_told() -> None:
    near, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    worker = LocalConnection(near)
    far.close()
    with pytest.raises(ConnectionClosed):
        worker.recv()
    with pytest.raises(ConnectionClosed):
        worker.send(Committed(1))
    with pytest.raises(ConnectionClosed, match="nobody answers"):
        LocalConnection.to("deadpool-test-nobody")


def test_close_wakes_a_blocked_receiver() -> None:
    near, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    worker, ended = LocalConnection(near), threading.Event()

    def receive() -> None:
        with pytest.raises(ConnectionClosed):
            worker.recv()
        ended.set()

    threading.Thread(target=receive).start()
    worker.close()
    assert ended.wait(WAIT_S)
    far.close()


def test_a_refused_connection_is_a_line_once_and_then_a_count(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        agent = Agent()
        for index in range(1000):
            agent.server.refused(f"process {index % 3}", f"number {index}")
        counted = [f"{n} local connections were refused by now, the last: number {n - 1}" for n in (10, 100, 1000)]
        assert caplog.messages == ["number 0", "number 1", "number 2", *counted]
        for index in range(1000, 3000):
            agent.server.refused(f"process {index}", f"number {index}")
        assert len(caplog.messages) == 6 + unix.REFUSALS_SAID - 3, "processes are many, too"
        agent.close()

    asyncio.run(scenario())


def test_the_oldest_connections_that_say_nothing_go_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unix, "UNHEARD_MAX", 4)

    async def scenario() -> None:
        async with greeted() as (agent, worker, peer):
            silent = [await asyncio.to_thread(LocalConnection.to, agent.name) for _ in range(12)]
            for one in silent[:-4]:
                with pytest.raises(ConnectionClosed, match="closed it"):
                    await asyncio.to_thread(one.recv)
            assert len(agent.server.unheard) <= 4 and not peer.closed
            worker.send(WorkerHello(0, 1, 3, False))
            assert (await agent.next())[0] is peer
            for one in silent:
                one.close()

    asyncio.run(scenario())


def test_without_descriptors_an_agent_accepts_later(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As long as there is none it says so once, and does not run in circles."""
    monkeypatch.setattr(unix, "RETRY_S", 0.0)

    class Listener:
        def __init__(self, sock: socket.socket) -> None:
            self.fails, self._sock, self.fileno = 3, sock, sock.fileno

        def accept(self) -> tuple[socket.socket, object]:
            self.fails -= 1
            if self.fails >= 0:
                raise OSError(errno.EMFILE, "too many open files")
            return self._sock.accept()

    async def scenario() -> None:
        agent = Agent()
        agent.server._sock = typing.cast(socket.socket, Listener(agent.server._sock))
        worker = await asyncio.to_thread(LocalConnection.to, agent.name)
        worker.send(WorkerHello(0, 1, 3, False))
        await agent.next()
        assert [line for line in caplog.messages if "too many" in line] == caplog.messages[:1]
        worker.close()
        agent.close()

    asyncio.run(scenario())


def test_every_message_can_be_read() -> None:
    """One that is in no union is refused, and its connection with it: the process at its other end is lost."""
    every = {kind for kind in vars(local).values() if isinstance(kind, type) and issubclass(kind, local.LocalMessage)}
    assert every - {local.LocalMessage} == set(typing.get_args(local.AnyLocalMessage))
