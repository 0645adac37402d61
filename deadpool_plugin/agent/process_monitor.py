"""Life and death of this node's processes, reported to the controller.

Rules of this file: a death becomes an input once, with the best reason there is. A worker process ended by a signal is
lost: its own node can run the rank again. One that ended by its own exit code has failed, as it may do anywhere. A
standby process or a supervisor that is gone is the node's end: neither runs anything that could crash it, and what they
looked after died with them.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Callable

from .. import events
from ..core import api, local
from ..core.types import Generation, Rank
from ..errors import EXIT_OK, shell_code
from ..host.proc import described_exit
from ..transport.unix import LocalPeer
from .node import LocalNode, Process, Slot

SIGTERM_S = 25.0
"""How long a script that handles SIGTERM has: less than the 30 s after which deepspeed's launcher and Slurm kill."""
TERM_GRACE_S = 1.0
"""A supervisor that was told to end knows better why; this agent knows better who else was told. Each gives the other
so long to speak first."""
EXIT_REPORT_S = 2.0
"""How long after a worker's connection has ended the standby process may take to say how it ended."""


class ProcessMonitor:
    """The processes of this node, watched. `on_lost` hears of each slot whose rank has lost its process."""

    def __init__(self, node: LocalNode, on_lost: Callable[[Slot], None]) -> None:
        self._node, self._slots, self._processes = node, node.slots, node.host.processes
        self._on_lost = on_lost
        self.ending = self.paused = self._has_sigterm = False
        self._exit_code = 0
        self._deadlines: list[asyncio.TimerHandle] = []
        self.late_exit_code = 0
        """The worst exit code of a rank's process after the job's end, as a shell counts signals."""
        self.changed = asyncio.Event()
        """Set whenever a process has ended."""

    def watch(self, slot: Slot, process: Process) -> None:
        self._processes.watch(
            process.pid, lambda code: self.ended(slot, process, code), lambda s: self._stopped(slot, process, s)
        )

    def forget(self, process: Process) -> None:
        self._mark_ended(process)
        if process.peer is not None:
            process.peer.tag = None
            process.peer.close()
            process.peer = None

    def _mark_ended(self, process: Process, kills: bool = False) -> None:
        process.ended = True
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
        what = f"process {process.pid} {described_exit(exit_code)}"
        if self.ending:
            if slot.rank >= 0 and (process.took_over or not process.rehearses):
                self.late_exit_code = max(shell_code(exit_code), self.late_exit_code)
            self._end_standby(slot)
        elif self._processes.is_gone(slot.standby_pid):
            self.standby_ended(slot, "was ended, together with the processes that it had forked")
        elif exit_code < 0 or slot.rank < 0 or (process.rehearses and not process.in_training):
            self._lost(slot, process, process.failing or what)
        else:
            early = f"process {process.pid} exited with 0 before the job had ended"
            reason = process.failing or ("see its output above" if exit_code > 0 else early)
            self._lost(slot, process, reason, exit_code or 1)

    def _lost(self, slot: Slot, process: Process, reason: str, exit_code: int = 0) -> None:
        if self.ending:
            return
        if slot.rank < 0:
            self._node.feed(api.SpareFailed(slot.local_rank, process.rank, reason))
        elif process.rank == slot.rank:  # else the slot has just been given another rank, whose process is on its way
            # First: a node that is alone decides at once, and what it orders then replaces what is begun here.
            self._on_lost(slot)
            lost = api.WorkerFailed(slot.rank, exit_code, reason) if exit_code else api.WorkerLost(slot.rank, reason)
            self._node.feed(lost)

    def kill(self, slot: Slot, process: Process, reason: str, exit_code: int = 0) -> None:
        """End a useless process, to be replaced. `exit_code`: not 0 if its script did it, twice being the job's end."""
        if process.ended or self.ending:
            return
        self._mark_ended(process, kills=True)
        self._lost(slot, process, reason, exit_code)

    def _stopped(self, slot: Slot, process: Process, seconds: float) -> None:
        reason = f"process {process.pid} had been stopped (state T) for {seconds:.1f} s and was killed"
        if self.ending:  # or it would hold the host for ever; its exit code tells of it
            self._node.reports.emit(events.Note(text=reason))
            self._processes.kill(process.pid)
        else:
            self.kill(slot, process, reason)

    def await_unwinding(self, generation: Generation) -> None:
        """Set deadlines for the processes in training, which have been told that `generation` begins.

        A process that is still in its call then is replaced here: it holds the interpreter, its device is dead, or user
        code does not come to its next call. A process in a save is healthy, and has longer. One that has not come to
        training has no deadline: it begins anew, or joins the newest generation when it is through.
        """
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

    def watch_standby(self, slot: Slot) -> None:
        self._processes.watch(
            slot.standby_pid,
            lambda code: self.standby_ended(slot, described_exit(code)),
            lambda seconds: self.give_up(f"{_standby(slot)} had been stopped (state T) for {seconds:.1f} s"),
        )

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
            if exit_code := self._processes.exit_code(process.pid):
                self.ended(slot, process, exit_code)
            elif not process.ended:
                reason = f"process {process.pid} closed its connection and did not end"
                asyncio.get_running_loop().call_later(EXIT_REPORT_S, self.kill, slot, process, reason)

    def leaving(self, message: local.Leaving) -> None:
        """Take in that a supervisor was told to end by a signal."""
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
        pids = [slot.running.pid for slot in self._slots if slot.running is not None]
        return any(pid and self._processes.catches(pid, signal.SIGTERM) for pid in pids)

    def end(self, exit_code: int) -> None:
        """Expect every death from now on; what is paused ends as it stands, unless the job ends well."""
        self.ending, self._exit_code = True, exit_code
        if exit_code == EXIT_OK:
            self.resume()
        else:
            self._processes.kill_paused()
        for slot in self._slots:
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
