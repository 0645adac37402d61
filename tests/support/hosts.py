"""A host for parts of the agent: a real store, whose work in threads is done at once; others' memory is the test's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from deadpool_plugin.agent.fetching import Fetches
from deadpool_plugin.agent.host import Bulk
from deadpool_plugin.agent.reports import Reports
from deadpool_plugin.host.bulk import BulkTransfers
from deadpool_plugin.host.watch import Processes
from deadpool_plugin.mirror.store import SnapshotStore
from support.stand_in import stand_in

T = TypeVar("T")


class Host:
    """`bulk`: what a test does not give is never asked for."""

    def __init__(self, store: SnapshotStore | None = None, bulk: Any = None) -> None:
        self.store = SnapshotStore() if store is None else store
        self.processes = Processes("tag.", 10.0)
        self.bulk: Bulk = stand_in(BulkTransfers) if bulk is None else bulk

    async def in_thread(self, work: Callable[[], T]) -> T:
        return work()


def fetches(host: Host, patience_s: float = 60.0, feed: Callable[[Any], None] = lambda event: None) -> Fetches:
    """Make the Fetches of node 0 on `host`, of which nobody is told."""
    return Fetches(0, host, patience_s, stand_in(Reports), feed)
