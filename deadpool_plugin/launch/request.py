"""`python -m deadpool_plugin.launch.request WORDS...`: what a `deepspeed` command line asks for, as one line of JSON.

A process of its own, because only deepspeed knows its own arguments and loading it loads torch, while `deadpool launch`
stays small for as long as the job lasts.
Rules of this file: the command line is read by the installed deepspeed's own functions; what cannot work with losses is
refused by name (ConfigError).
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import msgspec

from ..errors import EXIT_CONFIG, ConfigError, DeadpoolError, Unsupported
from ..host.output import say
from .argv import FLAG, RUN, parse, take_flag

_USE_PDSH = "use pdsh (the default): mpirun ends every process of a job when one host is lost"
LAUNCHERS = {  # deepspeed's that a lost host would end -> what to do instead
    "slurm": "submit configs/slurm.sbatch, which starts one `deepspeed --no_ssh` per node",
    **dict.fromkeys(("openmpi", "mpich", "impi", "mvapich"), _USE_PDSH),
}
_HOSTFILE = re.compile(r"-H|--hostf(i|il|ile)?(=|$)")


class Request(msgspec.Struct, frozen=True):
    """A job to start. `config`: the file, or ""."""

    options: list[str]  # deepspeed's own arguments
    command: list[str]  # what our supervisors run
    config: str
    hosts: list[str] = []  # those the launcher starts ranks on, by node; empty: this one only, without ssh
    ssh_port: int | None = None
    venv_script: str | None = None
    slots: list[tuple[str, int]] = []  # name and slots of each host of the job; empty without a hostfile

    def deepspeed(self, config: str) -> list[str]:
        """Make the arguments for deepspeed, our module in front of the script and `config` behind it."""
        return [*self.options, RUN, *self.command, *([FLAG, config] if config else [])]


def read(words: Sequence[str]) -> Request:
    """Raises: ConfigError. Blocks: seconds, while deepspeed is loaded."""
    from deepspeed.launcher import runner

    rest, config = take_flag(words)
    args = runner.parse_args(rest)  # which would take our flag for its own, if it stood before the script
    if instead := LAUNCHERS.get(args.launcher.lower()):
        raise Unsupported(f"--launcher is {args.launcher}", "a launcher that outlives a host", instead)
    if args.no_python:
        python = "a Python script or module, which our processes run"
        raise Unsupported("--no_python starts a program that is not Python", python, "leave it out")
    if args.autotuning:
        tuning = "tune with `deepspeed`, train with `deadpool launch`"
        raise Unsupported("--autotuning starts many jobs", "one job", tuning)
    options = rest[: len(rest) - 1 - len(args.user_args)] + ([] if args.module else ["--module"])
    script = [args.user_script, *args.user_args, *([FLAG, config] if config else [])]
    if args.module:
        script = script[1:] if args.user_script == RUN else ["-m", *script]
    line = parse(script)
    slots = slots_of(args, runner, is_named=any(_HOSTFILE.match(word) for word in options))
    hosts = [host for host, _ in slots] if (len(slots) > 1 or args.force_multi) and not args.no_ssh else []
    return Request(options, line.command, line.config, hosts, args.ssh_port, args.venv_script, slots)


def slots_of(args: argparse.Namespace, runner: Any, is_named: bool) -> list[tuple[str, int]]:
    """List the hosts that deepspeed will use, each with its slots; none without a hostfile. Raises: ConfigError."""
    file = args.hostfile
    if is_named and not os.path.isfile(file):
        remedy = "correct --hostfile; deepspeed would train on this host alone"
        raise ConfigError(f"there is no hostfile {file}", "a file with a line `host slots=8` for each host", remedy)
    try:
        pool = runner.fetch_hostfile(file)
        found = runner.parse_inclusion_exclusion(pool, args.include, args.exclude) if pool else {}
    except ValueError as error:
        lines = "lines of the form `host slots=8`, each host once"
        raise ConfigError(f"{file}: {error}", lines, "correct that line") from error
    if options := ", ".join(name for name in found if name.startswith("-")):
        names = "host names, which do not begin with `-`"
        raise ConfigError(f"{file} names {options}", names, "correct the first word of that line")
    slots = [(host, args.num_gpus if args.num_gpus > 0 else len(numbers)) for host, numbers in found.items()]
    return slots[: args.num_nodes] if args.num_nodes > 0 else slots


def understood(words: Sequence[str]) -> Request:
    """Do `read` in a process of its own, whose messages are the user's. Raises: SystemExit with its exit code."""
    done = subprocess.run([sys.executable, "-m", __name__, *words], stdout=subprocess.PIPE, check=False)
    if done.returncode or not done.stdout:
        raise SystemExit(done.returncode)
    return msgspec.json.decode(done.stdout, type=Request)


def main(words: Sequence[str]) -> int:
    try:
        with contextlib.redirect_stdout(sys.stderr):  # deepspeed says things while it is loaded
            request = read(words)
    except ImportError as error:
        say(f"deepspeed cannot be loaded: {error}; to do: `pip install deepspeed` on every host", to=sys.stderr)
        return EXIT_CONFIG
    except DeadpoolError as error:
        say(str(error), to=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    sys.stdout.buffer.write(msgspec.json.encode(request))
    return 0


if __name__ == "__main__":
    sys.argv[0] = "deadpool launch"  # the name by which argparse tells of mistakes
    sys.exit(main(sys.argv[1:]))
