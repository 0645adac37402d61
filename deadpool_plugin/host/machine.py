"""One Linux machine: its addresses and, for the agent that runs on it, its processes, memory, files and bulk transfers.

Rules of this file: the simulator has bodies of its own for the classes (tests/simulator), and the agent relies on
nothing but what stands in them. What waits is awaited, and may end in any order, or never; what is said to block is
given to `at_files` or `in_thread`. Thread: the event loop's only, but for what blocks.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import os
import shutil
import signal
import socket
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import psutil

from ..config import Config
from ..core.local import AnyLocalMessage
from ..core.types import NodeId
from ..errors import ConfigError, TransportError
from ..mirror.arena import budgets
from ..mirror.store import SnapshotStore
from ..mirror.transfers import BulkTransfers
from ..transport.handshake import Credentials
from ..transport.linux import pidfd_open
from ..transport.rendezvous import Hello
from ..transport.sockets import Address, address_towards, allow_many_files
from ..transport.tasks import loop_time
from ..transport.unix import LocalPeer, LocalServer
from . import files, proc
from .files import SharedFolder
from .output import Pipe, Writer
from .proc import Processes, come_first, reset_affinity
from .stacks import Stacks

T = TypeVar("T")
Found = list[tuple[str, str]]
"""Interfaces and their addresses."""
_LOOPBACK = ("127.0.0.1", "::1", "localhost")
_RESOLVE_RETRY_S = 0.5
_OF_THE_JOB = {
    "MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE",
    "CUDA_VISIBLE_DEVICES",
}  # fmt: skip
"""Variables that, with DEADPOOL_*, say what this host is in the job: a command may start another host."""
_TAIL_BYTES, _LINE_MAX = 4096, 200
_SETTLE_S = 5.0
"""How long a process that was killed, or the file system, may take after a command."""
_log = logging.getLogger(__name__)


def addresses_of(said: str, found: Found | None = None) -> tuple[str, ...]:
    """Find this host's addresses by `said`, one or several separated by commas. Raises: as `address_of`."""
    return tuple(dict.fromkeys(address_of(part.strip(), found) for part in said.split(",")))


def address_of(said: str, found: Found | None = None) -> str:
    """Find this host's address by `said`: the address, a network (10.1.0.0/16), or an interface's name (ib0).

    Raises: ConfigError if this host has none. `found`: its addresses; None asks the kernel.
    """
    with contextlib.suppress(ValueError):
        ipaddress.ip_address(said)
        return said
    found = addresses_here() if found is None else found
    matching = [address for name, address in found if name == said]
    if "/" in said:
        try:
            network = ipaddress.ip_network(said, strict=False)
        except ValueError as error:
            wrong = f"interface_address {said} ({error})"
            raise ConfigError(wrong, "such as 10.1.0.0/16", "correct the network") from error
        matching = [address for _, address in found if ipaddress.ip_address(address) in network]
    if not matching:
        raise ConfigError(
            f"interface_address {said} is no address of {os.uname().nodename}, which has "
            + ", ".join(f"{name} {address}" for name, address in found),
            "an address, a network such as 10.1.0.0/16, or the name of an interface that every host has",
            "name one of these in interface_address",
        )
    return matching[0]


async def reachable(config: Config, target: Address, timeout_s: float) -> tuple[str, ...]:
    """Return where to listen, and the addresses that others use. `target`: what they must be reached by.

    Raises: ConfigError; TransportError if there is no way to `target` within `timeout_s`.
    """
    if config.interface_address is not None:
        several = addresses_of(config.interface_address)
        return several[0], *several
    deadline, said = loop_time() + timeout_s, False
    while True:  # a name that comes into being with its host (Kubernetes) may be unknown for a while
        try:
            ours = address_towards(*target)
            break
        except TransportError as error:
            if loop_time() >= deadline:
                raise
            if not said:
                _log.warning("%s; it is tried again for %.0f s", error, timeout_s)
                said = True
        await asyncio.sleep(_RESOLVE_RETRY_S)
    where = ours, ours
    if ipaddress.ip_address(ours).is_loopback and target[0] not in _LOOPBACK:
        where = "", target[0]  # the first host's name means itself there; others know it by that name
    if hint := other_network(where[1], os.environ):
        _log.warning("%s", hint)
    return where


def other_network(ours: str, environ: Mapping[str, str], found: Found | None = None) -> str:
    """Warn if the frameworks use another interface than that of `ours`; "" if they were not told to."""
    for name in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
        interface = environ.get(name, "").removeprefix("=").split(",")[0].strip()
        theirs = [address for named, address in found or addresses_here() if interface and named == interface]
        if theirs and ours not in theirs:
            return (
                f"snapshots are mirrored over {ours}, {name} names {interface} ({theirs[0]}); "
                f"`interface_address: {interface}` lets them go there, too"
            )
    return ""


def addresses_here() -> Found:
    """List this host's interfaces and their addresses, IPv4 first, without link-local ones."""
    found = [(its.family, name, its.address) for name, all_its in psutil.net_if_addrs().items() for its in all_its]
    of_ip = sorted((one for one in found if one[0] in (socket.AF_INET, socket.AF_INET6)), key=lambda one: one[0])
    return [(name, address) for _, name, address in of_ip if "%" not in address]


class Machine:
    """This host, for the agent of one node; made by the process's main thread.

    Args: where: the interface to listen on ("" for all), and the addresses by which others reach this node; if there
    are several, snapshots come to all of them, all else to the first. listener: the Unix socket of supervisors and
    workers. job_tag: what the environment tags of this node's workers begin with.
    """

    def __init__(
        self,
        node: NodeId,
        where: tuple[str, ...],
        config: Config,
        credentials: Credentials,
        listener: socket.socket,
        job_tag: str,
    ) -> None:
        reset_affinity()
        come_first()
        allow_many_files()
        self._node, self._config, self._listener, self._job_tag = node, config, listener, job_tag
        self.name, self.where = os.uname().nodename, where
        self.output = Writer()
        self.processes = Processes(job_tag, config.slow_after_s)
        self.processes.start()
        self.store = SnapshotStore(config.history_limit_bytes, config.memory_headroom_bytes, config.history_kept)
        self.bulk = BulkTransfers(node, credentials, self.store, (where[0], *where[2:]), config)
        self.witness = SharedFolder(config.witness) if config.witness is not None else None
        self._commands: set[int] = set()
        self._memory = ThreadPoolExecutor(thread_name_prefix="deadpool-memory")
        # Apart from the loop's own threads, in which names are looked up: storage that hangs may hold all of these.
        self._storage = ThreadPoolExecutor(thread_name_prefix="deadpool-storage")

    def pipe(self, descriptor: int) -> Pipe:
        """Read what processes of the node print, from `descriptor`, which is the pipe's from now on."""
        return Pipe(descriptor, self.output)

    def stacks(self, descriptor: int, pid: int) -> Stacks:
        """Read the Python stack of process `pid`, which writes it into `descriptor`, ours from now on."""
        return Stacks(descriptor, pid)

    def serve(
        self,
        on_message: Callable[[LocalPeer, AnyLocalMessage, list[int]], None],
        on_closed: Callable[[LocalPeer], None],
    ) -> None:
        """Accept the node's processes; the descriptors that come with a message are the receiver's."""
        self._server = LocalServer(self._listener, on_message, on_closed)

    def publish(self, hello: Hello, secret_files: tuple[str, ...], job: str) -> None:
        """Name this node where hosts that want to join look for one. Raises: OSError. Blocks: for the files."""
        files.publish(self._config.output_dir, hello, secret_files, job)

    def withdraw(self) -> None:
        """Name it there no more. Blocks: for the files."""
        files.withdraw(self._config.output_dir, self._node)

    async def at_files(self, work: Callable[[], T]) -> T:
        """Return what `work` does, which blocks for files that may be on shared storage: it may never return."""
        return await asyncio.get_running_loop().run_in_executor(self._storage, work)

    async def in_thread(self, work: Callable[[], T]) -> T:
        """Return what `work` does, which blocks for memory. If its caller is cancelled it goes on all the same."""
        return await asyncio.get_running_loop().run_in_executor(self._memory, work)

    def fits_beside(self, parked: int, like: Sequence[int], starting: int, limit_bytes: float | None) -> bool:
        """Return whether memory allows one more process beside those that are `parked`. Blocks: some ms a GiB.

        Args: like: processes by whose sizes that is judged. starting: how many of those that are parked only begin, and
        take more for a while. limit_bytes: for all that are parked together; None: half of what is free.
        """
        free = budgets()[0].available_bytes
        found = [proc.memory_of(pid) for pid in like]
        size, most = (max((one[part] for one in found), default=0) for part in (0, 1))
        limit = (free + parked * size) / 2 if limit_bytes is None else limit_bytes
        return (parked + 1) * size <= limit and (starting + 1) * most + self._config.memory_headroom_bytes <= free

    def is_short(self) -> bool:
        """Return whether less than half of the headroom is left: what can be spared is to be given up."""
        return budgets()[0].available_bytes < self._config.memory_headroom_bytes / 2

    def has_program(self, name: str) -> bool:
        """Return whether `run_command` finds it. Blocks: for the files."""
        return shutil.which(name) is not None

    async def run_command(self, words: Sequence[str], output: Path, limit_s: float) -> tuple[int | None, str]:
        """Run a program that is none of ours, and append what it prints to `output`.

        Returns: its exit code, None if it was killed because it still ran after `limit_s`; its last line of output.
        Raises: OSError (TimeoutError if the storage of `output` does not answer).
        """
        async with asyncio.timeout(limit_s):
            file = await self.at_files(lambda: self.output.open(output))
        begins = file.tell()
        env = {name: value for name, value in os.environ.items() if not name.startswith("DEADPOOL_")}
        env = {name: value for name, value in env.items() if name not in _OF_THE_JOB}
        # Nothing waits for its execve(2): the program may be on storage that hangs.
        pid = proc.spawn(words, env, signal.SIGKILL, file.fileno(), apart=True)
        self._commands.add(pid)
        self.output.release(file)
        loop, pidfd, ended = asyncio.get_running_loop(), pidfd_open(pid), asyncio.Event()
        loop.add_reader(pidfd, ended.set)
        is_late = False
        try:
            async with asyncio.timeout(limit_s):
                await ended.wait()
        except TimeoutError:
            is_late = True
            proc.kill_group(pid)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_SETTLE_S):
                    await ended.wait()
        finally:
            loop.remove_reader(pidfd)
            os.close(pidfd)
        self._commands.discard(pid)
        _, status = os.waitpid(pid, os.WNOHANG)  # 0 if even SIGKILL has not ended it
        said = ""
        with contextlib.suppress(OSError):
            async with asyncio.timeout(_SETTLE_S):
                said = await self.at_files(lambda: _last_line(output, begins))
        return None if is_late else os.waitstatus_to_exitcode(status), said

    def end_commands(self) -> None:
        """End every command that still runs, and what is in its process group."""
        commands, self._commands = self._commands, set()
        for pid in commands:
            proc.kill_group(pid)

    async def close(self) -> None:
        """Serve other nodes no more, and end what waits for them."""
        self.processes.close()
        await self.bulk.close()

    def end(self) -> None:
        """Write what is queued, and end (SIGKILL) every process of the node that is left."""
        self.end_commands()
        self.output.close()
        proc.sweep(self._job_tag)


def _last_line(path: Path, begins: int) -> str:
    """Read the last line, behind the first `begins` bytes, that is not empty; for people. Blocks: for the file."""
    with path.open("rb") as file:
        file.seek(max(begins, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
        lines = file.read().decode(errors="replace").splitlines()
    last = next((line.strip() for line in reversed(lines) if line.strip()), "")
    return "".join(one if one.isprintable() else " " for one in last[:_LINE_MAX])
