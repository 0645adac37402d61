"""The real standby process with workers without torch: they train an array of integers and survive swaps.

Every step is a function of the step before, so a snapshot of wrong bytes shows in the final hash. Behaviours:
--steps N, --step-s SECONDS, --payload BYTES, --same-state (all ranks train the same array), --replicas RANKS,
--children (two grandchildren, one in a session of its own), --rehearse-s SECONDS, --refuse RANK (its rehearsal),
--differs RANK:ORDERS (so many of its agent's orders take over with other data than the rank read),
--exit-at RANK:STEP:CODE (RANK -1: every rank; CODE below 0: a signal; with --once only the rank's first process, with
--only-on NODE only there), --disk-fails-at RANK:STEP:TIMES (RANK -1: every rank, so many times each),
--stuck-at RANK:STEP (deaf, the first process only), --killed-late RANK:SIGNAL (after the training),
--fail-start RANK:CODE, --hold-at STEP with --hold-file FILE (goes on from there once the file exists; STEP -1: before
it is ready to train). The last step is not made as long as there is FILE.stay.
"""

from __future__ import annotations

import argparse
import errno
import functools
import os
import select
import subprocess
import sys
import time
import traceback
from typing import NoReturn

import xxhash
from dist.stub_launch import be_called

from deadpool_plugin.core import local
from deadpool_plugin.launch.standby import Standby
from deadpool_plugin.launch.worker import tell_failing
from deadpool_plugin.mirror.arena import SlotPair
from deadpool_plugin.transport.framing import ConnectionClosed
from deadpool_plugin.transport.linux import die_with_parent
from deadpool_plugin.transport.unix import LocalConnection

HEADER_BYTES = 64 << 10


class Aborted(Exception):
    """The agent announced a new generation."""


def first_state(rank: int, size: int) -> bytes:
    return advance(b"rank%d" % rank, 0, size)


def advance(state: bytes, step: int, size: int) -> bytes:
    """The state after `step`, from the one before it."""
    seed = xxhash.xxh3_128_digest(state + b"%d" % step)
    return (seed * (size // len(seed) + 1))[:size]


def state_at(rank: int, step: int, size: int) -> bytes:
    state = first_state(rank, size)
    for past in range(1, step + 1):
        state = advance(state, past, size)
    return state


def digest(state: bytes) -> str:
    return xxhash.xxh3_64_hexdigest(state)


def record_of(rank: int, step: int) -> bytes:
    return b"record of rank %d step %d" % (rank, step)


class Process:
    """The connection to the agent, and what it said."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.local_rank = int(os.environ["LOCAL_RANK"])
        self.connection = LocalConnection.to(os.environ["DEADPOOL_SOCKET"])
        self.committed = self.aborted = self.generation = -1
        self.join: local.Join | None = None
        self.end: int | None = None
        self.inbox: list[tuple[local.LocalMessage, list[int]]] = []
        self.stores = 0
        self.first = True

    def offer_store(self) -> None:
        if self.local_rank == 0:
            self.stores += 1
            self.connection.send(local.StoreOffer(f"127.0.0.1:{os.getpid() * 1000 + self.stores}"))

    def listen(self, timeout_s: float | None = None) -> bool:
        """Take in what has come; False if nothing came in time."""
        ready, _, _ = select.select([self.connection], [], [], timeout_s)
        if not ready:
            return False
        try:
            message, descriptors = self.connection.recv()
        except ConnectionClosed:
            os._exit(87)
        if isinstance(message, local.Committed):
            self.committed = max(self.committed, message.step)
        elif isinstance(message, local.Abort):
            self.aborted = message.generation
        elif isinstance(message, local.Join):
            self.join = message
        elif isinstance(message, local.End):
            self.end = message.exit_code
        elif isinstance(message, local.HostStore):
            self.offer_store()
        else:
            self.inbox.append((message, descriptors))
        return True

    def receive(self, *kinds: type[local.LocalMessage]) -> tuple[local.LocalMessage, list[int]]:
        while True:
            for item in self.inbox:
                if isinstance(item[0], kinds):
                    self.inbox.remove(item)
                    return item
            self.listen()

    def pause(self, seconds: float) -> None:
        """Compute for a while. Raises: Aborted"""
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            self.listen(left)
            self.check()

    def check(self) -> None:
        if self.aborted > self.generation:
            raise Aborted

    def wait_committed(self, step: int) -> None:
        while self.committed < step:
            self.listen()
            self.check()


class Rank:
    """A rank in training."""

    def __init__(self, process: Process, rank: int, slots: SlotPair, generation: int) -> None:
        self.process, self.rank, self.slots = process, rank, slots
        self.step = 0
        self.state = first_state(0 if process.options.same_state else rank, slots.payload_bytes)
        process.generation = generation

    def stage(self) -> None:
        if self.step >= 2:
            self.process.wait_committed(self.step - 1)
        self.slots.invalidate(self.step, self.step - 1)
        self.slots.payload(self.step)[:] = self.state
        self.slots.seal(self.step, self.process.generation, "layout", b"scalars of %d" % self.step)
        records = [record_of(self.rank, self.step)]
        self.process.connection.send(local.Staged(self.rank, self.step, self.process.generation, records))

    def restore(self, step: int) -> None:
        self.slots.drop_newer(step)
        header = self.slots.open(step)
        assert header is not None, f"rank {self.rank} lacks step {step}"
        assert header.scalars == b"scalars of %d" % step, header
        self.step, self.state = step, bytes(self.slots.payload(step))
        self.process.connection.send(local.WorkerRestored(self.rank, self.process.generation))
        print(f"rank {self.rank} restored step {step} hash {digest(self.state)}", flush=True)

    def train(self) -> None:
        options = self.process.options
        while True:
            try:
                self.process.check()
                while self.step < options.steps:
                    self.process.pause(options.step_s)
                    self.hold()
                    self.maybe_exit()
                    self.maybe_stick()
                    self.step += 1
                    self.state = advance(self.state, self.step, len(self.state))
                    self.stage()
                    self.process.connection.send(
                        local.WorkerEvent("StepDone", {"rank": self.rank, "step": self.step, "loss": 1.0 / self.step})
                    )
                    print(f"rank {self.rank} step {self.step}", flush=True)
                self.process.connection.send(local.WorkerFinished(self.rank))
                while self.process.end is None:
                    self.process.listen()
                    self.process.check()
                print(f"rank {self.rank} final step {self.step} hash {digest(self.state)}", flush=True)
                self.end()
            except Aborted:
                self.rejoin()

    def end(self) -> NoReturn:
        """Do what a script does after the training."""
        rank, number = map(int, (self.process.options.killed_late or "-1:0").split(":"))
        if rank == self.rank:
            os.kill(os.getpid(), number)
        sys.exit(self.process.end)

    def hold(self) -> None:
        options = self.process.options
        while self.step == options.hold_at and not os.path.exists(options.hold_file):
            self.process.pause(0.02)
        while self.step == options.steps - 1 and os.path.exists(f"{options.hold_file}.stay"):
            self.process.pause(0.02)

    def maybe_exit(self) -> None:
        options = self.process.options
        if options.disk_fails_at:
            rank, step, times = map(int, options.disk_fails_at.split(":"))
            with open(f"{options.hold_file}.failed{self.rank}", "ab") as failed:
                if rank in (self.rank, -1) and self.step == step and failed.tell() < times:
                    failed.write(b".")
                    raise OSError(errno.EIO, os.strerror(errno.EIO))
        if options.exit_at:
            rank, step, code = map(int, options.exit_at.split(":"))
            due = rank in (self.rank, -1) and self.step == step and options.only_on in ("", options.node)
            if due and (self.process.first or not self.process.options.once):
                if code > 0:
                    raise RuntimeError(f"told to at step {step}") from SystemExit(code)
                os._exit(0) if code == 0 else os.kill(os.getpid(), -code)

    def maybe_stick(self) -> None:
        if self.process.options.stuck_at and self.process.first:
            if self.step == int(self.process.options.stuck_at.split(":")[1]):
                print(f"rank {self.rank} has come to the step of --stuck-at", flush=True)
            while (self.rank, self.step) == tuple(map(int, self.process.options.stuck_at.split(":"))):
                time.sleep(60)

    def rejoin(self) -> None:
        process = self.process
        told = -1
        while process.join is None or process.join.generation < process.aborted:
            if process.aborted > told:
                told = process.aborted
                process.connection.send(local.Unwound(told))
            process.listen()
        process.generation = process.join.generation
        process.committed = process.join.restore_step
        self.restore(process.join.restore_step)


def begin(process: Process, order: local.RunRank) -> None:
    process.offer_store()
    start, _ = process.receive(local.StartGroups)
    assert isinstance(start, local.StartGroups)
    if process.options.fail_start:
        failing, code = map(int, process.options.fail_start.split(":"))
        if order.rank == failing:
            raise RuntimeError("told to at start") from SystemExit(code)
    while process.options.hold_at == -1 and not os.path.exists(process.options.hold_file):
        process.listen(0.02)
    replicas = tuple(map(int, process.options.replicas.split(","))) if process.options.replicas else (order.rank,)
    recording = b"recording of rank %d" % order.rank
    process.connection.send(
        local.RankReady(order.rank, HEADER_BYTES, process.options.payload, "layout", replicas, recording)
    )
    arena, (descriptor,) = process.receive(local.ArenaHandOver)
    assert isinstance(arena, local.ArenaHandOver)
    slots = SlotPair.attach(descriptor, order.rank, HEADER_BYTES, process.options.payload)
    rank = Rank(process, order.rank, slots, start.generation)
    rank.stage()
    process.offer_store()
    rank.train()


def rehearse(process: Process, number: int, ordered: int) -> None:
    order, _ = process.receive(local.Recording)
    assert isinstance(order, local.Recording)
    assert order.recording == b"recording of rank %d" % number
    if number == process.options.refuse:
        process.connection.send(local.Failing(number, "told to"))
        os._exit(1)
    process.offer_store()
    time.sleep(process.options.rehearse_s)
    process.connection.send(local.Rehearsed(number, process.options.rehearse_s))
    followed = -1
    while True:
        message, descriptors = process.receive(local.History, local.Park, local.TakeOver)
        if isinstance(message, local.History):
            for record in message.records:
                followed += 1
                assert record == record_of(number, followed), (record, followed)
            continue
        if isinstance(message, local.Park):
            process.connection.send(local.Parked(number, 0, 0, 0))
            continue
        assert isinstance(message, local.TakeOver)
        if process.options.differs and number == process.options.differs[0] and ordered <= process.options.differs[1]:
            reason = f"read other data than rank {number} in step {followed}"
            process.connection.send(local.Failing(number, reason, differs=True))
            os._exit(1)
        assert message.restore_step == followed, (message.restore_step, followed)
        slots = SlotPair.attach(descriptors[0], number, message.header_bytes, message.payload_bytes)
        rank = Rank(process, number, slots, message.generation)
        process.committed = message.restore_step
        rank.restore(message.restore_step)
        rank.train()


def become(options: argparse.Namespace, order: local.RunRank) -> NoReturn:
    """The forked process."""
    be_called(f"worker{os.environ['LOCAL_RANK']}")
    os.environ.update(order.env)
    process = Process(options)
    rehearsing = order.rehearses
    process.first = not rehearsing
    process.connection.send(local.WorkerHello(process.local_rank, os.getpid(), order.rank, rehearsing, order.order))
    if options.children:
        subprocess.Popen(["sleep", "777"])
        subprocess.Popen(["sleep", "778"], start_new_session=True)
    try:
        if rehearsing:
            rehearse(process, order.rank, order.order)
        else:
            begin(process, order)
    except SystemExit as end:
        sys.stdout.flush()
        os._exit(int(end.code or 0))
    except BaseException as error:
        traceback.print_exc()
        tell_failing(process.connection, order.rank, error)
        os._exit(int(error.__cause__.code or 0) if isinstance(error.__cause__, SystemExit) else 1)
    os._exit(1)


def main(words: list[str]) -> None:
    be_called(f"standby{os.environ['LOCAL_RANK']}")
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--step-s", type=float, default=0.05)
    parser.add_argument("--payload", type=int, default=1 << 16)
    parser.add_argument("--rehearse-s", type=float, default=0.0)
    parser.add_argument("--replicas", default="")
    parser.add_argument("--hold-at", type=int)
    parser.add_argument("--hold-file", default="")
    parser.add_argument("--refuse", type=int, default=-1)
    parser.add_argument("--differs", type=lambda text: tuple(map(int, text.split(":"))))
    parser.add_argument("--same-state", action="store_true")
    parser.add_argument("--exit-at", default="")
    parser.add_argument("--stuck-at", default="")
    parser.add_argument("--killed-late", default="")
    parser.add_argument("--fail-start", default="")
    parser.add_argument("--once", action="store_true")
    parser.add_argument("--only-on", default="")
    parser.add_argument("--disk-fails-at", default="")
    parser.add_argument("--children", action="store_true")
    options = parser.parse_args([word for word in words if not word.startswith("--local_rank")])
    options.node = os.environ["CROSS_RANK"]
    die_with_parent()
    connection = LocalConnection.to(os.environ["DEADPOOL_SOCKET"])
    Standby(connection, int(os.environ["LOCAL_RANK"]), functools.partial(become, options), ()).serve()


if __name__ == "__main__":
    main(sys.argv[1:])
