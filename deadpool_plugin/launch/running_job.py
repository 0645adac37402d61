"""A job that runs, seen from outside: find it by its output_dir or a member's address, end it, or join it.

Rules of this file: everything that can be found wrong is found before anything starts, as a ConfigError; the job's
secret is all that is needed. A host that joins plays the launcher for itself: the command that runs is the job's own,
and the supervisors see what the deepspeed launcher would have told them, and an invitation.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import yaml

from ..agent.links import versions
from ..agent.world import INVITATION, Invitation, check_alike
from ..config import Config, load
from ..core.types import NodeId
from ..errors import EXIT_TAKEN, ConfigError, PeerRefused, TransportError, shell_code
from ..host import files
from ..host.output import say
from ..host.proc import ending_signals
from ..transport.framing import ConnectionClosed
from ..transport.handshake import ANY_JOB, Credentials
from ..transport.join_protocol import Describe, JobDescription, Reserve, Reserved, Stop, Stopping, ask, expect
from ..transport.rendezvous import Hello
from ..transport.sockets import Address
from . import checks, job_files
from .argv import FLAG, RUN, check_script, parse, without_launchers_words

ASK_S = 5.0
STOP_LIMIT_S = 120.0
STOP_POLL_S = 0.2
ATTEMPTS_MAX = 5  # so often another node id is tried when other hosts are faster
NOT_FOUND = "run this on a host that reaches these addresses; `deadpool outcome` says whether the job runs"
MEMBERS_NAMED = 3  # to a host that lacks the secret


class Wish(msgspec.Struct, frozen=True):
    """The user's wish: where the job is (`to`, else `job`, else the configuration's output_dir), the configuration's
    file ("": the job's own) and, to be sure, the job's command."""

    to: Address | None = None
    job: Path | None = None
    config: str = ""
    command: list[str] = []

    @property
    def path(self) -> str:
        """The configuration's file, wherever the flag stands; "" if none is named."""
        return self.config or (parse(self.command).config if self.command else "")


class FoundJob(msgspec.Struct, frozen=True):
    """`config`: the user's file for the job, "" for what its members have; `secret_file`: its secret on this host."""

    description: JobDescription
    config: str
    credentials: Credentials
    secret_file: Path


def find(wish: Wish) -> FoundJob:
    """Ask the first member that answers. Raises: ConfigError; TransportError if none answers."""
    path = wish.path
    config = load(path)
    folder = wish.job or config.output_dir
    named = [] if wish.to else files.published(folder)
    if not wish.to and not named:
        raise ConfigError(
            f"no node of a running job is named in {folder / files.CONTACTS_FOLDER}",
            "the job's output_dir on a shared file system",
            "name the job's output_dir, or a member by --to HOST:PORT",
        )
    if named and not path:
        # The members' own copies come before the user's file. `Path.exists` raises in a folder that is closed to us.
        theirs = [Path(file) for contact in named for file in contact.secret_files]
        config = Config(secret_file=next((file for file in theirs if os.path.exists(file.expanduser())), theirs[-1]))
    credentials = Credentials(existing_secret(config, named))
    addresses = [(wish.to, ANY_JOB)] if wish.to else [(contact.control, contact.job) for contact in named]
    description = asyncio.run(_described(addresses, credentials, config.secret_path))
    file = str(Path(path).resolve()) if path else ""
    return FoundJob(description, file, credentials.of(description.job), config.secret_path)


def existing_secret(config: Config, members: Sequence[files.ContactFile] = ()) -> bytes:
    """Read the secret of a job of `members`. Raises: ConfigError; TransportError if none of them answers."""
    path = config.secret_path
    if os.path.exists(path):  # it is never made here: a new one would be a wrong one
        return job_files.ensure_secret(config)
    hosts = asyncio.run(_at_work(members, Credentials(b"")))
    if members and not hosts:
        silent = ", ".join(one.host for one in members)
        raise TransportError(f"no member of a running job was found: {silent} do not answer", remedy=NOT_FOUND)
    copies = [f"{one.host}:{one.secret_files[0]}" for one in members if one.host in hosts and one.secret_files]
    theirs = ", ".join(copies[:MEMBERS_NAMED] or [f"HOST:{job_files.folder_of('*') / job_files.SECRET}"])
    raise ConfigError(
        f"there is no secret_file {path} on {os.uname().nodename}",
        "the job's secret, mode 0600",
        f"copy it from a host that is in the job ({theirs}) or from where it was launched: `mkdir -p {path.parent}; "
        f"scp -p FROM {path}`; or name a configuration with another secret_file by {FLAG}",
    )


async def _described(addresses: list[tuple[Address, str]], credentials: Credentials, secret: Path) -> JobDescription:
    """Ask for the job's description. `addresses`: with the job that is to answer there. Raises: TransportError."""
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
                here = f"{error.found}, with the secret in {secret}"
                raise PeerRefused(here, "the job's secret and id", remedy, address=error.address) from error
        except TransportError as error:
            failures.append(str(error))
    raise TransportError(f"no member of a running job was found: {'; '.join(failures)}", remedy=NOT_FOUND)


def check_unused(config: Config, secret: bytes) -> None:
    """Check that no job runs in the configuration's output_dir, whatever its secret is. Raises: ConfigError."""
    # Hosts that do not answer within ASK_S count as gone.
    if hosts := asyncio.run(_at_work(files.published(config.output_dir), Credentials(secret))):
        raise ConfigError(
            f"output_dir {config.output_dir.absolute()} is that of a job that runs on {', '.join(hosts)}",
            "a folder of its own for each job",
            f"name another one, or end that job: `deadpool stop {config.output_dir}`",
        )


async def _at_work(named: Sequence[files.ContactFile], credentials: Credentials) -> list[str]:
    asked = (ask(one.control, credentials.of(one.job), Describe(), ASK_S) for one in named)
    there = set()
    for one, answer in zip(named, await asyncio.gather(*asked, return_exceptions=True), strict=True):
        if isinstance(answer, JobDescription) or (isinstance(answer, PeerRefused) and answer.job == one.job):
            there.add(one.host)
    return sorted(there)


async def stop(job: FoundJob) -> list[str]:
    """End the job as Ctrl-C in its launcher does (exit code 130 everywhere), and wait until no member is there.

    Returns: the hosts that gave no answer: lost, or out of reach from here (they hear of it from the others).
    Raises: TransportError if no member takes the request, or some are still there after STOP_LIMIT_S.
    """
    deadline, rest, told = time.monotonic() + STOP_LIMIT_S, job.description.hellos, False
    say(f"ending the job of {', '.join(_names(rest))}")
    while True:
        # Each tells all others; those still there are told again, as they may not have been reached.
        answers = await asyncio.gather(*(_ends(hello, job.credentials) for hello in rest))
        there = [hello for hello, ends in zip(rest, answers, strict=True) if ends]
        rest = [hello for hello, ends in zip(rest, answers, strict=True) if ends is not False]
        told = told or bool(there)
        if not told:
            raise TransportError("no member took the request", remedy="ask again in a moment")
        if not there:
            return _names(rest)
        if time.monotonic() > deadline:
            found = f"{', '.join(_names(there))} did not end within {STOP_LIMIT_S:g} s"
            raise TransportError(found, remedy="look at what its processes do there (`deadpool watch` says the newest)")
        await asyncio.sleep(STOP_POLL_S)


async def _ends(hello: Hello, credentials: Credentials) -> bool | None:
    """Ask a member to end the job: True if it does, False if no agent of this job is there, None without an answer."""
    try:
        answer = await ask(hello.control, credentials, Stop(os.uname().nodename), ASK_S)
    except ConnectionClosed as error:
        answered = error.__cause__ is None or isinstance(error.__cause__, (ConnectionError, EOFError))
        return False if answered else None
    except TransportError:  # its port is another's by now
        return False
    return isinstance(answer, Stopping)  # who arrives just now finds nobody


def _names(hellos: Sequence[Hello]) -> list[str]:
    return [f"node {hello.node} ({hello.host})" for hello in hellos]


def join(wish: Wish, program: Sequence[str] = (sys.executable, "-u", "-m", RUN)) -> int:
    """Take part in the job until its end; its supervisors' exit code. Raises: ConfigError, TransportError."""
    job = find(wish)
    description, slots = job.description, range(job.description.hellos[0].local_size)
    members = [hello.host for hello in description.hellos if hello.node == description.node]
    with configured(job) as config:
        check(description, config, wish.command)
        commands = [supervisor_command(program, description, slot, config) for slot in slots]
        for _ in range(ATTEMPTS_MAX):
            node = asyncio.run(reserve(job))
            say(f"{os.uname().nodename} joins the job that {(*members, 'another host')[0]} is in, as node {node}")
            environments = [environment(description, node, slot) for slot in slots]
            exit_code = asyncio.run(play_launcher(commands, environments, description.directory))
            if exit_code != EXIT_TAKEN:
                return exit_code
    raise TransportError(f"{ATTEMPTS_MAX} node ids were taken by other hosts", remedy="deadpool join again")


@contextlib.contextmanager
def configured(job: FoundJob) -> Iterator[str]:
    """Keep the configuration file that this host takes part with, as long as the block runs. Raises: ConfigError."""
    if job.config:
        yield job.config
        return
    # The job's, with the secret where it lies here, and without an address, which is another host's.
    told = {**yaml.safe_load(job.description.config), "secret_file": os.path.abspath(job.secret_file)}
    for part in (told.get("interface_address") or "").split(","):
        with contextlib.suppress(ValueError):
            ipaddress.ip_address(part.strip())
            told.pop("interface_address", None)
    with job_files.installed(job_files.new_job(), yaml.safe_dump(told)) as folder:
        yield str(folder / job_files.CONFIG)


def check(description: JobDescription, config: str, command: Sequence[str]) -> None:
    member = next((hello for hello in description.hellos if hello.node == description.node), description.hellos[0])
    here, digest = os.uname().nodename, load(config).digest()
    checks.check_versions()
    ours = msgspec.structs.replace(member, node=-1, host=here, versions=versions(), config_digest=digest)
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
    for hello in job.description.hellos:
        try:
            answer = await ask(hello.control, job.credentials, Reserve(), ASK_S)
        except ConnectionClosed as error:
            reason = error
        else:
            reserved: Reserved = expect(answer, Reserved, "{}:{}".format(*hello.control))
            return reserved.node
    raise TransportError(f"no member of the job can be reached from here: {reason}", remedy="check the network")


def supervisor_command(program: Sequence[str], description: JobDescription, local_rank: int, config: str) -> list[str]:
    """Make the command that launch.py runs for one slot, launcher's words included where the job has them."""
    plain = without_launchers_words(description.command)
    said = [f"--local_rank={local_rank}"] if len(plain) < len(description.command) else []
    return [*program, *said, *plain, FLAG, config]


def environment(description: JobDescription, node: NodeId, local_rank: int) -> dict[str, str]:
    """Merge this host's variables, the job's exported ones where it has none, and the launcher's for one slot."""
    slots = description.hellos[0].local_size
    invitation = Invitation(description.job, tuple(hello.control for hello in description.hellos))
    return {
        **description.environment,
        **os.environ,
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


async def play_launcher(commands: list[list[str]], environments: list[dict[str, str]], directory: str) -> int:
    """Run one process per command in `directory`; the first that fails ends the others, and signals are passed on.
    Thread: the main one (the children live as long as it does)."""
    children, exit_code = list[asyncio.subprocess.Process](), 0

    def tell(number: int) -> None:
        for child in children:
            with contextlib.suppress(ProcessLookupError):
                child.send_signal(signal.SIGTERM if number == signal.SIGHUP else number)

    for number in ending_signals():
        asyncio.get_running_loop().add_signal_handler(number, tell, number)
    for command, env in zip(commands, environments, strict=True):
        children.append(await asyncio.create_subprocess_exec(*command, env=env, cwd=directory))
    for ended in asyncio.as_completed([child.wait() for child in children]):
        if (code := await ended) and not exit_code:
            exit_code = shell_code(code)
            tell(signal.SIGTERM)
    return exit_code
