"""`activate()`: the one line for a script that may be edited. Rules of this file: no torch, no imports that cost."""

from __future__ import annotations

import os
import sys

from ..errors import ConfigError
from .argv import RUN, take_flag
from .deepspeed_config import named_config


def activate() -> None:
    """Become, in a plain process whose command line names our configuration, the supervisor that runs it again.

    By the flag, or in a DeepSpeed configuration. In a worker, or without either: nothing. Must be the script's first
    statement: before torch is imported, before a thread is started.
    """
    if "DEADPOOL_SOCKET" in os.environ or not _is_wanted(sys.argv[1:]):
        return
    os.execv(sys.executable, supervised(sys.orig_argv, len(sys.argv)))


def _is_wanted(words: list[str]) -> bool:
    try:
        return len(take_flag(words)[0]) < len(words) or bool(named_config(words))
    except ConfigError:
        return True  # `run` says what is wrong


def supervised(original: list[str], script_words: int) -> list[str]:
    """`python OPTIONS SCRIPT ARGUMENTS...` -> `python OPTIONS -m deadpool_plugin.run SCRIPT ARGUMENTS...`

    Args:
        original: as sys.orig_argv. script_words: how many words at its end are the script and its arguments.
    """
    options, script = original[1 : len(original) - script_words], original[len(original) - script_words :]
    if options[-1:] == ["-m"]:
        options, script = options[:-1], ["-m", *script]
    return [original[0], *options, "-m", RUN, *script]
