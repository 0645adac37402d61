"""A node's links to others: how it meets the others or joins a running job, and answers guests.

Rules of this file: nothing is decided about the job here. The lowest living members have a link with everybody: who
coordinates, and who would next. Other links are made when they are needed, so that a node's work does not grow with the
job. A node id is never used twice. One newcomer arrives at a time, so that each is told of all before it and links to
them (the others are asked to wait). Nothing here makes a member: that is the controller's, from the first JoinRequest
on. A newcomer announces itself to the members in the order of their ids: two that want the same id meet at the first.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Mapping, Sequence
from functools import cache
from importlib import metadata

from .. import events
from ..config import Config
from ..core import api
from ..core.messages import AnyMessage, Goodbye, NodeFailed, Prepare, RankFailed, Verdict
from ..core.types import Generation, Holding, NodeId, listed
from ..errors import AlreadyEnded, ConfigError, InvariantViolated, NodeTaken, PeerRefused, TransportError, present
from ..transport import join_protocol
from ..transport.framing import ConnectionClosed
from ..transport.join_protocol import Admitted, Answer, Busy, JobDescription, NotAdmitted
from ..transport.mesh import ControlMesh
from ..transport.rendezvous import Hello, Stored, job_id, meet
from ..transport.sockets import Address
from ..transport.tasks import loop_time
from .node import LocalNode

PACKAGES = ("deadpool_plugin", "torch", "megatron-core", "deepspeed")
STARTS_APART = 6  # hosts wait for each other for this fraction of `start_timeout_s`, or for `decision_timeout_s`
_JOIN_RETRY_S = 0.2
ATTEMPT_S = 1.0  # the least time a node is given to answer a host that joins
LOWEST = 4  # members that are linked with everybody
KEEPS_APART = 64  # parts of a patience, in one of which a node begins links that a plan has made necessary
_ARRIVAL_S = 10.0  # a newcomer that has not spoken by then keeps the next one waiting no longer


def meeting_s(config: Config) -> float:
    """Return how long hosts wait for each other when a job starts."""
    return max(config.decision_timeout_s, config.start_timeout_s / STARTS_APART)


@cache
def versions() -> dict[str, str]:
    """Read the versions of the packages that must be alike on all hosts; nobody changes what is returned."""
    found = {}
    for package in PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[package] = metadata.version(package)
    return found


class Links:
    """This node's control mesh, how it comes to be, and the nodes known here."""

    def __init__(self, node: LocalNode) -> None:
        self._node = node
        self._hellos: dict[NodeId, Hello] = {}
        self._largest, self._arriving_since = node.id, 0.0
        self._arriving: NodeId | None = None
        self.missed: set[NodeId] = set()  # taken for lost before a plan says so: a newcomer is not to wait for them
        self._verdict: Verdict | None = None  # how the job has ended, if a member that has left said so
        self.mesh = ControlMesh(
            node.id, node.credentials, node.host.where[0], node.config.port_range, self.received, self._link_lost,
            node.config.slow_after_s, self._refused, self.answer,
            lambda answering, ago_s: node.feed(api.HostAnswered(answering, ago_s)),
        )  # fmt: skip

    def _mirrored(self, holding: Holding, generation: Generation) -> None:
        before = self._node.host.store.before(holding.rank, holding.step)
        self._node.feed(api.SnapshotHeld(holding, generation, before))

    async def listen(self, stored: Stored | None = None) -> Hello:
        """Open both listeners. Returns: what the others must know of this node. Raises: DeadpoolError."""
        node, addresses = self._node, self._node.host.where[1:]
        control = (addresses[0], (await self.mesh.listen())[1])
        self.address = f"{control[0]}:{control[1]}"
        self.how_to_join = f"to add a host: deadpool join --to {self.address}"
        bulk = tuple(zip(addresses, node.host.bulk.serve(self._mirrored, self._refused), strict=True))
        return Hello(
            node.id, node.host.name, control, bulk, node.place.local_size, versions(), node.config.digest(),
            os.urandom(8).hex(), node.job.launch, stored,
        )  # fmt: skip

    async def meet(self, hello: Hello) -> list[Hello]:
        """Exchange hellos at the master's address and make the first links. Raises: DeadpoolError."""
        place, credentials, timeout_s = self._node.place, self._node.credentials, meeting_s(self._node.config)
        hellos = await meet(place.nodes_total, (place.master_addr, place.master_port), hello, credentials, timeout_s)
        credentials.job = job_id(hellos)
        everyone = sorted(one.node for one in hellos)
        wanted = everyone[:LOWEST] if self._node.id not in everyone[:LOWEST] else everyone
        await self.mesh.connect({one.node: one.control for one in hellos}, timeout_s, wanted)
        for one in hellos:
            self.know(one)
        return hellos

    async def join(self, hello: Hello) -> tuple[NodeId, ...]:
        """Link up with everyone of the job this host is invited to. Returns: its members. Raises: DeadpoolError."""
        node, timeout_s = self._node, self._node.config.decision_timeout_s
        invitation = present(node.job.invitation, "a host that was not invited joins")
        node.credentials.job = invitation.job
        deadline, attempt_s = loop_time() + timeout_s, max(ATTEMPT_S, timeout_s / 30)
        known, linked, missing = list(invitation.members), dict[NodeId, Hello](), set[NodeId]()
        while loop_time() < deadline:
            description = await self._ask(known, attempt_s)
            if description is not None:
                known = [one.control for one in description.hellos] or known
                there = {one.node: one for one in description.hellos if one.node != node.id}
                linked = {key: one for key, one in linked.items() if key in there and key in self.mesh.linked}
                missing = await self._link_to(there, linked, hello, attempt_s)
                if description.members and not missing:
                    for one in (*linked.values(), hello):
                        self.know(one)
                    return tuple(member for member in description.members if member in linked)
            await asyncio.sleep(_JOIN_RETRY_S)
        who = f"node {listed(sorted(missing))}" if missing else "any member"
        raise TransportError(
            f"this host could not link to {who} of the job within {timeout_s:g} s",
            remedy="check that no firewall blocks the ports (port_range), and that the job still runs",
        )

    async def _ask(self, known: Sequence[Address], attempt_s: float) -> JobDescription | None:
        """Return the first answer, None if there may be one later. Raises: PeerRefused, AlreadyEnded."""
        refused: PeerRefused | None = None
        gone = arriving = 0
        for address in known:
            try:
                answer = await join_protocol.ask(address, self._node.credentials, join_protocol.Describe(), attempt_s)
            except ConnectionClosed as error:
                gone += isinstance(error.__cause__, ConnectionRefusedError)
                continue
            except PeerRefused as error:
                refused = error
                continue
            if isinstance(answer, JobDescription):
                return answer
            arriving += isinstance(answer, Busy) and answer.arrives  # this host itself, for one
        if (verdict := self._verdict) is not None:  # of a part cut off, if another member answers
            raise _over(verdict.reason, verdict.exit_code)
        if refused is not None:  # by another job, it may be, which has the port of a member that is gone
            raise refused
        # An agent listens until it leaves the job, and nobody else can tell this host of members that came later.
        if gone and gone + arriving == len(known):
            raise _over("nobody listens any more where its members did")
        return None

    async def _link_to(
        self, there: Mapping[NodeId, Hello], linked: dict[NodeId, Hello], ours: Hello, attempt_s: float
    ) -> set[NodeId]:
        """Try each node in turn, and add to `linked`; a failure ends the round. Returns: the nodes that are missing."""
        todo = {node: hello for node, hello in there.items() if node not in linked}
        while todo:
            node = min(todo)
            try:
                answer = await self.mesh.visit(node, todo[node].control, ours, attempt_s)
            except ConnectionClosed:
                break
            match answer:
                case Admitted(hellos=hellos):
                    linked[node] = todo.pop(node)
                    todo |= {one.node: one for one in hellos if one.node not in linked and one.node != ours.node}
                case Busy(arrives=True) if node > ours.node:
                    del todo[node]  # it waits for us, or it would wait for ever: it links to us when we have arrived
                case Busy():
                    break
                case NotAdmitted(reason=reason, for_good=for_good):
                    error = ConfigError if for_good else NodeTaken
                    raise error(f"node {node} does not admit this host: {reason}", remedy="deadpool join again")
                case _:
                    raise InvariantViolated(f"node {node} answered {type(answer).__name__}")
        return set(todo)

    def entered(self) -> None:
        """Keep links with the lowest members of the new world, in a while: not all nodes at a time, nor in the swap."""
        after_s = self._node.config.patience_s * (1 + self._node.id % KEEPS_APART) / KEEPS_APART
        asyncio.get_running_loop().call_later(after_s, self._keep)

    def _keep(self) -> None:
        """Have links with the lowest living members, which the larger end of a link begins."""
        if (world := self._node.world) is None:
            return
        gone = self.mesh.gone
        living = [node for node in world.seniority if node not in gone]
        self.mesh.keep(node for node in living[:LOWEST] if node < self._node.id)

    def send(self, node: NodeId, message: AnyMessage) -> None:
        """Send a message, over a link that is made first if need be. Nobody is dialled for what ends something: the
        lowest members, which are linked with everybody, pass a verdict on, and see to losses."""
        last = isinstance(message, NodeFailed) and message.node in (node, self._node.id)
        self.mesh.send(node, message, makes_link=not (last or isinstance(message, RankFailed | Verdict)))

    def received(self, node: NodeId, message: AnyMessage) -> None:
        self._seen(node)
        if isinstance(message, Goodbye):
            self.gone(node)
            self._verdict = self._verdict or message.verdict
        elif isinstance(message, Prepare):
            self.missed |= {*message.lost} - {self._node.id}
        self._node.feed(api.Received(node, message))

    def _link_lost(self, lost: api.LinkLost) -> None:
        self.gone(lost.node)
        self._node.feed(lost)
        if lost.silent and not lost.still:  # those after it may have fallen silent with it: that is found at once
            self._keep()

    def _refused(self, error: PeerRefused) -> None:
        self._node.reports.emit(events.PeerRefused(address=error.address, reason=str(error)))

    @property
    def hellos(self) -> list[Hello]:
        """Every node known to be there, this one included, in the order of ids."""
        return [self._hellos[node] for node in sorted(self._hellos.keys() - self.missed)]

    def know(self, hello: Hello) -> None:
        self._hellos[hello.node] = hello
        self._node.reports.hosts[hello.node] = hello.host
        self._node.host.bulk.know(hello.node, hello.bulk)
        self._largest = max(self._largest, hello.node)

    def gone(self, node: NodeId) -> None:
        self._hellos.pop(node, None)
        self._seen(node)

    def _seen(self, node: NodeId) -> None:
        self.missed.discard(node)
        if self._arriving == node:  # it has spoken or ended: it is linked to everyone, or never will be
            self._arriving = None

    def answer(self, question: join_protocol.Question) -> Answer:
        """Describe the job to a guest, or do what it asks for."""
        node, world = self._node, self._node.world
        if not self._hellos:
            return Busy("the job is starting", arrives=True)
        if isinstance(question, join_protocol.Describe):
            job, place = node.job, node.place
            return JobDescription(
                node.id, job.command, job.directory, job.config, job.environment, place.master_addr, place.master_port,
                world.generation if world else 0, world.members if world else (), self.hellos, node.credentials.job,
            )  # fmt: skip
        if isinstance(question, join_protocol.Announce):
            return self._admit(question.hello)
        if isinstance(question, join_protocol.Stop):
            if world is None:
                return Busy("this host is about to join itself", arrives=True)
            node.feed(api.StopRequested(f"ended by `deadpool stop` on {question.host}", 128 + signal.SIGINT))
            return join_protocol.Stopping()
        self._largest += 1
        return join_protocol.Reserved(self._largest)

    def _admit(self, hello: Hello) -> Answer:
        world = self._node.world
        if world is not None and self._arriving in world.members:
            self._arriving = None  # a member speaks to the coordinator only, so this node may never hear of it
        if self._arriving is not None and loop_time() - self._arriving_since < _ARRIVAL_S:
            return Busy(f"node {self._arriving} is joining just now")
        if hello.node in self._hellos:
            return NotAdmitted(f"node {hello.node} is {self._hellos[hello.node].host} already")
        ours = self._hellos[self._node.id]
        theirs, mine = ((one.versions, one.config_digest, one.local_size) for one in (hello, ours))
        if theirs != mine:
            reason = f"{hello.host} has other versions, slots or another configuration than {ours.host}"
            return NotAdmitted(reason, for_good=True)
        admitted = Admitted(self.hellos)
        self._arriving, self._arriving_since = hello.node, loop_time()
        self.know(hello)
        return admitted


def _over(how: str, exit_code: int = 1) -> AlreadyEnded:
    remedy = "`deadpool outcome OUTPUT_DIR` says how it ended; join the job that is started next"
    return AlreadyEnded(
        f"the job has ended before it took this host in ({how})", "one that runs", remedy, exit_code=exit_code
    )
