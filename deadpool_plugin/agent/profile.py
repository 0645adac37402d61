"""The profile that a stand-in needs of a rank. It travels between nodes as the rank's "recording"."""

from __future__ import annotations

import msgspec

from ..core.types import Rank
from ..errors import TransportError


class Profile(msgspec.Struct, frozen=True):
    """Sizes of the rank's snapshots, their layout, who has the same payload, and the recording itself (opaque)."""

    header_bytes: int
    payload_bytes: int
    layout_hash: str
    replicas: tuple[Rank, ...]
    recording: bytes

    def encoded(self) -> bytes:
        return msgspec.msgpack.encode(self)


def decode_profile(blob: bytes) -> Profile:
    """Raises: TransportError"""
    try:
        return msgspec.msgpack.decode(blob, type=Profile)
    except msgspec.MsgspecError as error:
        raise TransportError(f"a recording of {len(blob)} bytes cannot be read: {error}") from error
