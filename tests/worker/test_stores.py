"""The host of the next store: the process whose store groups are built over offers another one at once."""

from __future__ import annotations

import socket
import threading
from typing import cast

from support import expect, present
from support.stand_in import fake

from deadpool_plugin.agent.node import Process, Slot
from deadpool_plugin.agent.workers import Workers
from deadpool_plugin.comm.generations import Generations
from deadpool_plugin.core import local
from deadpool_plugin.transport.unix import LocalConnection, LocalPeer
from deadpool_plugin.worker.link import AgentLink

KEPT: list[LocalConnection] = []
"""A link ends its process when the agent's end is closed."""


def test_a_store_is_hosted_while_the_main_thread_is_somewhere_else():
    ours, theirs = socket.socketpair()
    agent, link = LocalConnection(ours), AgentLink(LocalConnection(theirs), Generations(explain_timeout_s=0.0))
    KEPT.append(agent)
    threads = []

    def offer() -> None:
        threads.append(threading.current_thread())
        link.send(local.StoreOffer("127.0.0.1:4711"))

    link.start(fake(offer_store=offer))
    agent.send(local.HostStore())
    message, _ = agent.recv()
    assert message == local.StoreOffer("127.0.0.1:4711")
    assert threads != [threading.main_thread()]
    agent.send(local.RunRank(3, {}))
    assert link.receive(local.RunRank, local.HostStore)[0] == local.RunRank(3, {})  # it was nothing for the main thread


class Peer:
    def __init__(self) -> None:
        self.told: list[local.LocalMessage] = []

    def send(self, message: local.LocalMessage) -> None:
        self.told.append(message)


def slot_with(number: int, rehearses: bool, *stores: str) -> Slot:
    process = Process(order=1, rank=0, rehearses=rehearses, pid=1, peer=cast(LocalPeer, Peer()), stores=list(stores))
    return Slot(number, rank=-1 if rehearses else 0, process=process)


def told(slot: Slot) -> list[local.LocalMessage]:
    return expect(Peer, present(slot.process).peer).told


def test_whoever_hosts_it_is_told_also_one_that_stands_by():
    slots = [slot_with(0, False, "a:1"), slot_with(1, True, "a:2", "a:3"), slot_with(2, True, "a:4"), Slot(3)]
    Workers.replace_store(fake(_slots=slots), "a:3")
    assert [told(slot) for slot in slots[:3]] == [[], [local.HostStore()], []]
    present(slots[1].process).ended = True
    Workers.replace_store(fake(_slots=slots), "a:2")
    assert told(slots[1]) == [local.HostStore()]
