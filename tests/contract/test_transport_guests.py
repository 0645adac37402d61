"""Tests of the control port towards hosts that join: one that is no member asks, is refused, or is let in."""

import asyncio
import gc
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

import msgspec
import pytest
from support import expect
from support.hosts import local_node
from support.stand_in import fake

from deadpool_plugin.agent import links
from deadpool_plugin.agent.links import Links
from deadpool_plugin.agent.world import Invitation, Job, Place
from deadpool_plugin.core import api
from deadpool_plugin.core.messages import Goodbye, JoinRequest, Prepare, Status, Verdict
from deadpool_plugin.core.types import Ballot, World
from deadpool_plugin.errors import AlreadyEnded, ConfigError, NodeTaken, PeerRefused, TransportError
from deadpool_plugin.transport.framing import ConnectionClosed, pack_frame
from deadpool_plugin.transport.handshake import Credentials, shake_hands
from deadpool_plugin.transport.join_protocol import (
    GUEST,
    PURPOSE,
    Admitted,
    Busy,
    Describe,
    JobDescription,
    NotAdmitted,
    Reserve,
    Reserved,
    Stop,
    Stopping,
    ask,
)
from deadpool_plugin.transport.mesh import NotWanted
from deadpool_plugin.transport.rendezvous import Hello
from deadpool_plugin.transport.sockets import connected, listen_tcp

WAIT_S = 20.0
SECRET = Credentials(b"secret")
JOB = Job(["train.py", "--local_rank=0"], "/job", "/job/d.yaml", {"NCCL_DEBUG": "INFO"})


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """No attempt is given up because this process stood still for a while: a member may have admitted its host."""
    monkeypatch.setattr(links, "ATTEMPT_S", WAIT_S)


class Arrival(NamedTuple):
    hellos: list[Hello]
    members: tuple[int, ...]


class Node:
    """A node's links, whose agent is the test."""

    def __init__(self, node: int, credentials: Credentials = SECRET) -> None:
        self.node, self.met = node, {node}
        self.messages: asyncio.Queue[tuple[int, object]] = asyncio.Queue()
        self.lost: asyncio.Queue[int] = asyncio.Queue()
        self.refused: asyncio.Queue[object] = asyncio.Queue()
        self.stopped_by: list[str] = []
        said = fake(hosts={}, emit=lambda event: self.refused.put_nowait(event.reason))
        self.local = local_node(feed=self._fed, node=node, reports=said)
        self.local.place, self.local.job = Place(node, 2, 2, "master", 29500), JOB
        self.local.credentials = credentials
        self.links = Links(self.local)
        self.mesh = self.links.mesh

    @property
    def newcomers(self) -> list[Hello]:
        """Those it has admitted."""
        return [hello for hello in self.links.hellos if hello.node not in self.met]

    def _fed(self, event: api.Input) -> None:
        match event:
            case api.Received(sender=sender, message=message):
                self.messages.put_nowait((sender, message))
            case api.LinkLost(node=node):
                self.lost.put_nowait(node)
            case api.StopRequested(reason=reason, exit_code=130):
                self.stopped_by.append(reason.rpartition(" ")[2])
            case _:
                raise AssertionError(event)

    async def listen(self, digest: str = "d") -> Hello:
        control = await self.mesh.listen()
        self.hello = Hello(self.node, f"host{self.node}", control, (("127.0.0.1", 1),), 2, {"torch": "2"}, digest)
        return self.hello

    async def arrive(self, *invitation: Hello, timeout_s: float = WAIT_S) -> Arrival:
        members = tuple(hello.control for hello in invitation)
        self.local.job = msgspec.structs.replace(JOB, invitation=Invitation("", members))
        self.local.config = self.local.config.model_copy(update={"patience_s": timeout_s / 30})
        arrival = Arrival(members=await self.links.join(self.hello), hellos=self.links.hellos)
        self.met |= {hello.node for hello in arrival.hellos}
        return arrival

    def ask_in(self, arrival: Arrival) -> None:
        for hello in arrival.hellos:
            if hello.node != self.node:
                self.mesh.send(hello.node, JoinRequest())


@asynccontextmanager
async def job(size: int) -> AsyncIterator[list[Node]]:
    """`size` members that have met, and room for newcomers."""
    nodes = [Node(index) for index in range(size)]
    hellos = [await node.listen() for node in nodes]
    await asyncio.gather(*(node.mesh.connect({h.node: h.control for h in hellos}, WAIT_S) for node in nodes))
    for node in nodes:
        node.local.world, node.met = World(3, tuple(range(size))), {*range(size)}
        for hello in hellos:
            node.links.know(hello)
    try:
        yield nodes
    finally:
        await asyncio.gather(*(node.mesh.close() for node in nodes))


@asynccontextmanager
async def newcomer(node: int, credentials: Credentials = SECRET, digest: str = "d") -> AsyncIterator[Node]:
    made = Node(node, credentials)
    await made.listen(digest)
    try:
        yield made
    finally:
        await made.mesh.close()


def run(scenario: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(scenario(), 2 * WAIT_S))


async def soon(queue: asyncio.Queue[Any]) -> object:
    return await asyncio.wait_for(queue.get(), WAIT_S)


def test_a_member_describes_its_job_and_gives_every_id_once() -> None:
    async def scenario() -> None:
        async with job(2) as members:
            where = members[1].hello.control
            told = expect(JobDescription, await ask(where, SECRET, Describe()))
            assert (told.node, told.command, told.directory, told.config) == (1, JOB.command, "/job", "/job/d.yaml")
            assert (told.master_addr, told.master_port, told.environment) == ("master", 29500, JOB.environment)
            assert (told.generation, told.members) == (3, (0, 1))
            assert told.hellos == [members[0].hello, members[1].hello]
            answers = [await ask(where, SECRET, Reserve()) for _ in range(2)]
            assert answers == [Reserved(2), Reserved(3)]

    run(scenario)


def test_who_has_the_secret_may_end_the_job_once_there_is_one() -> None:
    async def scenario() -> None:
        async with job(1) as (member,):
            told = member.stopped_by
            with pytest.raises(PeerRefused):
                await ask(member.hello.control, Credentials(b"other"), Stop("elsewhere"))
            assert await ask(member.hello.control, SECRET, Stop("here")) == Stopping() and told == ["here"]
            member.local.world = None
            assert isinstance(await ask(member.hello.control, SECRET, Stop("here")), Busy) and told == ["here"]

    run(scenario)


def test_without_the_secret_nothing_is_told() -> None:
    async def scenario() -> None:
        async with job(1) as (member,):
            with pytest.raises(PeerRefused, match="does not prove the job's secret"):
                await ask(member.hello.control, Credentials(b"other"), Describe())
            assert "127.0.0.1" in str(await soon(member.refused))
            async with newcomer(1, credentials=Credentials(b"other")) as stranger:
                with pytest.raises(PeerRefused):
                    await stranger.arrive(member.hello)
            assert not member.newcomers and not member.mesh.linked

    run(scenario)


def test_a_node_nobody_admitted_gets_no_link_even_with_the_secret() -> None:
    async def scenario() -> None:
        async with job(2) as members:
            async with newcomer(7) as stranger:
                with pytest.raises(NotWanted, match="node 0 at .* wants no link with node 7"):
                    await stranger.mesh.connect({0: members[0].hello.control}, WAIT_S)
                assert stranger.lost.empty()
            assert "node 7 was not admitted" in str(await soon(members[0].refused))
            assert members[0].mesh.linked == {1} and members[0].messages.empty()

    run(scenario)


def test_a_newcomer_is_linked_to_all_and_known_before_it_speaks() -> None:
    async def scenario() -> None:
        async with job(3) as members, newcomer(3) as host:
            arrival = await host.arrive(members[2].hello)
            assert arrival.members == (0, 1, 2)
            assert arrival.hellos == [*(member.hello for member in members), host.hello]
            assert all(member.newcomers == [host.hello] for member in members)
            host.ask_in(arrival)
            for member in members:
                assert await soon(member.messages) == (3, JoinRequest())
                member.mesh.send(3, Status(3, member.node, True))
                assert await soon(host.messages) == (member.node, Status(3, member.node, True))

    run(scenario)


@pytest.mark.parametrize("taken", [0, 1])
def test_the_id_of_a_node_is_not_given_again_and_its_link_stays(taken: int) -> None:
    async def scenario() -> None:
        async with job(2) as members, newcomer(taken) as thief:
            other = members[1 - taken]
            answer = await thief.mesh.visit(other.node, other.hello.control, thief.hello, WAIT_S)
            assert isinstance(answer, NotAdmitted) and f"node {taken} is or was" in answer.reason
            members[taken].mesh.send(other.node, Status(3, 9, True))
            assert await soon(other.messages) == (taken, Status(3, 9, True))
            assert other.lost.empty()

    run(scenario)


def test_a_lost_node_does_not_come_back() -> None:
    async def scenario() -> None:
        async with job(2) as members:
            await members[1].mesh.close()
            assert await soon(members[0].lost) == 1
            for drop in (False, True):
                if drop:
                    members[0].mesh.drop(1)
                async with newcomer(1) as again:
                    with pytest.raises(NodeTaken):
                        await again.arrive(members[0].hello)

    run(scenario)


def test_of_two_hosts_with_one_id_one_is_let_in_everywhere() -> None:
    async def scenario() -> None:
        async with job(3) as members, newcomer(3) as first, newcomer(3) as second:
            results = await asyncio.gather(
                first.arrive(members[0].hello), second.arrive(members[2].hello), return_exceptions=True
            )
            assert sorted(type(result).__name__ for result in results) == ["Arrival", "NodeTaken"]
            let_in = first if isinstance(results[0], Arrival) else second
            assert all(member.newcomers == [let_in.hello] for member in members)
            assert all(3 in member.mesh.linked for member in members)

    run(scenario)


def test_two_hosts_at_once_are_linked_to_each_other_too() -> None:
    async def scenario() -> None:
        async with job(2) as members, newcomer(2) as first, newcomer(3) as second:

            async def join(host: Node, where: Node) -> Arrival:
                arrival = await host.arrive(where.hello)
                host.ask_in(arrival)
                return arrival

            await asyncio.gather(join(first, members[0]), join(second, members[1]))
            everyone = {0, 1, 2, 3}
            for node in (*members, first, second):
                assert node.mesh.linked == everyone - {node.node}
                assert {hello.node for hello in node.links.hellos} == everyone

    run(scenario)


def test_of_two_hosts_that_arrive_at_once_only_one_waits_for_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "_ARRIVAL_S", 0.0)

    async def scenario() -> None:
        async with job(2) as members, newcomer(2) as first, newcomer(3) as second:
            for member in members:
                visit = second.mesh.visit(member.node, member.hello.control, second.hello, WAIT_S)
                assert isinstance(await visit, Admitted)
            arrival = await first.arrive(members[0].hello, timeout_s=5.0)
            assert [hello.node for hello in arrival.hellos] == [0, 1, 2]
            visit = second.mesh.visit(2, first.hello.control, second.hello, WAIT_S)
            assert isinstance(await visit, Admitted)
            assert 3 in first.mesh.linked and first.newcomers == [second.hello]

    run(scenario)


def test_while_one_arrives_the_next_waits_unless_the_first_is_gone() -> None:
    async def scenario() -> None:
        async with job(1) as (member,), newcomer(1) as first, newcomer(2) as second:
            visit = first.mesh.visit(0, member.hello.control, first.hello, WAIT_S)
            assert isinstance(await visit, Admitted)
            answer = await second.mesh.visit(0, member.hello.control, second.hello, WAIT_S)
            assert answer == Busy("node 1 is joining just now")
            await first.mesh.close()
            assert await soon(member.lost) == 1
            assert (await second.arrive(member.hello)).hellos == [member.hello, second.hello]

    run(scenario)


def test_who_has_become_a_member_without_a_word_to_us_is_arriving_no_more() -> None:
    async def scenario() -> None:
        async with job(1) as (member,), newcomer(1) as first, newcomer(2) as second:
            visit = first.mesh.visit(0, member.hello.control, first.hello, WAIT_S)
            assert isinstance(await visit, Admitted)
            member.local.world = World(generation=3, node_of=(0,), spares=(1,))
            visit = second.mesh.visit(0, member.hello.control, second.hello, WAIT_S)
            assert isinstance(await visit, Admitted)

    run(scenario)


def test_a_member_that_is_gone_is_not_waited_for() -> None:
    async def scenario() -> None:
        async with job(3) as members, newcomer(3) as host:
            await members[0].mesh.close()
            for member in members[1:]:
                assert await soon(member.lost) == 0
            arrival = await host.arrive(members[0].hello, members[1].hello)
            assert [hello.node for hello in arrival.hellos] == [1, 2, 3] and arrival.members == (1, 2)

    run(scenario)


def test_a_newcomer_that_left_politely_is_not_waited_for() -> None:
    async def scenario() -> None:
        async with job(2) as members, newcomer(2) as host, newcomer(3) as another:
            await host.arrive(members[0].hello)
            await host.mesh.close(Goodbye(0))
            for member in members:
                assert await soon(member.messages) == (2, Goodbye(0))
            arrival = await another.arrive(members[0].hello, timeout_s=5.0)
            assert [hello.node for hello in arrival.hellos] == [0, 1, 3]

    run(scenario)


def test_a_member_that_hangs_is_not_waited_for_once_it_is_taken_for_lost_until_it_is_heard_again() -> None:
    async def scenario() -> None:
        async with job(2) as members, newcomer(5) as host:
            with listen_tcp("127.0.0.1") as hung:
                hello = Hello(4, "host4", hung.getsockname()[:2], (("127.0.0.1", 1),), 2, {}, "d")
                for member in members:
                    member.links.know(hello)
                members[0].links.missed |= {4}
                members[0].mesh.send(1, Prepare(Ballot(4, 1, 0), (4, 1)))
                await soon(members[1].messages)
                arrival = await host.arrive(members[1].hello, timeout_s=5.0)
                assert [hello.node for hello in arrival.hellos] == [0, 1, 5]
            members[1].links.received(4, Status(3, 9, True))
            assert hello in members[1].links.hellos and hello not in members[0].links.hellos

    run(scenario)


def test_another_job_at_the_address_of_a_member_that_is_gone_is_passed_over() -> None:
    async def scenario() -> None:
        async with job(2) as members, newcomer(2) as host, newcomer(0, credentials=Credentials(b"other")) as another:
            arrival = await host.arrive(another.hello, members[1].hello)
            assert [hello.node for hello in arrival.hellos] == [0, 1, 2]

    run(scenario)


def test_a_member_that_cannot_be_reached_is_named() -> None:
    async def scenario() -> None:
        async with job(2) as members, newcomer(5) as host:
            for member in members:
                member.links.know(Hello(4, "host4", ("127.0.0.1", 1), (("127.0.0.1", 1),), 2, {}, "d"))
            with pytest.raises(TransportError, match="could not link to node 4"):
                await host.arrive(members[1].hello, timeout_s=1.0)

    run(scenario)


def test_a_host_that_finds_the_job_ended_is_told_at_once() -> None:
    """Each way to meet no member any more: asked too late, linked to some, and linked to one that said how it ended."""

    async def scenario() -> None:
        async with job(2) as members, newcomer(5) as late, newcomer(6) as early, newcomer(7) as last:
            with listen_tcp("127.0.0.1") as silent:  # a member that hangs, or a host that was switched off
                hello = Hello(4, "host4", silent.getsockname()[:2], (("127.0.0.1", 1),), 2, {}, "d")
                assert isinstance(await early.mesh.visit(0, members[0].hello.control, early.hello, WAIT_S), Admitted)
                await members[0].mesh.close(Goodbye(3, Verdict(3, 130, "ended by a person")))
                assert isinstance((await soon(early.messages)), tuple)
                members[1].links.gone(0)
                assert (await late.arrive(members[1].hello)).members == (1,), "one half's verdict is not the other's"
                await members[1].mesh.close()
                with pytest.MonkeyPatch.context() as patch:
                    patch.setattr(links, "ATTEMPT_S", 0.1)
                    with pytest.raises(AlreadyEnded, match="has ended before .*ended by a person") as told:
                        await early.arrive(hello, members[1].hello)
                assert told.value.exit_code == 130
            with pytest.raises(AlreadyEnded, match=r"has ended before it took this host in \(nobody listens") as found:
                await last.arrive(members[0].hello, members[1].hello, early.hello, last.hello)
            assert found.value.exit_code == 1 and "deadpool outcome" in str(found.value)

    run(scenario)


def test_who_is_configured_otherwise_is_refused() -> None:
    async def scenario() -> None:
        async with job(1) as (member,), newcomer(1, digest="other") as host:
            with pytest.raises(ConfigError, match="another configuration"):
                await host.arrive(member.hello)

    run(scenario)


def test_before_the_job_stands_a_guest_shall_wait_and_nobody_at_all_is_said() -> None:
    async def scenario() -> None:
        async with newcomer(0) as starting:
            assert await ask(starting.hello.control, SECRET, Describe()) == Busy("the job is starting", arrives=True)
        with pytest.raises(ConnectionClosed, match="nobody answers at"):
            await ask(starting.hello.control, SECRET, Describe(), 5.0)

    run(scenario)


def test_what_a_guest_of_another_version_says_costs_nobody_anything() -> None:
    async def scenario() -> None:
        async with job(1) as members:
            unhandled: list[object] = []
            asyncio.get_running_loop().set_exception_handler(lambda _, context: unhandled.append(context))
            with await connected(members[0].hello.control) as sock:
                await shake_hands(sock, SECRET, PURPOSE, GUEST, dialling=True)
                body = msgspec.msgpack.encode(["a question of later days"])
                await asyncio.get_running_loop().sock_sendall(sock, pack_frame(body, 1 << 20))
                assert not await asyncio.get_running_loop().sock_recv(sock, 1)
            gc.collect()
            await asyncio.sleep(0)
            assert not unhandled

    run(scenario)
