"""Memory that this process may still take, before it takes it.

Rules of this file: the smallest of the kernel's MemAvailable and the headroom of every cgroup (v2 or v1) above this
process counts; page cache that a cgroup can drop, active or not, is headroom. Reads files only.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from ..core.types import Rank
from ..errors import MemoryShortage
from .arena import TOUCH_BYTES, GoingOn, SlotPair, arena_bytes, goes_on

_GIB = 1 << 30


class MemoryBudget(NamedTuple):
    """The memory that one authority leaves."""

    available_bytes: int
    name: str  # of the file that says so
    detail: str  # its numbers, for people


def _gib(size: int) -> str:
    return f"{size / _GIB:.2f} GiB"


def _table(path: Path) -> dict[str, int]:
    rows = (line.replace(":", " ").split() for line in path.read_text().splitlines())
    return {row[0]: int(row[1]) for row in rows if len(row) >= 2 and row[1].isdigit()}


def _cgroup_budgets(root: Path) -> Iterator[MemoryBudget]:
    membership = root / "proc/self/cgroup"
    for line in membership.read_text().splitlines() if membership.is_file() else []:
        hierarchy, controllers, path = line.split(":", 2)
        base, limit_name, usage_name, prefix = root / "sys/fs/cgroup", "memory.max", "memory.current", ""
        if "memory" in controllers.split(","):
            base, limit_name, usage_name = base / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes"
            prefix = "total_"
        elif hierarchy != "0" or controllers:
            continue
        inner = base / path.strip("/")  # absent inside a container that sees only its own part: then base is ours
        for folder in (inner, *inner.parents):
            if not folder.is_relative_to(base):
                break
            limit = (folder / limit_name).read_text().strip() if (folder / limit_name).is_file() else "max"
            if limit == "max" or int(limit) >= 1 << 60:
                continue
            usage, table = int((folder / usage_name).read_text()), _table(folder / "memory.stat")
            cache = sum(table.get(f"{prefix}{kind}_file", 0) for kind in ("inactive", "active"))
            detail = f"limit {_gib(int(limit))}, used {_gib(usage)} of which {_gib(cache)} can be dropped"
            yield MemoryBudget(int(limit) - usage + cache, str(folder / limit_name), detail)


def budgets(root: Path = Path("/")) -> list[MemoryBudget]:
    """Find everything that limits this process's memory, the tightest first."""
    available = _table(root / "proc/meminfo")["MemAvailable"] * 1024
    whole_host = MemoryBudget(available, str(root / "proc/meminfo"), f"MemAvailable {_gib(available)}")
    return sorted([whole_host, *_cgroup_budgets(root)], key=lambda budget: budget.available_bytes)


def check_memory(need_bytes: int, headroom_bytes: int, root: Path = Path("/")) -> None:
    """Raises: MemoryShortage unless `need_bytes` can be taken and `headroom_bytes` still be left."""
    found = budgets(root)
    if need_bytes + headroom_bytes <= found[0].available_bytes:
        return
    keeps = f"memory_headroom_gib keeps {_gib(headroom_bytes)} free"
    if need_bytes:
        need, sum_ = _gib(need_bytes), _gib(need_bytes + headroom_bytes)
        keeps = f"snapshots need {need} of host memory and {keeps}, together {sum_}"
    told = "; ".join(f"{budget.name}: {_gib(budget.available_bytes)} available ({budget.detail})" for budget in found)
    raise MemoryShortage(
        f"{keeps}, but only {_gib(found[0].available_bytes)} can be had on {os.uname().nodename} ({told})",
        remedy="give the job more memory, run fewer ranks per node, or lower memory_headroom_gib",
    )


class SlotMaker:
    """Makes slots while there is memory for them, and leaves `headroom_bytes` of it free. Thread: any."""

    def __init__(self, headroom_bytes: int = 0) -> None:
        self._headroom_bytes, self._asking = headroom_bytes, threading.Lock()
        self._untouched: dict[tuple[Rank, int], int] = {}  # rank and thread that are being served -> bytes to be taken

    def makes(self, rank: Rank) -> bool:
        return any(made == rank for made, _ in tuple(self._untouched))

    def check(self, need_bytes: int) -> None:
        """Raises: MemoryShortage unless so much can be had beside what is being made."""
        check_memory(need_bytes + sum(tuple(self._untouched.values())), self._headroom_bytes)

    def make(self, rank: Rank, header_bytes: int, payload_bytes: int, going_on: GoingOn = goes_on) -> SlotPair:
        """Make slots. Raises: MemoryShortage, what `going_on` raises. Blocks: about 0.6 s per GiB."""
        key, size = (rank, threading.get_ident()), arena_bytes(header_bytes, payload_bytes)

        def touched() -> None:
            self._untouched[key] = max(0, self._untouched[key] - TOUCH_BYTES)
            going_on()

        with self._asking:  # many ask at the same moment, when nobody has taken anything yet
            self.check(size)
            self._untouched[key] = size
        try:
            return SlotPair.create(rank, header_bytes, payload_bytes, touched)
        finally:
            del self._untouched[key]
