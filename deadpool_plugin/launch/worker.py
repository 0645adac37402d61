"""The process a slot's standby process forks: becomes one rank, or rehearses one, and runs the user's script.

Rules of this file: torch is imported by functions only, as the standby process may have to do without it. The
environment is set before anything of the user's runs; the process introduces itself on a connection of its own. A
script that ends well waits for everybody else's end; every other end is told to the agent, after it has been printed
(the agent may end us at once), and also if it could not be (a full disk). One method of argparse is replaced for the
script, and nothing else here.
"""

from __future__ import annotations

import argparse
import atexit
import contextlib
import functools
import os
import re
import runpy
import sys
import textwrap
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from ..config import MIB, Config
from ..core import local
from ..errors import DeadpoolError, GenerationChanged
from ..host.output import say
from ..host.stacks import write_stacks
from ..transport import linux
from ..transport.unix import LocalConnection
from ..worker.faults import machine_fault
from ..worker.file_view import FileView
from ..worker.mute import Mute

if TYPE_CHECKING:
    from ..worker.context import Context

REASON_CHARS = 200  # of an error of several lines


def become(config: Config, local_rank: int, script: list[str], order: local.RunRank) -> NoReturn:
    """Carry out `order`; never returns."""
    os.environ.update(order.env)
    linux.name_process(f"python-{'spare' if order.rehearses else 'rank'}{order.rank}")
    if order.stands_in:  # until it takes over, its orphans are its own: the standby process has another's beside them
        linux.prctl(linux.PR_SET_CHILD_SUBREAPER, 1)
    connection = LocalConnection.to(os.environ["DEADPOOL_SOCKET"])
    connection.send(local.WorkerHello(local_rank, os.getpid(), order.rank, order.rehearses, order.order))
    connection.send(local.StackFile(), [write_stacks()])
    try:
        if order.rehearses:
            read_end, write_end = os.pipe()
            connection.send(local.RehearsalOutput(), [read_end])
            os.close(read_end)
            mute = Mute(write_end)  # only now: what goes wrong in there is said into the pipe, which somebody must read
            rehearsal, _ = connection.recv()
            assert isinstance(rehearsal, local.Recording), f"the agent answered {type(rehearsal).__name__}"
            context = start_following(connection, config, rehearsal, local_rank, mute)
        else:
            context = start_live(connection, config, order, local_rank)
    except SystemExit as end:
        leave(int(end.code or 0))
    except Exception as error:  # nobody may see its traceback: that goes to a file, which may be on a full disk
        tell_failing(connection, order.rank, error)
        raise

    def failed(error: BaseException) -> None:
        tell_failing(connection, order.rank, error, context.difference is not None)

    leave(run_script(script, context, failed))


def start_live(connection: LocalConnection, config: Config, order: local.RunRank, local_rank: int) -> Context:
    """Become an active rank, ready for the script. Raises: SystemExit if its world is over before that."""
    from ..worker.starting import Starting

    context = _context(connection, config, local_rank)
    try:
        start, _ = context.link.receive(local.StartGroups)
        assert isinstance(start, local.StartGroups)
        context.groups.start(start.generation, start.store)
    except GenerationChanged:  # the world it was for is over, and another process will begin the script
        raise SystemExit(context.link.wait_for_end(interruptible=False)) from None
    context.mode = starting = Starting(context, order.rank, config.header_kib * 1024)
    starting.watch()
    return context


def start_following(
    connection: LocalConnection, config: Config, rehearsal: local.Recording, local_rank: int, mute: Mute
) -> Context:
    """Begin a spare's rehearsal of one rank: the groups answer from the rank's recording."""
    from ..worker import codec
    from ..worker.follow import Follow
    from ..worker.light import Unread

    context = _context(connection, config, local_rank, rehearses=True)
    recording, layout_digest, looks, files = codec.decode(rehearsal.recording)
    context.groups.rehearse(recording)
    unread = Unread(lambda text: context.link.event("Note", text=f"rank {rehearsal.rank}: {text}"))
    context.mode = Follow(context, rehearsal.rank, layout_digest, mute, FileView(looks, files), unread)
    return context


def _context(connection: LocalConnection, config: Config, local_rank: int, rehearses: bool = False) -> Context:
    from ..adapters.deepspeed import extensions
    from ..adapters.deepspeed.adapter import DeepSpeedAdapter
    from ..adapters.megatron.adapter import MegatronAdapter
    from ..comm.groups import Groups
    from ..worker.context import Context
    from ..worker.link import AgentLink

    groups = Groups(config.recording_limit_mib * MIB, config.phase_timeout_s)
    link = AgentLink(connection, groups.generations)
    context = Context(link, groups, [MegatronAdapter(), DeepSpeedAdapter()], local_rank=local_rank)
    # Not with the adapter: DeepSpeed compiles before it initialises torch.distributed. Of a rehearsal nobody sees the
    # output, and the job is not protected before it is ready.
    extensions.install((lambda text: link.event("Note", text=text)) if rehearses else (lambda text: None))
    context.install()
    link.start(context)
    context.offer_store()  # at once: if every process of the job is lost, nobody else has one
    return context


def tell_failing(connection: LocalConnection, rank: int, error: BaseException, differs: bool = False) -> None:
    """Tell the agent, in a line, of the exception with which the script ends."""
    if isinstance(error, SystemExit):
        reason, fault = f"the script called sys.exit({error.code!r})", ""
    elif isinstance(error, DeadpoolError):
        reason, fault = str(error), ""  # the agent writes it into the rank's file; the job says it once for all ranks
    else:
        reason, fault = _in_a_line(error), machine_fault(error)
    connection.send(local.Failing(rank, f"{reason} ({fault})" if fault else reason, differs, bool(fault)))


def _in_a_line(error: BaseException) -> str:
    text = f"{type(error).__name__}: {error}"
    return textwrap.shorten(text, max(REASON_CHARS, len(text.partition("\n")[0])), placeholder=" ...")


def run_script(argv: list[str], context: Context, failed: Callable[[BaseException], None]) -> int:
    """Run the user's script as python would; the exit code for this process. `failed` hears why it did not end well."""
    try:
        try:
            spell_local_rank()
            if argv[0] == "-m":
                sys.argv, sys.path[0] = argv[1:], os.getcwd()
                runpy.run_module(argv[1], run_name="__main__", alter_sys=True)
            else:
                sys.argv, sys.path[0] = argv, str(Path(argv[0]).resolve().parent)
                runpy.run_path(argv[0], run_name="__main__")
        except SystemExit as end:
            if end.code not in (None, 0):
                raise
        return context.finish()
    except SystemExit as end:
        if not isinstance(end.code, int):
            with contextlib.suppress(OSError):
                print(end.code, file=sys.stderr, flush=True)
        failed(end)
        return end.code if isinstance(end.code, int) else 1
    except DeadpoolError as error:
        if Mute.active:  # into the rehearsal's own file
            say(str(error), to=sys.stderr)
        failed(error)
        return error.exit_code
    except GenerationChanged:  # during start-up there is nothing to go back to: the agents end the job
        return context.link.wait_for_end(interruptible=False)
    except BaseException as error:
        with contextlib.suppress(OSError):
            traceback.print_exc()
        failed(error)
        return 1


def spell_local_rank() -> None:
    """Give parsers that know only `--local-rank=N` (Megatron-LM's) what launch.py says as `--local_rank=N`. Once."""
    original = argparse.ArgumentParser.parse_known_args

    @functools.wraps(original)
    def parse_known_args(self: argparse.ArgumentParser, args: Any = None, namespace: Any = None, **more: Any) -> Any:
        words, known = list(sys.argv[1:] if args is None else args), self._option_string_actions
        if "--local-rank" in known and "--local_rank" not in known:
            words = [re.sub("^--local_rank=", "--local-rank=", word) for word in words]
        return original(self, words, namespace, **more)

    argparse.ArgumentParser.parse_known_args = parse_known_args  # type: ignore[method-assign]


def leave(exit_code: int) -> NoReturn:
    if exit_code == 0:
        atexit._run_exitfuncs()  # what the script has registered: loggers that flush
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)  # abandoned communicators must not be destroyed: their destructors may hang
