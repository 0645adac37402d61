"""`deadpool COMMAND ...`, also as `python -m deadpool_plugin COMMAND ...`: what people do about a job from outside.

Rules of this file: a command is a module with `add_arguments(parser)` and `run(args) -> exit code`, imported when it is
asked for; one that is VERBATIM gets all words as they are; what goes wrong with a reason (DeadpoolError) is one line on
standard error and the error's exit code.
"""

from __future__ import annotations

import argparse
import importlib
import os
import signal
import sys

from ..errors import DeadpoolError

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
"""Command -> its line in the help; the module has the same name."""


def main(arguments: list[str] | None = None) -> int:
    """Entry point; the exit code."""
    words = sys.argv[1:] if arguments is None else arguments
    try:
        exit_code = _run(words)
        sys.stdout.flush()
        return exit_code
    except BrokenPipeError:  # whoever read it (`| head`) has had enough; nothing is left to flush at the end
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_PIPE
    except DeadpoolError as error:
        print(f"[deadpool] {error}", file=sys.stderr, flush=True)
        return error.exit_code


def _run(words: list[str]) -> int:
    known = argparse.ArgumentParser(prog="deadpool", description="Jobs that survive the loss of nodes.")
    listed = "\n".join(f"  {name:10}{line}" for name, line in COMMANDS.items())
    known.formatter_class = argparse.RawDescriptionHelpFormatter
    known.epilog = f"commands:\n{listed}\n\n`deadpool COMMAND --help` says more"
    version = importlib.import_module("deadpool_plugin").__version__
    known.add_argument("--version", action="version", version=f"deadpool_plugin {version}")
    known.add_argument("command", choices=COMMANDS, metavar="COMMAND", help="what to do")
    if not words:
        known.print_help(sys.stderr)
        return EXIT_USAGE
    command: str = known.parse_args(words[:1]).command
    module = importlib.import_module(f".{command}", __package__)
    parser = argparse.ArgumentParser(prog=f"deadpool {command}", description=COMMANDS[command].capitalize() + ".")
    module.add_arguments(parser)
    rest = words[1:]
    if getattr(module, "VERBATIM", False) and rest not in (["-h"], ["--help"]):
        rest = ["--", *rest]
    exit_code: int = module.run(parser.parse_args(rest))
    return exit_code
