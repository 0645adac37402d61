"""`activate()`: the one line for a script that may be edited. Rules of this file: no torch, no imports that cost."""

from __future__ import annotations

import os
import sys

from .argv import FLAG

RUN = "deadpool_plugin.run"


def activate() -> None:
    """In a plain process whose command line has our flag: become the supervisor that runs the same command again.

    In a worker, or without the flag: nothing. Must be the script's first statement: before torch is imported, before a
    thread is started.
    """
    flagged = any(word == FLAG or word.startswith(FLAG + "=") for word in sys.argv[1:])
    if "DEADPOOL_SOCKET" in os.environ or not flagged:
        return
    os.execv(sys.executable, supervised(sys.orig_argv, len(sys.argv)))


def supervised(original: list[str], script_words: int) -> list[str]:
    """`python OPTIONS SCRIPT ARGUMENTS...` -> `python OPTIONS -m deadpool_plugin.run SCRIPT ARGUMENTS...`

    Args:
        original: as sys.orig_argv. script_words: how many words at its end are the script and its arguments.
    """
    options, script = original[1 : len(original) - script_words], original[len(original) - script_words :]
    if options[-1:] == ["-m"]:
        options, script = options[:-1], ["-m", *script]
    return [original[0], *options, "-m", RUN, *script]
