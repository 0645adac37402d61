"""Joining a running job: what a member's agent answers to hosts that want to (or to who wants the job to end), and what
such a host's agent does.

Rules of this file: a node id is never used twice; one newcomer arrives at a time, so that each is told of all before
it and links to them (the others are asked to wait); nothing here makes a member: that is the controller's, from the
first JoinRequest on. A newcomer announces itself to the members in the order of their ids: two that want the same id
meet at the first.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

import msgspec

from ..core.messages import AnyMessage, Goodbye, Prepare, Verdict
from ..core.types import NodeId, World, listed
from ..errors import AlreadyEnded, ConfigError, NodeTaken, PeerRefused, TransportError, invariant
from ..transport import join_protocol
from ..transport.framing import ConnectionClosed
from ..transport.handshake import Credentials
from ..transport.join_protocol import (
    Admitted,
    Announce,
    Answer,
    Busy,
    Describe,
    JobDescription,
    Refused,
    Reserved,
    Stop,
    Stopping,
)
from ..transport.mesh import ControlMesh
from ..transport.rendezvous import Hello
from ..transport.sockets import Address
from ..transport.tasks import loop_time

COMMAND = "DEADPOOL_COMMAND"
INVITATION = "DEADPOOL_INVITATION"
_EXPORTED = (
    "NCCL_", "PYTHON", "UCX_", "GLOO_", "OMP_", "MKL_", "MV2", "MLFLOW", "CUBLAS_", "CUDA_", "TORCH_", "NVTE_", "HF_",
    "ACCELERATE_",
)  # fmt: skip
_HOSTS_OWN = "CUDA_VISIBLE_DEVICES"
_SECRETS = ("TOKEN", "KEY", "SECRET", "PASSWORD", "CREDENTIAL")
"""Answers to guests are not encrypted on their way: a joining host must have variables of such names itself."""
_RETRY_S = 0.2
_ARRIVAL_S = 10.0
"""A newcomer that has not spoken by then keeps the next one waiting no longer."""


class Invitation(msgspec.Struct, frozen=True):
    """A running job's id, and control addresses of its members."""

    job: str
    members: tuple[Address, ...]


class Job(msgspec.Struct, frozen=True):
    """The start of this node's supervisors. `config`: as `Config.told`; `secret_files`: where the secret may
    lie. `launch`: the name of the `deadpool launch` that started it, "" for another launcher. `invitation`: to the
    running job this host shall join; None for a host that meets the others at the rendezvous.
    """

    command: list[str]
    directory: str
    config: str
    environment: dict[str, str]
    secret_files: tuple[str, ...] = ()
    launch: str = ""
    invitation: Invitation | None = None


def job_from(environ: Mapping[str, str], directory: str, config: str, secret_files: tuple[str, ...]) -> Job:
    """Read what the supervisor and `deadpool join` put into the environment; both are ours."""
    named = deepspeed_env(environ, directory)
    exported = {
        name: value
        for name, value in environ.items()
        if (name.startswith(_EXPORTED) or name in named)
        and name != _HOSTS_OWN
        and not any(word in name.upper() for word in _SECRETS)
    }
    command = msgspec.json.decode(environ.get(COMMAND, "[]"), type=list[str])
    invitation = msgspec.json.decode(environ.get(INVITATION, "null"), type=Invitation | None)
    return Job(command, directory, config, exported, secret_files, invitation=invitation)


def deepspeed_env(environ: Mapping[str, str], directory: str) -> dict[str, str]:
    """The variables of `.deepspeed_env`, which deepspeed exports to every host, as far as this host has the file; their
    values as they stand there, for a shell."""
    file, found = environ.get("DS_ENV_FILE", ".deepspeed_env"), dict[str, str]()
    for folder in (os.path.expanduser("~"), directory):
        with contextlib.suppress(OSError, UnicodeDecodeError):
            for line in Path(folder, file).read_text().splitlines():
                name, is_one, value = line.partition("=")
                found |= {name.strip(): value} if is_one else {}
    return found


def how_to_join(address: Address) -> str:
    return f"to add a host: deadpool join --to {address[0]}:{address[1]}"


class Owner(Protocol):
    """A node's agent, as its roster needs it."""

    @property
    def world(self) -> World | None:
        """None before there is one."""

    def admitted(self, hello: Hello) -> None:
        """A newcomer is about to be linked."""

    def told_to_stop(self, host: str) -> None:
        """Somebody on that host wants the job to end."""


class Roster:
    """The nodes known here, and the answers to guests. Thread: the event loop's only.

    `missed`: who is taken for lost while no plan says so yet; a member that hangs answers nobody, and the job may wait
    for the very newcomer that would wait for it.
    """

    def __init__(self, node: NodeId, job: Job, master: Address, credentials: Credentials, owner: Owner) -> None:
        self._node, self._job, self._master, self._credentials = node, job, master, credentials
        self._owner = owner
        self._hellos: dict[NodeId, Hello] = {}
        self.hosts: dict[NodeId, str] = {}
        """The host name of every node that was ever known here; lost ones stay, for messages."""
        self._largest = node
        self._arriving: NodeId | None = None
        self._arriving_since = 0.0
        self.missed: set[NodeId] = set()
        self.verdict: Verdict | None = None
        """How the job has ended, if a member that has left said so."""

    @property
    def hellos(self) -> list[Hello]:
        """Every node known to be there, this one included, in the order of ids."""
        return [self._hellos[node] for node in sorted(self._hellos.keys() - self.missed)]

    def know(self, hello: Hello) -> None:
        self._hellos[hello.node] = hello
        self.hosts[hello.node] = hello.host
        self._largest = max(self._largest, hello.node)

    def gone(self, node: NodeId) -> None:
        """`node` is lost, or has left, or its link is lost."""
        self._hellos.pop(node, None)
        self._seen(node)

    def heard(self, node: NodeId, message: AnyMessage) -> None:
        """Learn from a message of `node` which nodes are there."""
        self._seen(node)
        if isinstance(message, Goodbye):
            self.gone(node)
            self.verdict = self.verdict or message.verdict
        elif isinstance(message, Prepare):
            self.missed |= {*message.lost} - {self._node}

    def _seen(self, node: NodeId) -> None:
        """It is not missed; a newcomer that says a first word, or ends, has been linked to everyone or never will."""
        self.missed.discard(node)
        if self._arriving == node:
            self._arriving = None

    def answer(self, question: join_protocol.Question) -> Answer:
        """Describe the job to a guest."""
        if not self._hellos:
            return Busy("the job is starting", arrives=True)
        if isinstance(question, Describe):
            return self._description()
        if isinstance(question, Announce):
            return self._admit(question.hello)
        if isinstance(question, Stop):
            return self._stop(question.host)
        self._largest += 1
        return Reserved(self._largest)

    def _stop(self, host: str) -> Answer:
        if self._owner.world is None:
            return Busy("this host is about to join itself", arrives=True)
        self._owner.told_to_stop(host)
        return Stopping()

    def _description(self) -> JobDescription:
        job, world = self._job, self._owner.world
        return JobDescription(
            self._node, job.command, job.directory, job.config, job.environment, *self._master,
            world.generation if world else 0, world.members if world else (), self.hellos,
            self._credentials.job,
        )  # fmt: skip

    def _admit(self, hello: Hello) -> Answer:
        if self._is_arriving():
            return Busy(f"node {self._arriving} is joining just now")
        if hello.node in self._hellos:
            return Refused(f"node {hello.node} is {self._hellos[hello.node].host} already")
        ours = self._hellos[self._node]
        if (hello.versions, hello.config_digest, hello.local_size) != (
            ours.versions, ours.config_digest, ours.local_size
        ):  # fmt: skip
            return Refused(
                f"{hello.host} has other versions, slots or another configuration than {ours.host}", for_good=True
            )
        others = self.hellos
        self._arriving, self._arriving_since = hello.node, loop_time()
        self.know(hello)
        self._owner.admitted(hello)
        return Admitted(others)

    def _is_arriving(self) -> bool:
        """Return whether the last newcomer still is one. A node that came when it did may never get a message from it:
        it is a member by then, and speaks to the coordinator only."""
        world = self._owner.world
        if world is not None and self._arriving in world.members:
            self._arriving = None
        return self._arriving is not None and loop_time() - self._arriving_since < _ARRIVAL_S


class Arrival(msgspec.Struct, frozen=True):
    """`hellos`: of everyone this host is linked to, and its own; `members`: the job's members among them."""

    hellos: list[Hello]
    members: tuple[NodeId, ...]


class Newcomer:
    """A host on its way into a running job: links to every node that is there. `arrive` once."""

    def __init__(
        self, mesh: ControlMesh, hello: Hello, credentials: Credentials, roster: Roster, timeout_s: float
    ) -> None:
        self._mesh, self._hello, self._credentials, self._roster = mesh, hello, credentials, roster
        self._timeout_s = timeout_s
        self._linked: dict[NodeId, Hello] = {}

    async def arrive(self, members: tuple[Address, ...]) -> Arrival:
        """Raises: NodeTaken; AlreadyEnded; TransportError naming whom it could not reach; PeerRefused."""
        deadline = loop_time() + self._timeout_s
        addresses = list(members)
        missing: set[NodeId] = set()
        while loop_time() < deadline:
            description = await self._described(addresses)
            if description is not None:
                addresses = [hello.control for hello in description.hellos] or addresses
                there = {hello.node: hello for hello in description.hellos if hello.node != self._hello.node}
                self._linked = {
                    node: hello for node, hello in self._linked.items() if node in there and node in self._mesh.linked
                }
                missing = await self._link_to(there)
                if description.members and not missing:
                    return self._arrived(description.members)
            await asyncio.sleep(_RETRY_S)
        who = f"node {listed(sorted(missing))}" if missing else "any member"
        raise TransportError(
            f"this host could not link to {who} of the job within {self._timeout_s:g} s",
            remedy="check that no firewall blocks the ports (port_range), and that the job still runs",
        )

    async def _described(self, addresses: list[Address]) -> JobDescription | None:
        """Return the first answer, None if there may be one later.

        Raises: PeerRefused if some refuse and none answers: another job may have the port of a member that is gone.
        AlreadyEnded if none answers and one has said so before it left, or if only other newcomers listen any more.
        """
        refused: PeerRefused | None = None
        gone = arriving = 0
        for address in addresses:
            try:
                answer = await join_protocol.ask(address, self._credentials, Describe(), self._attempt_s)
            except ConnectionClosed as error:
                gone += isinstance(error.__cause__, ConnectionRefusedError)
                continue
            except PeerRefused as error:
                refused = error
                continue
            if isinstance(answer, JobDescription):
                return answer
            arriving += isinstance(answer, Busy) and answer.arrives  # this host itself, for one
        if (verdict := self._roster.verdict) is not None:  # of a part cut off, if another member answers
            raise _over(verdict.reason, verdict.exit_code)
        if refused is not None:
            raise refused
        # An agent listens until it leaves the job, and nobody else can tell this host of members that came later.
        if gone and gone + arriving == len(addresses):
            raise _over("nobody listens any more where its members did")
        return None

    @property
    def _attempt_s(self) -> float:
        return max(1.0, self._timeout_s / 30)

    async def _link_to(self, there: Mapping[NodeId, Hello]) -> set[NodeId]:
        """One attempt at each node in turn; the first that is not to be had ends the round. Returns: who is missing."""
        todo = {node: hello for node, hello in there.items() if node not in self._linked}
        while todo:
            node = min(todo)
            try:
                answer = await self._mesh.visit(node, todo[node].control, self._hello, self._attempt_s)
            except ConnectionClosed:
                break
            if isinstance(answer, Refused):
                error = ConfigError if answer.for_good else NodeTaken
                raise error(f"node {node} does not admit this host: {answer.reason}", remedy="deadpool join again")
            if isinstance(answer, Busy):
                if answer.arrives and node > self._hello.node:
                    del todo[node]  # it waits for us, or it would wait for ever: it links to us when we have arrived
                    continue
                break
            invariant(isinstance(answer, Admitted), f"node {node} answered {type(answer).__name__}")
            assert isinstance(answer, Admitted)
            self._linked[node] = todo.pop(node)
            news = {hello.node: hello for hello in answer.hellos}
            todo |= {key: hello for key, hello in news.items() if key not in self._linked and key != self._hello.node}
        return set(todo)

    def _arrived(self, members: tuple[NodeId, ...]) -> Arrival:
        for hello in (*self._linked.values(), self._hello):
            self._roster.know(hello)
        return Arrival(self._roster.hellos, tuple(node for node in members if node in self._linked))


def _over(how: str, exit_code: int = 1) -> AlreadyEnded:
    remedy = "`deadpool outcome OUTPUT_DIR` says how it ended; join the job that is started next"
    return AlreadyEnded(
        f"the job has ended before it took this host in ({how})", "one that runs", remedy, exit_code=exit_code
    )
