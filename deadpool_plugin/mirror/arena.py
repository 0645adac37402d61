"""Two snapshot slots of one rank in one memfd, shared by descriptor between agent and worker; the memory for them.

Rules of this file: a snapshot is written over the older one, or whatever its writer need not keep. A writer calls
`invalidate(step, keep)`, writes `payload(step)`, and calls `seal(step, ...)`. The header is written last and its digest
makes a torn one invalid, so a writer killed at any point leaves the other slot whole and this one invalid. The payload
carries no digest of its own (it would cost training time); its transfer does (wire.py). The gate (core/chain.py)
decides when a slot may be overwritten. Behind the slots lie the generation that the agent has announced, and the rank's
flight recorder.

Slots are made while there is memory: the smallest of the kernel's MemAvailable and the headroom of every cgroup (v2 or
v1) above this process. Page cache that a cgroup can drop, active or not, is headroom.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
import struct
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec
import xxhash

from ..core.types import NO_STEP, Count, Digest, Generation, Rank, Step
from ..errors import ConfigError, MemoryShortage, TransportError, invariant
from ..transport import linux
from ..transport.flight_recorder import AREA_BYTES
from ..transport.linux import libc

PAGE_BYTES = mmap.PAGESIZE
_PREFIX = struct.Struct("<8sQQq")  # magic, length of the encoded header, its xxh3, the step
_GENERATION = struct.Struct("<Q")
_MAGIC = b"deadpool"
_SEALS = linux.F_SEAL_SHRINK | linux.F_SEAL_GROW | linux.F_SEAL_SEAL
_MADV_DONTDUMP = 16
_MADV_POPULATE_WRITE = 23  # Linux 5.14
TOUCH_BYTES = 8 << 20  # some 5 ms, ten times that on a loaded host
SMALL_BYTES = 64 << 20  # slots up to this size are freed by the caller itself
Sums = tuple[Digest, ...]  # xxh3 of every frame of a payload, in order; none where only the header is held
GoingOn = Callable[[], None]  # called again and again while slots are made; what it raises ends that


def goes_on() -> None: ...


class SnapshotHeader(msgspec.Struct, frozen=True, array_like=True):
    """The header of a sealed slot. `payload_bytes` is the rank's, also where only the header is held."""

    rank: Rank
    step: Step
    generation: Generation
    layout_hash: str
    payload_bytes: Count
    scalars: bytes
    paired: Digest = 0  # the sum of the rank's collectives in that generation (transport/flight_recorder.py)


class Snapshot(NamedTuple):
    """A snapshot that was found whole in its slot. The view keeps the memory, whose content may change."""

    pair: SlotPair
    header: SnapshotHeader
    encoded: bytes
    digest: int  # the xxh3 of `encoded`: it tells the snapshots that a slot has held apart
    payload: memoryview
    slot: int


_decode = msgspec.msgpack.Decoder(SnapshotHeader).decode


def _rounded_up(size: int) -> int:
    return -(-size // PAGE_BYTES) * PAGE_BYTES


def arena_bytes(header_bytes: int, payload_bytes: int) -> int:
    """Return the memory that one SlotPair takes: two slots, a page for the agent, and the flight recorder."""
    return 2 * (_rounded_up(header_bytes) + _rounded_up(payload_bytes)) + PAGE_BYTES + AREA_BYTES


class SlotPair:
    """The two slots of one rank; `payload_bytes` is 0 if only headers are mirrored. One writer at a time per slot."""

    def __init__(self, fd: int, rank: int, header_bytes: int, payload_bytes: int) -> None:
        self.fd, self.rank = fd, rank
        self.header_bytes, self.payload_bytes = header_bytes, payload_bytes
        # Slot -> digest of a header, checksums of its payload's frames when they were first sent or received here.
        self.sums: dict[int, tuple[int, Sums]] = {}
        self._writing = (NO_STEP, 0)  # the step that was begun last, and its slot
        self._payload_at = _rounded_up(header_bytes)
        self._slot_bytes = self._payload_at + _rounded_up(payload_bytes)
        self._view = self._mapped(arena_bytes(header_bytes, payload_bytes))

    def _mapped(self, size: int) -> memoryview:
        self._map = mmap.mmap(self.fd, size, mmap.MAP_SHARED)
        self._map.madvise(_MADV_DONTDUMP)  # or every core dump, of a worker or of the agent, would have it all
        return memoryview(self._map)

    @classmethod
    def create(cls, rank: int, header_bytes: int, payload_bytes: int, going_on: GoingOn = goes_on) -> SlotPair:
        """Make empty slots whose pages are all in memory, TOUCH_BYTES between two calls of `going_on`.

        Raises: MemoryShortage if the kernel gives no memory, descriptor or address space for it.
        Blocks: about 0.6 s per GiB (first touch), ten times that on a loaded host; call it in a thread.
        """
        size = arena_bytes(header_bytes, payload_bytes)
        try:
            fd = linux.memfd_create(f"deadpool-rank{rank}", linux.MFD_CLOEXEC | linux.MFD_ALLOW_SEALING)
            with contextlib.ExitStack() as undo:
                undo.callback(os.close, fd)
                os.ftruncate(fd, size)
                fcntl.fcntl(fd, linux.F_ADD_SEALS, _SEALS)
                pair = cls(fd, rank, header_bytes, payload_bytes)
                undo.pop_all()
                undo.callback(pair.close)
                pair._touch(going_on)
                undo.pop_all()
        except OSError as error:
            raise MemoryShortage(f"slots of {size} bytes for rank {rank} cannot be made: {error}") from error
        return pair

    @classmethod
    def attach(cls, fd: int, rank: int, header_bytes: int, payload_bytes: int) -> SlotPair:
        """Take over a descriptor of the agent's, and map its slots. Raises: TransportError if their shape differs."""
        expected, found = arena_bytes(header_bytes, payload_bytes), os.fstat(fd).st_size
        if found != expected:
            raise TransportError(f"the arena of rank {rank} has {found} bytes, expected {expected}")
        if fcntl.fcntl(fd, linux.F_GET_SEALS) & _SEALS != _SEALS:
            raise TransportError(f"the arena of rank {rank} is not sealed against resizing")
        return cls(fd, rank, header_bytes, payload_bytes)

    def _touch(self, going_on: GoingOn) -> None:
        # Every page is taken, zeroed and mapped now, so that the first snapshot costs no more than others.
        # Nothing here holds the interpreter lock (mmap's own madvise does), and with it the agent's event loop.
        address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        for start in range(0, len(self._map), TOUCH_BYTES):
            size = min(TOUCH_BYTES, len(self._map) - start)
            try:
                if libc.madvise(ctypes.c_void_p(address + start), ctypes.c_size_t(size), _MADV_POPULATE_WRITE):
                    error = ctypes.get_errno()
                    if error != errno.EINVAL:
                        raise OSError(error, os.strerror(error))
                    # An older kernel takes the pages first: a plain write that finds no memory is the process's end
                    # (SIGBUS), and fallocate alone leaves zeroing and mapping to whoever writes first.
                    os.posix_fallocate(self.fd, start, size)
                    ctypes.memset(address + start, 0, size)
            except OSError as failure:
                raise OSError(failure.errno, f"{failure.strerror} after {start} bytes") from failure
            going_on()

    def _slot(self, slot: int) -> memoryview:
        return self._view[slot * self._slot_bytes :]

    def step_in(self, slot: int) -> Step:
        """Return the step of which the slot says that it holds the snapshot; NO_STEP if it holds none."""
        view = self._slot(slot)
        if len(view) < _PREFIX.size:  # closed
            return NO_STEP
        magic, _, _, step = _PREFIX.unpack_from(view)
        return int(step) if magic == _MAGIC else NO_STEP

    def slot_of(self, step: Step, keep: Step = NO_STEP) -> int:
        """Return the slot in which `step` is or is being written, else that to write it to: not that of `keep`."""
        invariant(step >= 0, "snapshots have steps from 0 on")
        held = [self.step_in(slot) for slot in (0, 1)]
        if step in held:
            return held.index(step)
        written, slot = self._writing
        if written == step and held[slot] == NO_STEP:  # else it was sealed, emptied, and then written by somebody else
            return slot
        if keep >= 0 and keep in held:
            return 1 - held.index(keep)
        # A newer one is of a history that did not happen; else the older one goes.
        worth = [(one != NO_STEP, one < step, one) for one in held]
        return worth.index(min(worth))

    def payload_in(self, slot: int) -> memoryview:
        return self._slot(slot)[self._payload_at : self._payload_at + self.payload_bytes]

    def payload(self, step: Step) -> memoryview:
        """Return the bytes of the slot of `step`, writable, page-aligned; valid only if `open(step)` says so."""
        return self.payload_in(self.slot_of(step))

    @property
    def announced(self) -> int:
        """The newest generation that the agent has announced here, 0 before it has."""
        return int(_GENERATION.unpack_from(self._view, 2 * self._slot_bytes)[0])

    def announce(self, generation: int) -> None:
        _GENERATION.pack_into(self._view, 2 * self._slot_bytes, generation)

    @property
    def calls(self) -> memoryview:
        """The memory of the rank's flight recorder; its process writes there."""
        start = 2 * self._slot_bytes + PAGE_BYTES
        return self._view[start : start + AREA_BYTES]

    def invalidate(self, step: Step, keep: Step = NO_STEP) -> Step:
        """Empty the slot for `step`; call before the first byte is written to its payload. Returns: what was in it."""
        slot = self.slot_of(step, keep)
        self._writing = step, slot
        return self._empty(slot)

    def _empty(self, slot: int) -> Step:
        before = self.step_in(slot)
        self._slot(slot)[: _PREFIX.size] = bytes(_PREFIX.size)
        return before

    def drop_newer(self, step: Step) -> None:
        """Empty the slots that hold later snapshots."""
        for slot in (0, 1):
            if self.step_in(slot) > step:
                self._empty(slot)

    def seal(self, step: int, generation: int, layout_hash: str, scalars: bytes, paired: int = 0) -> None:
        """Declare the slot's payload complete. Raises: ConfigError if the `scalars` do not fit into the header."""
        header = SnapshotHeader(self.rank, step, generation, layout_hash, self.payload_bytes, scalars, paired)
        self.seal_encoded(step, msgspec.msgpack.encode(header))

    def seal_encoded(self, step: int, encoded: bytes) -> None:
        """Seal a slot with a header taken from another slot. Raises: ConfigError."""
        need = _PREFIX.size + len(encoded)
        if need > self.header_bytes:
            raise ConfigError(
                f"the snapshot header of rank {self.rank}, step {step} (its scalars) takes {need} bytes, "
                f"there is room for {self.header_bytes}: set header_kib to at least {-(-need // 1024)}"
            )
        self.invalidate(step)
        slot = self._slot(self._writing[1])
        slot[_PREFIX.size : need] = encoded
        slot[: _PREFIX.size] = _PREFIX.pack(_MAGIC, len(encoded), xxhash.xxh3_64_intdigest(encoded), step)

    def sealed(self, step: int) -> Snapshot | None:
        """Read and verify the header of `step`; None if no slot holds it."""
        number = next((slot for slot in (0, 1) if step >= 0 and self.step_in(slot) == step), None)
        if number is None:
            return None
        slot = self._slot(number)
        magic, length, digest, _ = _PREFIX.unpack_from(slot)
        if magic != _MAGIC or length > self.header_bytes - _PREFIX.size:
            return None
        encoded = bytes(slot[_PREFIX.size : _PREFIX.size + length])
        if xxhash.xxh3_64_intdigest(encoded) != digest:
            return None
        header = _decode(encoded)
        if (header.rank, header.step) != (self.rank, step):
            return None
        return Snapshot(self, header, encoded, digest, self.payload_in(number)[: header.payload_bytes], number)

    def open(self, step: int) -> SnapshotHeader | None:
        """Read the header of snapshot `step`; None if the slot does not hold it whole."""
        return snapshot.header if (snapshot := self.sealed(step)) else None

    def close(self) -> None:
        """Close the descriptor; the memory goes when the last view on it does (a tensor may still look at it)."""
        os.close(self.fd)
        self.fd = -1
        self._view = memoryview(b"")
        del self._map


def decode_header(encoded: bytes, rank: Rank, step: Step) -> SnapshotHeader:
    """Decode a header that has travelled. Raises: TransportError if it is none, or another snapshot's."""
    try:
        header = _decode(encoded)
    except msgspec.MsgspecError as error:
        raise TransportError(f"cannot read a snapshot header of {len(encoded)} bytes: {error}") from error
    if (header.rank, header.step) != (rank, step):
        raise TransportError(f"the header of rank {header.rank}, step {header.step}", f"rank {rank}, step {step}")
    return header


def free(*pairs: SlotPair | None) -> None:
    """Close slots nobody uses any more; large ones, which take about 0.1 s per GiB, on a thread of their own."""
    for pair in pairs:
        if pair is not None and arena_bytes(pair.header_bytes, pair.payload_bytes) <= SMALL_BYTES:
            pair.close()
        elif pair is not None:
            threading.Thread(target=pair.close, name="deadpool-free", daemon=True).start()


# ---- the memory that is left for slots


class MemoryBudget(NamedTuple):
    """The memory that one authority leaves."""

    available_bytes: int
    name: str  # of the file that says so
    detail: str  # its numbers, for people


def _gib(size: int) -> str:
    return f"{size / (1 << 30):.2f} GiB"


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
