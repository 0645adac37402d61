import asyncio
import socket
import threading
from collections.abc import Callable

import pytest

from deadpool_plugin.errors import PeerRefused
from deadpool_plugin.transport.framing import ConnectionClosed
from deadpool_plugin.transport.handshake import Handshake, shake_hands, shake_hands_async
from deadpool_plugin.transport.sockets import bound_address, listen_tcp


def tcp_pair() -> tuple[socket.socket, socket.socket]:
    with listen_tcp("127.0.0.1") as listener:
        dialler = socket.create_connection(bound_address(listener))
        return dialler, listener.accept()[0]


def outcome(call: Callable[[], int]) -> int | Exception:
    try:
        return call()
    except Exception as error:
        return error


def shake(
    dialler_secret: bytes, listener_secret: bytes, purposes: tuple[str, str] = ("x", "x")
) -> list[int | Exception]:
    dialler, listener = tcp_pair()
    results: list[int | Exception] = [0, 0]

    def listen() -> None:
        results[1] = outcome(lambda: shake_hands(listener, listener_secret, purposes[1], 7, dialling=False))

    thread = threading.Thread(target=listen)
    with dialler, listener:
        thread.start()
        results[0] = outcome(lambda: shake_hands(dialler, dialler_secret, purposes[0], 3, dialling=True))
        thread.join(10)
    return results


def test_both_learn_the_others_identity() -> None:
    assert shake(b"secret", b"secret") == [7, 3]


@pytest.mark.parametrize("case", [(b"secret", b"other", ("x", "x")), (b"secret", b"secret", ("control", "bulk"))])
def test_wrong_secret_or_purpose_is_refused_on_both_sides(case: tuple[bytes, bytes, tuple[str, str]]) -> None:
    for error in shake(*case):
        assert isinstance(error, PeerRefused)
        assert "refused 127.0.0.1:" in str(error) and "secret_file" in str(error)
        assert error.address.startswith("127.0.0.1:")


def test_async_and_blocking_sides_agree_and_refuse() -> None:
    async def listen(sock: socket.socket, secret: bytes) -> int:
        sock.setblocking(False)
        return await shake_hands_async(sock, secret, "x", 7, dialling=False)

    async def both(secret: bytes) -> list[object]:
        dialler, listener = tcp_pair()
        with dialler, listener:
            blocking = asyncio.to_thread(shake_hands, dialler, b"secret", "x", 3, dialling=True)
            return await asyncio.gather(blocking, listen(listener, secret), return_exceptions=True)

    assert asyncio.run(both(b"secret")) == [7, 3]
    assert all(isinstance(error, PeerRefused) for error in asyncio.run(both(b"other")))


def test_another_protocol_is_refused_and_silence_ends() -> None:
    dialler, listener = tcp_pair()
    with dialler, listener:
        dialler.sendall(b"GET / HTTP/1.1\r\nHost: somewhere.else.example\r\n\r\n")
        with pytest.raises(PeerRefused, match="does not speak this protocol"):
            shake_hands(listener, b"secret", "x", 7, dialling=False)
    dialler, listener = tcp_pair()
    with dialler, listener, pytest.raises(ConnectionClosed, match="ended early"):
        shake_hands(listener, b"secret", "x", 7, dialling=False, timeout_s=0.05)


def test_a_reflected_proof_is_refused() -> None:
    mine = Handshake(b"secret", "x", 1, dialling=True, address="somewhere")
    proof = mine.answer(mine.greeting)
    with pytest.raises(PeerRefused):
        mine.check(proof)
