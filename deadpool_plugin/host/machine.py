"""The Linux machine a node's agent runs on: the body of `Host` (agent/host.py) that jobs have."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from ..config import Config
from ..core.local import AnyLocalMessage
from ..core.types import NodeId
from ..mirror.store import SnapshotStore
from ..transport.handshake import Credentials
from ..transport.rendezvous import Hello
from ..transport.sockets import allow_many_files
from ..transport.unix import LocalPeer, LocalServer
from . import files, proc
from .bulk import BulkTransfers
from .files import SharedFolder
from .output import Pipe, Writer
from .processes import Processes
from .spawning import reset_affinity

T = TypeVar("T")


class Machine:
    """This host, for the agent of one node. Thread: the event loop's only, made by the process's main one.

    Args:
        where: this node's addresses, of `reachable`.
        listener: the listening Unix socket supervisors and workers connect to.
        job_tag: what the environment tags of this node's workers begin with.
    """

    def __init__(
        self,
        node: NodeId,
        where: tuple[str, str],
        config: Config,
        credentials: Credentials,
        listener: socket.socket,
        job_tag: str,
    ) -> None:
        reset_affinity()
        allow_many_files()
        self._node, self._config, self._listener, self._job_tag = node, config, listener, job_tag
        self.name, self.where = os.uname().nodename, where
        self.output = Writer()
        self.processes = Processes(job_tag, config.silent_after_s)
        self.processes.start()
        self.store = SnapshotStore(config.history_limit_bytes, config.memory_headroom_bytes)
        self.bulk = BulkTransfers(node, credentials, self.store, where[0], config.port_range, config.patience_s)
        self.witness = SharedFolder(config.witness) if config.witness is not None else None
        self._memory = ThreadPoolExecutor(thread_name_prefix="deadpool-memory")

    def pipe(self, descriptor: int) -> Pipe:
        return Pipe(descriptor, self.output)

    def serve(
        self,
        on_message: Callable[[LocalPeer, AnyLocalMessage, list[int]], None],
        on_closed: Callable[[LocalPeer], None],
    ) -> None:
        self._server = LocalServer(self._listener, on_message, on_closed)

    def publish(self, hello: Hello, secret_files: tuple[str, ...], job: str) -> None:
        files.publish(self._config.output_dir, hello, secret_files, job)

    def withdraw(self) -> None:
        files.withdraw(self._config.output_dir, self._node)

    async def at_files(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(None, work)

    async def in_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._memory, work)

    async def close(self) -> None:
        self.processes.close()
        await self.bulk.close()

    def end(self) -> None:
        self.output.close()
        proc.sweep(self._job_tag)
