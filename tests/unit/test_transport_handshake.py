import asyncio
import socket
import threading
from collections.abc import Callable

import pytest

from deadpool_plugin.errors import PeerRefused
from deadpool_plugin.transport.framing import ConnectionClosed
from deadpool_plugin.transport.handshake import ANY_JOB, Credentials, Handshake, shake_hands, shake_hands_async
from deadpool_plugin.transport.sockets import bound_address, listen_tcp

OURS, OTHERS = Credentials(b"secret"), Credentials(b"other")


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
    dialler_pass: Credentials, listener_pass: Credentials, purposes: tuple[str, str] = ("x", "x")
) -> list[int | Exception]:
    dialler, listener = tcp_pair()
    results: list[int | Exception] = [0, 0]

    def listen() -> None:
        results[1] = outcome(lambda: shake_hands(listener, listener_pass, purposes[1], 7, dialling=False))

    thread = threading.Thread(target=listen)
    with dialler, listener:
        thread.start()
        results[0] = outcome(lambda: shake_hands(dialler, dialler_pass, purposes[0], 3, dialling=True))
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
    mine, theirs = (Handshake(OURS.of("a"), "x", 1, dialling=dials, address="there") for dials in (True, False))
    mine.answer(theirs.greeting)
    theirs.answer(mine.greeting.replace(b"a".ljust(16, b"\0"), b"b".ljust(16, b"\0")))
    with pytest.raises(PeerRefused, match="does not prove"):
        mine.check(theirs._proof(b"listen"))


@pytest.mark.parametrize("job", ["", "a"])
def test_who_asks_what_job_it_has_found_is_told(job: str) -> None:
    assert shake(OURS.of(ANY_JOB), OURS.of(job)) == [7, 3]


def test_who_has_not_met_the_others_yet_is_to_be_tried_again() -> None:
    for error in (*shake(OURS.of("a"), OURS), *shake(OURS, OURS.of("a"))):
        assert isinstance(error, ConnectionClosed) and "try again" in str(error)


def test_async_and_blocking_sides_agree_and_refuse() -> None:
    async def listen(sock: socket.socket, credentials: Credentials) -> int:
        sock.setblocking(False)
        return await shake_hands_async(sock, credentials, "x", 7, dialling=False)

    async def both(credentials: Credentials) -> list[object]:
        dialler, listener = tcp_pair()
        with dialler, listener:
            blocking = asyncio.to_thread(shake_hands, dialler, OURS, "x", 3, dialling=True)
            return await asyncio.gather(blocking, listen(listener, credentials), return_exceptions=True)

    assert asyncio.run(both(OURS)) == [7, 3]
    assert all(isinstance(error, PeerRefused) for error in asyncio.run(both(OTHERS)))


def test_another_protocol_is_refused_and_silence_ends() -> None:
    dialler, listener = tcp_pair()
    with dialler, listener:
        dialler.sendall(b"GET / HTTP/1.1\r\nHost: somewhere.else.example\r\n\r\n")
        with pytest.raises(PeerRefused, match="does not speak this protocol"):
            shake_hands(listener, OURS, "x", 7, dialling=False)
    dialler, listener = tcp_pair()
    with dialler, listener, pytest.raises(ConnectionClosed, match="ended early"):
        shake_hands(listener, OURS, "x", 7, dialling=False, timeout_s=0.05)


def test_a_reflected_proof_is_refused() -> None:
    mine = Handshake(OURS, "x", 1, dialling=True, address="somewhere")
    proof = mine.answer(mine.greeting)
    with pytest.raises(PeerRefused):
        mine.check(proof)
