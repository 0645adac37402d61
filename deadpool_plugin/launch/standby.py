"""A spare's process: imports once, forks a process for every rank it is told to rehearse.

Rules of this file: no thread may exist in the forking process. The modules a first rehearsal turned out to need
are imported here afterwards, so that the next fork (a rank nobody rehearsed was lost) starts warm.
"""

from __future__ import annotations

import importlib
import os
import select
import signal
import sys
from collections.abc import Iterable

from ..config import Config
from ..transport import local
from ..transport.framing import ConnectionClosed
from ..transport.local import LocalConnection
from .processes import die_with_parent
from .script import leave, run_script

DEFAULT_PRELOAD = ("torch", "torch.distributed")


def stand_by(connection: LocalConnection, config: Config, local_rank: int, script: list[str]) -> None:
    """Serve rehearsal orders until the agent is gone; never returns."""
    _preload(config.preload if config.preload is not None else DEFAULT_PRELOAD)
    child, learned = 0, -1
    while True:
        readable, _, _ = select.select([connection] + ([learned] if learned >= 0 else []), [], [])
        if learned in readable:
            _learn(learned)
            os.close(learned)
            learned = -1
        if connection not in readable:
            continue
        try:
            order, _ = connection.recv()
        except ConnectionClosed:
            os._exit(0)
        if isinstance(order, local.EndWorker):
            os._exit(order.exit_code)
        if isinstance(order, local.RehearseRank):
            if child:
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
            if learned >= 0:
                os.close(learned)
            learned, tell = os.pipe()
            child = os.fork()
            if child == 0:
                os.close(learned)
                os.close(connection.fileno())
                _rehearse(config, order, local_rank, script, tell)
            os.close(tell)


def _rehearse(config: Config, order: local.RehearseRank, local_rank: int, script: list[str], tell: int) -> None:
    """The forked process: introduce ourselves, go quiet, run the script. Never returns."""
    from ..plugin import start_following
    from ..worker.output import Mute

    die_with_parent()
    os.environ.update(order.env)
    mute = Mute(config.output_dir / "rehearsals" / f"rank{order.rank:04d}.{os.getpid()}.txt")
    connection = LocalConnection.to(os.environ["DEADPOOL_SOCKET"])
    connection.send(local.RehearserHello(local_rank, os.getpid(), order.rank))
    rehearsal, _ = connection.recv()
    assert isinstance(rehearsal, local.Rehearsal)
    context = start_following(connection, config, rehearsal, local_rank, mute)
    context.on_rehearsed = lambda: _tell_modules(tell)
    refuse = lambda reason: connection.send(local.RehearsalRefused(order.rank, reason))  # noqa: E731
    leave(run_script(script, context, refuse))


def _tell_modules(tell: int) -> None:
    """Names of the installed (not the user's own) modules this rehearsal imported, for the parent."""
    installed = [
        name
        for name, module in list(sys.modules.items())
        if "site-packages" in (getattr(module, "__file__", None) or "") and not name.startswith("deadpool_plugin")
    ]
    with os.fdopen(tell, "w") as pipe:
        pipe.write("\n".join(installed))


def _learn(pipe: int) -> None:
    names = b""
    while piece := os.read(pipe, 1 << 16):
        names += piece
    _preload(names.decode().split("\n"))


def _preload(names: Iterable[str]) -> None:
    """Import what can be imported; a module that cannot be is the rehearsal's to complain about."""
    for name in names:
        if name and name not in sys.modules:
            try:
                importlib.import_module(name)
            except Exception as error:
                print(f"[deadpool] standby could not preload {name}: {error}", file=sys.stderr)
