"""The command line `run SCRIPT ARGUMENTS...`: our one flag is taken out, the launcher's own is put in its place.

Rules of this file: no argparse, because everything that is not ours belongs to the user's script and may look like
anything.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path

import msgspec

from ..errors import ConfigError
from .carried import is_carried
from .deepspeed_config import agreed, named_config

RUN = "deadpool_plugin.run"
"""The module that the launcher starts."""
FLAG = "--deadpool-config"
_ALMOST = ("--deadpool", "-deadpool")
"""Beginnings of options that are meant for us; a script that takes unknown ones would train with the defaults."""
_USAGE = "deepspeed --hostfile HOSTS --module deadpool_plugin.run SCRIPT ARGUMENTS... --deadpool-config FILE"


class CommandLine(msgspec.Struct, frozen=True):
    """`command`: what the worker runs, SCRIPT ARGUMENTS... (or -m MODULE ARGUMENTS...); `config`: the file, or ""."""

    command: list[str]
    config: str


def parse(arguments: Sequence[str]) -> CommandLine:
    """Split the arguments after the program's name.

    `--deadpool-config FILE` may stand anywhere; launch.py's `--local_rank=N`, which it puts first, goes behind the
    script, where scripts expect it. Without our flag, a DeepSpeed configuration among the arguments may name the file.

    Raises: ConfigError
    """
    rest, config = take_flag(arguments)
    launchers = launchers_words(rest)
    rest = rest[len(launchers) :]
    head = head_of(rest)
    if len(rest) < head or rest[head - 1].startswith("-"):
        found = f"{rest[0]} where the script should be" if rest else "no script on the command line"
        raise ConfigError(found, f"`{_USAGE}`", "name the training script")
    if not is_carried(config):  # else it was agreed on where the job began
        config = agreed(config, named_config(rest[head:]))
    return CommandLine(rest[:head] + launchers + rest[head:], config)


def head_of(command: Sequence[str]) -> int:
    """Count the words that name the script: SCRIPT, or -m MODULE."""
    return 2 if command[:1] == ["-m"] else 1


def missing_file(command: Sequence[str], directory: Path) -> str:
    """Say that the script is not on this host; "" if it is, or is a module."""
    found = command[0] == "-m" or (directory / command[0]).is_file()
    return "" if found else f"there is no file {command[0]} in {directory}"


def launchers_words(words: Sequence[str]) -> list[str]:
    """launch.py's own among the first ones."""
    return list(itertools.takewhile(lambda word: word.startswith(("--local_rank=", "--local-rank=")), words))


def take_flag(words: Sequence[str]) -> tuple[list[str], str]:
    """Return the other words, and the file that `--deadpool-config` names, or "". Raises: ConfigError."""
    arguments, rest, config = list(words), list[str](), list[str]()
    while arguments:
        argument = arguments.pop(0)
        if argument == FLAG:
            if not arguments:
                raise ConfigError(f"{FLAG} is the last word", f"`{FLAG} FILE`", "name the file")
            config.append(arguments.pop(0))
        elif argument.startswith(FLAG + "="):
            config.append(argument.partition("=")[2])
        elif argument.startswith(_ALMOST):
            raise ConfigError(f"the option {argument}", f"`{FLAG} FILE`", "correct its name")
        else:
            rest.append(argument)
    if len(config) > 1:
        raise ConfigError(f"{FLAG} is given {len(config)} times", "once at most", "remove all but one")
    return rest, config[0] if config else ""
