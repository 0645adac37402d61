"""Life and death of this node's processes, told to the controller.

Rules of this file: a death becomes an input once, with the best reason there is. A worker process ended by a signal is
lost (its own node can do it again), one that ended by its own exit code has failed (it may do so anywhere). A standby
process or a supervisor that is gone is the node's end: neither runs anything that could crash it, so whoever ended
them (the launcher, a person, the kernel short of memory) means the node, and what they looked after died with them.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Sequence

from ..core import api, local
from ..core.types import NodeId, Rank
from ..errors import EXIT_OK, shell_code
from ..host.processes import described_exit
from ..transport.unix import LocalPeer
from .host import Processes
from .slots import Process, Slot

NOTICE_S = 25.0
"""How long a script that handles SIGTERM has: less than the 30 s after which deepspeed's launcher and Slurm kill."""
TERM_GRACE_S = 1.0
"""A supervisor that was told to end knows better why; this agent knows better who else was told. Each gives the other
so long to speak first."""
EXIT_REPORT_S = 2.0
"""How long after a worker's connection has ended the standby process may take to say how it ended."""


class Lives:
    """Thread: the event loop's only. `changed` is set whenever a process has ended; `on_lost` hears of each slot whose
    rank has lost its process, `say` of what people are told."""

    def __init__(
        self,
        node: NodeId,
        slots: Sequence[Slot],
        processes: Processes,
        feed: Callable[[api.Input], None],
        on_lost: Callable[[Slot], None],
        say: Callable[[str], None],
    ) -> None:
        self._node, self._slots, self._processes, self._feed = node, slots, processes, feed
        self._on_lost, self._say = on_lost, say
        self.ending = self.paused = self._has_notice = False
        self._exit_code = 0
        self.late_exit_code = 0
        """The worst exit code of a rank's process after the job's end, as a shell counts signals."""
        self.changed = asyncio.Event()

    # ---- worker processes

    def watch(self, slot: Slot, process: Process) -> None:
        self._processes.watch(
            process.pid, lambda code: self.ended(slot, process, code), lambda s: self._stopped(slot, process, s)
        )

    def forget(self, process: Process) -> None:
        """Another one takes its place: nothing of it means anything any more."""
        process.ended = True
        self._processes.forget(process.pid)
        self._withdraw(process)
        if process.peer is not None:
            process.peer.tag = None
            process.peer.close()
            process.peer = None

    def exited(self, slot: Slot, message: local.WorkerExited) -> None:
        process = slot.process
        if process is not None and process.order == message.order:
            self.ended(slot, process, message.exit_code)

    def ended(self, slot: Slot, process: Process, exit_code: int) -> None:
        """`process` is ending (told by /proc or by the standby process, whichever is first)."""
        if process.peer is not None:
            process.peer.read_rest()  # its last words
        if process.ended:
            return
        process.ended = True
        self._processes.forget(process.pid)
        self.changed.set()
        self._withdraw(process)
        what = f"process {process.pid} {described_exit(exit_code)}"
        if self.ending:
            if slot.rank >= 0 and (process.took_over or not process.rehearses):
                self.late_exit_code = max(shell_code(exit_code), self.late_exit_code)
            self._end_standby(slot)
        elif self._processes.is_gone(slot.standby_pid):
            self._standby_ended(slot, "was ended, together with the processes that it had forked")
        elif exit_code < 0 or slot.rank < 0 or (process.rehearses and not process.in_training):
            self.lost(slot, process, process.failing or what)
        else:
            early = f"process {process.pid} exited with 0 before the job had ended"
            reason = process.failing or ("see its output above" if exit_code > 0 else early)
            self._on_lost(slot)
            self._feed(api.WorkerFailed(slot.rank, exit_code or 1, reason))

    def lost(self, slot: Slot, process: Process, reason: str, exit_code: int = 0) -> None:
        """The slot needs another process. `exit_code`: not 0 if it is the script's doing, which ends the job the second
        time.

        `on_lost` comes first: where nobody else is to be asked the controller decides at once, and what it orders then
        replaces what is begun here.
        """
        if self.ending:
            return
        if slot.rank < 0:
            self._feed(api.SpareFailed(slot.local_rank, process.rank, reason))
        elif process.rank == slot.rank:  # else the slot has just been given another rank, whose process is on its way
            self._on_lost(slot)
            lost = api.WorkerFailed(slot.rank, exit_code, reason) if exit_code else api.WorkerLost(slot.rank, reason)
            self._feed(lost)

    def kill(self, slot: Slot, process: Process, reason: str, exit_code: int = 0) -> None:
        """End a process that does not serve any more. `exit_code`: as for `lost`."""
        if process.ended or self.ending:
            return
        process.ended = True
        self._processes.forget(process.pid)
        if process.pid:  # else it has not said hello yet, and the next order ends it
            self._processes.kill(process.pid)
        self._withdraw(process)
        self.lost(slot, process, reason, exit_code)

    def end_rank(self, rank: Rank, reason: str) -> None:
        """End the process that runs `rank` here."""
        for slot in self._slots:
            if slot.rank == rank and slot.living is not None:
                self.kill(slot, slot.living, reason)

    def out_of_reach(self, slot: Slot, message: local.OutOfReach) -> None:
        """Its rank goes on here with another process, which goes by the records of the steps it need not redo."""
        if slot.process is not None:
            self.kill(slot, slot.process, message.reason)

    def hosts(self, slot: Slot, process: Process, address: str) -> None:
        """`process` offers a store for the next build of groups."""
        process.stores.append(address)
        stand_in = process.rehearses and not process.took_over
        self._feed(api.StoreOffered(address, slot.local_rank, stand_in))

    def _withdraw(self, process: Process) -> None:
        """Stores die with the process that hosts them; one before the newest may be what others are told to build
        over."""
        stores, process.stores = process.stores, []
        for address in stores if not self.ending else ():
            self._feed(api.StoreLost(address))

    def _stopped(self, slot: Slot, process: Process, seconds: float) -> None:
        reason = f"process {process.pid} had been stopped (state T) for {seconds:.1f} s and was killed"
        if self.ending:  # or it would hold the host for ever; its exit code tells of it
            self._say(reason)
            self._processes.kill(process.pid)
        else:
            self.kill(slot, process, reason)

    # ---- what looks after them

    def watch_standby(self, slot: Slot) -> None:
        self._processes.watch(
            slot.standby_pid,
            lambda code: self._standby_ended(slot, described_exit(code)),
            lambda seconds: self.give_up(f"{_standby(slot)} had been stopped (state T) for {seconds:.1f} s"),
        )

    def standby_exited(self, slot: Slot, message: local.StandbyExited) -> None:
        self._standby_ended(slot, described_exit(message.exit_code))

    def cannot_end(self, slot: Slot, message: local.CannotEnd) -> None:
        self.give_up(f"local rank {slot.local_rank} cannot get a new process: {message.reason}")

    def _standby_ended(self, slot: Slot, how: str) -> None:
        self.changed.set()
        if slot.standby_ended:
            return
        slot.standby_ended = True
        self._processes.forget(slot.standby_pid)
        self.give_up(f"{_standby(slot)} {how}")

    def leaving(self, slot: Slot, message: local.Leaving) -> None:
        name = signal.Signals(message.signal).name
        if message.signal == signal.SIGINT:
            why = f"ended where it was launched (Ctrl-C, a closed terminal or a signal; node {self._node} was told)"
            self._feed(api.StopRequested(why, 128 + message.signal))
        elif message.signal == signal.SIGHUP:
            self.give_up(f"node {self._node} found the launcher gone (on_launcher_loss: stop)")
        else:
            self._supervisor_told(f"the launcher of node {self._node} ended its processes ({name})")

    # ---- told to end (SIGTERM)

    def told(self, reason: str) -> None:
        """End, as a scheduler tells a host before it takes it away.

        A script that has a handler for SIGTERM (Megatron-LM's --exit-signal-handler) saves and ends the job; it has
        NOTICE_S for that. A host whose script has none is given up at once, and a spare takes its ranks.
        """
        if self._has_notice:
            return
        if not self._script_handles_it():
            self._give_up_later(TERM_GRACE_S, reason)
            return
        self._has_notice = True
        self._say(f"told to end (SIGTERM): the script handles that itself, and has {NOTICE_S:g} s for it")
        late = f"{reason}; the script, which handles SIGTERM itself, has not ended within {NOTICE_S:g} s"
        self._give_up_later(NOTICE_S, late)

    def _supervisor_told(self, reason: str) -> None:
        """The script is asked only where everybody on the host was told, this agent too, as deepspeed's launcher does
        (terminate_process_tree): a supervisor that was told alone has lost its launcher, and nobody else has."""
        if not self._script_handles_it():
            self.give_up(reason)
        else:
            asyncio.get_running_loop().call_later(TERM_GRACE_S, self._give_up_unless_told, reason)

    def _give_up_unless_told(self, reason: str) -> None:
        if not self._has_notice:
            self.give_up(reason)

    def _script_handles_it(self) -> bool:
        running = [slot.process.pid for slot in self._slots if slot.serving is not None and slot.process is not None]
        return any(pid and self._processes.catches(pid, signal.SIGTERM) for pid in running)

    def _give_up_later(self, seconds: float, reason: str) -> None:
        asyncio.get_running_loop().call_later(seconds, self.give_up, reason)

    # ---- the node's end

    def give_up(self, reason: str) -> None:
        """Others take its ranks over. Nothing once the job ends."""
        if not self.ending:
            self._feed(api.NodeGivenUp(reason))

    def closed(self, peer: LocalPeer) -> None:
        """A connection has ended from its other side."""
        slot = peer.tag
        if not isinstance(slot, Slot):
            return
        self.changed.set()
        process = slot.process
        if peer is slot.supervisor:
            slot.supervisor = None
            if not self.ending:
                self._processes.sweep(slot.local_rank)
                self.give_up(f"supervisor of local rank {slot.local_rank} is gone")
        elif peer is slot.standby:
            slot.standby = None
        elif process is not None and peer is process.peer:
            process.peer = None
            self._disconnected(slot, process)

    def _disconnected(self, slot: Slot, process: Process) -> None:
        if exit_code := self._processes.exit_code(process.pid):
            self.ended(slot, process, exit_code)
        elif not process.ended:
            reason = f"process {process.pid} closed its connection and did not end"
            asyncio.get_running_loop().call_later(EXIT_REPORT_S, self.kill, slot, process, reason)

    # ---- pausing

    def pause(self) -> None:
        """Stop every process that runs a rank, with all it has started: others may replace this node. Blocks: some
        10 ms."""
        self.paused = True
        running = {
            slot.local_rank: slot.process.pid
            for slot in self._slots
            if slot.serving is not None and slot.process is not None and slot.process.pid
        }
        self._processes.pause(running, {slot.local_rank: slot.standby_pid for slot in self._slots})

    def keep_paused(self) -> None:
        """Stop whoever has come to run a rank meanwhile, too."""
        if self.paused:
            self.pause()

    def resume(self) -> None:
        """Let the processes go on: nobody has replaced this node."""
        self.paused = False
        self._processes.resume()

    # ---- the end

    def end(self, exit_code: int) -> None:
        """Expect every death from now on; what is paused ends as it stands, unless the job ends well. A standby
        process outlives the one it forked."""
        self.ending, self._exit_code = True, exit_code
        if exit_code == EXIT_OK:
            self.resume()
        else:
            self._processes.kill_paused()
        for slot in self._slots:
            if slot.serving is not None:
                slot.serving.send(local.EndWorker(exit_code))
            else:
                self._end_standby(slot)

    def _end_standby(self, slot: Slot) -> None:
        if slot.standby is not None:
            slot.standby.send(local.EndWorker(self._exit_code))

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
        """Those whose script still runs; one that is already ending the kernel may hold for ever."""
        return [rank for rank, pid in self.unended.items() if not self._processes.is_gone(pid)]

    @property
    def workers_gone(self) -> bool:
        return all(slot.standby_ended or slot.supervisor is None for slot in self._slots)

    @property
    def supervisors_gone(self) -> bool:
        return all(slot.supervisor is None for slot in self._slots)

    def end_supervisors(self, exit_code: int) -> None:
        for slot in self._slots:
            if slot.supervisor is not None:
                slot.supervisor.send(local.EndSupervisor(exit_code))

    async def wait(self, done: Callable[[], bool], timeout_s: float) -> bool:
        """Until `done()`, looked at after every change; False at the deadline."""
        deadline = asyncio.get_running_loop().time() + timeout_s
        while not done():
            self.changed.clear()
            try:
                async with asyncio.timeout_at(deadline):
                    await self.changed.wait()
            except TimeoutError:
                return done()
        return True


def _standby(slot: Slot) -> str:
    return f"standby process {slot.standby_pid} of local rank {slot.local_rank}"
