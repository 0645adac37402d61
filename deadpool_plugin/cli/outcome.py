"""`deadpool outcome OUTPUT_DIR [--hostfile FILE] [--otherwise CODE]`: what became of a job, from its event logs.

For jobs of plain `deepspeed` and of Slurm, whose exit code is that of the worst host, lost ones included: exit code and
line are those of `deadpool launch`. Of a job that has not ended it says so (75), however slow it is, and whatever it
waits for; one whose logs are silent for SILENT_S is gone. Whoever knows that the job has ended, because its launcher
has, says so by `--otherwise`.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import msgspec

from .. import events
from ..errors import EXIT_RUNNING, ConfigError, refusing
from ..host.output import say
from ..launch.fate import FAILED, UNREAD, Fate

SILENT_S = 5 * events.ALIVE_S
"""A job that has not ended says so, whatever it does or waits for: without a word for so long it is gone."""
LAST_WORD_S = 10.0
"""Within such a time of each other the hosts say how the job has ended, and their exit codes."""
RECENT_BYTES = 1 << 16
"""Read at a time of each file of what recurs: hundreds of steps. So what is read does not grow with the job."""


class Follower:
    """The new events of `folder/events.*.jsonl`; folder and files may appear later. Thread: one."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.unreadable = 0
        """Lines that were left out: the writer may be newer than this reader."""
        self._offsets: dict[Path, int] = {}

    def poll(self) -> list[events.Event]:
        """Read what was written since the last call, in the order of time. Blocks: as long as the file system does."""
        found: list[events.Event] = []
        for path in sorted(self.folder.glob("events.*.jsonl")):
            for line in self._new_lines(path):
                try:
                    found.append(events.decoder.decode(line))
                except msgspec.DecodeError:
                    self.unreadable += 1
        return sorted(found, key=lambda event: event.time)

    def _new_lines(self, path: Path) -> list[bytes]:
        """Read the lines completed since the last call; of what recurs the last ones."""
        lines: list[bytes] = []
        with path.open("rb") as file:
            size, offset = file.seek(0, 2), self._offsets.get(path, 0)
            offset = file.seek(offset if offset <= size else 0)  # a file that shrank began anew
            if path.match("events.*.recent?.jsonl") and size - offset > RECENT_BYTES:
                file.seek(size - RECENT_BYTES)
                offset = size - RECENT_BYTES + len(file.readline())  # the rest of a line
            for line in file:
                if not line.endswith(b"\n"):
                    break
                offset += len(line)
                lines.append(line)
        self._offsets[path] = offset
        return lines


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("output_dir", type=Path, help="`output_dir` of the job's configuration; its last job counts")
    parser.add_argument("--hostfile", type=Path, help="the job's hosts; without it, those that have an event log")
    line = f"the job's launcher has ended: exit code if no node says how ({FAILED} where this is left out)"
    parser.add_argument("--otherwise", type=int, metavar="CODE", help=line)


def run(args: argparse.Namespace) -> int:
    last = last_job(args.output_dir)
    if last is None:
        raise ConfigError(
            f"no event log of a job in {args.output_dir}",
            "its output_dir",
            "name the folder it wrote to; a job that ended before its hosts had met wrote nothing",
        )
    fate, silent_s = last
    owing = fate.at_work() or (silent_s < LAST_WORD_S and fate.silent())
    if args.otherwise is None and silent_s < SILENT_S and (owing or not fate.ended()):
        more = f"`deadpool watch {args.output_dir}` shows it"
        say(f"the job is still running (last event {span(silent_s)} ago); exit code {EXIT_RUNNING}; {more}")
        return EXIT_RUNNING
    hosts: list[str] = []
    if args.hostfile is not None:
        with refusing(f"{args.hostfile} cannot be read", "the job's hostfile", "check the path"):
            lines = [line.split() for line in args.hostfile.read_text().splitlines()]
        hosts = [words[0] for words in lines if words and not words[0].startswith("#")]
    code, may_run = (FAILED, UNREAD) if args.otherwise is None else (args.otherwise, "")
    concluded = fate.outcome(hosts, code, may_run, by_logs=True)
    say(str(concluded))
    return concluded.exit_code


def last_job(folder: Path) -> tuple[Fate, float] | None:
    """Read of the last job that wrote to `folder` its fate, and the seconds since its last event; None without one."""
    stories: dict[int, list[events.Event]] = {}  # logs are appended to, and an earlier job may have had more nodes
    began_at = 0.0
    for event in Follower(folder).poll():
        if isinstance(event, events.NodeJoined):  # node 0 says just before that the world has formed
            before = stories.get(event.node, [])[-1:]
            stories[event.node] = [last for last in before if isinstance(last, events.WorldFormed)]
        elif isinstance(event, events.WorldFormed) and event.generation == 0:
            began_at = event.time
        stories.setdefault(event.node, []).append(event)
    told = {node: story for node, story in stories.items() if story[-1].time >= began_at}
    newest = max((story[-1].time for story in told.values()), default=None)
    return None if newest is None else (Fate(told), time.time() - newest)


def span(seconds: float) -> str:
    """Say a while, roughly: `40 s`, `12 min`, `2 h`."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.0f} h"
