"""This node's processes: who they are when they connect, what they are told, how they end.

Rules of this file: an order replaces the process of the order before, whose last words mean nothing from then on.
A death becomes an input once, with the best reason there is. A worker process ended by a signal is lost: its own node
can run the rank again. So is one whose error is its host's fault. Any other that ended by its own exit code has failed,
as it may do anywhere. A standby process or a supervisor that is gone is the node's end: neither runs anything that
could crash it, and what they looked after died with them.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Callable

from .. import events
from ..core import api, local
from ..core.types import NO_STEP, Generation, Rank, Step, World
from ..errors import EXIT_OK, invariant, present, shell_code
from ..host.output import Repeats
from ..host.proc import described_exit
from ..host.stacks import frames_of
from ..transport.unix import LocalPeer, close_descriptors
from .node import LocalNode, Process, Slot
from .outputs import Outputs
from .world import worker_env

SIGTERM_S = 25.0  # for a script that handles SIGTERM: deepspeed's launcher and Slurm kill after 30 s
TERM_GRACE_S = 1.0  # a supervisor told to end knows why, its agent who else was told: each lets the other speak first
EXIT_REPORT_S = 2.0  # after a worker's connection has ended, for the standby process to say how it ended


class Workers:
    """The processes of this node's slots. `on_lost` is called with each slot whose rank has lost its process."""

    def __init__(self, node: LocalNode, on_lost: Callable[[Slot], None]) -> None:
        self._node, self._slots, self._processes = node, node.slots, node.host.processes
        self._on_lost, self.outputs = on_lost, Outputs(node)
        self.committed: Step = NO_STEP
        self._snapshots: tuple[Step, ...] = ()  # as in messages.Status, of this generation
        self._void: tuple[Step, ...] = ()
        self._orders = self._exit_code = 0
        self._start: local.StartGroups | None = None
        self.ending = self.paused = self._has_sigterm = False
        self._deadlines: list[asyncio.TimerHandle] = []
        self.late_exit_code = 0  # the worst of a rank's process after the job's end, as a shell counts signals
        self.changed = asyncio.Event()  # set whenever a process has ended

    # ---- who they are, and what they are told

    def _slot(self, local_rank: int) -> Slot:
        invariant(0 <= local_rank < len(self._slots), f"no local rank {local_rank} of {len(self._slots)}")
        return self._slots[local_rank]

    def supervisor(self, peer: LocalPeer, hello: local.SupervisorHello, descriptors: list[int]) -> None:
        slot = peer.tag = self._slot(hello.local_rank)
        slot.supervisor, slot.standby_pid = peer, hello.standby_pid
        slot.pipe = self._node.host.pipe(descriptors[0])
        self._processes.watch(
            slot.standby_pid,
            lambda code: self.standby_ended(slot, described_exit(code)),
            lambda seconds: self.give_up(f"{_standby(slot)} had been stopped (state T) for {seconds:.1f} s"),
        )
        if self._node.world is not None:
            self.outputs.assign(slot)

    def standby(self, peer: LocalPeer, hello: local.StandbyHello) -> None:
        slot = peer.tag = self._slot(hello.local_rank)
        slot.standby = peer
        if slot.order is not None:
            peer.send(slot.order)
        elif self.ending:
            peer.send(local.End(0))

    def worker(self, peer: LocalPeer, hello: local.WorkerHello) -> None:
        """Take in a process for a slot's newest order, and begin it unless it is to rehearse."""
        slot = self._slot(hello.local_rank)
        if (process := slot.of_order(hello.order)) is None:
            return peer.close()  # an order that has been overtaken
        peer.tag, process.peer, process.pid = slot, peer, hello.pid
        self._processes.watch(
            process.pid, lambda code: self.ended(slot, process, code), lambda s: self._stopped(slot, process, s)
        )
        if not hello.rehearsing and self._start is not None:
            peer.send(self._start)

    def stack_file(self, slot: Slot, peer: LocalPeer, descriptors: list[int]) -> None:
        if (process := slot.of_peer(peer)) is None or process.ended:
            return close_descriptors(descriptors)
        process.stacks = self._node.host.stacks(descriptors[0], process.pid)

    async def stack(self, slot: Slot) -> tuple[str, ...]:
        """Have the process of the slot's rank write its Python stack, into its log too. Returns: the frames."""
        process = slot.running
        if process is None or process.stacks is None:
            return ()
        text = await process.stacks.read()
        if slot.pipe is not None:
            slot.pipe.note(f"the Python stack of process {process.pid}, which gets no further:\n{text.rstrip()}")
        return frames_of(text) or (text.strip(),)

    def store_offer(self, slot: Slot, process: Process, message: local.StoreOffer) -> None:
        if not process.ended:  # else these are the last words of one that is known to be dead
            process.stores.append(message.address)
            self._offer(slot)

    def _offer(self, slot: Slot) -> None:
        """Offer a store of the slot: that of the process that runs its rank, or is to, before any stand-in's."""
        process = next((process for process in slot.processes if process.stores), None)
        if process is not None:
            stand_in = process.rehearses and not process.took_over
            self._node.feed(api.StoreOffered(process.stores[-1], slot.local_rank, stand_in))

    def replace_store(self, address: str) -> None:
        """Have the process here that hosts the store at `address` offer another one."""
        # At once, and also if it only stands by: the next loss may leave no other that has one.
        for process in [process for slot in self._slots for process in slot.processes]:
            if process.peer is not None and address in process.stores:
                process.peer.send(local.HostStore())

    def form(self, world: World, begins: bool = True) -> None:
        """Enter the first world: tell every slot what it is. `begins`: its ranks begin the script from its top."""
        self._node.world, self.committed, self._start = world, NO_STEP, None
        self._snapshots = self._void = ()
        ranks = world.ranks_of(self._node.id)
        for slot in self._slots:
            slot.rank = ranks[slot.local_rank] if slot.local_rank < len(ranks) else -1
            self.outputs.assign(slot)
            if slot.rank >= 0 and begins:
                self.order(slot, slot.rank, rehearses=False)

    def enter(self, world: World, restore_step: Step) -> None:
        """Enter a world that goes on from `restore_step` of the one before (for a host that has joined: its first)."""
        self._node.world, self.committed = world, min(self.committed, restore_step)
        self._snapshots = self._void = ()
        for slot in self._slots:
            if slot.pipe is not None and not slot.pipe.assigned:
                self.outputs.assign(slot)

    def order(self, slot: Slot, rank: Rank, *, rehearses: bool, stands_in: bool = False) -> Process:
        """Order a fresh process that runs or rehearses `rank`: in the place of the slot's process, or to stand in."""
        node = self._node
        world = present(node.world, "a process was ordered before the world had formed")
        if stands_in:
            self.end_stand_in(slot, rank)
        elif slot.process is not None:
            self._mark_ended(slot.process)
            self._cut_off(slot.process)
        self._orders += 1
        # It takes the ring position of the node that runs the rank now.
        env = worker_env(node.place, world, rank, slot.local_rank, node.host.where[1])
        slot.order = local.RunRank(rank, env, self._orders, rehearses, stands_in)
        process = Process(self._orders, rank, rehearses)
        if stands_in:
            slot.stand_ins[rank] = process
        else:
            slot.process = process
        if slot.standby is not None:
            slot.standby.send(slot.order)
        return process

    def tell_imports(self, slot: Slot, modules: bytes) -> None:
        """Have the slot's standby process import what a rank has imported: those it forks then share that memory."""
        if modules and slot.standby is not None and not slot.imports:
            slot.imports = True
            slot.standby.send(local.Imports(modules))

    def _cut_off(self, process: Process) -> None:
        if process.peer is not None:
            process.peer.tag = None
            process.peer.close()
            process.peer = None

    def promote(self, slot: Slot) -> Process | None:
        """Have the stand-in of the slot's rank, if there is one, take the place of the slot's process."""
        process, before = slot.stand_ins.pop(slot.rank, None), slot.process
        if process is None:
            return None
        if before is not None and not before.ended:
            self._end(slot, before)
        slot.process = process
        if slot.standby is not None:
            slot.standby.send(local.RunsRank(process.order))
        self._offer(slot)
        return process

    async def take(self, slot: Slot, process: Process, step: Step) -> bool:
        """Have a process run the slot's rank, which it has rehearsed, from `step` on, and print nothing again.

        Returns: False if it has ended meanwhile.
        """
        file, printed = await self.outputs.of_rank(slot.rank, step)
        if slot.living is not process:
            return False
        invariant(process.rank == slot.rank, f"rank {process.rank} is run in the place of rank {slot.rank}")
        process.took_over = True
        self.outputs.assign(slot, file, late=file is None)
        if slot.pipe is not None:
            slot.pipe.repeats = Repeats(printed or {}, step)
        return True

    def end_stand_in(self, slot: Slot, rank: Rank) -> None:
        """End a stand-in that is not needed any more; that is no loss."""
        if (process := slot.stand_ins.pop(rank, None)) is not None:
            self._end(slot, process)

    def _end(self, slot: Slot, process: Process) -> None:
        self._mark_ended(process, kills=True)
        self._cut_off(process)
        if slot.standby is not None:
            slot.standby.send(local.EndProcess(process.order))
        self._offer(slot)

    def vacate(self, slot: Slot) -> None:
        """End what runs or rehearses a slot's rank, which another host has got; the slot stands by."""
        slot.rank = -1
        for rank in list(slot.stand_ins):
            self.end_stand_in(slot, rank)
        if slot.living is not None:
            self._mark_ended(slot.living, kills=True)
        self.outputs.assign(slot)

    def start_groups(self, generation: Generation, store: str) -> None:
        """Have every process that begins the script build groups, also those that have yet to connect."""
        self._start = local.StartGroups(generation, store)
        self._tell_serving(self._start)

    def abort(self, generation: Generation) -> None:
        self._start = None  # who has yet to connect is not to look for a store that may be gone
        self._tell_serving(local.Abort(generation))

    def commit(self, step: Step, snapshots: tuple[Step, ...] = (), void: tuple[Step, ...] = ()) -> None:
        self.committed = max(self.committed, step)
        self.announce(snapshots, void)

    def announce(self, snapshots: tuple[Step, ...], void: tuple[Step, ...]) -> None:
        """Tell which steps are snapshots, and which are not after all (core/chain.py)."""
        self._snapshots, self._void = snapshots, void
        self._tell_serving(self._newest)

    @property
    def _newest(self) -> local.Committed:
        return local.Committed(self.committed, self._snapshots, self._void)

    def tell_committed(self, peer: LocalPeer) -> None:
        """Tell one process what all were told of commits and snapshots in this generation."""
        peer.send(self._newest)

    def tell_snapshots(self, peer: LocalPeer) -> None:
        """Tell one process of snapshots, if any were announced in this generation."""
        if self._snapshots or self._void:
            peer.send(self._newest)

    def _tell_serving(self, message: local.LocalMessage) -> None:
        for slot in self._slots:
            if slot.serving is not None:
                slot.serving.send(message)

    # ---- their deaths

    def _mark_ended(self, process: Process, kills: bool = False) -> None:
        process.ended = True
        if process.stacks is not None:
            process.stacks.close()
        self._processes.forget(process.pid)
        if kills and process.pid:  # else it has not said hello yet, and the next order ends it
            self._processes.kill(process.pid)
        # Stores die with the process that hosts them; one before the newest may be what others are told to build over.
        stores, process.stores = process.stores, []
        for address in stores if not self.ending else ():
            self._node.feed(api.StoreLost(address))

    def ended(self, slot: Slot, process: Process, exit_code: int) -> None:
        """Take in that `process` is ending, of which /proc or the standby process tells first."""
        if process.peer is not None:
            process.peer.read_rest()  # its last words
        if process.ended:
            return
        self.changed.set()
        self._mark_ended(process)
        if self.ending:
            if process is not slot.process:
                return
            if slot.rank >= 0 and (process.took_over or not process.rehearses):
                self.late_exit_code = max(shell_code(exit_code), self.late_exit_code)
            self._end_standby(slot)
        elif self._processes.is_gone(slot.standby_pid):
            self.standby_ended(slot, "was ended, together with the processes that it had forked")
        elif exit_code < 0 or slot.rank < 0 or process.of_host or (process.rehearses and not process.in_training):
            self._lost(slot, process, process.failing or f"process {process.pid} {described_exit(exit_code)}")
        else:
            early = f"process {process.pid} exited with 0 before the job had ended"
            reason = process.failing or ("see its output above" if exit_code > 0 else early)
            self._lost(slot, process, reason, exit_code or 1)

    def _lost(self, slot: Slot, process: Process, reason: str, exit_code: int = 0) -> None:
        if slot.stand_ins.get(process.rank) is process:
            del slot.stand_ins[process.rank]
            self._cut_off(process)  # what it has said last is of no use
            self._offer(slot)
            if slot.rank < 0:
                self._node.feed(api.SpareFailed(slot.local_rank, process.rank, reason))
        elif process is slot.process and process.rank == slot.rank:  # else another one is on its way
            # First: a node that is alone decides at once, and what it orders then replaces what is begun here.
            self._on_lost(slot)
            lost = api.WorkerFailed(slot.rank, exit_code, reason) if exit_code else api.WorkerLost(slot.rank, reason)
            self._node.feed(lost)

    def kill(self, slot: Slot, process: Process, reason: str, exit_code: int = 0) -> None:
        """End a useless process, to be replaced. `exit_code`: not 0 if its script did it, twice being the job's end."""
        if process.ended or self.ending:
            return
        self._mark_ended(process, kills=True)
        if slot.standby is not None and slot.stand_ins.get(process.rank) is process:
            slot.standby.send(local.EndProcess(process.order))
        self._lost(slot, process, reason, exit_code)

    def _stopped(self, slot: Slot, process: Process, seconds: float) -> None:
        reason = f"process {process.pid} had been stopped (state T) for {seconds:.1f} s and was killed"
        if self.ending:  # or it would hold the host for ever; its exit code tells of it
            self._node.reports.emit(events.Note(text=reason))
            self._processes.kill(process.pid)
        else:
            self.kill(slot, process, reason)

    def await_unwinding(self, generation: Generation) -> None:
        """Set deadlines for the processes in training, which have been told that `generation` begins."""
        # One that is still in its call then is replaced here: it holds the interpreter, its device is dead, or user
        # code does not come to its next call. A process in a save is healthy, and has longer. One that has not come to
        # training has no deadline: it begins anew, or joins the newest generation when it is through.
        asked = [(slot, slot.running) for slot in self._slots if slot.running is not None and slot.running.in_training]
        loop, config = asyncio.get_running_loop(), self._node.config
        self._deadlines = [deadline for deadline in self._deadlines if deadline.when() > loop.time()]
        for after_s in (config.phase_timeout_s, config.saving_timeout_s):
            self._deadlines.append(loop.call_later(after_s, self._expire, generation, asked, after_s))

    def _expire(self, generation: Generation, asked: list[tuple[Slot, Process]], after_s: float) -> None:
        for slot, process in asked:
            saves = process.saving_for >= generation and after_s < self._node.config.saving_timeout_s
            if slot.process is process and process.unwound_for < generation and not saves:
                left = "the save it was in" if process.saving_for >= generation else "its call"
                reason = f"process {process.pid} had not left {left} after {after_s:g} s and was killed"
                self.kill(slot, process, reason)

    def pause(self) -> None:
        """Stop every process that runs a rank, with all it has started, and its deadline. Blocks: some 10 ms."""
        self.paused = True
        for deadline in self._deadlines:
            deadline.cancel()
        self._deadlines.clear()
        running = {slot.local_rank: slot.running.pid for slot in self._slots if slot.running and slot.running.pid}
        self._processes.pause(running, {slot.local_rank: slot.standby_pid for slot in self._slots})

    def resume(self) -> None:
        self.paused = False
        self._processes.resume()

    def standby_ended(self, slot: Slot, how: str) -> None:
        self.changed.set()
        if slot.standby_ended:
            return
        slot.standby_ended = True
        self._processes.forget(slot.standby_pid)
        self.give_up(f"{_standby(slot)} {how}")

    def give_up(self, reason: str) -> None:
        """Have others take the ranks of this node over, unless the job ends."""
        if not self.ending:
            self._node.feed(api.NodeGivenUp(reason))

    def closed(self, peer: LocalPeer) -> None:
        slot = peer.tag
        if not isinstance(slot, Slot):
            return
        self.changed.set()
        process = slot.of_peer(peer)
        if peer is slot.supervisor:
            slot.supervisor = None
            if not self.ending:
                self._processes.sweep(slot.local_rank)
                self.give_up(f"supervisor of local rank {slot.local_rank} is gone")
        elif peer is slot.standby:
            slot.standby = None
        elif process is not None:
            process.peer = None
            if exit_code := self._processes.exit_code(process.pid):
                self.ended(slot, process, exit_code)
            elif not process.ended:
                reason = f"process {process.pid} closed its connection and did not end"
                asyncio.get_running_loop().call_later(EXIT_REPORT_S, self.kill, slot, process, reason)

    def leaving(self, message: local.Leaving) -> None:
        node = self._node.id
        reason = f"the launcher of node {node} ended its processes ({signal.Signals(message.signal).name})"
        if message.signal == signal.SIGINT:
            why = f"ended where it was launched (Ctrl-C, a closed terminal or a signal; node {node} was told)"
            self._node.feed(api.StopRequested(why, 128 + message.signal))
        elif message.signal == signal.SIGHUP:
            self.give_up(f"node {node} found the launcher gone (on_launcher_loss: stop)")
        elif not self._script_handles_sigterm():
            self.give_up(reason)
        else:
            # The script is asked only where everybody on the host was told, this agent too, as deepspeed's launcher
            # does (terminate_process_tree): one that was told alone has lost its launcher, and nobody else has.
            asyncio.get_running_loop().call_later(TERM_GRACE_S, self._give_up_unless_told, reason)

    def _give_up_unless_told(self, reason: str) -> None:
        if not self._has_sigterm:
            self.give_up(reason)

    def told_to_end(self, reason: str) -> None:
        """End, as a scheduler tells a host before it takes it away (SIGTERM)."""
        if self._has_sigterm:
            return
        after_s = TERM_GRACE_S
        # A script that has a handler of its own (Megatron-LM's --exit-signal-handler) saves and ends the job.
        if self._script_handles_sigterm():
            self._has_sigterm, after_s = True, SIGTERM_S
            text = f"told to end (SIGTERM): the script handles that itself, and has {SIGTERM_S:g} s for it"
            self._node.reports.emit(events.Note(text=text))
            reason = f"{reason}; the script, which handles SIGTERM itself, has not ended within {SIGTERM_S:g} s"
        asyncio.get_running_loop().call_later(after_s, self.give_up, reason)

    def _script_handles_sigterm(self) -> bool:
        return any(slot.running and self._processes.catches(slot.running.pid, signal.SIGTERM) for slot in self._slots)

    def end(self, exit_code: int) -> None:
        """Expect every death from now on; what is paused ends as it stands, unless the job ends well."""
        self.ending, self._exit_code = True, exit_code
        if exit_code == EXIT_OK:
            self.resume()
        else:
            self._processes.kill_paused()
        for slot in self._slots:
            for rank in list(slot.stand_ins):
                self.end_stand_in(slot, rank)
            if slot.serving is not None:
                slot.serving.send(local.End(exit_code))
            else:
                self._end_standby(slot)

    def _end_standby(self, slot: Slot) -> None:
        if slot.standby is not None:  # it outlives the process that it forked
            slot.standby.send(local.End(self._exit_code))

    @property
    def unended(self) -> dict[Rank, int]:
        """Ranks of this node whose process has not ended, and its pid."""
        return {
            slot.rank: slot.living.pid
            for slot in self._slots
            if slot.rank >= 0 and slot.living is not None and not slot.standby_ended and slot.supervisor is not None
        }

    @property
    def at_work(self) -> list[Rank]:
        """Ranks whose script still runs; a process that is already ending the kernel may hold for ever."""
        return [rank for rank, pid in self.unended.items() if not self._processes.is_gone(pid)]

    @property
    def workers_gone(self) -> bool:
        return all(slot.standby_ended or slot.supervisor is None for slot in self._slots)

    async def end_supervisors(self, exit_code: int, timeout_s: float) -> None:
        for slot in self._slots:
            if slot.supervisor is not None:
                slot.supervisor.send(local.End(exit_code))
        await self.wait(lambda: all(slot.supervisor is None for slot in self._slots), timeout_s)

    async def wait(self, done: Callable[[], bool], timeout_s: float) -> bool:
        """Wait until `done()`, which is looked at after every change; False at the deadline."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while not done():
                    self.changed.clear()
                    await self.changed.wait()
        return done()


def _standby(slot: Slot) -> str:
    return f"standby process {slot.standby_pid} of local rank {slot.local_rank}"
