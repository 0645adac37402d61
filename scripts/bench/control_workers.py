"""Stub workers: a few processes play the supervisors, standby processes and workers of all nodes of a job.

Rules of this file: the agents' real local protocol over their real Unix sockets, and no training: a step is a sealed
slot and the word for it. One thread, nothing blocks but on an agent that does not read. What an agent watches in /proc
are two processes: this one, and a body that sleeps (its pid stands for every worker with the same local rank). A worker
that rehearses has a body of its own: its agent ends it when others are to have the memory.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import time
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from deadpool_plugin.core import local
from deadpool_plugin.core.chain import Chain
from deadpool_plugin.core.types import NO_STEP, NodeId
from deadpool_plugin.host.proc import spawn
from deadpool_plugin.mirror.arena import SlotPair
from deadpool_plugin.transport.framing import ConnectionClosed
from deadpool_plugin.transport.linux import die_with_parent
from deadpool_plugin.transport.unix import LocalConnection

from .control_agents import HOST, Party

HEADER_BYTES = 4 << 10
PAYLOAD_BYTES = 4 << 10
ORDER_BYTES = 8
_CHAIN = Chain()
_LAYOUT = "stub"
_CONNECT_S = 60.0
_RETRY_S, _MOVES_S = 0.02, 1.0
_SLEEP = ("/bin/sleep", "infinity")

Handler = Callable[[Any, list[int]], None]


class Stage:
    """All stub workers of this process. `until`: the step they may train to."""

    def __init__(self, party: Party, nodes: Sequence[NodeId], orders: int) -> None:
        self.party, self.until = party, NO_STEP
        self._orders = orders
        self._selector = selectors.DefaultSelector()
        self._slots: list[Slot] = []
        self._bodies = [_body() for _ in range(party.slots)]
        self.pipe, self._silent_end = os.pipe()  # the output of all workers, who say nothing
        self._slots = [Slot(self, node, local_rank) for node in nodes for local_rank in range(party.slots)]
        self._selector.register(orders, selectors.EVENT_READ)

    def play(self) -> NoReturn:
        while True:
            if not (ready := self._selector.select(_MOVES_S)):
                self._get_on()
            for key, _ in ready:
                if key.fd == self._orders:
                    self._ordered()
                else:
                    self._hear(key)

    def body(self, order: local.RunRank, local_rank: int) -> int:
        return spawn(_SLEEP, {}, signal.SIGKILL) if order.rehearses else self._bodies[local_rank]

    def _get_on(self) -> None:
        """Rank 0 is in a long step: nobody is to take the time between two orders for a hang."""
        for slot in self._slots:
            if slot.rank is not None and slot.rank.number == 0:
                slot.rank.get_on()

    def _ordered(self) -> None:
        """The driver says how far to train; the end of its pipe is our end."""
        order = os.read(self._orders, ORDER_BYTES)
        if not order:
            os._exit(0)
        self.until = int.from_bytes(order, "big")
        for slot in self._slots:
            if slot.rank is not None:
                slot.rank.go_on()

    def connect(self, node: NodeId, handler: Handler) -> LocalConnection:
        """A connection to the node's agent whose messages go to `handler`. Raises: ConnectionClosed"""
        connection = self._connected(self.party.socket_name(node))
        self._selector.register(connection, selectors.EVENT_READ, handler)
        return connection

    def _connected(self, name: str) -> LocalConnection:
        deadline = time.monotonic() + _CONNECT_S
        while True:
            try:
                return LocalConnection.to(name)
            except ConnectionClosed:
                if time.monotonic() > deadline:
                    raise
            time.sleep(_RETRY_S)

    def _hear(self, key: selectors.SelectorKey) -> None:
        connection = key.fileobj
        assert isinstance(connection, LocalConnection)
        try:
            message, descriptors = connection.recv()
        except ConnectionClosed:  # the agent has ended, or wants this one no more
            self._selector.unregister(connection)
            connection.close()
        else:
            key.data(message, descriptors)


class Slot:
    """One local rank of one node: its supervisor, its standby process, and what that has forked last."""

    def __init__(self, stage: Stage, node: NodeId, local_rank: int) -> None:
        self._stage, self._node, self._local_rank = stage, node, local_rank
        self.rank: Rank | None = None
        self._supervisor = stage.connect(node, lambda message, descriptors: None)
        hello = local.SupervisorHello(local_rank, standby_pid=os.getpid())
        self._supervisor.send(hello, [stage.pipe])
        self._standby = stage.connect(node, self._ordered)
        self._standby.send(local.StandbyHello(local_rank))

    def _ordered(self, order: local.LocalMessage, descriptors: list[int]) -> None:
        if isinstance(order, local.RunRank):
            with contextlib.suppress(ConnectionClosed):
                self.rank = Rank(self._stage, self._node, self._local_rank, order)


class Rank:
    """The process forked for one order."""

    def __init__(self, stage: Stage, node: NodeId, local_rank: int, order: local.RunRank) -> None:
        self._stage, self.number = stage, order.rank
        self._step = self._committed = NO_STEP
        self._generation = self._stores = 0
        self._trains = False
        self._pair: SlotPair | None = None
        self._handlers: dict[type[local.LocalMessage], Handler] = {
            local.StartGroups: self._start,
            local.ArenaHandOver: self._train,
            local.Committed: self._open_gate,
            local.Abort: self._unwind,
            local.Join: self._join,
            local.Recording: self._rehearse,
            local.Park: self._park,
            local.TakeOver: self._take_over,
        }
        self._connection = stage.connect(node, self._hear)
        body = stage.body(order, local_rank)
        self._send(local.WorkerHello(local_rank, body, order.rank, order.rehearses, order.order))
        self._offer_store()

    def _hear(self, message: local.LocalMessage, descriptors: list[int]) -> None:
        handler = self._handlers.get(type(message))
        if handler is not None:
            handler(message, descriptors)

    def _send(self, message: local.LocalMessage) -> None:
        with contextlib.suppress(ConnectionClosed):  # seen again by reading
            self._connection.send(message)

    def _offer_store(self) -> None:
        self._stores += 1
        port = self.number * 1000 + self._stores  # a name like another: nobody connects
        self._send(local.StoreOffer(f"{HOST}:{port}"))

    # ---- from the top

    def _start(self, start: local.StartGroups, _: list[int]) -> None:
        self._generation = start.generation
        ready = local.RankReady(self.number, HEADER_BYTES, PAYLOAD_BYTES, _LAYOUT, (self.number,), b"")
        self._send(ready)

    def _train(self, arena: local.ArenaHandOver, descriptors: list[int]) -> None:
        self._attach(descriptors[0])
        self._trains = True
        self._stage_step(0)
        self._offer_store()
        self.go_on()

    def _attach(self, descriptor: int) -> None:
        self._pair = SlotPair.attach(descriptor, self.number, HEADER_BYTES, PAYLOAD_BYTES)

    # ---- steps

    def get_on(self) -> None:
        if self._trains:
            self._send(local.WorkerMoved(self.number))

    def go_on(self) -> None:
        """Go on as far as the driver and the gate allow."""
        while self._trains and self._step < self._stage.until and _CHAIN.may_stage(self._step + 1, self._committed):
            self._stage_step(self._step + 1)

    def _stage_step(self, step: int) -> None:
        assert self._pair is not None
        self._step = step
        self._pair.invalidate(step)
        self._pair.seal(step, self._generation, _LAYOUT, b"")
        self._send(local.Staged(self.number, step, self._generation, [b""]))

    def _open_gate(self, message: local.Committed, _: list[int]) -> None:
        self._committed = max(self._committed, message.step)
        self.go_on()

    # ---- a swap

    def _unwind(self, message: local.Abort, _: list[int]) -> None:
        self._trains = False
        self._send(local.Unwound(message.generation))

    def _join(self, message: local.Join, _: list[int]) -> None:
        self._restore(message.generation, message.restore_step)

    def _rehearse(self, message: local.Recording, _: list[int]) -> None:
        self._send(local.Rehearsed(self.number, 0.0))

    def _park(self, message: local.Park, _: list[int]) -> None:
        self._send(local.Parked(self.number, 0, 0, 0))

    def _take_over(self, message: local.TakeOver, descriptors: list[int]) -> None:
        self._attach(descriptors[0])
        self._restore(message.generation, message.restore_step)

    def _restore(self, generation: int, step: int) -> None:
        assert self._pair is not None
        if self._pair.open(step + 1) is not None:
            self._pair.invalidate(step + 1)
        if self._pair.open(step) is None:
            raise RuntimeError(f"rank {self.number} is to go back to step {step}, which its arena does not hold")
        self._generation, self._step, self._committed, self._trains = generation, step, step, True
        self._send(local.WorkerRestored(self.number, generation))
        self._offer_store()
        self.go_on()


def _body() -> int:
    """A process that does nothing until this one ends."""
    me = os.getpid()
    pid = os.fork()
    if pid == 0:
        die_with_parent(signal.SIGKILL, me)
        while True:
            signal.pause()
    return pid
