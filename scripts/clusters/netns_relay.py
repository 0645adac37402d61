"""A relay between two interfaces that loses and delays Ethernet frames: what netem does, on a kernel that lacks it.

    python netns_relay.py relay PORT OTHER LOSS DELAY_S SEED    until it is killed
    python netns_relay.py plain INTERFACE                       frames of one packet each from now on, with checksums

Rules of this file: standard library only; it runs in the namespace that the interfaces are in, and needs root.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import random
import selectors
import socket
import struct
import sys
import time
from collections import deque

ETH_P_ALL = 3
PACKET_OUTGOING = 4
FRAME_BYTES_MAX = 1 << 16
SIOCETHTOOL = 0x8946
CHECKSUMS, SCATTER, SEGMENTS, LATE_SEGMENTS = 0x17, 0x19, 0x1F, 0x24
"""ETHTOOL_STXCSUM, _SSG, _STSO, _SGSO: what a sender leaves to a network card, which a relay is not."""
BUFFER_BYTES = 8 << 20


def plain(name: str) -> None:
    """Have `name` send what can go over a wire as it is. Raises: OSError."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        for command in (SEGMENTS, LATE_SEGMENTS, SCATTER, CHECKSUMS):
            value = ctypes.create_string_buffer(struct.pack("II", command, 0))
            fcntl.ioctl(sock, SIOCETHTOOL, struct.pack("16sP", name.encode(), ctypes.addressof(value)))


def listening(name: str) -> socket.socket:
    sock = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(ETH_P_ALL))
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, BUFFER_BYTES)
    sock.bind((name, 0))
    sock.setblocking(False)
    return sock


def relay(port: str, other: str, loss: float, delay_s: float, seed: int) -> None:
    """Carry frames both ways for ever; each is lost with probability `loss`, or arrives `delay_s` later."""
    with contextlib.suppress(OSError):  # a wire does not wait for a CPU
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
    ends, draw = (listening(port), listening(other)), random.Random(seed)
    print("ready", flush=True)
    to = {ends[0]: ends[1], ends[1]: ends[0]}
    under_way: deque[tuple[float, socket.socket, bytes]] = deque()
    with selectors.DefaultSelector() as selector:
        for end in ends:
            selector.register(end, selectors.EVENT_READ)
        while True:
            wait_s = max(0.0, under_way[0][0] - time.monotonic()) if under_way else None
            for key, _ in selector.select(wait_s):
                source = key.fileobj
                assert isinstance(source, socket.socket)
                frame, address = source.recvfrom(FRAME_BYTES_MAX)
                if address[2] != PACKET_OUTGOING and draw.random() >= loss:
                    under_way.append((time.monotonic() + delay_s, to[source], frame))
            while under_way and under_way[0][0] <= time.monotonic():
                _, target, frame = under_way.popleft()
                try:
                    target.send(frame)
                except OSError:
                    continue  # a full queue loses it, as on any wire


if __name__ == "__main__":
    if sys.argv[1] == "plain":
        plain(sys.argv[2])
    else:
        relay(sys.argv[2], sys.argv[3], float(sys.argv[4]), float(sys.argv[5]), int(sys.argv[6]))
