"""`deadpool outcome OUTPUT_DIR [--hostfile FILE] [--otherwise CODE]`: what became of a job.

For jobs of plain `deepspeed` and of Slurm, whose exit code is that of the worst host, lost ones included: exit code and
line are those of `deadpool launch`. Of a job that has not ended it says so (75), however slow it is, and whatever it
waits for; one whose logs are silent for SILENT_S is gone. Whoever knows that the job has ended, because its launcher
has, says so by `--otherwise`.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path

from .. import events
from ..errors import EXIT_RUNNING, ConfigError
from ..launch.outcome import FAILED, Outcome, at_work, ended, outcome
from .follow import Follower
from .model import SILENT_S, span


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("output_dir", type=Path, help="`output_dir` of the job's configuration; its last job counts")
    parser.add_argument("--hostfile", type=Path, help="the job's hosts; without it, those that have an event log")
    parser.add_argument(
        "--otherwise",
        type=int,
        metavar="CODE",
        help=f"the job's launcher has ended: exit code if no node says how ({FAILED} where this is left out)",
    )


def run(args: argparse.Namespace) -> int:
    """The exit code of the job. Raises: ConfigError."""
    told = of_last_job(Follower(args.output_dir).poll())
    if not told:
        raise ConfigError(
            f"no event log of a job in {args.output_dir}",
            "its output_dir",
            "name the folder it wrote to; a job that ended before its hosts had met wrote nothing",
        )
    heard = [event for story in told.values() for event in story]
    if args.otherwise is None and _runs(heard):
        since = f"last event {span(_silent_s(heard))} ago"
        more = f"`deadpool watch {args.output_dir}` shows it"
        print(f"[deadpool] the job is still running ({since}); exit code {EXIT_RUNNING}; {more}")
        return EXIT_RUNNING
    found = outcome(told, hosts(args.hostfile), FAILED if args.otherwise is None else args.otherwise)
    print(f"[deadpool] {found}")
    return found.exit_code


def last_outcome(folder: Path) -> tuple[Outcome, float] | None:
    """Find the outcome of the last job that wrote to `folder`, and how long ago its last event was, in seconds; None if
    it has not ended on all hosts, or there is none."""
    try:
        told = of_last_job(Follower(folder).poll())
    except OSError:
        return None
    heard = [event for story in told.values() for event in story]
    return (outcome(told, [], FAILED), _silent_s(heard)) if ended(heard) and not _runs(heard) else None


def _runs(heard: Sequence[events.Event]) -> bool:
    """Return whether the job has something to do yet, and has spoken lately."""
    return _silent_s(heard) < SILENT_S and (not ended(heard) or bool(at_work(heard)))


def _silent_s(heard: Sequence[events.Event]) -> float:
    return time.time() - max(event.time for event in heard)


def of_last_job(said: Sequence[events.Event]) -> dict[int, list[events.Event]]:
    """Node -> its events, of the job that began last: logs are appended to, and an earlier job may have had more nodes.

    Args:
        said: all nodes' events in order of time.
    """
    stories: dict[int, list[events.Event]] = {}
    began_at = 0.0
    for event in said:
        if isinstance(event, events.NodeJoined):
            stories[event.node] = []
        elif isinstance(event, events.WorldFormed) and event.generation == 0:
            began_at = event.time
        stories.setdefault(event.node, []).append(event)
    return {node: story for node, story in stories.items() if story[-1].time >= began_at}


def hosts(hostfile: Path | None) -> list[str]:
    """Names by node id; without a hostfile none: hosts say their names themselves. Raises: ConfigError."""
    if hostfile is None:
        return []
    try:
        lines = [line.split() for line in hostfile.read_text().splitlines()]
    except OSError as error:
        found = f"{hostfile} cannot be read ({error.strerror})"
        raise ConfigError(found, "the job's hostfile", "check the path") from error
    return [words[0] for words in lines if words and not words[0].startswith("#")]
