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
from ..config import Config, load
from ..core.types import NodeId
from ..errors import EXIT_TAKEN, ConfigError, PeerRefused, TransportError, shell_code
from ..host import files
from ..host.spawning import ending_signals
from ..transport.framing import ConnectionClosed
from ..transport.handshake import ANY_JOB, Credentials
from ..transport.join_protocol import Describe, JobDescription, Reserve, Reserved, ask, expect
from ..transport.rendezvous import Hello
from ..transport.sockets import Address
from . import carried, roles
from .argv import FLAG, RUN, head_of, launchers_words, missing_file, parse
from .secret import ensure

ASK_S = 5.0
POLL_S = 0.05
ATTEMPTS_MAX = 5
"""How often another node id is tried when other hosts are faster."""
NOT_FOUND = "run this on a host that reaches these addresses; `deadpool outcome` says whether the job runs"
MEMBERS_NAMED = 3
"""Number of members named to a host that lacks the secret."""


class Wish(msgspec.Struct, frozen=True):
    """The user's wish: where the job is (`to`, else `job`, else the configuration's output_dir), the configuration's
    file ("": the job's own) and, to be sure, the job's command. `job_id`: that of the job that was found before."""

    to: Address | None = None
    job: Path | None = None
    config: str = ""
    command: list[str] = []
    job_id: str = ANY_JOB


class FoundJob(msgspec.Struct, frozen=True):
    """A job that was found. `config`: the user's file for it, "" for what its members have; `secret_file`: the job's
    secret on this host."""

    description: JobDescription
    config: str
    secret: bytes
    secret_file: Path


def join(wish: Wish, program: Sequence[str] = (sys.executable, "-u", "-m", RUN)) -> int:
    """Take part in the job until its end; the exit code of this host's supervisors.

    Raises: ConfigError and TransportError for what is wrong, before anything was started.
    """
    for _ in range(ATTEMPTS_MAX):
        job = find(wish)
        with configured(job) as config:
            exit_code = take_part(job, config, wish.command, program)
        if exit_code != EXIT_TAKEN:
            return exit_code
        wish = msgspec.structs.replace(wish, config=job.config, job_id=job.description.job)
    raise TransportError(f"{ATTEMPTS_MAX} node ids were taken by other hosts", remedy="deadpool join again")


def take_part(job: FoundJob, config: str, command: Sequence[str], program: Sequence[str]) -> int:
    """Once, as one node; the exit code. Raises: as `join`."""
    description = job.description
    check(description, config, command)
    node = asyncio.run(reserve(job))
    member = next((hello.host for hello in description.hellos if hello.node == description.node), "another host")
    print(f"[deadpool] {os.uname().nodename} joins the job that {member} is in, as node {node}", flush=True)
    slots = description.hellos[0].local_size
    commands = [supervisor_command(program, description, k, config) for k in range(slots)]
    environments = [environment(description, node, k, os.environ) for k in range(slots)]
    return play_launcher(commands, environments, description.directory)


@contextlib.contextmanager
def configured(job: FoundJob) -> Iterator[str]:
    """The configuration file this host takes part with: the user's, or the job's, with the secret where it lies here
    and without an address, which is another host's. Raises: ConfigError."""
    if job.config:
        yield job.config
        return
    told = {**yaml.safe_load(job.description.config), "secret_file": os.path.abspath(job.secret_file)}
    with contextlib.suppress(ValueError):
        ipaddress.ip_address(told.get("interface_address") or "")
        del told["interface_address"]
    with carried.installed(carried.new_job(), yaml.safe_dump(told)) as folder:
        yield str(folder / carried.CONFIG)


# ---- finding the job


def find(wish: Wish) -> FoundJob:
    """Ask the first member that answers. Raises: ConfigError; TransportError if none answers."""
    config, path = _named(wish)
    found = files.published(wish.job or config.output_dir) if wish.to is None else []
    if wish.to is None and not found:
        raise ConfigError(
            f"no node of a running job is named in {(wish.job or config.output_dir) / files.CONTACTS_FOLDER}",
            "the job's output_dir on a shared file system",
            "name the job's output_dir, or a member by --to HOST:PORT",
        )
    if found and not path:
        config = Config(secret_file=_nearest([Path(file) for contact in found for file in contact.secret_files]))
    secret = _secret(config, found)
    addresses = [(wish.to, wish.job_id)] if wish.to else [(contact.control, contact.job) for contact in found]
    described = asyncio.run(
        _described(
            [one for one in addresses if wish.job_id in (ANY_JOB, one[1])], Credentials(secret), config.secret_path
        )
    )
    return FoundJob(described, path, secret, config.secret_path)


def check_unused(config: Config) -> None:
    """Check that no job runs that writes to the configuration's output_dir, whatever its secret is. Hosts that do not
    answer count as gone.

    Raises: ConfigError. Blocks: at most ASK_S and a moment.
    """
    named, secret = files.published(config.output_dir), ensure(config)
    hosts = asyncio.run(_at_work(named, Credentials(secret))) if named else []
    if hosts:
        raise ConfigError(
            f"output_dir {config.output_dir.absolute()} is that of a job that runs on {', '.join(hosts)}",
            "a folder of its own for each job",
            f"name another one, or end that job: `deadpool stop {config.output_dir}`",
        )


async def _at_work(named: Sequence[files.Contact], credentials: Credentials) -> list[str]:
    """The hosts of the members among them."""
    asked = (ask(one.control, credentials.of(one.job), Describe(), ASK_S) for one in named)
    answers = await asyncio.gather(*asked, return_exceptions=True)
    there = [
        one.host
        for one, answer in zip(named, answers, strict=True)
        if isinstance(answer, JobDescription) or (isinstance(answer, PeerRefused) and answer.job == one.job)
    ]
    return sorted(set(there))


def _nearest(files: Sequence[Path]) -> Path:
    """The first of them that is on this host, else the last: the members' own copies come before the user's file.

    A file in a folder that this user may not look into counts as none (`Path.exists` raises there).
    """
    return next((file for file in files if os.path.exists(os.path.expanduser(file))), files[-1])


def _named(wish: Wish) -> tuple[Config, str]:
    """The user's configuration, wherever the flag stands, and its file ("": none was named)."""
    path = wish.config or (parse(wish.command).config if wish.command else "")
    return load(path), str(Path(path).resolve()) if path else ""


def _secret(config: Config, members: Sequence[files.Contact] = ()) -> bytes:
    """Never made here: a new one would be a wrong one. `members`: who has it. Raises: ConfigError; TransportError if
    there are such files, and none of those hosts answers."""
    if not os.path.exists(config.secret_path):
        hosts = asyncio.run(_at_work(members, Credentials(b"")))
        if members and not hosts:
            raise TransportError(
                f"no member of a running job was found: {', '.join(one.host for one in members)} do not answer",
                remedy=NOT_FOUND,
            )
        has_it = [one for one in members if one.host in hosts and one.secret_files]
        files = [f"{one.host}:{one.secret_files[0]}" for one in has_it[:MEMBERS_NAMED]]
        theirs = ", ".join(files or [str(carried.folder_of("*") / carried.SECRET)])
        raise ConfigError(
            f"there is no secret_file {config.secret_path} on {os.uname().nodename}",
            "the job's secret, mode 0600",
            f"copy it from a host that is in the job ({theirs}) or from where it was launched, or name a configuration "
            f"with another secret_file by {FLAG}",
        )
    return ensure(config)


async def _described(
    addresses: Sequence[tuple[Address, str]], credentials: Credentials, secret_path: Path
) -> JobDescription:
    """`addresses`: with the job that is to answer there. Raises: TransportError if nobody describes a job."""
    failures = []
    for address, job in addresses:
        where = f"{address[0]}:{address[1]}"
        try:
            answer = await ask(address, credentials.of(job), Describe(), ASK_S)
            found: JobDescription = expect(answer, JobDescription, where)
            if found.members:
                return found
            failures.append(f"the host at {where} is joining itself")
        except PeerRefused as error:
            failures.append(error.found)
            if len(failures) == len(addresses):
                remedy = f"copy the secret from where the job was launched, or name the job's configuration by {FLAG}"
                here = f"{error.found}, with the secret in {secret_path}"
                raise PeerRefused(here, "the job's secret and id", remedy, address=error.address) from error
        except TransportError as error:
            failures.append(str(error))
    raise TransportError(
        f"no member of a running job was found: {'; '.join(failures)}",
        remedy=NOT_FOUND,
    )


async def reserve(job: FoundJob) -> NodeId:
    """A node id of the lowest member that answers: two hosts ask the same one. Raises: TransportError."""
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


# ---- checks


def check(description: JobDescription, config: str, command: Sequence[str]) -> None:
    """Refuse a host that cannot take part. Raises: ConfigError."""
    member = next((hello for hello in description.hellos if hello.node == description.node), description.hellos[0])
    here = os.uname().nodename
    roles.check_versions()
    ours = Hello(-1, here, member.control, member.bulk, member.local_size, versions(), load(config).digest())
    check_alike([member, ours])
    theirs = without_launcher_words(description.command)
    if command and without_launcher_words(parse(list(command)).command) != theirs:
        raise ConfigError(
            f"the command given is not the job's, which is `{' '.join(theirs)}`",
            "the same, or none at all",
            "leave out everything from `--` on",
        )
    directory = Path(description.directory)
    if not directory.is_dir():
        raise ConfigError(
            f"there is no directory {directory} on {here}", "the job's working directory", "make it as on other hosts"
        )
    if missing := missing_file(theirs, directory):
        raise ConfigError(f"{missing} on {here}", "the job's script", "copy it from another host")


def without_launcher_words(command: Sequence[str]) -> list[str]:
    """`command` without the `--local_rank=N` that launch.py puts behind the script."""
    head = head_of(command)
    rest = command[head:]
    return [*command[:head], *rest[len(launchers_words(rest)) :]]


# ---- playing the launcher


def supervisor_command(program: Sequence[str], description: JobDescription, local_rank: int, config: str) -> list[str]:
    """Make the command that launch.py runs for one slot, launcher's words included where the job has them."""
    plain = without_launcher_words(description.command)
    said = [f"--local_rank={local_rank}"] if len(plain) < len(description.command) else []
    return [*program, *said, *plain, FLAG, config]


def environment(
    description: JobDescription, node: NodeId, local_rank: int, environ: Mapping[str, str]
) -> dict[str, str]:
    """This host's variables, the job's exported ones where this host has none, and the launcher's for one slot."""
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
    """Start one process per command in `directory` and wait for all; the first that fails ends the others. The exit
    code.

    Signals that should end us are passed on. Thread: the main one (the children live as long as it does).
    """
    children: dict[int, subprocess.Popen[bytes]] = {}
    told: list[signal.Signals] = []

    def remember(number: int, _: object) -> None:
        told.append(signal.SIGTERM if number == signal.SIGHUP else signal.Signals(number))

    before = {number: signal.signal(number, remember) for number in ending_signals()}
    try:
        for command, env in zip(commands, environments, strict=True):
            child = subprocess.Popen(command, env=env, cwd=directory)
            children[child.pid] = child
        return _wait(children, told)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _wait(children: dict[int, subprocess.Popen[bytes]], told: list[signal.Signals]) -> int:
    """Polls: a signal may come just before any wait, which then knows nothing of it."""
    exit_code = 0
    while children:
        while told:
            _end(children, told.pop(0))
        pid, status = os.waitpid(-1, os.WNOHANG)
        if not pid:
            time.sleep(POLL_S)
            continue
        child = children.pop(pid, None)
        if child is None:
            continue
        child.returncode = os.waitstatus_to_exitcode(status)
        if child.returncode != 0 and exit_code == 0:
            exit_code = shell_code(child.returncode)
            _end(children, signal.SIGTERM)
    return exit_code


def _end(children: dict[int, subprocess.Popen[bytes]], number: signal.Signals) -> None:
    for pid in list(children):
        with contextlib.suppress(ProcessLookupError):  # a signal has come between its end and our knowing
            os.kill(pid, number)  # not Popen's: that one would wait for the child, and `_wait` would miss it
