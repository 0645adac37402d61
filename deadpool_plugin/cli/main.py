"""`deadpool COMMAND ...`, also as `python -m deadpool_plugin COMMAND ...`: what people do about a job from outside.

Rules of this file: no torch; what goes wrong with a reason (DeadpoolError) is one line on standard error and the
error's exit code.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .. import __version__
from ..config import explained, load
from ..errors import EXIT_OK, ConfigError, DeadpoolError
from ..host.output import say
from ..launch.argv import FLAG
from ..launch.launcher import launch
from ..launch.running_job import Wish, find, join, stop
from ..transport.sockets import Address
from . import outcome, patch, watch

EXIT_USAGE = 2
"""As argparse has it."""
EXIT_PIPE = 128 + signal.SIGPIPE
"""The exit code of a command whose reader has gone, as a shell has it."""

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
    what = "Jobs that survive the loss of nodes."
    known = argparse.ArgumentParser(prog="deadpool", description=what, formatter_class=raw)
    listed = "\n".join(f"  {name:10}{line}" for name, line in COMMANDS.items())
    known.epilog = f"commands:\n{listed}\n\n`deadpool COMMAND --help` says more"
    known.add_argument("--version", action="version", version=f"deadpool_plugin {__version__}")
    commands = known.add_subparsers(metavar="COMMAND", help="what to do", required=True)
    of = {name: commands.add_parser(name, description=f"{line.capitalize()}.") for name, line in COMMANDS.items()}

    line = "list the example files (Slurm, DeepSpeed) instead"
    of["config"].add_argument("--examples", action="store_true", help=line)
    of["config"].epilog = "deadpool config > deadpool.yaml"
    of["config"].set_defaults(run=_config)

    of["launch"].usage = "deadpool launch DEEPSPEED'S ARGUMENTS... SCRIPT ARGUMENTS... [--deadpool-config FILE]"
    of["launch"].formatter_class = raw
    of["launch"].epilog = (
        "example:\n  deadpool launch --hostfile hosts.txt train.py --deepspeed_config ds.json \\\n"
        "    --deadpool-config deadpool.yaml"
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

    for name, module in (("outcome", outcome), ("patch", patch), ("watch", watch)):
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
    silent = stop(job)
    unheard = f"; no answer came from {', '.join(silent)}" if silent else ""
    say(f"the job has ended; its last processes may need some seconds more{unheard}")
    return EXIT_OK


def _add_place(parser: argparse.ArgumentParser, name: str, **more: Any) -> None:
    """Add the options that say which job is meant. `name`: of the argument for its output_dir; `more`: about that."""
    where = parser.add_mutually_exclusive_group()
    line = "the job's output_dir, on a shared file system; without it and --to: that of the configuration"
    where.add_argument(name, type=Path, metavar="OUTPUT_DIR", help=line, **more)
    where.add_argument("--to", metavar="HOST:PORT", help="a node of the job, as its output says (`to add a host: ...`)")
    parser.add_argument(FLAG, dest="config", default="", metavar="FILE", help="the job's configuration file")


@contextlib.contextmanager
def _place(args: argparse.Namespace, remedy: str) -> Iterator[Wish]:
    """Read the options of `_add_place`. An error of the block says so, and `remedy`, if the job's event logs say that
    it has ended. Raises: ConfigError."""
    wish = Wish(None if args.to is None else address(args.to), args.job, args.config, args.command)
    try:
        yield wish
    except DeadpoolError as error:
        if wish.to:
            raise
        folder, last = wish.job or load(wish.path).output_dir, None
        with contextlib.suppress(OSError):
            last = outcome.last_job(folder)
        if last is None:
            raise
        fate, silent_s = last
        if not fate.ended() or (fate.at_work() and silent_s < outcome.SILENT_S):
            raise
        ended = f"{outcome.span(silent_s)} ago: {fate.outcome(by_logs=True)}"
        found = f"no running job is found in {folder}; the last one there ended {ended}"
        raise ConfigError(found, "a job that runs", remedy) from error


def address(text: str) -> Address:
    """Read `HOST:PORT`, `[IPv6]:PORT`. Raises: ConfigError."""
    host, colon, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not colon or not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise ConfigError(f"--to is `{text}`", "HOST:PORT", "take it from the job's output: `to add a host: ...`")
    return host, int(port)
