"""The process a slot's standby process forks: becomes one rank, or rehearses one, and runs the user's script.

Rules of this file: the environment is set before anything of the user's runs; the process introduces itself on a
connection of its own; it tells once what it has imported and, if its script fails, why.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, NoReturn

from ..config import Config
from ..core import local
from ..transport import linux
from ..transport.unix import LocalConnection
from .lessons import tell_modules
from .script import in_a_line, leave, run_script

if TYPE_CHECKING:
    from ..worker.context import Context


def become(config: Config, local_rank: int, script: list[str], order: local.RunRank, tell: int) -> NoReturn:
    """Carry out `order`; never returns. `tell`: where to say what was imported, -1 if nobody asks."""
    os.environ.update(order.env)
    linux.name_process(f"python-{'spare' if order.rehearses else 'rank'}{order.rank}")
    connection = LocalConnection.to(os.environ["DEADPOOL_SOCKET"])
    connection.send(local.WorkerHello(local_rank, os.getpid(), order.rank, order.rehearses, order.order))
    try:
        if order.rehearses:
            context = _rehearse(connection, config, local_rank)
        else:
            context = _begin(connection, config, local_rank, order)
    except Exception as error:  # nobody may see its traceback: that goes to a file, which may be on a full disk
        connection.send(local.Failing(order.rank, in_a_line(error)))
        raise
    context.on_built = lambda: tell_modules(tell, context.adapter.beforehand())

    def failed(reason: str) -> None:
        connection.send(local.Failing(order.rank, reason, context.reads.difference is not None))

    leave(run_script(script, context, failed))


def _begin(connection: LocalConnection, config: Config, local_rank: int, order: local.RunRank) -> Context:
    from ..plugin import start_live

    try:
        return start_live(connection, config, order, local_rank)
    except SystemExit as end:
        leave(int(end.code or 0))


def _rehearse(connection: LocalConnection, config: Config, local_rank: int) -> Context:
    from ..plugin import start_following
    from ..worker.output import Mute

    read_end, write_end = os.pipe()
    connection.send(local.RehearsalOutput(), [read_end])
    os.close(read_end)
    mute = Mute(write_end)  # only now: what goes wrong in there is said into the pipe, which somebody must read
    rehearsal, _ = connection.recv()
    assert isinstance(rehearsal, local.Rehearsal), f"the agent answered {type(rehearsal).__name__}"
    return start_following(connection, config, rehearsal, local_rank, mute)
