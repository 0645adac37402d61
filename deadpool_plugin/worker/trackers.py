"""Experiment trackers of a rehearsal: silent until the process takes its rank over, then they continue its run.

TensorBoard's events go to a file of its own then, without those that the rank had written already. The W&B run is the
rank's, resumed; DeepSpeed's CSV files are the rank's, continued.

Rules of this file: what the rank wrote is looked for where it writes, so on a file system that both hosts share;
elsewhere the last step's events come twice and the run is a new one. Standard library only: the packages are the
script's, used as they are when it imports them.
"""

from __future__ import annotations

import contextlib
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

from .patching import PatchSet, when_imported

FILES_MAX, RECORDS_MAX = 8, 4096
"""Number of newest event files, and of last records in each, in which a rank's last step is looked for."""
LINES_BYTES_MAX = 65536
"""Size of the end of a CSV file in which a rank's last step is looked for."""
_HEAD, _FOOT = struct.Struct("<QI"), 4
_RUN = re.compile(r"(?:offline-)?run-\d+_\d+-(.+)")


class Trackers:
    """The trackers of a rehearsing process, from before its script begins; a rank in training is left alone."""

    def __init__(self) -> None:
        self._rehearsing = True
        self._waiting: dict[Any, tuple[str, Callable[[], None]]] = {}
        """Event files and W&B runs that the script has made: the tracker's name, and what begins each."""
        self._values: weakref.WeakKeyDictionary[Any, set[tuple[str, int]]] = weakref.WeakKeyDictionary()
        """By event file: (tag, step) of the last values that the rank itself has written."""
        self._csv_steps: dict[str, set[str]] = {}
        """By CSV file: the steps of the last lines that the rank itself has written."""
        self._patches = PatchSet()
        when_imported("tensorboard.summary.writer.event_file_writer", self.hold_event_files)
        when_imported("wandb", self.hold_runs)
        when_imported("deepspeed.monitor.csv_monitor", self.hold_csv_files)

    def resume(self) -> None:
        """Begin what has waited: the process runs its rank from now on. What fails is said, and ends no training.

        Blocks: for files, and for the W&B service if there is a run.
        """
        self._rehearsing = False
        for tracked, (tracker, begin) in list(self._waiting.items()):
            try:
                begin()
            except Exception as error:
                self._waiting[tracked] = tracker, begin  # silent for good
                print(f"[deadpool] {tracker} cannot continue its log: {error!r}", file=sys.stderr, flush=True)

    def folders(self) -> set[str]:
        """List where event files that wait for `resume` will lie."""
        return {str(file._logdir) for file in list(self._waiting) if not isinstance(file, Run)}

    # ---- tensorboard's EventFileWriter, which torch's SummaryWriter writes through

    def hold_event_files(self, module: ModuleType) -> None:
        self._parse_event = module.event_pb2.Event.FromString
        self._patches.wrap(self._begin_file, module.EventFileWriter, "__init__")
        self._patches.wrap(self._add_event, module.EventFileWriter, "add_event")
        self._patches.wrap(self._flush_or_close, module.EventFileWriter, "flush", "close")

    def _begin_file(self, original: Callable[..., Any], file: Any, logdir: str, *args: Any, **kwargs: Any) -> None:
        def begin() -> None:
            written = Path(file.get_logdir()).glob("events.out.tfevents.*")
            files = sorted(written, key=lambda path: path.stat().st_mtime_ns)
            events = [self._parse_event(data) for path in files[-FILES_MAX:] for data in last_records(path)]
            self._values[file] = {(value.tag, event.step) for event in events for value in event.summary.value}
            del self._waiting[file]
            original(file, logdir, *args, **kwargs)

        if self._rehearsing:
            file._logdir = logdir
            self._waiting[file] = "TensorBoard", begin
        else:
            original(file, logdir, *args, **kwargs)

    def _add_event(self, original: Callable[..., Any], file: Any, event: Any) -> None:
        written = self._values.get(file, set())
        known = [value for value in event.summary.value if (value.tag, event.step) in written]
        for value in known:
            event.summary.value.remove(value)
        if file not in self._waiting and (not known or event.summary.value):
            original(file, event)

    def _flush_or_close(self, original: Callable[..., Any], file: Any) -> None:
        if file not in self._waiting:
            original(file)
        elif original.__name__ == "close":
            del self._waiting[file]

    # ---- W&B

    def hold_runs(self, wandb: ModuleType) -> None:
        self._patches.wrap(self._init_run, wandb, "init")

    def _init_run(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if not self._rehearsing:
            return original(*args, **kwargs)
        run = Run(original(*args, **{**kwargs, "mode": "disabled"}))

        def begin() -> None:
            found = latest_run(Path(kwargs.get("dir") or os.environ.get("WANDB_DIR") or "."))
            same = {"id": found, "resume": "allow"} if found else {}
            run._run = original(*args, **{**same, **kwargs})

        self._waiting[run] = "WandB", begin
        return run

    # ---- DeepSpeed's csvMonitor: a file for each name, a line for each value, a heading where it begins

    def hold_csv_files(self, module: ModuleType) -> None:
        self._patches.wrap(self._write_events, module.csvMonitor, "write_events")

    def _write_events(self, original: Callable[..., Any], monitor: Any, events: Any) -> None:
        if self._rehearsing:
            return
        new = []
        for event in events:
            file = event[0].replace("/", "_").replace(" ", "_")  # as csvMonitor calls it
            if file not in self._csv_steps:
                self._csv_steps[file] = last_steps(Path(monitor.log_dir, f"{file}.csv"))
                if self._csv_steps[file]:
                    monitor.filenames.append(file)  # it has its heading
            if str(event[2]) not in self._csv_steps[file]:
                new.append(event)
        original(monitor, new)


class Run:
    """The script's W&B run: one that does nothing, later the real one."""

    def __init__(self, run: Any) -> None:
        self._run = run

    def __getattr__(self, name: str) -> Any:
        return getattr(self._run, name)


def last_records(path: Path) -> Iterator[bytes]:
    """Read the last records of a file of TFRecords; half a record at its end is left out."""
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


def last_steps(path: Path) -> set[str]:
    """Read the first cells of the last lines of a CSV file. Removes half a line of a killed writer at the end."""
    with contextlib.suppress(FileNotFoundError), open(path, "r+b") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - LINES_BYTES_MAX))
        whole, newline, half = file.read().rpartition(b"\n")
        file.truncate(size - len(half))
        return {line.partition(b",")[0].decode() for line in (whole + newline).splitlines()}
    return set()


def latest_run(folder: Path) -> str:
    """Find the id of the run that was begun last in W&B's `folder`, "" if there is none."""
    link = folder / "wandb" / "latest-run"
    match = _RUN.fullmatch(os.path.basename(os.readlink(link))) if link.is_symlink() else None
    return match[1] if match else ""
