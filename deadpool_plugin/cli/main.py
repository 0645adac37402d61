"""`deadpool COMMAND ...`, also as `python -m deadpool_plugin COMMAND ...`: what people do about a job from outside.

Rules of this file: no torch; what goes wrong with a reason (DeadpoolError) is one line on standard error and the
error's exit code.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .. import __version__
from ..config import explained, load
from ..errors import EXIT_OK, EXIT_RUNNING, ConfigError, DeadpoolError, refusing
from ..host.output import say
from ..launch.argv import FLAG
from ..launch.fate import FAILED, UNREAD
from ..launch.launcher import launch
from ..launch.running_job import Wish, find, join, stop
from ..transport.sockets import Address
from . import patch, watch
from .jobview import LAST_WORD_S, SILENT_S, Follower, JobView
from .watch import span, updates

EXIT_USAGE, EXIT_PIPE = 2, 128 + signal.SIGPIPE  # as argparse and a shell have them

COMMANDS = {
    "config": "print a configuration file with all fields, their defaults and what they mean",
    "launch": "start a job on the hosts of a hostfile, as `deepspeed` does",
    "join": "add this host to a running job",
    "patch": "put the flag and the first statement into a checkout of Megatron-LM",
    "outcome": "say what became of a job, and end with its exit code",
    "stop": "end a running job on all its hosts",
    "watch": "show what a job is doing",
}
"""Command -> its line in the help."""


def main(arguments: list[str] | None = None) -> int:
    words = sys.argv[1:] if arguments is None else arguments
    try:
        if not words:
            parser().print_help(sys.stderr)
            return EXIT_USAGE
        if words[0] == "launch" and words[1:] not in (["-h"], ["--help"]):
            words = ["launch", "--", *words[1:]]  # all of them are deepspeed's and the script's
        args = parser().parse_args(words)
        exit_code: int = args.run(args)
        sys.stdout.flush()
        return exit_code
    except BrokenPipeError:  # whoever read it (`| head`) has had enough; nothing is left to flush at the end
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_PIPE
    except DeadpoolError as error:
        say(str(error), to=sys.stderr)
        return error.exit_code


def parser() -> argparse.ArgumentParser:
    """Make the parser of all commands; the namespace it returns has `run`, which returns the exit code."""
    raw = argparse.RawDescriptionHelpFormatter
    known = argparse.ArgumentParser("deadpool", description="Jobs that survive the loss of nodes.", formatter_class=raw)
    listed = "\n".join(f"  {name:10}{line}" for name, line in COMMANDS.items())
    known.epilog = f"commands:\n{listed}\n\n`deadpool COMMAND --help` says more"
    known.add_argument("--version", action="version", version=f"deadpool_plugin {__version__}")
    commands = known.add_subparsers(metavar="COMMAND", help="what to do", required=True)
    of = {name: commands.add_parser(name, description=f"{line.capitalize()}.") for name, line in COMMANDS.items()}

    line = "list the example files (Slurm, DeepSpeed) instead"
    of["config"].add_argument("--examples", action="store_true", help=line)
    of["config"].epilog = "deadpool config > deadpool.yaml"
    of["config"].set_defaults(run=_config)

    of["launch"].usage = f"deadpool launch [--resume DIR] DEEPSPEED'S ARGUMENTS... SCRIPT ARGUMENTS... [{FLAG} FILE]"
    of["launch"].formatter_class = raw
    of["launch"].epilog = (
        "example:\n  deadpool launch --hostfile hosts.txt train.py --deepspeed_config ds.json \\\n"
        "    --deadpool-config deadpool.yaml\n"
        "--resume STORE_DIR/JOB goes on from the state that an earlier job left (store_dir)"
    )
    line = "deepspeed's arguments (`deepspeed --help`), the script, its arguments"
    of["launch"].add_argument("words", nargs="+", metavar="SCRIPT", help=line)
    of["launch"].set_defaults(run=lambda args: launch(args.words))

    _add_place(of["join"], "--job")
    line = "the job's command, to be sure it is that one"
    of["join"].add_argument("command", nargs="*", metavar="-- SCRIPT ARGUMENTS", help=line)
    of["join"].set_defaults(run=_join)

    _add_place(of["stop"], "job", nargs="?")
    of["stop"].set_defaults(run=_stop, command=[])

    add = of["outcome"].add_argument
    add("output_dir", type=Path, help="`output_dir` of the job's configuration; its last job counts")
    add("--hostfile", type=Path, help="the job's hosts; without it, those that have an event log")
    line = f"the job's launcher has ended: exit code if no node says how ({FAILED} where this is left out)"
    add("--otherwise", type=int, metavar="CODE", help=line)
    of["outcome"].set_defaults(run=_outcome)

    for name, module in (("patch", patch), ("watch", watch)):
        module.add_arguments(of[name])
        of[name].set_defaults(run=module.run)
    return known


def _config(args: argparse.Namespace) -> int:
    if args.examples:
        print(*sorted(patch.shipped("configs/minimal.yaml").parent.iterdir()), sep="\n")
    else:
        print(explained(), end="")
    return EXIT_OK


def _join(args: argparse.Namespace) -> int:
    with _place(args, "name a job that runs; if a new one is only starting there, join again in a moment") as wish:
        return join(wish)


def _stop(args: argparse.Namespace) -> int:
    remedy = "nothing, if that is the one; one that is only starting is ended where it was launched"
    with _place(args, remedy) as wish:
        job = find(wish)
    silent = asyncio.run(stop(job))
    unheard = f"; no answer came from {', '.join(silent)}" if silent else ""
    say(f"the job has ended; its last processes may need some seconds more{unheard}")
    return EXIT_OK


def _outcome(args: argparse.Namespace) -> int:
    """Conclude what became of a job from its event logs; the exit code and the line are those of `deadpool launch`."""
    # Plain `deepspeed` and Slurm end with the code of the worst host, lost ones included. A job that has not ended says
    # so, however slow it is, and whatever it waits for; its launcher's end is told by `--otherwise`.
    view = JobView()
    next(updates(Follower(args.output_dir), view))
    if not view.nodes:
        raise ConfigError(
            f"no event log of a job in {args.output_dir}",
            "its output_dir",
            "name the folder it wrote to; a job that ended before its hosts had met wrote nothing",
        )
    fate, silent_s = view.fate, time.time() - view.heard_at
    owing = fate.at_work() or (silent_s < LAST_WORD_S and fate.silent())
    if args.otherwise is None and silent_s < SILENT_S and (owing or not view.outcome):
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


def _add_place(parser: argparse.ArgumentParser, name: str, **more: Any) -> None:
    """Add the options that say which job is meant. `name`: of the argument for its output_dir; `more`: about that."""
    where = parser.add_mutually_exclusive_group()
    line = "the job's output_dir, on a shared file system; without it and --to: that of the configuration"
    where.add_argument(name, type=Path, metavar="OUTPUT_DIR", help=line, **more)
    line = "a node of the job, as its output says (`to add a host: ...`)"
    where.add_argument("--to", type=address, metavar="HOST:PORT", help=line)
    parser.add_argument(FLAG, dest="config", default="", metavar="FILE", help="the job's configuration file")


@contextlib.contextmanager
def _place(args: argparse.Namespace, remedy: str) -> Iterator[Wish]:
    """Read the options of `_add_place`. An error of the block says so, and `remedy`, if the job's event logs say that
    it has ended. Raises: ConfigError."""
    wish = Wish(args.to, args.job, args.config, args.command)
    try:
        yield wish
    except DeadpoolError as error:
        if wish.to:
            raise
        folder, view = wish.job or load(wish.path).output_dir, JobView()
        with contextlib.suppress(OSError):
            next(updates(Follower(folder), view))
        silent_s = time.time() - view.heard_at
        if not view.outcome or (view.fate.at_work() and silent_s < SILENT_S):
            raise
        ended = f"{span(silent_s)} ago: {view.fate.outcome(by_logs=True)}"
        found = f"no running job is found in {folder}; the last one there ended {ended}"
        raise ConfigError(found, "a job that runs", remedy) from error


def address(text: str) -> Address:
    """Read `HOST:PORT`, `[IPv6]:PORT`. Raises: ConfigError."""
    host, colon, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not colon or not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise ConfigError(f"--to is `{text}`", "HOST:PORT", "take it from the job's output: `to add a host: ...`")
    return host, int(port)
