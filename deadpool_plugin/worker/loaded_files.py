"""Records of the checkpoint that a rank began with, but for its large tensors: a process that follows the rank later
needs no such file, and sees the objects that the rank saw.

A file is recorded if the script opened it in start-up and it belongs to a checkpoint: it lies in a folder from which
`torch.load` or torch.distributed.checkpoint read, or in one of the two folders above. Of a file of `torch.save` all is
recorded but the contents of large tensors, of a `.distcp` file the objects and small tensors this rank asked for, of
others everything. A process that follows is shown the record where the file is gone or was changed (`file_view`).
"""

from __future__ import annotations

import contextlib
import io
import os
import stat
import struct
import zipfile
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any, BinaryIO

from ..errors import Divergence
from .patching import Function, PatchSet, when_imported

SMALL_BYTES = 8192
"""Tensors up to it are recorded with the objects: counters, rates, random states (5 KB)."""
ALL_BYTES_MAX = 64 << 20  # of a rank's records, compressed
FOLDERS_ABOVE = 2
KEEP = "keep what a job has loaded when it began, a checkpoint above all, until the job has ended (save_total_limit)"
_FILESYSTEM = "torch.distributed.checkpoint.filesystem"
_LOCAL_HEADER, _NAMES_AT = 30, 26  # bytes of a file's header in an archive; where it has the lengths of what follows
_END_BYTES = 8192  # of an archive, which torch looks through in blocks of 4096 for the list of its files
Span = tuple[int, int]
"""The first byte, and the one after the last: of a file here, of a storage in light.py."""
Recorded = list[Any]
"""Plain data: path, what `os.stat` gave, and for a file the spans that are recorded, and these bytes (zlib)."""


class Loads:
    """The files of checkpoints that a rank's script loads in start-up. Until `finish`."""

    def __init__(self) -> None:
        import torch

        self._archives: set[str] = set()
        self._spans: defaultdict[str, set[Span]] = defaultdict(set)
        self._patches = PatchSet()
        self._patches.wrap(self._open, torch.serialization, "_open_zipfile_reader")
        self._is_on = True
        when_imported(_FILESYSTEM, self._watch_reader)

    def _watch_reader(self, filesystem: Any) -> None:
        if self._is_on:
            self._patches.wrap(self._read_data, filesystem.FileSystemReader, "read_data")

    def _open(self, original: Function, file: Any) -> Any:
        if isinstance(getattr(file, "name", None), str):
            self._archives.add(os.path.abspath(file.name))
        return original(file)

    def _read_data(self, original: Function, reader: Any, plan: Any, planner: Any) -> Any:
        for item in plan.items:
            found = reader.storage_data[item.storage_index]
            if item.type.name == "BYTE_IO" or found.length <= 2 * SMALL_BYTES:  # with what torch.save puts around it
                path = os.path.abspath(os.path.join(str(reader.path), found.relative_path))
                self._spans[path].add((found.offset, found.offset + found.length))
        return original(reader, plan, planner)

    def finish(self, opened: Iterable[str], limit_bytes: int) -> tuple[list[Recorded], list[str]]:
        """End with start-up. Returns: records, and the files that are too large for one. Blocks: reads these files.

        Args: opened: paths that the script has opened. limit_bytes: of one record, compressed.
        """
        self._is_on = False
        self._patches.undo()
        above = {above for path in self._archives | self._spans.keys() for above in _above(path)}
        paths = sorted(path for path in {*opened, *self._spans} if os.path.dirname(path) in above)
        records, too_large, left = list[Recorded](), list[str](), ALL_BYTES_MAX
        for path in paths:
            with contextlib.suppress(OSError):  # gone already
                record = self._record(path, limit_bytes)
                if record is None or len(record[-1]) > min(limit_bytes, left):
                    too_large.append(path)
                    continue
                left -= len(record[-1])
                records.append(record)
        for folder in sorted({above for path, *_ in records for above in _above(os.fsdecode(path))}):
            records.append([os.fsencode(folder), _stat(folder)])
        return records, too_large

    def _record(self, path: str, limit_bytes: int) -> Recorded | None:
        found = os.stat(path)
        if not stat.S_ISREG(found.st_mode):
            raise FileNotFoundError(path)
        with open(path, "rb") as file:
            spans = [(0, found.st_size)]
            if path in self._spans:
                spans = sorted(self._spans[path])
            elif path in self._archives:
                spans = _around_tensors(file, found.st_size)
            if sum(end - first for first, end in spans) > 16 * limit_bytes:  # no need to try
                return None
            parts = []
            for first, end in spans:
                file.seek(first)
                parts.append(file.read(end - first))
        return [os.fsencode(path), _stat(path), spans, zlib.compress(b"".join(parts), 1)]


def _above(path: str) -> list[str]:
    folders = []
    for _ in range(FOLDERS_ABOVE + 1):
        path = os.path.dirname(path)
        folders.append(path)
    return folders


def _stat(path: str) -> list[int]:
    found = os.stat(path)
    return [*found[:7], found.st_atime_ns, found.st_mtime_ns, found.st_ctime_ns]


def _around_tensors(file: BinaryIO, size: int) -> list[Span]:
    """Return what of an archive of `torch.save` is not the content of a large tensor."""
    spans, at = [], 0
    with zipfile.ZipFile(file) as archive:
        for one in sorted(archive.infolist(), key=lambda one: one.header_offset):
            if one.file_size > SMALL_BYTES and one.filename.split("/")[-2:-1] == ["data"]:
                file.seek(one.header_offset + _NAMES_AT)
                begin = one.header_offset + _LOCAL_HEADER + sum(struct.unpack("<HH", file.read(4)))
                if (end := min(begin + one.file_size, size - _END_BYTES)) > begin:
                    spans.append((at, begin))
                    at = end
    return [*spans, (at, size)]


class RecordedFile(io.RawIOBase):
    """A file that is gone or was changed, by its record. What that lacks is read from the file if it is the same.

    Raises: Divergence where the file is needed, and is not.
    """

    def __init__(self, record: Recorded, open_file: Callable[[str], BinaryIO]) -> None:
        path, self._stat, spans, compressed = record
        self.name, self._open_file = os.fsdecode(path), open_file
        self._parts, body, at = [], zlib.decompress(compressed), 0
        for first, end in spans:
            self._parts.append((first, body[at : at + end - first]))
            at += end - first
        self._size, self._at = self._stat[6], 0
        self._real: BinaryIO | None = None

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._at = offset + (0, self._at, self._size)[whence]
        return self._at

    def readinto(self, buffer: Any) -> int:
        target = memoryview(buffer).cast("B")
        wanted = max(0, min(len(target), self._size - self._at))
        done = 0
        while done < wanted:
            piece = self._piece(self._at, wanted - done)
            target[done : done + len(piece)] = piece
            done += len(piece)
            self._at += len(piece)
        return done

    def _piece(self, at: int, size: int) -> bytes:
        for first, part in self._parts:
            if first <= at < first + len(part):
                return part[at - first : at - first + size]
        size = min([size, *(first - at for first, _ in self._parts if first > at)])
        real = self.real()
        real.seek(at)
        return real.read(size)

    def real(self) -> BinaryIO:
        """Open the file itself. Raises: Divergence if that is gone, or another one."""
        if self._real is None:
            try:
                file = self._open_file(self.name)
            except OSError as error:
                raise self._lost("is gone") from error
            found = os.fstat(file.fileno())
            is_same = found.st_size == self._size
            if is_same and found.st_mtime_ns != self._stat[8]:  # a copy of this host's, perhaps
                for first, part in self._parts:
                    file.seek(first)
                    is_same = is_same and file.read(len(part)) == part
            if not is_same:
                file.close()
                raise self._lost("was changed")
            self._real = file
        return self._real

    def _lost(self, how: str) -> Divergence:
        found = f"a tensor is needed of {self.name}, which {how} since the job began"
        return Divergence(found, "no use of it but for what a restore overwrites", KEEP)

    def close(self) -> None:
        if self._real is not None:
            self._real.close()
            self._real = None
        super().close()


def as_opened(record: Recorded, mode: str, open_file: Callable[[str], BinaryIO], *given: Any, **named: Any) -> Any:
    """Open a record as `open` opens a file for reading. `given`, `named`: the arguments behind `mode`."""
    raw = RecordedFile(record, open_file)
    if "b" in mode:
        return raw
    options = dict(zip(("buffering", "encoding", "errors", "newline"), given, strict=False)) | named
    buffered = io.BufferedReader(raw)
    return io.TextIOWrapper(buffered, options.get("encoding"), options.get("errors"), options.get("newline"))


def stat_of(record: Recorded) -> os.stat_result:
    values, (accessed, changed, created) = record[1], record[1][7:]
    seconds = [value // 10**9 for value in (accessed, changed, created)]
    exact = {"st_atime_ns": accessed, "st_mtime_ns": changed, "st_ctime_ns": created}
    return os.stat_result([*values[:7], *seconds], exact)


def is_same(record: Recorded, found: os.stat_result) -> bool:
    """Return whether a file that is there now is surely the recorded one."""
    return bool(found.st_size == record[1][6] and found.st_mtime_ns == record[1][8])
