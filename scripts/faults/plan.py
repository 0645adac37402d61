"""Faults: where one strikes, what it does, and the proof that it did, once.

Rules of this file: standard library only; used by the processes of a job (through inject.py) and by whoever plans a
job's faults. A fault writes its line to the marker file before it happens. Which process fires is settled by who
creates the fault's own file first, so a fault fires once per job however often its place is passed.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import os
import signal
import socket
import stat
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from clusters import processes

ORDERED = {
    "spin": ("fakecuda_order", b"spin", 1),
    "mute": ("fakenccl_order", b"silent", 1),
    "abort-hangs": ("fakenccl_order", b"abort_hangs", 1),
    "issue": ("fakenccl_order", b"fail_at_issue", 2),
    "on-stream": ("fakenccl_order", b"fail_on_stream", 6),
    "oom": ("fakecuda_order", b"refuse_malloc", 100),
}
"""Faults of the device and of NCCL that the stand-ins in tests/fakecuda are ordered to have, and by which call."""
KINDS = (
    "node", "rank", "raise", "poison", "stop", "silent", "gil", "file", "absent", "slow", "assert", "reset", *ORDERED,
)  # fmt: skip
"""node: SIGKILL of every process of the host; rank: of the worker; raise: an exception in the worker; poison: one that
says that its host has failed; stop: SIGSTOP of the worker; silent: SIGSTOP of every process of the host; gil: the
worker waits for ever in C and holds the GIL; file: it opens a file that never opens; absent: it waits for a message
that nobody sends, while the others wait for it in a collective; slow: it goes on after SLOW_S; assert: a device-side
assertion, of which the worker hears at one of its next CUDA calls; all of them fail then; reset: the worker's
connections to other processes end, and nobody dies; spin: the worker's next kernel never ends; mute: its communicators
neither send nor take anything more, their connections stay open; abort-hangs: its next abort does not return; issue:
NCCL gives ncclSystemError where its next operation is issued; on-stream: that operation fails on its stream, with
ncclRemoteError; oom: the device has no memory for an allocation made here."""
HANGS = ("gil", "file", "absent")
"""Faults that only a stall tells of."""
LEAVES = ("reset", *HANGS)
"""Faults for which a host may be asked to leave, if they come again."""
OF_SNAPSHOTS = ("staging", "push")
"""Phases of the first snapshot from the fault's step on."""
INJECTED = "a fault was planned here"
CAUSES = {
    "assert": ("device-side assert", "CUDA error", "unhandled cuda error"),
    "oom": ("out of memory",),
    "issue": ("NCCL error",),
}
"""Words of the errors that a script meets because of such a fault: at once, or at a later call of CUDA or NCCL."""
SLOW_S = 10.0
HOLD_POLL_S = 0.005


class Injected(RuntimeError):
    """The exception that a fault of kind `raise` raises."""

    def __init__(self) -> None:
        super().__init__(INJECTED)


@dataclass(frozen=True)
class Kill:
    """One fault of the plan; `index` tells faults apart.

    Args:
        node, rank: whose process fires; -1: anybody's. A rank is found wherever it runs at that time.
        step: 0 is any step.
        after: index of the fault that must have fired before; -1: none.
        hold: after this step every rank waits for `release`, so that whoever watches the job can get ready for the
            fault; 0: nobody waits.
        also: further nodes that are killed at the same moment; of kinds `rank` and `poison`: further ranks.
    """

    index: int
    node: int
    step: int
    phase: str
    kind: str = "node"
    rank: int = -1
    after: int = -1
    hold: int = 0
    also: tuple[int, ...] = ()


class Plan:
    """All faults of a job and the files beside `marker` that say which of them have fired or been released."""

    def __init__(self, kills: list[Kill], marker: Path | None) -> None:
        self.kills, self.marker = kills, marker

    def save(self, path: Path) -> None:
        path.write_text(json.dumps([asdict(kill) for kill in self.kills]))

    @staticmethod
    def load(path: Path, marker: Path | None) -> Plan:
        return Plan(
            [Kill(**{**fields, "also": tuple(fields["also"])}) for fields in json.loads(path.read_text())], marker
        )

    def due(self, phase: str, step: int, node: int, rank: int) -> Kill | None:
        """The fault that fires here and now; asking is firing."""
        for kill in self.kills:
            # Not every step need be a snapshot.
            comes = kill.step <= step if phase in OF_SNAPSHOTS else kill.step in (0, step)
            here = kill.phase == phase and comes and kill.node in (-1, node)
            if here and kill.rank in (-1, rank) and self._may_fire(kill) and self._first_to_fire(kill):
                return kill
        return None

    def awaits(self, phase: str, step: int) -> bool:
        """Return whether a fault is still to fire at this place, in whatever process."""
        here = [kill for kill in self.kills if kill.phase == phase and kill.step in (0, step)]
        return any(self._may_fire(kill) and not self._file("fired", kill.index).exists() for kill in here)

    def _may_fire(self, kill: Kill) -> bool:
        released = not kill.hold or self._file("go", kill.index).exists()
        return released and (kill.after < 0 or self._file("fired", kill.after).exists())

    def _first_to_fire(self, kill: Kill) -> bool:
        try:
            os.close(os.open(self._file("fired", kill.index), os.O_CREAT | os.O_EXCL | os.O_WRONLY))
        except FileExistsError:
            return False
        return True

    def _file(self, name: str, index: int) -> Path:
        return Path(f"{self.marker}.{name}.{index}")

    def record(self, kill: Kill, node: int, rank: int, step: int) -> None:
        """The line that proves the fault."""
        line: dict[str, Any] = {"index": kill.index, "node": node, "rank": rank, "step": step, "phase": kill.phase}
        line |= {"kind": kill.kind, "pid": os.getpid(), "time": time.time()}
        descriptor = os.open(self.marker, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)  # type: ignore[arg-type]
        with open(descriptor, "ab", buffering=0) as marker:  # by number: a follower's `open` of a path writes nothing
            marker.write(json.dumps(line).encode() + b"\n")

    def poison(self, rank: int) -> None:
        """Have the process of `rank` fail at the next place where a fault can be."""
        self._file("poison", rank).touch()

    def takes_poison(self, rank: int) -> bool:
        """Return whether `rank` is to fail here and now; `poisoned` counts it."""
        with contextlib.suppress(FileNotFoundError):
            self._file("poison", rank).unlink()
            descriptor = os.open(self._file("poisoned", rank), os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
            os.write(descriptor, b".")
            os.close(descriptor)
            return True
        return False

    def poisoned(self, rank: int) -> int:
        """How many times `rank` has taken poison."""
        path = self._file("poisoned", rank)
        return path.stat().st_size if path.exists() else 0

    # ---- holding a job at a step

    def hold(self, step: int) -> None:
        """Block while a fault is planned that is to be released after `step`."""
        for kill in self.kills:
            if kill.hold and kill.hold == step:
                while not self._file("go", kill.index).exists():
                    time.sleep(HOLD_POLL_S)

    def release(self, index: int) -> None:
        self._file("go", index).touch()

    # ---- which process runs a rank

    def tell_pid(self, rank: int) -> None:
        """By a worker that is in training."""
        path = self._file("pid", rank)
        draft = path.with_name(f"{path.name}.{os.getpid()}")
        draft.write_text(str(os.getpid()))
        draft.replace(path)

    def tell_leader(self, node: int, pid: int) -> None:
        self._file("leader", node).write_text(str(pid))

    def leader_of(self, node: int) -> int:
        return int(self._file("leader", node).read_text())

    def pid_of(self, rank: int) -> int:
        """0 before the rank's first step."""
        path = self._file("pid", rank)
        return int(path.read_text()) if path.exists() else 0


def strike(
    kill: Kill, plan: Plan, pid: int, kill_node: Callable[[Callable[[], None]], None], record: Callable[[], None]
) -> None:
    """Let it happen. Returns only what a worker survives: a stopped one may be woken.

    Args:
        pid: the worker that is meant (another process than this one where an agent strikes).
        kill_node: SIGKILLs every process of the node after calling its argument.
    """
    if kill.kind == "node":

        def others_first() -> None:
            record()
            for node in kill.also:
                processes.signal_node(plan.leader_of(node), signal.SIGKILL)

        kill_node(others_first)
        return
    record()
    for rank in kill.also:
        if kill.kind == "rank":
            processes.send(plan.pid_of(rank), signal.SIGKILL)
        else:
            plan.poison(rank)
    _strike_worker(kill.kind, pid)


def _strike_worker(kind: str, pid: int) -> None:
    if kind in ("rank", "stop"):
        processes.send(pid, signal.SIGKILL if kind == "rank" else signal.SIGSTOP)
    elif kind == "silent":
        processes.signal_node(int(os.environ["DEMO_LEADER"]), signal.SIGSTOP)
    elif kind == "gil":
        ctypes.PyDLL(None).read(os.pipe()[0], ctypes.create_string_buffer(1), 1)
    elif kind == "file":
        os.mkfifo(path := f"{tempfile.mkdtemp()}/file")
        os.close(os.open(path, os.O_RDONLY))
    elif kind == "absent":
        torch = sys.modules["torch"]
        others = [rank for rank in range(torch.distributed.get_world_size()) if rank != torch.distributed.get_rank()]
        torch.distributed.recv(torch.zeros(1), src=others[0])
    elif kind == "slow":
        time.sleep(SLOW_S)
    elif kind == "assert":
        torch = sys.modules["torch"]
        torch._assert_async(torch.zeros(1, device="cuda"))
    elif kind == "reset":
        end_connections()
    elif kind == "poison":
        fail_disk()
    elif kind in ORDERED:
        function, name, value = ORDERED[kind]
        if getattr(ctypes.CDLL(None), function)(name, ctypes.c_long(value)):
            raise RuntimeError(f"the stand-in does not know {name.decode()}")
        if kind == "oom":  # in a step that allocates nothing new nobody would notice
            sys.modules["torch"].empty(1 << 28, device="cuda")
    else:
        raise Injected


def fail_disk() -> None:
    """Raises: OSError, as a file system does whose disk is gone."""
    raise OSError(errno.EIO, os.strerror(errno.EIO), INJECTED)


def end_connections() -> None:
    """Shut down every internet connection of this process, as a device on the way does that forgets them."""
    for descriptor in map(int, os.listdir("/proc/self/fd")):
        with contextlib.suppress(OSError):
            if stat.S_ISSOCK(os.fstat(descriptor).st_mode):
                with socket.socket(fileno=os.dup(descriptor)) as connection:
                    if connection.family in (socket.AF_INET, socket.AF_INET6):
                        connection.getpeername()  # a listener has none, and stays
                        connection.shutdown(socket.SHUT_RDWR)


def is_rehearsal() -> bool:
    """Return whether this process only rehearses a rank; False also where the plugin is not in use."""
    plugin = sys.modules.get("deadpool_plugin")
    return plugin is not None and plugin.is_rehearsal()
