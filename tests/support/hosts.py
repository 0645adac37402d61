"""A host for parts of the agent: a real store and real files, whose work in threads is done at once; others' memory is
the test's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

from deadpool_plugin.agent.node import LocalNode, Slot
from deadpool_plugin.agent.reports import Reports
from deadpool_plugin.agent.world import Job, Place
from deadpool_plugin.config import Config
from deadpool_plugin.core import api
from deadpool_plugin.host.machine import Machine
from deadpool_plugin.host.proc import Processes
from deadpool_plugin.mirror.store import SnapshotStore
from deadpool_plugin.mirror.transfers import BulkTransfers
from deadpool_plugin.transport.handshake import Credentials
from support.stand_in import StandIn, stand_in

T = TypeVar("T")


class _Host(StandIn):
    async def in_thread(self, work: Callable[[], T]) -> T:
        return work()

    at_files = in_thread


def host(store: SnapshotStore | None = None, bulk: Any = None, **parts: object) -> Machine:
    """Make a host. `bulk`: others' memory, of which nothing is asked that a test does not give; `parts`: its others."""
    made = _Host(Machine)
    made.name, made.where, made.witness = "here", ("127.0.0.1", "here"), None
    made.store = SnapshotStore() if store is None else store
    made.bulk = stand_in(BulkTransfers) if bulk is None else bulk
    made.processes = Processes("tag.", 10.0)
    for name, part in parts.items():
        setattr(made, name, part)
    return cast(Machine, made)


def local_node(
    on: Machine | None = None,
    feed: Callable[[api.Input], Any] = lambda event: None,
    slots: Sequence[Slot] = (),
    node: int = 0,
    reports: Any = None,
    **config: Any,
) -> LocalNode:
    """Make a node; nobody is told what it reports unless a test gives `reports`."""
    said = StandIn(Reports)
    said.hosts = {}
    made = LocalNode(
        Place(node, 3, len(slots), "m", 5), host() if on is None else on, Config().model_copy(update=config),
        Credentials(b"secret", "job"), Job([], "", "", {}), cast(Reports, said) if reports is None else reports, feed,
    )  # fmt: skip
    made.slots = list(slots)
    return made
