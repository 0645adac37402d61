"""The bulk connection: messages, each after its checksum, and payloads, before theirs.

Rules of this file: blocking sockets with kernel time-outs (so that MSG_WAITALL receives straight into the arena). Both
ends know how long a payload is, and nothing stands between its bytes: its checksums follow in Sealed. After
CorruptFrame a connection is of no more use.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, zip_longest
from typing import Annotated, TypeVar

import msgspec
import xxhash

from ..core.types import Count, Generation, Rank, Step
from ..errors import CorruptFrame, TransportError
from ..transport.framing import ConnectionClosed, decoded
from ..transport.sockets import remote_name, tune
from .arena import Sums

FRAME_BYTES = 512 << 10  # a checksum finds it in the cache
MESSAGE_BYTES_MAX = 1 << 30
RECORDS_BYTES_MAX = MESSAGE_BYTES_MAX // 2
PURPOSE = "bulk"
_PREFIX = struct.Struct("!4sIQ")  # magic, length of the message, its xxh3
_MAGIC = b"DPms"
SLOWEST_BYTES_PER_S = 1 << 16  # a peer that sends or accepts less for longer than its patience holds a thread in vain
_SUSPECT = "they are not used; if it happens again, suspect the network card or memory of either host"
_NICE = 10
T = TypeVar("T")
Size = Annotated[int, msgspec.Meta(ge=0, le=MESSAGE_BYTES_MAX)]


class BulkMessage(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Base of all requests and replies."""


class Push(BulkMessage, frozen=True):
    """Followed, if the answer is Ready, by Records, the payload, and Sealed or Refusal."""

    rank: Rank
    step: Step
    generation: Generation
    replicas: tuple[Rank, ...]
    header_bytes: Size
    header: bytes  # encoded
    with_payload: bool
    before: Step = -1  # the snapshot that is needed until this one is committed


class PushRecording(BulkMessage, frozen=True):
    rank: Rank
    generation: Generation
    recording: bytes


class GetRecording(BulkMessage, frozen=True):
    rank: Rank  # the answer is one record


class GetHistory(BulkMessage, frozen=True):
    rank: Rank
    first: Step
    last: Step  # included in the answer


class GetHeader(BulkMessage, frozen=True):
    rank: Rank
    step: Step  # the answer is one record, the encoded header


class GetPayload(BulkMessage, frozen=True):
    """Answered by Ready, the payload, and Sealed or Refusal."""

    rank: Rank
    step: Step
    layout_hash: str
    payload_bytes: Count


class Ready(BulkMessage, frozen=True):
    history_last: Step = -1  # newest step before the pushed one whose records are held


class Wait(BulkMessage, frozen=True):
    """Not yet: room is being made here."""


class Done(BulkMessage, frozen=True):
    """The pushed snapshot or recording is held."""


class Refusal(BulkMessage, frozen=True):
    """The answer is no; or, after a payload: its source changed while it was sent, throw it away."""

    reason: str
    in_another_generation: bool = False  # the asked node is in another one than what was sent


class Sealed(BulkMessage, frozen=True):
    """The source did not change while it was sent."""

    sums: Sums = ()  # of the payload's frames, as they were sent


class Records(BulkMessage, frozen=True):
    """Call records, or what else is asked for."""

    records: list[bytes]
    more: bool  # others follow


AnyRequest = Push | PushRecording | GetRecording | GetHistory | GetHeader | GetPayload
AnyReply = Ready | Wait | Done | Refusal | Sealed | Records
# Made here: two threads that make the first decoders of a type at once get one that is not complete, and crash.
requests: msgspec.msgpack.Decoder[AnyRequest] = msgspec.msgpack.Decoder(AnyRequest)
replies: msgspec.msgpack.Decoder[AnyReply] = msgspec.msgpack.Decoder(AnyReply)


class RefusedByPeer(TransportError):
    """The other node answered, and said no."""


class InAnotherGeneration(RefusedByPeer):
    """The other node lives, and is fenced for the next generation, or not in this one yet."""


def lower_priority() -> None:
    """Put the calling thread behind training and heartbeats."""
    with contextlib.suppress(PermissionError):  # the whole job is nicer than that already
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)


class BulkStream:
    """A bulk connection, whose other end may be still for `silent_after_s` in an exchange. Thread: one; `cut`: any."""

    def __init__(self, sock: socket.socket, silent_after_s: float) -> None:
        self.address = remote_name(sock)
        self._sock, self._silent_after_s = sock, silent_after_s
        self.generation: Generation | None = None  # that of the push which is being received
        tune(sock, silent_after_s)
        sock.settimeout(None)
        limit = struct.pack("ll", int(silent_after_s), int(silent_after_s % 1 * 1e6))
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)

    def _limit_s(self, size: int) -> float:
        """Return how long `size` bytes may take: what counts is all of them, not each system call."""
        return self._silent_after_s + size / SLOWEST_BYTES_PER_S

    def _recv_exact(self, view: memoryview, *, idle: bool = False) -> None:
        start, deadline = 0, None if idle else time.monotonic() + self._limit_s(len(view))
        while start < len(view):
            if deadline is not None and time.monotonic() > deadline:
                raise TransportError(
                    f"{self.address} sent {start} of {len(view)} bytes in {self._limit_s(len(view)):g} s"
                )
            try:
                count = self._sock.recv_into(view[start:], 0, socket.MSG_WAITALL)
            except BlockingIOError as error:
                if idle and start == 0:
                    continue  # nobody owes us anything; a dead host ends by keepalive
                raise TransportError(f"{self.address} sent nothing for {self._silent_after_s:g} s") from error
            except OSError as error:
                raise ConnectionClosed(f"the bulk connection with {self.address} broke: {error}") from error
            if not count:
                raise ConnectionClosed(f"{self.address} closed the bulk connection")
            start += count
            deadline = deadline or time.monotonic() + self._limit_s(len(view))

    def _send_exact(self, view: memoryview, *, more: bool = False) -> None:
        """Send all of `view`. `more`: something follows at once, do not wake the other end for this."""
        start, flags = 0, socket.MSG_MORE if more else 0
        deadline = time.monotonic() + self._limit_s(len(view))
        try:
            while start < len(view):
                if time.monotonic() > deadline:
                    raise TransportError(f"{self.address} accepted {start} of {len(view)} bytes in time")
                start += self._sock.send(view[start:], flags)
        except BlockingIOError as error:
            raise TransportError(f"{self.address} accepted nothing for {self._silent_after_s:g} s") from error
        except OSError as error:
            raise ConnectionClosed(f"the bulk connection with {self.address} broke: {error}") from error

    def send(self, message: BulkMessage, *, more: bool = False) -> None:
        body = msgspec.msgpack.encode(message)
        prefix = _PREFIX.pack(_MAGIC, len(body), xxhash.xxh3_64_intdigest(body))
        self._send_exact(memoryview(prefix), more=True)
        self._send_exact(memoryview(body), more=more)

    def recv(self, decoder: msgspec.msgpack.Decoder[T], *, idle: bool = False) -> T:
        """Receive a message; `idle` waits for it as long as the connection lives."""
        prefix = bytearray(_PREFIX.size)
        self._recv_exact(memoryview(prefix), idle=idle)
        magic, length, digest = _PREFIX.unpack(prefix)
        if magic != _MAGIC:
            raise CorruptFrame(f"{magic!r} from {self.address}", f"{_MAGIC!r}")
        if length > MESSAGE_BYTES_MAX:
            raise CorruptFrame(f"a message of {length} bytes from {self.address}", f"at most {MESSAGE_BYTES_MAX}")
        body = bytearray(length)
        self._recv_exact(memoryview(body))
        if xxhash.xxh3_64_intdigest(body) != digest:
            raise CorruptFrame(f"{length} bytes from {self.address} fail their checksum", remedy=_SUSPECT)
        return decoded(decoder, body, f"{self.address}: ")

    def expect(self, *kinds: type[T]) -> T:
        """Receive a reply of one of these kinds; the other end may say Wait before. Raises: RefusedByPeer."""
        reply: object = Wait()
        while isinstance(reply, Wait):
            reply = self.recv(replies)
        if isinstance(reply, Refusal):
            kind = InAnotherGeneration if reply.in_another_generation else RefusedByPeer
            raise kind(f"{self.address} refused: {reply.reason}")
        if not isinstance(reply, kinds):
            raise CorruptFrame(f"{type(reply).__name__} from {self.address}", " or ".join(k.__name__ for k in kinds))
        return reply

    def send_records(self, records: Sequence[bytes]) -> None:
        """Send records in as many messages as they need."""
        while len(records) > (fitting := how_many_fit(records)):
            self.send(Records([*records[:fitting]], True), more=True)
            records = records[fitting:]
        self.send(Records([*records], False))

    def recv_records(self) -> list[bytes]:
        """Receive what the other end sends by `send_records`. Raises: as `expect`."""
        records: list[bytes] = []
        while (part := self.expect(Records)).more:
            records += part.records
        return [*records, *part.records]

    def recv_record(self) -> bytes:
        """Receive the only record that the other end sends. Raises: as `expect`; CorruptFrame if it is not one."""
        records = self.recv_records()
        if len(records) != 1:
            raise CorruptFrame(f"{len(records)} records from {self.address}", "one")
        return records[0]

    def send_payload(self, view: memoryview, check: Callable[[Sums], None]) -> None:
        """Send a payload, and Sealed; or a Refusal, if `check` of its checksums raises, as this does then."""
        sums = list[int]()
        for frame in frames(view):  # one end computes the checksum of a frame while the other has the next one
            sums.append(xxhash.xxh3_64_intdigest(frame))
            self._send_exact(frame, more=True)
        try:
            check(tuple(sums))
        except BaseException as error:
            self.send(Refusal(str(error)))
            raise
        self.send(Sealed(tuple(sums)))

    def recv_payload(self, view: memoryview, check: Callable[[], None]) -> Sums:
        """Fill `view` with what `send_payload` sends; `check` may raise before each frame. Returns: its checksums."""
        sums = list[int]()
        for frame in frames(view):
            check()
            self._recv_exact(frame)
            sums.append(xxhash.xxh3_64_intdigest(frame))
        sent = self.expect(Sealed).sums
        wrong = [frame for frame, pair in enumerate(zip_longest(sums, sent)) if pair[0] != pair[1]]
        if wrong:
            raise CorruptFrame(
                f"{len(wrong)} of {len(sums)} frames from {self.address} fail their checksum, the first is {wrong[0]}",
                remedy=_SUSPECT,
            )
        return tuple(sums)

    def cut(self) -> None:
        """End whatever the connection's thread waits for."""
        with contextlib.suppress(OSError):  # it has ended already
            self._sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._sock.close()


def how_many_fit(records: Sequence[bytes]) -> int:
    """Count the call records that go into one message, the first of them in any case."""
    return max(1, sum(size <= RECORDS_BYTES_MAX for size in accumulate(map(len, records))))


def frames(view: memoryview) -> Iterator[memoryview]:
    """Cut a payload into the parts that have a checksum each."""
    return (view[start : start + FRAME_BYTES] for start in range(0, len(view), FRAME_BYTES))
