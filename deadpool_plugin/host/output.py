"""Output for people: rank files and event log on one thread, the launcher's pipe on another, and no line twice.

A replacement's script goes on right behind the cut of the restore step. What the lost process printed behind that cut
is in its rank's file, wherever it ran, and the files of cuts beside it say where the cut is. Such lines are dropped,
once each. A line counts as the same if its words are, whatever its numbers (times differ), within the same step.

Rules of this file: the event loop never waits for a disk or for a launcher that does not read, and the files never for
the launcher; what a bounded queue cannot hold is dropped and counted; a broken pipe ends forwarding, nothing else.
A repeated line is better than a lost one, so what cannot be read drops nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import math
import os
import re
import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from io import FileIO
from itertools import pairwise
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Self, TextIO

import msgspec

from ..core.types import NO_STEP, NodeId, Rank, Step

Printed = dict[Step, Counter[bytes]]
"""Step -> the words of the lines printed behind its cut, up to the next one, and how often."""
QUEUE_BYTES_MAX = 16 << 20
LINE_BYTES_MAX = 64 << 10
SAID_EVERY_S = 3600.0
"""Between two words about files that cannot be written."""
LOOK_EVERY_S = 10.0
"""Between two looks whether a file that is written to is still there."""
READ_S = 1.0
"""How long a take-over waits for the file system."""
CUTS_BYTES = 1 << 16
"""Size of each of the two files of cuts: about 900 cuts. A takeover needs those of the last two steps."""
_CLOSE_S = 2.0
_READ_BYTES = 1 << 16
_NUMBERS = re.compile(rb"[0-9]+([.:,][0-9]+)*([eE][+-]?[0-9]+)?")


def say(text: str, to: TextIO | None = None) -> None:
    """Print lines of the plugin's. A closed terminal or pipe is no error: nothing more is written to it."""
    stream = to or sys.stdout
    try:
        print("\n".join(f"[deadpool] {line}" for line in text.split("\n")), file=stream, flush=True)
    except OSError:
        with open(os.devnull, "wb") as nowhere:
            os.dup2(nowhere.fileno(), stream.fileno())


def rank_file(output_dir: Path, rank: Rank, node: NodeId) -> Path:
    return output_dir / f"rank{rank:04d}.node{node}.log"


class LogFile(FileIO):
    """The file that a lane writes to. It is closed when nobody has it any more."""

    broken = False
    """Its reader is gone, and does not come back."""
    cut = False
    """It ends within a line."""
    looked_at = -math.inf

    @classmethod
    def of_another(cls, descriptor: int) -> Self:
        """Write to a file that is somebody else's: what becomes of it is not looked at, and it is not closed."""
        file = cls(descriptor, "w", closefd=False)
        file.looked_at = math.inf
        return file


class Lane:
    """Writes to files, in order, on a thread of its own. Thread: any."""

    def __init__(self, name: str) -> None:
        self._queue: SimpleQueue[Callable[[], object] | None] = SimpleQueue()
        self._lock = threading.Lock()
        self._queued_bytes = self._dropped_bytes = 0
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while (work := self._queue.get()) is not None:
            try:
                work()
            except OSError as error:
                self._not_kept(error.strerror or str(error))

    def _not_kept(self, why: str) -> None:
        """Take note that something was dropped. Thread: any."""

    def write(self, file: LogFile, data: bytes) -> None:
        """Queue `data` for `file`; dropped if too much is queued. Blocks: never."""
        if not data:
            return
        with self._lock:
            fits = self._queued_bytes + len(data) <= QUEUE_BYTES_MAX
            if fits:
                self._queued_bytes += len(data)
        if fits:
            self._queue.put(lambda: self._write(file, data))
        else:
            self._drop(len(data), f"more than {QUEUE_BYTES_MAX >> 20} MiB wait to be written")

    def _write(self, file: LogFile, data: bytes) -> None:
        view, begun = memoryview(b"\n" + data if file.cut else data), False
        try:
            while view and not file.broken:
                view = view[os.write(file.fileno(), view) :]
                begun = True
            file.cut = False
        except OSError as error:  # a disk that is full may have room later, for a line of its own
            file.broken, file.cut = error.errno == errno.EPIPE, file.cut or begun
            self._drop(len(view), error.strerror or str(error))
        with self._lock:
            self._queued_bytes -= len(data)
        now = time.monotonic()
        if now - file.looked_at >= LOOK_EVERY_S:
            file.looked_at = now
            if not os.fstat(file.fileno()).st_nlink:  # writing to it succeeds, and nobody can read it
                self._drop(len(data), "a file was removed that is still written to")

    def _drop(self, size: int, why: str) -> None:
        self._dropped_bytes += size
        self._not_kept(why)

    def close(self) -> None:
        """Write what is queued, within a short deadline."""
        self._queue.put(None)
        self._thread.join(_CLOSE_S)


class StderrHandler(logging.Handler):
    """Log records on their way to standard error, which may be a full pipe, or a file on a disk that hangs."""

    def __init__(self, stderr: int = 2) -> None:
        super().__init__()
        self._lane, self._file = Lane("deadpool-stderr"), LogFile.of_another(stderr)
        self.setFormatter(logging.Formatter("[deadpool] %(message)s"))

    def emit(self, record: logging.LogRecord) -> None:
        self._lane.write(self._file, f"{self.format(record)}\n".encode())

    def close(self) -> None:
        """Write what is queued, within a short deadline."""
        self._lane.close()
        super().close()


class Writer(Lane):
    """Appends to files, and forwards to the launcher on a lane of its own. Thread: any."""

    def __init__(self, launcher: int = 1) -> None:
        super().__init__("deadpool-files")
        self._pipe, self._launcher = LogFile.of_another(launcher), Lane("deadpool-launcher")
        self._said_at = -math.inf

    @property
    def dropped_bytes(self) -> int:
        return self._dropped_bytes + self._launcher._dropped_bytes

    def open(self, path: Path) -> LogFile:
        """Open a file to append to, made with its folder. Blocks: for the file system. Raises: OSError."""
        path.parent.mkdir(parents=True, exist_ok=True)
        return LogFile(path, "a", opener=lambda name, flags: os.open(name, flags, 0o644))

    def open_later(self, path: Path) -> LogFile:
        """Open it on the thread that writes; if that fails, the terminal has the reason. Blocks: never."""
        file = LogFile(os.devnull, "a")

        def work() -> None:
            with self.open(path) as opened:
                os.dup2(opened.fileno(), file.fileno(), inheritable=False)

        self._queue.put(work)
        return file

    def empty(self, file: LogFile) -> None:
        """Make `file` empty once what is queued for it has been written. Blocks: never."""

        def work() -> None:
            file.truncate(0)
            file.cut = False

        self._queue.put(work)

    def release(self, file: LogFile) -> None:
        """Close `file` once what is queued for it has been written."""
        self._queue.put(file.close)  # a shared file system may say only now that what was written is not kept

    def forward(self, data: bytes) -> None:
        self._launcher.write(self._pipe, data)

    def _not_kept(self, why: str) -> None:
        now = time.monotonic()
        if now - self._said_at >= SAID_EVERY_S:
            self._said_at = now
            lost = f"{os.uname().nodename} cannot write everything to output_dir"
            then = "training goes on; its logs and events have gaps until there is room again"
            self.forward(f"[deadpool] {lost}: {why}; {then}\n".encode())

    def close(self) -> None:
        """Write what is queued: the files first (a launcher that does not read must not hold us)."""
        super().close()
        self._launcher.close()


class Ring:
    """Two files that are written in turns: where one is full, the other begins anew. Thread: one.

    They hold the newest `bytes_max` of what this process wrote, and at most twice as much. Making it blocks for the
    file system, and raises OSError.
    """

    def __init__(self, writer: Writer, paths: tuple[Path, Path], bytes_max: int) -> None:
        self._writer, self._bytes_max, self._size = writer, bytes_max, 0
        self._files = [writer.open(path) for path in paths]
        for file in self._files:  # what is in them is of an earlier job
            writer.empty(file)

    def write(self, data: bytes) -> None:
        """Append `data`, whole lines. Blocks: never."""
        if self._size + len(data) > self._bytes_max:
            self._files.reverse()
            self._writer.empty(self._files[0])
            self._size = 0
        self._size += len(data)
        self._writer.write(self._files[0], data)


class LineBuffer:
    """A stream in whole lines, so that those of several ranks do not mix."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> bytes:
        """Take in `data`; return the whole lines that may be forwarded now."""
        data = self._rest + data
        end = data.rfind(b"\n") + 1 or (len(data) if len(data) > LINE_BYTES_MAX else 0)
        self._rest = data[end:]
        return data[:end]

    def flush(self) -> bytes:
        rest, self._rest = self._rest, b""
        return rest


class Repeats(LineBuffer):
    """A replacement's lines without those in `printed`, until the last step of it is over."""

    def __init__(self, printed: Printed, step: Step) -> None:
        super().__init__()
        self._printed, self._step = printed, step

    @property
    def over(self) -> bool:
        return not any(printed.total() for step, printed in self._printed.items() if step >= self._step)

    def reached(self, step: Step) -> None:
        """Note that later output is after the cut of `step` (a swap may go back to an earlier one)."""
        self._step = max(self._step, step)

    def without(self, data: bytes) -> bytes:
        """Return the whole lines so far that are new; after the last repeated one, all of `data`."""
        if self.over:
            return self.flush() + data
        left, kept = self._printed.get(self._step, Counter()), list[bytes]()
        for line in self.feed(data).splitlines(keepends=True):
            if left[said := words(line)] > 0:
                left[said] -= 1
            else:
                kept.append(line)
        return b"".join(kept) + (self.flush() if self.over else b"")


class Pipe:
    """The read end of a worker's output pipe on the running event loop: into its file, and forwarded if asked.

    Reading begins with the first `assign`, and never stalls: a worker never waits for a disk or a launcher.
    """

    def __init__(self, fd: int, writer: Writer) -> None:
        os.set_blocking(fd, False)
        self._fd, self._writer = fd, writer
        self._path: Path | None = None
        self._file: LogFile | None = None
        self._file_bytes: int | None = 0
        self._forward = False
        self._lines = LineBuffer()
        self._loop = asyncio.get_running_loop()
        self.repeats = Repeats({}, NO_STEP)
        """The lines that a lost process has printed already."""
        self.ended = asyncio.Event()

    @property
    def assigned(self) -> bool:
        return self._path is not None

    def assign(self, path: Path, forward: bool, file: LogFile | None = None, late: bool = False) -> None:
        """Write into `path` from now on; `forward` to our own standard output too. Blocks: to open it here.

        Args: file: `path`, opened already. late: it could not be opened in time; the thread that writes opens it.
        """
        if self.ended.is_set() or path == self._path:
            return
        if self._path is None:
            self._loop.add_reader(self._fd, self._read)
        self._release()
        self._path, self._forward, self._file_bytes = path, forward, None if late else 0
        try:
            self._file = self._writer.open_later(path) if late else file or self._writer.open(path)
            if not late:
                self._file_bytes = self._file.tell()
        except OSError as error:  # what is printed is not worth a node
            self._writer.forward(f"[deadpool] cannot write {path}, its output is lost: {error.strerror}\n".encode())

    def _release(self) -> None:
        if self._file is not None:
            self._writer.release(self._file)
            self._file = None

    def cut(self, step: Step) -> int | None:
        """Return how much is in the file at the cut of `step`, before which the process flushed; None if not known."""
        self._read()  # takes all that is in a pipe (64 KiB at most)
        self.repeats.reached(step)
        return self._file_bytes

    def _read(self) -> None:
        if self._path is None or self.ended.is_set():
            return
        with contextlib.suppress(BlockingIOError):
            if data := os.read(self._fd, _READ_BYTES):
                self._put(self.repeats.without(data), self._forward)
            else:
                self.close()

    def note(self, line: str) -> None:
        """Write `line` behind what the process has printed, into its file only."""
        self._read()
        self._put(f"[deadpool] {line}\n".encode(), False)

    def _put(self, data: bytes, forward: bool) -> None:
        if self._file_bytes is not None:
            self._file_bytes += len(data)
        if self._file is not None:
            self._writer.write(self._file, data)
        if forward:
            self._writer.forward(self._lines.feed(data))

    def close(self) -> None:
        if not self.ended.is_set():
            self._loop.remove_reader(self._fd)
            os.close(self._fd)
            self.ended.set()
            self._put(self.repeats.flush(), self._forward)
            self._writer.forward(self._lines.flush())
            self._release()


class Cut(msgspec.Struct, frozen=True):
    """`output`: bytes in the rank's file of this node that were printed before the cut. `job`: as in Credentials."""

    job: str
    rank: Rank
    step: Step
    output: int


_cut: msgspec.json.Decoder[Cut] = msgspec.json.Decoder(Cut)  # made here: see mirror/wire.py


def cuts_of(folder: Path, node: int | str) -> tuple[Path, Path]:
    return folder / f"cuts.{node}.0.jsonl", folder / f"cuts.{node}.1.jsonl"


def printed_since(output_dir: Path, job: str, rank: Rank, step: Step) -> Printed:
    """Read what processes of `rank` printed after the cut of `step`, on any node of `job`. Blocks."""
    found: Printed = defaultdict(Counter)
    for path in sorted(output_dir.glob(f"rank{rank:04d}.node*.log")):
        with contextlib.suppress(OSError), open(path, "rb") as file:
            cuts = _cuts(cuts_of(output_dir, path.name.split(".")[1].removeprefix("node")), job, rank, step)
            for (cut, begin), (_, end) in pairwise([*cuts.items(), (NO_STEP, sys.maxsize)]):
                file.seek(begin)
                lines = file.read(min(end - begin, LINE_BYTES_MAX)).splitlines(keepends=True)
                found[cut] += Counter(words(line) for line in lines if line.endswith(b"\n"))
    return found


def _cuts(files: tuple[Path, Path], job: str, rank: Rank, step: Step) -> dict[Step, int]:
    """Return how much had been printed when each cut from `step` on was first made here, in this order."""
    cuts: list[Cut] = []
    for line in b"".join(file.read_bytes() for file in files).splitlines():
        with contextlib.suppress(msgspec.DecodeError):  # cut off by a crash
            cuts.append(_cut.decode(line))
    first: dict[Step, int] = {}
    for cut in sorted(cuts, key=lambda cut: (cut.output, cut.step)):  # what a rank has printed here never gets less
        if (cut.job, cut.rank) == (job, rank) and cut.step >= step:
            first.setdefault(cut.step, cut.output)
    return first


def words(line: bytes) -> bytes:
    """Return the part of a line that stays the same if it is printed again."""
    return b" ".join(_NUMBERS.sub(b"#", line).split())


class Cuts:
    """How much each rank on this node had printed before its newest cuts, written down. `job`: known with training."""

    def __init__(self, node: NodeId, writer: Writer, output_dir: Path, job: Callable[[], str]) -> None:
        self._job, self._files = job, Ring(writer, cuts_of(output_dir, node), CUTS_BYTES)

    def heard(self, pipe: Pipe | None, kind: str, fields: dict[str, Any]) -> None:
        """Take in a worker's event, which may be that of a cut; `pipe` is its output's."""
        if pipe is not None and kind in ("StepDone", "WorkerResumed"):
            rank, step = int(fields["rank"]), int(fields["step"])
            if (printed := pipe.cut(step)) is not None:
                self._files.write(msgspec.json.encode(Cut(self._job(), rank, step, printed)) + b"\n")
