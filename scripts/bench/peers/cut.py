"""An abort for gloo, lent to NVRx: the one it ships aborts NCCL only and leaves gloo operations blocked.

Cutting gloo's connections is what NCCL's abort would do; with it NVRx is measured, and not gloo.
"""

from __future__ import annotations

import os
import socket
from typing import Any

from nvidia_resiliency_ext import inprocess


class CutConnections(inprocess.abort.Abort):  # type: ignore[misc]
    """Shut down this process's established connections but those at `ports`, the stores'. Thread: NVRx's monitor
    thread."""

    def __init__(self, ports: set[int]) -> None:
        self._ports = ports

    def __call__(self, state: Any) -> Any:
        for name in os.listdir("/proc/self/fd"):
            try:
                found = socket.socket(fileno=os.dup(int(name)))
            except OSError:  # closed since, or no socket
                continue
            with found:
                self._cut(found)
        return state

    def _cut(self, found: socket.socket) -> None:
        try:
            if found.family not in (socket.AF_INET, socket.AF_INET6):
                return
            if not self._ports & {found.getsockname()[1], found.getpeername()[1]}:  # a listener has no peer
                found.shutdown(socket.SHUT_RDWR)
        except OSError:  # not connected (any more)
            return
