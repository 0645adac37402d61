"""One emulated node's launcher, as deepspeed's launch.py: starts a supervisor per local rank, ends all if one fails.

`stub_launch.py supervise CONFIG ARGUMENTS...` is the supervisor itself, its standby process being stub_worker.py.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

STUB = Path(__file__).with_name("stub_worker.py")


def supervise(config: str, arguments: list[str]) -> None:
    from deadpool_plugin.launch.roles import from_environment
    from deadpool_plugin.launch.supervisor import Supervisor

    Supervisor(from_environment(), arguments, config, standby=[sys.executable, "-u", str(STUB)]).run()


def launch(config: str, arguments: list[str]) -> int:
    local_size, node = int(os.environ["LOCAL_SIZE"]), int(os.environ["CROSS_RANK"])
    children = []
    for local_rank in range(local_size):
        env = {**os.environ, "LOCAL_RANK": str(local_rank), "RANK": str(node * local_size + local_rank)}
        command = [sys.executable, "-u", __file__, "supervise", config, f"--local_rank={local_rank}", *arguments]
        children.append(subprocess.Popen(command, env=env))

    told: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: told.append(number))
    alive = list(children)
    while alive:
        if told:
            end(children)
            return 1
        for child in list(alive):
            if child.poll() is not None:
                alive.remove(child)
                if child.returncode != 0:
                    end(alive)
                    return child.returncode
        time.sleep(0.1)
    return 0


def end(children: list[subprocess.Popen]) -> None:
    for child in children:
        child.terminate()
    for child in children:
        child.wait()


if __name__ == "__main__":
    if sys.argv[1] == "supervise":
        supervise(sys.argv[2], sys.argv[3:])
    sys.exit(launch(sys.argv[1], sys.argv[2:]))
