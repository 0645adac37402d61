"""The Linux machine a node's agent runs on: the body of `Host` (agent/host.py) that jobs have."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from ..config import Config
from ..core.types import NodeId
from ..mirror.store import SnapshotStore
from ..transport.handshake import Credentials
from .bulk import BulkTransfers
from .watch import Processes

T = TypeVar("T")
_THREADS = 16


class Machine:
    """This host, for the agent of `node`, whose processes have tags that begin with `job_tag`. Thread: the event loop's
    only."""

    def __init__(self, node: NodeId, job_tag: str, config: Config, credentials: Credentials) -> None:
        self.processes = Processes(job_tag, config.silent_after_s)
        self.processes.start()
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="deadpool-ask")
        self.store = SnapshotStore(config.history_limit_bytes, config.memory_headroom_bytes)
        self.bulk = BulkTransfers(node, credentials, self.store, config.patience_s, self._threads)

    async def in_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    async def close(self) -> None:
        """End what waits for other nodes; threads that do not end are left behind."""
        self.processes.close()
        await self.bulk.close()
        self._threads.shutdown(wait=False, cancel_futures=True)
