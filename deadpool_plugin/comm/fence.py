"""The generation this process lives in, the one that is announced, and what an error in a collective means then.

Rules of this file: `current` only grows, on the main thread; `announced` only grows, from any thread. While
`announced > current`, every collective and every wait raises GenerationChanged.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import NoReturn

import torch.distributed as dist

from ..errors import GenerationChanged

_NCCL = ("ncclRemoteError", "ncclSystemError")
_OTHERS = (
    "NCCL Error 2:", "NCCL Error 6:",
    "Connection closed by peer", "Connection reset by peer", "Connection timed out", "Connection refused",
    "Broken pipe", "No route to host", "Network is unreachable", "Host is unreachable", "Socket is not connected",
    "Transport endpoint is not connected", "Connection aborted", "Software caused connection abort",
)  # fmt: skip


def is_transports(error: BaseException) -> bool:
    """Return whether an error met in a collective comes from a connection to another process, whatever the script did.

    Source: torch's NCCLUtils.cpp (getNcclErrorDetailStr), csrc/cuda/nccl.cpp (throw_nccl_error, of what is made of
    sends and receives), TCPStore's exceptions; gloo's transport/tcp (pair.cc, error.cc), which says what strerror(3)
    says.
    """
    if isinstance(error, dist.DistNetworkError):
        return True
    text = str(error)
    return any(name in text for name in (_NCCL if isinstance(error, dist.DistBackendError) else _OTHERS))


class Fence:
    """The two generations and the place where errors wait for an announcement."""

    def __init__(self, explain_timeout_s: float) -> None:
        self.current = 0
        self.announced = 0
        self._explain_timeout_s = explain_timeout_s
        self.on_broken: Callable[[int, str], bool] = lambda generation, reason: False
        """Told of a connection of that generation that broke; whether somebody will announce a new one."""
        self._changed = threading.Condition()

    def announce(self, generation: int) -> bool:
        """Note that `generation` begins; False if that was known. Thread: any."""
        with self._changed:
            if generation <= max(self.announced, self.current):
                return False
            self.announced = generation
            self._changed.notify_all()
            return True

    def check(self) -> None:
        """Raises: GenerationChanged while an announced generation has not been entered."""
        self.check_since(self.current)

    def check_since(self, generation: int) -> None:
        """Raises: GenerationChanged if one newer than `generation` has been announced, entered or not."""
        if self.announced > generation:
            raise GenerationChanged(self.announced)

    def enter(self, generation: int) -> None:
        """Live in `generation` from here on.

        Raises:
            GenerationChanged: a newer one was announced meanwhile; nothing changed.
        """
        with self._changed:
            if self.announced > generation:
                raise GenerationChanged(self.announced)
            self.current = self.announced = generation

    def explain(self, error: BaseException, *, after: int | None = None) -> NoReturn:
        """Raise what `error`, met in a collective (or while building generation `after`), turns out to mean.

        A dead peer is felt by its neighbours before anybody has decided anything, so this waits for the announcement.
        A connection that broke though nobody died is said then, and the new generation that comes of it is waited for:
        it is not the script's error. Raises: GenerationChanged if one is announced, else `error`.
        """
        before = self.current if after is None else after
        if self.announced <= before:
            with self._changed:
                told = self._changed.wait_for(lambda: self.announced > before, self._explain_timeout_s)
            if not told and is_transports(error) and self.on_broken(before, str(error)):
                with self._changed:
                    self._changed.wait_for(lambda: self.announced > before)
        if self.announced > before:
            raise GenerationChanged(self.announced) from error
        raise error
