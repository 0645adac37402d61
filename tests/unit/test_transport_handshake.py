import asyncio
import contextlib
import errno
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.handshakes import shake as shake_one

from deadpool_plugin.errors import PeerRefused
from deadpool_plugin.transport import handshake
from deadpool_plugin.transport.framing import ConnectionClosed, recv_exact
from deadpool_plugin.transport.handshake import ANY_JOB, Credentials, Listener, shake_hands
from deadpool_plugin.transport.mesh import ControlMesh
from deadpool_plugin.transport.rendezvous import Hello, meet
from deadpool_plugin.transport.sockets import connected, listen_tcp
from deadpool_plugin.transport.tasks import Tasks

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))

from clusters.launched import free_port

OURS, OTHERS = Credentials(b"secret"), Credentials(b"other")


def hello(node: int) -> Hello:
    return Hello(node, f"host{node}", ("127.0.0.1", 1), (("127.0.0.1", 2),), 1, {}, "")


def tcp_pair() -> tuple[socket.socket, socket.socket]:
    with listen_tcp("127.0.0.1") as listener:
        dialler = socket.create_connection(listener.getsockname()[:2])
        return dialler, listener.accept()[0]


def socket_pairs(count: int) -> list[tuple[socket.socket, socket.socket]]:
    pairs = [tcp_pair() for _ in range(count)]
    for pair in pairs:
        for sock in pair:
            sock.setblocking(False)
    return pairs


def outcome(call: Callable[[], int]) -> int | Exception:
    try:
        return call()
    except Exception as error:
        return error


def shake(
    dialler_pass: Credentials, listener_pass: Credentials, purposes: tuple[str, str] = ("x", "x")
) -> list[int | Exception]:
    dialler, listener = tcp_pair()
    results: list[int | Exception] = [0, 0]

    def listen() -> None:
        results[1] = outcome(lambda: shake_one(listener, listener_pass, purposes[1], 7, dialling=False))

    thread = threading.Thread(target=listen)
    with dialler, listener:
        thread.start()
        results[0] = outcome(lambda: shake_one(dialler, dialler_pass, purposes[0], 3, dialling=True))
        thread.join(10)
    return results


def test_both_learn_the_others_identity() -> None:
    assert shake(OURS, OURS) == [7, 3]


@pytest.mark.parametrize("case", [(OURS, OTHERS, ("x", "x")), (OURS, OURS, ("control", "bulk"))])
def test_wrong_secret_or_purpose_is_refused_on_both_sides(
    case: tuple[Credentials, Credentials, tuple[str, str]],
) -> None:
    for error in shake(*case):
        assert isinstance(error, PeerRefused)
        assert "refused 127.0.0.1:" in str(error) and "secret_file" in str(error)
        assert error.address.startswith("127.0.0.1:")


def test_of_two_jobs_with_one_secret_both_sides_say_which_they_are() -> None:
    for error, theirs, ours in zip(shake(OURS.of("a"), OURS.of("b")), "ba", "ab", strict=True):
        assert isinstance(error, PeerRefused) and f"it is of job {theirs}, this is job {ours}" in str(error)
        assert error.address.startswith("127.0.0.1:")


def test_a_claimed_job_proves_nothing_without_the_secret() -> None:
    for error in shake(OURS.of("a"), OTHERS.of("a")):
        assert isinstance(error, PeerRefused) and "does not prove the job's secret" in str(error)


def test_the_job_is_part_of_what_is_proven() -> None:
    """Somebody between them changes what the dialler says it is of."""

    async def between(dialler: socket.socket, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        greeting = await recv_exact(dialler, 60)
        await loop.sock_sendall(listener, greeting.replace(b"a".ljust(16, b"\0"), b"b".ljust(16, b"\0")))
        await loop.sock_sendall(dialler, await recv_exact(listener, 60))
        await loop.sock_sendall(listener, await recv_exact(dialler, 32))

    async def scenario() -> None:
        near, far = socket_pairs(2)
        listening = shake_hands(far[0], OURS.of("b"), "x", 7, dialling=False)
        dialling = asyncio.create_task(shake_hands(near[0], OURS.of("a"), "x", 3, dialling=True))
        _, found = await asyncio.gather(between(near[1], far[1]), listening, return_exceptions=True)
        assert isinstance(found, PeerRefused) and "does not prove" in str(found)
        dialling.cancel()
        for sock in (*near, *far):
            sock.close()

    asyncio.run(scenario())


@pytest.mark.parametrize("job", ["", "a"])
def test_who_asks_what_job_it_has_found_is_told(job: str) -> None:
    assert shake(OURS.of(ANY_JOB), OURS.of(job)) == [7, 3]


def test_who_has_not_met_the_others_yet_is_to_be_tried_again() -> None:
    for error in (*shake(OURS.of("a"), OURS), *shake(OURS, OURS.of("a"))):
        assert isinstance(error, ConnectionClosed) and "try again" in str(error)


def test_another_protocol_is_refused_and_silence_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    dialler, listener = tcp_pair()
    with dialler, listener:
        dialler.sendall(b"GET / HTTP/1.1\r\nHost: somewhere.else.example\r\n\r\n")
        with pytest.raises(PeerRefused, match="does not speak this protocol"):
            shake_one(listener, OURS, "x", 7, dialling=False)
    monkeypatch.setattr(handshake, "HANDSHAKE_TIMEOUT_S", 0.05)
    dialler, listener = tcp_pair()
    with dialler, listener, pytest.raises(ConnectionClosed, match="ended early: time-out"):
        shake_one(listener, OURS, "x", 7, dialling=False)


def test_a_reflected_proof_is_refused() -> None:
    async def reflect(sock: socket.socket) -> None:
        for size in (60, 32):
            await asyncio.get_running_loop().sock_sendall(sock, await recv_exact(sock, size))

    async def scenario() -> None:
        ((ours, theirs),) = socket_pairs(1)
        with ours, theirs, pytest.raises(PeerRefused, match="does not prove"):
            await asyncio.gather(shake_hands(ours, OURS, "x", 1, dialling=True), reflect(theirs))

    asyncio.run(scenario())


def test_a_byte_now_and_then_is_no_handshake(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its time is up, although the other end is never silent for long."""
    monkeypatch.setattr(handshake, "HANDSHAKE_TIMEOUT_S", 0.5)
    dialler, listener = tcp_pair()
    ended = threading.Event()

    def trickle() -> None:
        for byte in b"deadpl-4" + bytes(1000):
            dialler.send(bytes([byte]))
            if ended.wait(0.05):
                break

    thread = threading.Thread(target=trickle)
    with dialler, listener:
        thread.start()
        with pytest.raises(ConnectionClosed, match="ended early"):
            shake_one(listener, OURS, "x", 1, dialling=False)
        ended.set()
        thread.join(10)


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> int:
    """Set how many connections may be unproven."""
    monkeypatch.setattr(handshake, "UNPROVEN_MIN", 4)
    monkeypatch.setattr(handshake, "UNPROVEN_MAX", 4)
    return 4


async def ended(sock: socket.socket) -> None:
    """Returns when the other end has ended the connection."""
    with contextlib.suppress(ConnectionResetError):
        while await asyncio.get_running_loop().sock_recv(sock, 4096):
            pass


@pytest.mark.parametrize("where", ["control", "rendezvous"])
def test_the_oldest_connections_without_a_proof_go_first(few: int, where: str) -> None:
    """And a node of the job links up although strangers hold all the others."""

    async def scenario() -> None:
        listener: Any = ControlMesh(0, OURS, "127.0.0.1", None, lambda *_: None, lambda *_: None)
        meeting: asyncio.Task[Any] | None = None
        if where == "control":
            address = await listener.listen()
        else:
            address = ("127.0.0.1", free_port())
            meeting = asyncio.create_task(meet(2, address, hello(0), OURS, 60))
            await asyncio.sleep(0)
        strangers = [await connected(address) for _ in range(5 * few)]
        await asyncio.wait_for(asyncio.gather(*map(ended, strangers[:-few])), 30)
        if meeting is None:
            assert len(listener._listener._unproven) <= few
            async with asyncio.timeout(30):
                sock = await connected(address)
                assert await shake_hands(sock, OURS, "control", 1, dialling=True) == 0
            sock.close()
        else:
            assert await asyncio.wait_for(meet(2, address, hello(1), OURS, 30), 30) == await meeting
        for stranger in strangers:
            stranger.close()
        await listener.close()

    asyncio.run(scenario())


@pytest.fixture
def listener(few: int) -> Iterator[Listener]:
    async def handle(sock: socket.socket, peer: int) -> None:
        sock.close()

    made = Listener(listen_tcp("127.0.0.1"), "bulk", OURS, 0, handle, lambda error: None)
    yield made
    made.close()


def test_who_has_proved_itself_is_not_ended_for_a_stranger(few: int, listener: Listener) -> None:
    pairs = [socket.socketpair() for _ in range(few + 2)]
    with listener.unproven(pairs[0][0]):
        pass
    with contextlib.ExitStack() as held:
        for ours, _ in pairs[1:]:
            held.enter_context(listener.unproven(ours))
        assert pairs[1][1].recv(1) == b""
        pairs[0][0].send(b"x")
        assert pairs[0][1].recv(1) == b"x"
        assert len(listener._unproven) == few
    assert not listener._unproven
    for pair in pairs:
        for sock in pair:
            sock.close()


def test_a_listener_without_descriptors_says_so_once(
    listener: Listener, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, theirs = socket.socketpair()
    monkeypatch.setattr(handshake, "_RETRY_S", 0.0)

    async def scenario() -> None:
        failed: asyncio.Queue[None] = asyncio.Queue()

        async def fails(sock: socket.socket) -> None:
            failed.put_nowait(None)
            raise OSError(errno.EMFILE, "too many open files")

        asyncio.get_running_loop().sock_accept = fails  # type: ignore[method-assign, assignment]
        tasks = Tasks()
        tasks.start(listener.serve(tasks))
        for _ in range(1000):
            await failed.get()
        await tasks.end()

    with listener.unproven(ours):
        asyncio.run(scenario())
        assert len(caplog.records) == 1 and theirs.recv(1) == b"", "the oldest one gives its descriptor back"
    for sock in (ours, theirs):
        sock.close()
