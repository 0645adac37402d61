"""The user's script inside one of our processes: run as `__main__`, its end turned into an exit code.

Rules of this file: a script that ends well waits for everybody else's end; every other end is told to whoever asked,
after it has been printed (who is told may end us at once), and also if it could not be (a full disk). One method
of argparse is replaced for the script, and nothing else here.
"""

from __future__ import annotations

import argparse
import atexit
import contextlib
import functools
import os
import runpy
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from ..errors import DeadpoolError, GenerationChanged

if TYPE_CHECKING:
    from ..worker.context import Context


def run_script(argv: list[str], context: Context, failed: Callable[[str], None]) -> int:
    """Run the user's script as `__main__`; the exit code for this process.

    A script that ends well waits for everybody else's end; otherwise `failed` hears why.
    """
    try:
        try:
            _run(argv)
        except SystemExit as end:
            if end.code not in (None, 0):
                raise
        return context.finish()
    except SystemExit as end:
        if not isinstance(end.code, int):
            with contextlib.suppress(OSError):
                print(end.code, file=sys.stderr, flush=True)
        failed(f"the script called sys.exit({end.code!r})")
        return end.code if isinstance(end.code, int) else 1
    except DeadpoolError as error:
        from ..worker.output import Mute

        if Mute.active:  # into the rehearsal's own file
            with contextlib.suppress(OSError):
                print(f"[deadpool] {error}", file=sys.stderr, flush=True)
        failed(str(error))  # the agent writes it into the rank's file; the job says it once for all ranks
        return error.exit_code
    except GenerationChanged:  # during start-up there is nothing to go back to: the agents end the job
        return context.wait_for_end()
    except BaseException as error:
        with contextlib.suppress(OSError):
            traceback.print_exc()
        failed(in_a_line(error))
        return 1


def in_a_line(error: BaseException) -> str:
    """Describe an exception to the agent, in one line."""
    return f"{type(error).__name__}: {error}".partition("\n")[0]


def _run(argv: list[str]) -> None:
    """Run it as `python SCRIPT ARGUMENTS...` or `python -m MODULE ARGUMENTS...` would."""
    spell_local_rank()
    if argv[0] == "-m":
        sys.argv, sys.path[0] = argv[1:], os.getcwd()
        runpy.run_module(argv[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv, sys.path[0] = argv, str(Path(argv[0]).resolve().parent)
        runpy.run_path(argv[0], run_name="__main__")


def spell_local_rank() -> None:
    """launch.py says `--local_rank=N`, torch's launchers say `--local-rank=N`: a parser that knows only the latter
    (Megatron-LM's) is given that. In a process that runs the user's script, once.
    """
    original = argparse.ArgumentParser.parse_known_args

    @functools.wraps(original)
    def parse_known_args(self: argparse.ArgumentParser, args: Any = None, namespace: Any = None, **more: Any) -> Any:
        words = list(sys.argv[1:] if args is None else args)
        known = self._option_string_actions
        if "--local-rank" in known and "--local_rank" not in known:
            given, meant = "--local_rank=", "--local-rank="
            words = [meant + word.removeprefix(given) if word.startswith(given) else word for word in words]
        return original(self, words, namespace, **more)

    argparse.ArgumentParser.parse_known_args = parse_known_args  # type: ignore[method-assign]


def leave(exit_code: int) -> NoReturn:
    """End this process now: abandoned communicators must not be destroyed (their destructors may hang).

    What the script registered with atexit (loggers that flush) runs first if all is well.
    """
    if exit_code == 0:
        atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)
