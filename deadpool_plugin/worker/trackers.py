"""Experiment trackers of a rehearsal: silent until the process takes its rank over, then they continue its run.

TensorBoard's events go to a file of its own then, without those that the rank had written already. The W&B run is the
rank's, resumed; DeepSpeed's CSV files are the rank's, continued. What the rank wrote is looked for where it writes, so
on a file system that both hosts share; elsewhere the last step's events come twice and the run is a new one.
Rules of this file: standard library only; the packages are the script's, used as they are when it imports them.
"""

from __future__ import annotations

import contextlib
import itertools
import mmap
import os
import struct
import sys
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from .patching import Function, PatchSet, when_imported

# Where a rank's last step is looked for: the newest event files, the last records of each, the bytes at a CSV's end.
FILES_MAX, RECORDS_MAX, LINES_BYTES_MAX = 8, 4096, 65536
_HEAD, _FOOT = struct.Struct("<QI"), 4


class Trackers:
    """The trackers of a rehearsing process, from before its script begins; a rank in training is left alone."""

    def __init__(self) -> None:
        self._rehearsing = True
        self._wrap = PatchSet().wrap
        # Event files and W&B runs that the script has made: the tracker's name, and what begins each.
        self._waiting: dict[Any, tuple[str, Callable[[], None]]] = {}
        when_imported("tensorboard.summary.writer.event_file_writer", self.hold_event_files)
        when_imported("wandb", self.hold_runs)
        when_imported("deepspeed.monitor.csv_monitor", self.hold_csv_files)

    def resume(self) -> None:
        """Begin what has waited: the process runs its rank from now on. What fails is said, and ends no training."""
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

    def hold_event_files(self, tensorboard: ModuleType) -> None:
        """Hold what goes through tensorboard's EventFileWriter, as that of torch's SummaryWriter does."""

        def init(original: Function, file: Any, logdir: str, *args: Any, **kwargs: Any) -> Any:
            def begin() -> None:
                written = Path(file.get_logdir()).glob("events.out.tfevents.*")
                newest = sorted(written, key=lambda path: path.stat().st_mtime_ns)[-FILES_MAX:]
                parsed = map(tensorboard.event_pb2.Event.FromString, itertools.chain(*map(last_records, newest)))
                file.of_the_rank = {(value.tag, event.step) for event in parsed for value in event.summary.value}
                del self._waiting[file]
                original(file, logdir, *args, **kwargs)

            if not self._rehearsing:
                return original(file, logdir, *args, **kwargs)
            file._logdir = logdir
            self._waiting[file] = "TensorBoard", begin

        def add_event(original: Function, file: Any, event: Any) -> None:
            values, of_the_rank = event.summary.value, getattr(file, "of_the_rank", ())
            known = [value for value in values if (value.tag, event.step) in of_the_rank]
            for value in known:
                values.remove(value)
            if file not in self._waiting and (values or not known):
                original(file, event)

        def flush_or_close(original: Function, file: Any) -> None:
            if file not in self._waiting:
                original(file)
            elif original.__name__ == "close":
                del self._waiting[file]

        self._wrap(init, tensorboard.EventFileWriter, "__init__")
        self._wrap(add_event, tensorboard.EventFileWriter, "add_event")
        self._wrap(flush_or_close, tensorboard.EventFileWriter, "flush", "close")

    def hold_runs(self, wandb: ModuleType) -> None:
        def init(original: Function, *args: Any, **kwargs: Any) -> Any:
            if not self._rehearsing:
                return original(*args, **kwargs)
            run = Run(original(*args, **{**kwargs, "mode": "disabled"}))

            def begin() -> None:
                found = latest_run(Path(kwargs.get("dir") or os.environ.get("WANDB_DIR") or "."))
                same = {"id": found, "resume": "allow"} if found else {}
                run._run = original(*args, **{**same, **kwargs})

            self._waiting[run] = "WandB", begin
            return run

        self._wrap(init, wandb, "init")

    def hold_csv_files(self, deepspeed: ModuleType) -> None:
        """Hold csvMonitor's: a file for each name, a line for each value, a heading where it begins."""
        of_the_rank: dict[str, set[str]] = {}  # by file: the steps of its last lines

        def write_events(original: Function, monitor: Any, events: Any) -> None:
            if self._rehearsing:
                return
            new = []
            for event in events:
                file = event[0].replace("/", "_").replace(" ", "_")  # as csvMonitor calls it
                if file not in of_the_rank:
                    of_the_rank[file] = last_steps(Path(monitor.log_dir, f"{file}.csv"))
                    if of_the_rank[file]:
                        monitor.filenames.append(file)  # it has its heading
                if str(event[2]) not in of_the_rank[file]:
                    new.append(event)
            original(monitor, new)

        self._wrap(write_events, deepspeed.csvMonitor, "write_events")


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
    link = folder / "wandb" / "latest-run"  # to [offline-]run-DATE_TIME-ID
    name = os.path.basename(os.readlink(link)) if link.is_symlink() else ""
    return name.removeprefix("offline-").removeprefix("run-").partition("-")[2]
