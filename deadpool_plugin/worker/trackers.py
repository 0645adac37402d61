"""TensorBoard, Weights & Biases and DeepSpeed's CSV files in a process that rehearses a rank: nothing until it takes
over, then the same run.

What a rehearsing process logs has been logged by the rank itself. Once it has taken over, its TensorBoard events go to
a file of its own, without those the rank had written already; its W&B run is the rank's, resumed; its CSV files are
the rank's, continued.

Rules of this file: a rank in training from the start is left alone. What the rank wrote is looked for where it writes,
so on a file system that both hosts share; where there is none, the last step's events come twice and the run is a new
one. Standard library only: both packages are the script's, used as they are when it imports them.
"""

from __future__ import annotations

import contextlib
import functools
import mmap
import os
import re
import struct
import sys
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from .imports import when_imported

CSV_MONITOR = "deepspeed.monitor.csv_monitor"
EVENTS = "tensorboard.summary.writer.event_file_writer"
FILES_MAX, RECORDS_MAX = 8, 4096
"""Where a rank's last step is looked for: in so many newest files, in so many last records of each."""
LINES_BYTES_MAX = 65536
"""Where a rank's last step is looked for in a CSV file: at its end."""
_HEAD, _FOOT = struct.Struct("<QI"), 4
_RUN = re.compile(r"(?:offline-)?run-\d+_\d+-(.+)")


class Trackers:
    """The trackers of a rehearsing process, from before its script begins. Thread: main."""

    def __init__(self) -> None:
        self._tensorboard, self._wandb, self._csv = TensorBoard(), WandB(), Csv()
        when_imported(CSV_MONITOR, self._csv.install)
        when_imported(EVENTS, self._tensorboard.install)
        when_imported("wandb", self._wandb.install)

    def resume(self) -> None:
        """The process runs its rank from now on. Blocks: for files, and for the W&B service if there is a run.

        What fails is said: training does not end for it.
        """
        for tracker in (self._tensorboard, self._wandb, self._csv):
            try:
                tracker.resume()
            except Exception as error:
                print(
                    f"[deadpool] {type(tracker).__name__} cannot continue its log: {error!r}",
                    file=sys.stderr,
                    flush=True,
                )

    def folders(self) -> set[str]:
        """List where writers that wait for `resume` will log to."""
        return self._tensorboard.folders()


class TensorBoard:
    """tensorboard's EventFileWriter, which torch's SummaryWriter writes through."""

    def __init__(self) -> None:
        self._rehearsing = True
        self._waiting: dict[Any, Callable[[], None]] = {}
        self._written: weakref.WeakKeyDictionary[Any, set[tuple[str, int]]] = weakref.WeakKeyDictionary()

    def folders(self) -> set[str]:
        return {str(file._logdir) for file in list(self._waiting)}

    def install(self, module: ModuleType) -> None:
        writer, self._event = module.EventFileWriter, module.event_pb2.Event
        original = writer.__init__

        @functools.wraps(original)
        def init(file: Any, logdir: str, *args: Any, **kwargs: Any) -> None:
            if not self._rehearsing:
                original(file, logdir, *args, **kwargs)
                return
            file._logdir = logdir
            self._waiting[file] = lambda: original(file, logdir, *args, **kwargs)

        writer.__init__ = init
        for name in ("add_event", "flush", "close"):
            setattr(writer, name, self._unless_waiting(getattr(writer, name)))
        writer.add_event = self._new_only(writer.add_event)

    def _unless_waiting(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def method(file: Any, *args: Any) -> None:
            if file not in self._waiting:
                original(file, *args)
            elif original.__name__ == "close":
                del self._waiting[file]

        return method

    def _new_only(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def add_event(file: Any, event: Any) -> None:
            written = self._written.get(file)
            known = [value for value in event.summary.value if written and (value.tag, event.step) in written]
            for value in known:
                event.summary.value.remove(value)
            if not known or event.summary.value:
                original(file, event)

        return add_event

    def resume(self) -> None:
        self._rehearsing = False
        for file, begin in list(self._waiting.items()):
            self._written[file] = self._last_values(Path(file.get_logdir()))
            del self._waiting[file]
            begin()

    def _last_values(self, folder: Path) -> set[tuple[str, int]]:
        """(tag, step) of the last values in the event files there."""
        files = sorted(folder.glob("events.out.tfevents.*"), key=lambda path: path.stat().st_mtime_ns)
        events = (self._event.FromString(data) for path in files[-FILES_MAX:] for data in last_records(path))
        return {(value.tag, event.step) for event in events for value in event.summary.value}


def last_records(path: Path) -> Iterator[bytes]:
    """The contents of the last records of a file of TFRecords; half a record at its end is left out."""
    if not path.stat().st_size:
        return
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        found: deque[tuple[int, int]] = deque(maxlen=RECORDS_MAX)
        at = 0
        while at + _HEAD.size <= len(data):
            size, _ = _HEAD.unpack_from(data, at)
            begin, at = at + _HEAD.size, at + _HEAD.size + size + _FOOT
            if at <= len(data):
                found.append((begin, begin + size))
        yield from (data[begin:end] for begin, end in found)


class Csv:
    """DeepSpeed's csvMonitor: a file for each name, a line for each value, a heading where it begins."""

    def __init__(self) -> None:
        self._rehearsing = True
        self._written: dict[str, set[str]] = {}

    def install(self, module: ModuleType) -> None:
        owner: Any = module.csvMonitor
        original = owner.write_events

        @functools.wraps(original)
        def write_events(monitor: Any, events: Any) -> None:
            if not self._rehearsing:
                original(monitor, [event for event in events if self._is_new(monitor, *event[:3])])

        owner.write_events = write_events

    def _is_new(self, monitor: Any, name: str, value: Any, step: Any) -> bool:
        """Return whether the rank has not written the line before it was lost."""
        file = name.replace("/", "_").replace(" ", "_")  # as csvMonitor calls it
        if file not in self._written:
            self._written[file] = last_steps(Path(monitor.log_dir, f"{file}.csv"))
            if self._written[file]:
                monitor.filenames.append(file)  # it has its heading
        return str(step) not in self._written[file]

    def resume(self) -> None:
        self._rehearsing = False


def last_steps(path: Path) -> set[str]:
    """Read the first cells of the last lines of a CSV file. Removes half a line of a killed writer at the end."""
    with contextlib.suppress(FileNotFoundError), open(path, "r+b") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - LINES_BYTES_MAX))
        whole, newline, half = file.read().rpartition(b"\n")
        file.truncate(size - len(half))
        return {line.partition(b",")[0].decode() for line in (whole + newline).splitlines()}
    return set()


class WandB:
    """wandb.init, which gives the script a run that does nothing until then."""

    def __init__(self) -> None:
        self._waiting: list[Callable[[], None]] = []
        self._rehearsing = True

    def install(self, wandb: ModuleType) -> None:
        original = wandb.init

        @functools.wraps(original)
        def init(*args: Any, **kwargs: Any) -> Any:
            if not self._rehearsing:
                return original(*args, **kwargs)
            run = Run(original(*args, **{**kwargs, "mode": "disabled"}))

            def begin() -> None:
                found = latest_run(Path(kwargs.get("dir") or os.environ.get("WANDB_DIR") or "."))
                same = {"id": found, "resume": "allow"} if found else {}
                run._run = original(*args, **{**same, **kwargs})

            self._waiting.append(begin)
            return run

        wandb.init = init  # type: ignore[attr-defined]

    def resume(self) -> None:
        self._rehearsing = False
        for begin in self._waiting:
            begin()
        self._waiting.clear()


class Run:
    """The script's run: one that does nothing, later the real one."""

    def __init__(self, run: Any) -> None:
        self._run = run

    def __getattr__(self, name: str) -> Any:
        return getattr(self._run, name)


def latest_run(folder: Path) -> str:
    """The id of the run that was begun last in W&B's `folder`, "" if there is none."""
    link = folder / "wandb" / "latest-run"
    match = _RUN.fullmatch(os.path.basename(os.readlink(link))) if link.is_symlink() else None
    return match[1] if match else ""
