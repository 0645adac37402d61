"""One emulated node's launcher, as deepspeed's launch.py: starts a supervisor per local rank, ends all if one fails.

`stub_launch.py supervise CONFIG ARGUMENTS...` is the supervisor itself, its standby process being stub_worker.py.
The node's processes are forks of the first one, which imports everything once: importing is nearly all that they cost.
With DEADPOOL_TEST_EXECUTES each of them is executed as in a real job. What a process is, is its name (/proc/PID/comm).
"""

from __future__ import annotations

import os
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import NoReturn

STUB = Path(__file__).with_name("stub_worker.py")
EXECUTES = "DEADPOOL_TEST_EXECUTES" in os.environ


def be_called(name: str) -> None:
    Path("/proc/self/comm").write_text(name)


def supervise(config: str, arguments: list[str]) -> NoReturn:
    from deadpool_plugin.launch.checks import place_of
    from deadpool_plugin.launch.supervisor import Supervisor

    place = place_of()
    be_called(f"supervisor{place.local_rank}")
    if EXECUTES:
        Supervisor(place, arguments, config, standby=[sys.executable, "-u", str(STUB)]).run()
    from dist import stub_worker

    Supervisor(place, arguments, config, lambda: stub_worker.main(arguments), lambda fd: lambda: agent(fd)).run()


def agent(descriptor: int) -> NoReturn:
    from deadpool_plugin.launch.agent import serve

    be_called("agent")
    serve(descriptor)


def launch(config: str, arguments: list[str]) -> int:
    if not EXECUTES:
        import dist.stub_worker  # noqa: F401 - imported for the forks

        import deadpool_plugin.agent.process
        import deadpool_plugin.host.machine
        import deadpool_plugin.launch.agent
        import deadpool_plugin.launch.supervisor  # noqa: F401
    be_called("launcher")
    children = {start(local_rank, config, arguments) for local_rank in range(int(os.environ["LOCAL_SIZE"]))}
    told: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: told.append(number))
    while children and not told:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid:
            children.discard(pid)
            if (code := os.waitstatus_to_exitcode(status)) != 0:
                end(children)
                return code
        else:
            time.sleep(0.1)
    end(children)
    return 1 if told else 0


def start(local_rank: int, config: str, arguments: list[str]) -> int:
    rank = int(os.environ["CROSS_RANK"]) * int(os.environ["LOCAL_SIZE"]) + local_rank
    pid = os.fork()
    if pid:
        return pid
    try:
        os.environ.update(LOCAL_RANK=str(local_rank), RANK=str(rank))
        words = ["supervise", config, f"--local_rank={local_rank}", *arguments]
        if EXECUTES:
            os.execv(sys.executable, [sys.executable, "-u", __file__, *words])
        supervise(config, words[2:])
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(1)


def end(children: set[int]) -> None:
    for pid in children:
        os.kill(pid, signal.SIGTERM)
    for pid in children:
        os.waitpid(pid, 0)


if __name__ == "__main__":
    if sys.argv[1] == "supervise":
        supervise(sys.argv[2], sys.argv[3:])
    sys.exit(launch(sys.argv[1], sys.argv[2:]))
