"""Snapshots on disk: what agents leave of their memory when a job ends, and how the next job gets it back.

One folder for each host and occasion, `STORE_DIR/JOB/GENERATION.STEP/nodeN/` (`nodeN.end/` of a job that has ended),
which appears whole or not at all: it is written beside, synced, and renamed. Numbers are little endian.

| file | content |
|---|---|
| `manifest` | `deadpool`, the version (u32), length (u64) and xxh3 (u64) of the rest: `Manifest` in msgpack |
| `rankR.stepS.payload` | the bytes of a snapshot as they lie in the arena |
| `rankR.recording` | what a process needs to go through the rank's script again |
| `rankR.history` | msgpack: the call records of all steps up to the newest, in rows as they lie in memory |

Rules of this file: the manifest has a checksum of every other file, and nothing is used before it is verified. Nothing
in a file is executed. A file that somebody else could have written is refused.
"""

from __future__ import annotations

import contextlib
import fcntl
import io
import os
import shutil
import stat
import struct
import time
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import NamedTuple

import msgspec
import xxhash

from ..core.types import Count, Digest, Generation, Holding, NodeId, Rank, Step, listed
from ..errors import DeadpoolError, StorageError
from .arena import SlotPair, Sums, decode_header
from .records import NotHeld
from .store import CorruptSnapshot, SnapshotStore
from .wire import FRAME_BYTES, frames

VERSION = 1
_MAGIC = b"deadpool"
_HEAD = struct.Struct("<8sIQQ")
_MANIFEST = "manifest"
MANIFEST_BYTES_MAX = 1 << 30
MAKE_ATTEMPTS = 5
CLAIM_S = 2.0  # for others of the same job, which claim at the same moment
Records = list[bytes]


class StoredFile(msgspec.Struct, frozen=True, array_like=True):
    """One file. `sums`: xxh3 of every frame."""

    bytes: Count
    sums: tuple[Digest, ...]


class StoredSnapshot(msgspec.Struct, frozen=True, array_like=True):
    """A snapshot. `payload` is None where the payload is in the file of a replica."""

    rank: Rank
    step: Step
    generation: Generation  # in which it was taken
    replicas: tuple[Rank, ...]
    paired: Digest
    header: bytes  # encoded
    payload: StoredFile | None = None


class StoredRank(msgspec.Struct, frozen=True, array_like=True):
    """The script of one rank: how it began, and the results of its calls in steps `first` to `last`."""

    rank: Rank
    recording: StoredFile
    history: StoredFile
    first: Step  # later than the first step of the job where older records were dropped
    last: Step


class Manifest(msgspec.Struct, frozen=True):
    """The content of one folder, and the job that left it. `command`: the script and its arguments."""

    job: str
    node: NodeId
    generation: Generation
    step: Step  # the newest one known to be committed
    ranks_total: Count
    command: list[str]
    versions: dict[str, str]
    snapshots: tuple[StoredSnapshot, ...] = ()
    ranks: tuple[StoredRank, ...] = ()
    frame_bytes: Count = FRAME_BYTES

    @property
    def nbytes(self) -> int:
        files = [one.payload for one in self.snapshots if one.payload is not None]
        files += [file for one in self.ranks for file in (one.recording, one.history)]
        return sum(file.bytes for file in files)


_manifest: msgspec.msgpack.Decoder[Manifest] = msgspec.msgpack.Decoder(Manifest)
_records: msgspec.msgpack.Decoder[Records] = msgspec.msgpack.Decoder(Records)


def folder_of(store_dir: Path, manifest: Manifest, suffix: str = "") -> Path:
    return store_dir / manifest.job / f"{manifest.generation}.{manifest.step}" / f"node{manifest.node}{suffix}"


# ---- writing


class Overtaken(DeadpoolError):
    """Training has replaced a snapshot in memory before it was copied."""


def write(
    store_dir: Path, manifest: Manifest, store: SnapshotStore, *, of_ranks: Collection[Rank] | None = None
) -> Manifest:
    """Write what `store` holds of step `manifest.step`; complete `manifest` with it, and return it.

    Where nothing is held, nothing is written.
    Args: of_ranks: training goes on: write the snapshots of that step of all these ranks, or nothing, and copy them
    before any is synced. Otherwise newer steps are written, too, and what was left half-way is left out.
    Raises: StorageError or Overtaken, and nothing is left then. Blocks: for the disk.
    """
    running, held = of_ranks is not None, [one for one in store.holdings() if one.step >= manifest.step]
    if not held and not running:
        return manifest
    folder = folder_of(store_dir, manifest, "" if running else ".end")
    draft = _draft_of(folder)
    try:
        _make(draft)
        wanted = [one for one in held if one.step == manifest.step] if running else held
        snapshots = tuple(_written_snapshots(draft, wanted, store, running))
        if gone := sorted({*(of_ranks or ())} - {one.rank for one in snapshots}):
            raise Overtaken(f"step {manifest.step} of rank(s) {listed(gone)} is not in memory any more")
        ranks = tuple(_written_rank(draft, store, rank) for rank in sorted({one.rank for one in snapshots}))
        if running and any(one.last < manifest.step or not one.recording.bytes for one in ranks):
            raise Overtaken(f"records of step {manifest.step} are not in memory any more")
        manifest = msgspec.structs.replace(manifest, snapshots=snapshots, ranks=ranks)
        body = msgspec.msgpack.encode(manifest)
        head = _HEAD.pack(_MAGIC, VERSION, len(body), xxhash.xxh3_64_intdigest(body))
        _write_file(draft / _MANIFEST, memoryview(head + body))
        for path in draft.iterdir():
            _sync(path)
        _sync(draft)
        draft.rename(folder)
        for changed in (folder.parent, folder.parent.parent, store_dir):
            _sync(changed)
        return manifest
    except BaseException as error:
        shutil.rmtree(draft, ignore_errors=True)
        if isinstance(error, OSError):
            raise StorageError(f"{folder} cannot be written: {error.strerror or error}") from error
        raise


def _draft_of(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.draft")


def _make(draft: Path) -> None:
    """Make the folder of a draft, and those above it, anew; another host may remove an empty one at the same moment."""
    shutil.rmtree(draft, ignore_errors=True)
    for attempt in range(MAKE_ATTEMPTS):
        try:
            draft.parent.parent.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            for new in (draft.parent.parent, draft.parent, draft):
                new.mkdir(mode=0o700, exist_ok=True)
            return
        except FileNotFoundError:
            if attempt == MAKE_ATTEMPTS - 1:
                raise


def _written_snapshots(
    folder: Path, wanted: Iterable[Holding], store: SnapshotStore, running: bool
) -> Iterable[StoredSnapshot]:
    for holding in wanted:
        try:
            snapshot = store.readable(holding.rank, holding.step, payload=holding.payload)
            path, file = folder / _payload(holding.rank, holding.step), None
            if holding.payload:
                file = _write_file(path, snapshot.payload)
                if not running:  # at once, or dirty pages would pile up
                    _sync(path)
            store.check_read(snapshot, file.sums if file is not None else ())
        except (NotHeld, CorruptSnapshot) as error:
            if running:
                raise Overtaken(str(error)) from error
            continue
        its = holding.rank, holding.step, snapshot.header.generation, holding.replicas, holding.paired
        yield StoredSnapshot(*its, snapshot.encoded, file)


def _written_rank(folder: Path, store: SnapshotStore, rank: Rank) -> StoredRank:
    history = store.history(rank)
    first, last = history.first, history.last  # while the job runs, the next snapshot may come with more
    records = msgspec.msgpack.encode(history.get(first, last) if last >= 0 else [])
    recording = _write_file(folder / f"rank{rank}.recording", memoryview(store.recordings.get(rank, b"")))
    file = _write_file(folder / f"rank{rank}.history", memoryview(records))
    return StoredRank(rank, recording, file, first, last)


def _payload(rank: Rank, step: Step) -> str:
    return f"rank{rank}.step{step}.payload"


def _write_file(path: Path, content: memoryview) -> StoredFile:
    sums = list[int]()
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        for frame in frames(content):
            sums.append(xxhash.xxh3_64_intdigest(frame))  # it is in the cache then
            while len(frame):
                frame = frame[os.write(descriptor, frame) :]
    finally:
        os.close(descriptor)
    return StoredFile(len(content), tuple(sums))


def _sync(path: Path) -> None:
    """Have a file or folder on the disk, and out of the page cache: nobody reads it soon."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)


# ---- reading


def claim(job_dir: Path, job: str) -> None:
    """Keep the folder of an earlier job for `job`, the one that goes on from it, while this process lives.

    Raises: StorageError if another one has it. Blocks: for the disk.
    """
    path, taken = job_dir / ".resumed", ""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)  # never closed
        deadline = time.monotonic() + CLAIM_S
        while time.monotonic() < deadline:
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)  # nobody has it
                os.ftruncate(descriptor, 0)
                os.pwrite(descriptor, job.encode(), 0)
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
                taken = os.pread(descriptor, len(job) + 1, 0).decode(errors="replace")
                if taken == job:
                    return
                fcntl.flock(descriptor, fcntl.LOCK_UN)
            time.sleep(0.05)
    except OSError:  # a copy that cannot be written to, or storage without locks: nobody can know
        return
    raise StorageError(
        f"job {taken or 'unknown'} goes on from {job_dir} already",
        "one job that does",
        "end that one (`deadpool stop`), or wait until it has ended",
    )


class Shelf(NamedTuple):
    """A folder on this host, and what it holds."""

    folder: Path
    manifest: Manifest


def shelves(job_dir: Path) -> tuple[list[Shelf], list[str]]:
    """Find the complete folders of one job. Returns: them; why others that are there cannot be used.

    Raises: StorageError if `job_dir` cannot be read. Blocks: for the disk.
    """
    found, problems = list[Shelf](), list[str]()
    try:
        folders = [path for path in sorted(job_dir.glob("*.*/node*")) if path.is_dir()]
    except OSError as error:
        raise StorageError(f"{job_dir} cannot be read: {error.strerror or error}") from error
    for folder in folders:
        try:
            found.append(Shelf(folder, load(folder)))
        except StorageError as error:
            problems.append(str(error))
    return found, problems


def load(folder: Path) -> Manifest:
    """Read the manifest of one folder. Raises: StorageError."""
    path = folder / _MANIFEST
    content = _read(path, MANIFEST_BYTES_MAX)
    magic, version, length, digest = _HEAD.unpack_from(content) if len(content) >= _HEAD.size else (b"", 0, 0, 0)
    if magic != _MAGIC:
        raise StorageError(f"{path} is no manifest of a job's state")
    if version != VERSION:
        raise StorageError(f"{path} has format {version}", f"format {VERSION}, which this version of the plugin reads")
    body = memoryview(content)[_HEAD.size :]
    if len(body) != length or xxhash.xxh3_64_intdigest(body) != digest:
        raise StorageError(f"{path} is damaged: its checksum does not fit, or {len(body)} bytes are not {length}")
    try:
        manifest = _manifest.decode(body)
        for one in manifest.snapshots:
            decode_header(one.header, one.rank, one.step)
    except (msgspec.MsgspecError, DeadpoolError) as error:
        raise StorageError(f"{path} cannot be read: {error}") from error
    if manifest.frame_bytes != FRAME_BYTES:
        raise StorageError(f"{path} has checksums of {manifest.frame_bytes} bytes each", f"{FRAME_BYTES}")
    return manifest


def read_snapshot(folder: Path, snapshot: StoredSnapshot, pair: SlotPair) -> bytes:
    """Bring a snapshot into a slot of `pair`, and seal it as one from before the job's first generation.

    Returns: its new header, encoded. Raises: StorageError, ConfigError. Blocks: for the disk.
    """
    header = decode_header(snapshot.header, snapshot.rank, snapshot.step)
    pair.invalidate(snapshot.step)
    if snapshot.payload is not None:
        into = pair.payload(snapshot.step)[: header.payload_bytes]
        path = folder / _payload(snapshot.rank, snapshot.step)
        if len(into) != snapshot.payload.bytes:
            raise StorageError(f"{path} has {snapshot.payload.bytes} bytes", f"{len(into)}")
        _fill(path, into, snapshot.payload)
    # Generations begin anew in each job: what this one writes is newer than what it began with.
    encoded = msgspec.msgpack.encode(msgspec.structs.replace(header, generation=0))
    pair.seal_encoded(snapshot.step, encoded)
    return encoded


def read_recording(folder: Path, one: StoredRank) -> bytes:
    return _checked(folder / f"rank{one.rank}.recording", one.recording)


def read_history(folder: Path, one: StoredRank) -> Records:
    """Read the records of a rank, as `CallHistory.append` takes them. Raises: StorageError."""
    path = folder / f"rank{one.rank}.history"
    try:
        return _records.decode(_checked(path, one.history))
    except msgspec.MsgspecError as error:
        raise StorageError(f"{path} cannot be read: {error}") from error


def _checked(path: Path, file: StoredFile) -> bytes:
    content = bytearray(file.bytes)
    _fill(path, memoryview(content), file)
    return bytes(content)


def _fill(path: Path, into: memoryview, file: StoredFile) -> None:
    sums: Sums = ()
    try:
        with _opened(path) as stream:
            size = os.fstat(stream.fileno()).st_size
            if size == file.bytes:
                sums = tuple(_sums_read(stream, into))
    except OSError as error:
        raise StorageError(f"{path} cannot be read: {error.strerror or error}") from error
    if size != file.bytes:
        raise StorageError(f"{path} has {size} bytes", f"{file.bytes}, as its manifest says")
    if sums != file.sums:
        wrong = [at for at, (found, expected) in enumerate(zip(sums, file.sums, strict=False)) if found != expected]
        raise StorageError(f"{path} is damaged: {len(wrong)} of {len(sums)} checksums do not fit")


def _sums_read(stream: io.FileIO, into: memoryview) -> Iterable[int]:
    for frame in frames(into):
        if stream.readinto(frame) != len(frame):
            raise OSError("it ends early")
        yield xxhash.xxh3_64_intdigest(frame)


def _read(path: Path, most: int) -> bytes:
    try:
        with _opened(path) as stream:
            return bytes(stream.read(most))
    except OSError as error:
        raise StorageError(f"{path} cannot be read: {error.strerror or error}") from error


def _opened(path: Path) -> io.FileIO:
    """Open a file of this user's. Raises: OSError; StorageError if another user could have written it."""
    stream = io.FileIO(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC))
    status = os.fstat(stream.fileno())
    if stat.S_ISREG(status.st_mode) and status.st_uid == os.getuid() and not status.st_mode & 0o022:
        return stream
    stream.close()
    mode = f"mode {stat.S_IMODE(status.st_mode):o}, owner {status.st_uid}"
    raise StorageError(f"{path} ({mode}) may have been written by others", "your own file, writable by nobody else")


def remove(folder: Path) -> None:
    """Remove a folder of `write`, as a whole to whoever looks, and the one above if that is empty then."""
    with contextlib.suppress(OSError):
        folder.rename(_draft_of(folder))
        shutil.rmtree(_draft_of(folder), ignore_errors=True)
        folder.parent.rmdir()
