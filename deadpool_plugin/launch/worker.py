"""`python -m deadpool_plugin.launch.worker COMMAND...`: a training process under its supervisor.

An active rank runs the script at once, recording its start-up. A spare's process preloads what it can and forks
one process for each rank it is told to rehearse (standby.py).
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from ..config import load
from ..errors import invariant
from ..transport import local
from ..transport.local import LocalConnection
from .processes import die_with_parent
from .script import leave, run_script
from .standby import stand_by


def main() -> None:
    """Entry point; never returns."""
    die_with_parent()
    config = load(Path(os.environ["DEADPOOL_CONFIG"]))
    local_rank = int(os.environ["LOCAL_RANK"])
    connection = LocalConnection.to(os.environ["DEADPOOL_SOCKET"])
    connection.send(local.WorkerHello(local_rank, os.getpid()))
    role, _ = connection.recv()
    if isinstance(role, local.EndWorker):  # the job ended before it began, and somebody else has said why
        leave(role.exit_code)
    invariant(isinstance(role, local.Assign), f"the agent answered {type(role).__name__}, expected Assign")
    assert isinstance(role, local.Assign)
    os.environ.update(role.env)
    script = sys.argv[1:]
    if role.rank < 0:
        stand_by(connection, config, local_rank, script)
    from ..plugin import start_live

    context = start_live(connection, config, role, local_rank)
    leave(run_script(script, context))


if __name__ == "__main__":
    main()
