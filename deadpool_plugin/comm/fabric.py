"""The seam between our handles and one communication library: everything of one backend in one generation.

Rules of this file: no state. A fabric is built on the main thread (or a thread it waits for), used by one
generation only, and unblocked once, from any thread, after that generation is over.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol

import torch.distributed as dist
from torch._C._distributed_c10d import Backend, Store

from .collective import Operation

Aside = Callable[[Callable[[], Any]], Any]
"""Runs a function that waits for peers inside of a library where the caller can leave it, and returns its result."""


@dataclass(frozen=True)
class GroupSpec:
    """The parts that a communicator of one group is built from.

    `ranks` are global, in group order; `key` is the same on every member, and unique; `options` is the backend's own.
    """

    key: str
    ranks: tuple[int, ...]
    rank: int
    timeout: timedelta
    options: Any = None


class Fabric(Protocol):
    """One backend's communicators of one generation."""

    def build(self, spec: GroupSpec, store: Store) -> Backend:
        """Connect to the group's other members. Blocks: until they do the same."""
        ...

    def unblock(self) -> None:
        """End whatever is in flight, with errors. Thread: any."""
        ...

    def ranks_named(self, text: str) -> tuple[int, ...]:
        """To which ranks the connection may have led that the library names in an error."""
        ...

    def begin(self, group: dist.ProcessGroup, operation: Operation, aside: Aside) -> Any:
        """Issue `operation` of `group`; returns torch's Work, None if there is none.

        Raises: RuntimeError if it cannot be issued; nothing of it is open in this thread then.
        """
        ...

    def await_rest(self, stop: Callable[[], bool]) -> bool:
        """Wait, after `unblock`, until nothing that was in flight can write any more; False if `stop()` first."""
        ...

    def wait_style(self, operation: str) -> str:
        """Return how `waits.SwapWork` waits for `operation`: "slices", "helper" or "direct"."""
        ...
