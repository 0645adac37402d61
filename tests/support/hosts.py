"""A host for parts of the agent: a real store and real files, whose work in threads is done at once; others' memory is
the test's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

from deadpool_plugin.agent import host as agent_host
from deadpool_plugin.agent.fetching import Fetches
from deadpool_plugin.agent.reports import Reports
from deadpool_plugin.host.bulk import BulkTransfers
from deadpool_plugin.host.machine import Machine
from deadpool_plugin.host.processes import Processes
from deadpool_plugin.mirror.store import SnapshotStore
from support.stand_in import StandIn, stand_in

T = TypeVar("T")


class _Host(StandIn):
    async def in_thread(self, work: Callable[[], T]) -> T:
        return work()

    at_files = in_thread


def host(store: SnapshotStore | None = None, bulk: Any = None, **parts: object) -> agent_host.Host:
    """Make a host. `bulk`: others' memory, of which nothing is asked that a test does not give; `parts`: its others."""
    made = _Host(Machine)
    made.name, made.where, made.witness = "here", ("127.0.0.1", "here"), None
    made.store = SnapshotStore() if store is None else store
    made.bulk = stand_in(BulkTransfers) if bulk is None else bulk
    made.processes = Processes("tag.", 10.0)
    for name, part in parts.items():
        setattr(made, name, part)
    return cast(agent_host.Host, made)


def fetches(on: agent_host.Host, patience_s: float = 60.0, feed: Callable[[Any], None] = lambda event: None) -> Fetches:
    """Make the Fetches of node 0 on a host, of which nobody is told."""
    return Fetches(0, on, patience_s, stand_in(Reports), feed)
