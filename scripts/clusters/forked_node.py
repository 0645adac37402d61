"""One emulated host of a forked cluster: plays launch.py, or `deadpool join`, without executing anything.

It forks a supervisor per slot with the launcher's environment; these fork the agent and the standby processes, and
those the workers. All of it is one session, so that the host can be killed or silenced as a whole.
Rules of this file: what runs here runs in forked processes, but for `preload`; nothing returns into the driver's code.
"""

from __future__ import annotations

import asyncio
import faulthandler
import importlib
import os
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from clusters import card, processes
from clusters.launched import REPOSITORY

OURS = (
    "deadpool_plugin.agent.process",
    "deadpool_plugin.host.machine",
    "deadpool_plugin.launch.supervisor",
    "deadpool_plugin.worker.live",
    "deadpool_plugin.worker.follow",
)
PRELOAD = (
    "torch.distributed",
    "patches.cpu.applied",
    "megatron.core.models.gpt.gpt_layer_specs",
    "megatron.core.datasets.gpt_dataset",
    "megatron.core.datasets.blended_megatron_dataset_builder",
    "megatron.core.dist_checkpointing.strategies.async_utils",
    "megatron.core.optimizer",
    "megatron.core.pipeline_parallel",
    "deadpool_plugin.adapters.megatron.adapter",
    *OURS,
)
DEEPSPEED = (
    "torch.distributed",
    "patches.cpu.applied_to_deepspeed",
    "deepspeed",
    "deepspeed.runtime.zero.muon.muon_optimizer",  # every engine imports it, and it torch's compiler: 3 CPU seconds
    "deadpool_plugin.adapters.deepspeed.adapter",
    *OURS,
)
MODULES = {"megatron": PRELOAD, "deepspeed": DEEPSPEED}
LAUNCHER_POLL_S = 0.1


def preload(names: Sequence[str] = PRELOAD, device: str = "cpu", cards: int = 1) -> None:
    """Import what all processes of a cluster need. Raises: RuntimeError if that has started a thread, or CUDA."""
    warnings.filterwarnings("ignore")
    os.environ.update(launcher_environment(device, cards))
    if str(REPOSITORY) not in sys.path:
        sys.path.insert(1, str(REPOSITORY))
    import_all(names)
    processes.require_one_thread()
    if device == "cuda":
        require_cuda_in_forks(cards)
    processes.become_subreaper()


def require_cuda_in_forks(cards: int) -> None:
    """Raises: RuntimeError if there are fewer cards, or if something has initialised CUDA in this process: no fork of
    it could use them."""
    import torch

    if (found := torch.cuda.device_count()) < cards:
        raise RuntimeError(f"torch sees {found} NVIDIA cards here; expected {cards}, which each emulated host has")
    pid = os.fork()
    if pid == 0:
        os._exit(torch.cuda._is_in_bad_fork())
    if os.waitpid(pid, 0)[1]:
        raise RuntimeError("CUDA was initialised by the imports: forked processes could not use the card")


def import_all(names: Sequence[str] = PRELOAD) -> None:
    for name in names:
        importlib.import_module(name)


def launcher_environment(device: str = "cpu", cards: int = 1) -> dict[str, str]:
    """Emulated nodes compute on the CPU also where there is a GPU, unless they are told to share those ("cuda")."""
    common = {
        "OMP_NUM_THREADS": "1",
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "PYTHONUNBUFFERED": "1",
    }
    return common | (
        card.environment(cards) if device == "cuda" else {"CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu"}
    )


@dataclass(frozen=True)
class Host:
    """Args as of forked.Cluster; `launch` or `join` is the whole life of the process that calls it."""

    folder: Path
    index: int
    size: int
    slots: int
    port: int
    script: list[str]
    config: Path
    before_agent: Callable[[], None]

    def launch(self, driver: int) -> NoReturn:
        """One of the hosts the job begins with."""
        self._live(driver, lambda: self._play_launcher(self._from_launcher))

    def join(self, driver: int) -> NoReturn:
        """A host that comes later."""
        self._live(driver, self._join)

    def _live(self, driver: int, play: Callable[[], NoReturn]) -> NoReturn:
        try:
            self._become(driver)
            play()
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)

    def _become(self, driver: int) -> None:
        from deadpool_plugin.transport.linux import die_with_parent

        os.setsid()
        die_with_parent(signal.SIGKILL, driver)
        output = os.open(
            self.folder / "launcher" / f"node{self.index}.txt", os.O_CREAT | os.O_APPEND | os.O_WRONLY, 0o644
        )
        nothing = os.open(os.devnull, os.O_RDONLY)
        for source, target in ((nothing, 0), (output, 1), (output, 2)):
            os.dup2(source, target)
        sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
        sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
        faulthandler.register(signal.SIGUSR1, all_threads=True)  # inherited by all that is forked from here
        os.chdir(REPOSITORY)
        os.environ.update(
            card.host_id(self.index),
            DEMO_NODE=str(self.index),
            DEMO_LEADER=str(os.getpid()),
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=str(self.port),
            WORLD_SIZE=str(self.size * self.slots),
            CROSS_SIZE=str(self.size),
            CROSS_RANK=str(self.index),
            LOCAL_SIZE=str(self.slots),
        )

    def _join(self) -> NoReturn:
        from deadpool_plugin.launch import running_job

        invitation = running_job.find(running_job.Wish(config=str(self.config)))
        node = asyncio.run(running_job.reserve(invitation))
        if node != self.index:
            raise RuntimeError(f"the job calls this host node {node}, expected {self.index}")
        self._play_launcher(lambda slot: running_job.environment(invitation.description, node, slot))

    def _from_launcher(self, local_rank: int) -> dict[str, str]:
        """Return the variables that launch.py gives one child and not the others."""
        return {"LOCAL_RANK": str(local_rank), "RANK": str(self.index * self.slots + local_rank)}

    def _play_launcher(self, environment: Callable[[int], dict[str, str]]) -> NoReturn:
        """Start as launch.py does: a child for each slot; if one ends badly, the others are ended."""
        children = {}
        for local_rank in range(self.slots):
            pid = os.fork()
            if pid == 0:
                os.environ.update(environment(local_rank))
                self._supervise(local_rank)
            children[pid] = local_rank
        signal.signal(signal.SIGTERM, lambda *_: end_all(children, 1))
        while children:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                time.sleep(LAUNCHER_POLL_S)
                continue
            code = os.waitstatus_to_exitcode(status)
            if children.pop(pid, None) is not None and code != 0:
                end_all(children, code)
        os._exit(0)

    def _supervise(self, local_rank: int) -> NoReturn:
        from deadpool_plugin.launch import argv, checks, standby
        from deadpool_plugin.launch.supervisor import Supervisor

        try:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            words = [f"--local_rank={local_rank}", *self.script, argv.FLAG, str(self.config)]
            line = argv.parse(words)
            Supervisor(
                checks.place_of(), line.command, line.config,
                standby=lambda: standby.main(line.command), agent=lambda fd: lambda: self._agent(fd),
            ).run()  # fmt: skip
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)

    def _agent(self, descriptor: int) -> None:
        from deadpool_plugin.launch.agent import serve

        self.before_agent()
        serve(descriptor)


def end_all(children: dict[int, int], code: int) -> NoReturn:
    """End children as launch.py does: one after the other, each with its time."""
    for pid in children:
        processes.send(pid, signal.SIGTERM)
    for pid in children:
        try:
            os.waitpid(pid, 0)
        except ChildProcessError:
            continue
    os._exit(code if code >= 0 else 128 - code)
