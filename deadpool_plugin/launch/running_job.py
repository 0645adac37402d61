"""A job that runs, seen from outside: find it by its output_dir or a member's address, or end it everywhere.

Rules of this file: everything that can be found wrong is found before anything starts, as a ConfigError; the job's
secret is all that is needed.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from ..config import Config, load
from ..errors import ConfigError, PeerRefused, TransportError
from ..host import files
from ..host.output import say
from ..transport.framing import ConnectionClosed
from ..transport.handshake import ANY_JOB, Credentials
from ..transport.join_protocol import Describe, JobDescription, Stop, Stopping, ask, expect
from ..transport.rendezvous import Hello
from ..transport.sockets import Address
from . import job_files
from .argv import FLAG, parse

ASK_S = 5.0
STOP_LIMIT_S = 120.0
STOP_POLL_S = 0.2
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

    @property
    def path(self) -> str:
        """The configuration's file, wherever the flag stands; "" if none is named."""
        return self.config or (parse(self.command).config if self.command else "")


class FoundJob(msgspec.Struct, frozen=True):
    """A job that was found. `config`: the user's file for it, "" for what its members have; `secret_file`: the job's
    secret on this host."""

    description: JobDescription
    config: str
    secret: bytes
    secret_file: Path


def find(wish: Wish) -> FoundJob:
    """Ask the first member that answers. Raises: ConfigError; TransportError if none answers."""
    path = wish.path
    config = load(path)
    named = files.published(wish.job or config.output_dir) if wish.to is None else []
    if wish.to is None and not named:
        raise ConfigError(
            f"no node of a running job is named in {(wish.job or config.output_dir) / files.CONTACTS_FOLDER}",
            "the job's output_dir on a shared file system",
            "name the job's output_dir, or a member by --to HOST:PORT",
        )
    if named and not path:
        # The members' own copies come before the user's file. `Path.exists` raises in a folder that is closed to us.
        theirs = [Path(file) for contact in named for file in contact.secret_files]
        config = Config(secret_file=next((file for file in theirs if os.path.exists(file.expanduser())), theirs[-1]))
    secret = existing_secret(config, named)
    addresses = [(wish.to, wish.job_id)] if wish.to else [(contact.control, contact.job) for contact in named]
    addresses = [one for one in addresses if wish.job_id in (ANY_JOB, one[1])]
    description = asyncio.run(_described(addresses, Credentials(secret), config.secret_path))
    return FoundJob(description, str(Path(path).resolve()) if path else "", secret, config.secret_path)


def existing_secret(config: Config, members: Sequence[files.ContactFile] = ()) -> bytes:
    """Read the secret of a job of `members`. It is never made here: a new one would be a wrong one.

    Raises: ConfigError; TransportError if none of them answers.
    """
    if os.path.exists(config.secret_path):
        return job_files.ensure_secret(config)
    hosts = asyncio.run(_at_work(members, Credentials(b"")))
    if members and not hosts:
        silent = ", ".join(one.host for one in members)
        raise TransportError(f"no member of a running job was found: {silent} do not answer", remedy=NOT_FOUND)
    has_it = [one for one in members if one.host in hosts and one.secret_files]
    copies = [f"{one.host}:{one.secret_files[0]}" for one in has_it[:MEMBERS_NAMED]]
    theirs = ", ".join(copies or [f"HOST:{job_files.folder_of('*') / job_files.SECRET}"])
    path = config.secret_path
    raise ConfigError(
        f"there is no secret_file {path} on {os.uname().nodename}",
        "the job's secret, mode 0600",
        f"copy it from a host that is in the job ({theirs}) or from where it was launched: `mkdir -p {path.parent}; "
        f"scp -p FROM {path}`; or name a configuration with another secret_file by {FLAG}",
    )


async def _described(
    addresses: Sequence[tuple[Address, str]], credentials: Credentials, secret_path: Path
) -> JobDescription:
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
                here = f"{error.found}, with the secret in {secret_path}"
                raise PeerRefused(here, "the job's secret and id", remedy, address=error.address) from error
        except TransportError as error:
            failures.append(str(error))
    raise TransportError(f"no member of a running job was found: {'; '.join(failures)}", remedy=NOT_FOUND)


def check_unused(config: Config) -> None:
    """Check that no job runs in the configuration's output_dir, whatever its secret is. Raises: ConfigError.

    Hosts that do not answer count as gone. Blocks: at most ASK_S and a moment.
    """
    named, secret = files.published(config.output_dir), job_files.ensure_secret(config)
    hosts = asyncio.run(_at_work(named, Credentials(secret))) if named else []
    if hosts:
        raise ConfigError(
            f"output_dir {config.output_dir.absolute()} is that of a job that runs on {', '.join(hosts)}",
            "a folder of its own for each job",
            f"name another one, or end that job: `deadpool stop {config.output_dir}`",
        )


async def _at_work(named: Sequence[files.ContactFile], credentials: Credentials) -> list[str]:
    asked = (ask(one.control, credentials.of(one.job), Describe(), ASK_S) for one in named)
    answers = await asyncio.gather(*asked, return_exceptions=True)
    there = [
        one.host
        for one, answer in zip(named, answers, strict=True)
        if isinstance(answer, JobDescription) or (isinstance(answer, PeerRefused) and answer.job == one.job)
    ]
    return sorted(set(there))


# ---- ending it


def stop(job: FoundJob) -> list[str]:
    """End the job as Ctrl-C in its launcher does (exit code 130 everywhere); returns once no member is there any more.

    Returns: the hosts that gave no answer: lost, or out of reach from here (they hear of it from the others).
    Raises: TransportError if no member takes the request, or some are still there after STOP_LIMIT_S.
    """
    say(f"ending the job of {_listed(job.description.hellos)}")
    return asyncio.run(_stop(job))


async def _stop(job: FoundJob) -> list[str]:
    """Tell each member, which tells all others; those still there again, as they may not have been reached."""
    credentials = Credentials(job.secret, job.description.job)
    deadline, rest, told = time.monotonic() + STOP_LIMIT_S, job.description.hellos, False
    while True:
        answers = await asyncio.gather(*(_ends(hello, credentials) for hello in rest))
        there = [hello for hello, ends in zip(rest, answers, strict=True) if ends]
        rest = [hello for hello, ends in zip(rest, answers, strict=True) if ends is not False]
        told = told or bool(there)
        if not told:
            raise TransportError("no member took the request", remedy="ask again in a moment")
        if not there:
            return [_name(hello) for hello in rest]
        if time.monotonic() > deadline:
            found = f"{_listed(there)} did not end within {STOP_LIMIT_S:g} s"
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


def _listed(hellos: Sequence[Hello]) -> str:
    return ", ".join(map(_name, hellos))


def _name(hello: Hello) -> str:
    return f"node {hello.node} ({hello.host})"
