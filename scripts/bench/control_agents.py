"""The agents of bench_control_plane.py: real ones with real sockets, several to a process if asked, which count.

Rules of this file: what runs here runs in processes forked from one that has imported everything; nothing of the agent
is replaced, it is watched from outside (two clock readings an input, an addition a message). An agent that ends by
itself ends its process, which the driver notices.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from deadpool_plugin.agent.process import Agent
from deadpool_plugin.agent.world import Job, Place
from deadpool_plugin.config import Config
from deadpool_plugin.core import api
from deadpool_plugin.core.types import NodeId
from deadpool_plugin.host.machine import Machine
from deadpool_plugin.transport.framing import LENGTH, FrameProtocol
from deadpool_plugin.transport.handshake import Credentials
from deadpool_plugin.transport.unix import listen_unix

from .control_board import Board, Row

SECRET = b"the secret of a benchmark on one machine"
HOST = "127.0.0.1"
_TIMES = {
    "SwapPlanned": "decided_ns",
    "TrainingStarted": "training_ns",
    "SwapDone": "training_ns",
    "Mirrored": "protected_ns",
}
_TROUBLES = ("ContactLost", "RankLost", "RehearsalFailed", "PeerRefused", "NodeFenced", "JobStopped")


@dataclass(frozen=True)
class Party:
    """Facts that all agents of a job share. `name` begins their local sockets' names; `folder` gets their output."""

    name: str
    folder: Path
    nodes: int
    slots: int
    spares: int
    patience_s: float
    port: int

    def socket_name(self, node: NodeId) -> str:
        return f"{self.name}/{node}"

    def config(self) -> Config:
        return Config(
            spares=self.spares,
            patience_s=self.patience_s,
            output_dir=self.folder / "output",
            interface_address=HOST,
            memory_headroom_gib=0.0,
            park_memory_gib=0.0,  # of other nodes than its first a spare rehearses what memory allows: here, all
            park_at_home=False,
        )


class Watched(Agent):
    """An agent that says on the board what it does."""

    def __init__(self, party: Party, node: NodeId, row: Row) -> None:
        place = Place(node, party.nodes, party.slots, HOST, party.port)
        job = Job(command=[], directory=str(party.folder), config="", environment={})
        listener, config, credentials = listen_unix(party.socket_name(node)), party.config(), Credentials(SECRET)
        machine = Machine(node, (HOST, HOST), config, credentials, listener, f"{party.name}.{node}.")
        super().__init__(machine, place, config, credentials, job)
        self._row = row
        mesh = self._links.mesh
        take_in, lose = mesh._received, mesh._on_lost

        def received(peer: NodeId, link: FrameProtocol, frame: bytes) -> None:
            row.add("received")
            row.add("received_bytes", LENGTH.size + len(frame))
            take_in(peer, link, frame)

        def lost(one: api.LinkLost) -> None:
            row.set("noticed_ns", time.monotonic_ns())
            lose(one)

        mesh._received = received  # type: ignore[method-assign]
        mesh._on_lost = lost

    def feed(self, event: api.Input) -> None:
        if self._stepping:  # it waits for its turn, which is inside the outer call
            super().feed(event)
            return
        began = time.thread_time_ns()
        super().feed(event)
        self._row.add("protocol_ns", time.thread_time_ns() - began)
        self._row.add("inputs")

    def _carry_out(self, action: api.Action) -> None:
        match action:
            case api.Send(message=message):
                self._row.add(type(message).__name__)
            case api.Reconfigure(plan=plan):  # before anything is done about it, the time
                self._row.set("planned_cpu_ns", time.process_time_ns())
                self._row.set("planned_ns", time.monotonic_ns())
                self._row.set("generation", plan.world.generation)
                self._row.set("committed", plan.restore_step)
        super()._carry_out(action)
        match action:
            case api.Commit(step=step):
                self._row.set("committed", step)
            case api.Emit(event=event) if (kind := type(event).__name__) in _TIMES:
                self._row.set(_TIMES[kind], time.monotonic_ns())
            case api.Emit(event=event) if type(event).__name__ in _TROUBLES:
                self._row.add("troubles")


def serve(party: Party, nodes: Sequence[NodeId], board: Board) -> NoReturn:
    """Be the agents of `nodes` until this process is killed."""
    try:
        asyncio.run(_together(party, nodes, board))
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(1)


async def _together(party: Party, nodes: Sequence[NodeId], board: Board) -> None:
    lives = [asyncio.create_task(Watched(party, node, board.row(node)).run()) for node in nodes]
    ended, _ = await asyncio.wait(lives, return_when=asyncio.FIRST_COMPLETED)
    print(f"ended with {[life.result() for life in ended]}", file=sys.stderr)
