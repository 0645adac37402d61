"""`deadpool join`: play the launcher for one more host of a job that runs.

Rules of this file: everything that can be found wrong is found before anything starts, as a ConfigError; the command
that runs is the job's own; the supervisors see what the deepspeed launcher would have told them, and an invitation.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import msgspec
import yaml

from ..agent.links import versions
from ..agent.world import INVITATION, Invitation, check_alike
from ..config import load
from ..core.types import NodeId
from ..errors import EXIT_TAKEN, ConfigError, TransportError, shell_code
from ..host.output import say
from ..host.spawning import ending_signals
from ..transport.framing import ConnectionClosed
from ..transport.handshake import Credentials
from ..transport.join_protocol import JobDescription, Reserve, Reserved, ask, expect
from ..transport.rendezvous import Hello
from . import job_files, roles
from .argv import FLAG, RUN, check_script, parse, without_launchers_words
from .running_job import ASK_S, FoundJob, Wish, find

POLL_S = 0.05
ATTEMPTS_MAX = 5
"""How often another node id is tried when other hosts are faster."""


def join(wish: Wish, program: Sequence[str] = (sys.executable, "-u", "-m", RUN)) -> int:
    """Take part in the job until its end; its supervisors' exit code. Raises: ConfigError, TransportError."""
    for _ in range(ATTEMPTS_MAX):
        job = find(wish)
        with configured(job) as config:
            exit_code = take_part(job, config, wish.command, program)
        if exit_code != EXIT_TAKEN:
            return exit_code
        wish = msgspec.structs.replace(wish, config=job.config, job_id=job.description.job)
    raise TransportError(f"{ATTEMPTS_MAX} node ids were taken by other hosts", remedy="deadpool join again")


def take_part(job: FoundJob, config: str, command: Sequence[str], program: Sequence[str]) -> int:
    """Take part once, as one node; the exit code. Raises: as `join`."""
    description = job.description
    check(description, config, command)
    node = asyncio.run(reserve(job))
    member = next((hello.host for hello in description.hellos if hello.node == description.node), "another host")
    say(f"{os.uname().nodename} joins the job that {member} is in, as node {node}")
    slots = range(description.hellos[0].local_size)
    commands = [supervisor_command(program, description, k, config) for k in slots]
    environments = [environment(description, node, k, os.environ) for k in slots]
    return play_launcher(commands, environments, description.directory)


@contextlib.contextmanager
def configured(job: FoundJob) -> Iterator[str]:
    """Keep the configuration file that this host takes part with, as long as the block runs. Raises: ConfigError."""
    if job.config:
        yield job.config
        return
    # The job's, with the secret where it lies here, and without an address, which is another host's.
    told = {**yaml.safe_load(job.description.config), "secret_file": os.path.abspath(job.secret_file)}
    with contextlib.suppress(ValueError):
        ipaddress.ip_address(told.get("interface_address") or "")
        del told["interface_address"]
    with job_files.installed(job_files.new_job(), yaml.safe_dump(told)) as folder:
        yield str(folder / job_files.CONFIG)


def check(description: JobDescription, config: str, command: Sequence[str]) -> None:
    """Refuse a host that cannot take part. Raises: ConfigError."""
    member = next((hello for hello in description.hellos if hello.node == description.node), description.hellos[0])
    here = os.uname().nodename
    roles.check_versions()
    ours = Hello(-1, here, member.control, member.bulk, member.local_size, versions(), load(config).digest())
    check_alike([member, ours])
    theirs = without_launchers_words(description.command)
    if command and without_launchers_words(parse(list(command)).command) != theirs:
        raise ConfigError(
            f"the command given is not the job's, which is `{' '.join(theirs)}`",
            "the same, or none at all",
            "leave out everything from `--` on",
        )
    directory = Path(description.directory)
    if not directory.is_dir():
        found = f"there is no directory {directory} on {here}"
        raise ConfigError(found, "the job's working directory", "make it as on other hosts")
    check_script(theirs, directory)


async def reserve(job: FoundJob) -> NodeId:
    """Get a node id from the lowest member that answers: two hosts ask the same one. Raises: TransportError."""
    reason: Exception | None = None
    credentials = Credentials(job.secret, job.description.job)
    for hello in job.description.hellos:
        try:
            answer = await ask(hello.control, credentials, Reserve(), ASK_S)
            reserved: Reserved = expect(answer, Reserved, f"{hello.control[0]}:{hello.control[1]}")
            return reserved.node
        except ConnectionClosed as error:
            reason = error
    raise TransportError(f"no member of the job can be reached from here: {reason}", remedy="check the network")


# ---- playing the launcher


def supervisor_command(program: Sequence[str], description: JobDescription, local_rank: int, config: str) -> list[str]:
    """Make the command that launch.py runs for one slot, launcher's words included where the job has them."""
    plain = without_launchers_words(description.command)
    said = [f"--local_rank={local_rank}"] if len(plain) < len(description.command) else []
    return [*program, *said, *plain, FLAG, config]


def environment(
    description: JobDescription, node: NodeId, local_rank: int, environ: Mapping[str, str]
) -> dict[str, str]:
    """Merge this host's variables, the job's exported ones where it has none, and the launcher's for one slot."""
    slots = description.hellos[0].local_size
    invitation = Invitation(description.job, tuple(hello.control for hello in description.hellos))
    return {
        **description.environment,
        **environ,
        "MASTER_ADDR": description.master_addr,
        "MASTER_PORT": str(description.master_port),
        "LOCAL_RANK": str(local_rank),
        "LOCAL_SIZE": str(slots),
        "RANK": str(node * slots + local_rank),
        "WORLD_SIZE": str((node + 1) * slots),
        "CROSS_RANK": str(node),
        "CROSS_SIZE": str(node + 1),
        INVITATION: msgspec.json.encode(invitation).decode(),
    }


def play_launcher(commands: Sequence[Sequence[str]], environments: Sequence[dict[str, str]], directory: str) -> int:
    """Start one process per command in `directory` and wait for all; the first that fails ends the others.

    Signals that should end us are passed on. Thread: the main one (the children live as long as it does).
    """
    children: dict[int, subprocess.Popen[bytes]] = {}
    told: list[int] = []

    def pass_on(number: int) -> None:
        for pid in list(children):
            with contextlib.suppress(ProcessLookupError):  # a signal has come between its end and our knowing
                os.kill(pid, number)  # not Popen's: that one would wait for the child, and we would miss it

    exit_code = 0
    before = {number: signal.signal(number, lambda number, _: told.append(number)) for number in ending_signals()}
    try:
        for command, env in zip(commands, environments, strict=True):
            child = subprocess.Popen(command, env=env, cwd=directory)
            children[child.pid] = child
        while children:
            while told:
                number = told.pop(0)
                pass_on(signal.SIGTERM if number == signal.SIGHUP else number)
            pid, status = os.waitpid(-1, os.WNOHANG)  # polled: a signal just before a wait would be missed
            if not pid:
                time.sleep(POLL_S)
            elif ended := children.pop(pid, None):
                ended.returncode = os.waitstatus_to_exitcode(status)
                if ended.returncode != 0 and exit_code == 0:
                    exit_code = shell_code(ended.returncode)
                    pass_on(signal.SIGTERM)
        return exit_code
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
