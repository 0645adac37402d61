"""The launcher's child for one local rank: starts the slot's standby process, on local rank 0 the node's agent too.

Rules of this file: no torch, one thread, small; it outlives what it starts. It decides nothing: the agent tells it when
and how to end. It ends by itself only if the agent is gone. No orphan is left whichever process is killed how:
parent-death signals (we: SIGTERM when the launcher ends; standby: SIGKILL, agent: SIGTERM when we end), end of file on
the agent's socket, and a sweep of everything that carries the slot's tag. That the launcher is gone is told to us by
SIGHUP, or seen from our standard output, which nobody reads any more.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import sys
import time
from collections.abc import Callable, Sequence
from typing import NoReturn

from ..agent.workers import SIGTERM_S
from ..agent.world import COMMAND, Place
from ..config import load
from ..core import local
from ..errors import EXIT_FENCED, DeadpoolError, TransportError, present, shell_code
from ..host import proc
from ..host.output import say
from ..host.proc import Program, ending_signals, spawn
from ..transport.framing import ConnectionClosed
from ..transport.linux import await_end, die_with_parent, pidfd_open
from ..transport.unix import LocalConnection, listen_unix

STANDBY = (sys.executable, "-u", "-m", "deadpool_plugin.launch.standby")
AGENT = (sys.executable, "-u", "-m", "deadpool_plugin.launch.agent")
CONNECT_S = 60.0
LEAVE_S = 5.0
"""For the agent to answer that we were told to end (after a script that handles that), and to end itself after us."""


class Supervisor:
    """One local rank's supervisor; `run` never returns.

    Args: command: the user's script and its arguments, appended to `standby` where that is a command line. agent: makes
    its program of the descriptor that it listens on (tests fork both from one process). storing_s: how long the agent
    may write the node's state to disk before it ends.
    """

    def __init__(
        self,
        place: Place,
        command: Sequence[str],
        config_path: str,
        standby: Program = STANDBY,
        agent: Callable[[int], Program] = lambda descriptor: [*AGENT, str(descriptor)],
        storing_s: float = 0.0,
    ) -> None:
        self._local_rank, self._command, self._agent_program = place.local_rank, command, agent
        self._leave_s = LEAVE_S + storing_s
        self._standby_program = standby if callable(standby) else [*standby, *command]
        launcher = os.getppid()
        die_with_parent(signal.SIGTERM, launcher)
        self._job = f"{launcher}.{proc.start_time(launcher)}."  # what the tags of all its workers begin with
        self._tag = f"{self._job}{place.local_rank}."
        self._socket = f"deadpool/{os.getuid()}/{self._job}"
        self._env = {**os.environ, "DEADPOOL_CONFIG": config_path, "DEADPOOL_SOCKET": self._socket}
        self._stops_with_launcher = load(config_path).on_launcher_loss == "stop"
        self._caught = [n for n in ending_signals() if n != signal.SIGHUP or self._stops_with_launcher]
        self._signals, wakeup = os.pipe()
        os.set_blocking(wakeup, False)
        signal.set_wakeup_fd(wakeup, warn_on_full_buffer=False)
        for number in self._caught:
            signal.signal(number, lambda *_: None)
        self._agent = self._standby = 0
        self._agent_end = self._standby_end = -1  # readable when these end
        self._connection: LocalConnection | None = None
        self._poll = select.poll()
        self._left_for, self._leave_by = 0, 0.0
        """The signal we were told to end by, and when we do so whatever the agent says."""

    def run(self) -> NoReturn:
        """Start everything, wait for the end, leave nothing behind, exit; an error of our own is one line."""
        try:
            if self._local_rank == 0:
                self._start_agent()
                if self._stops_with_launcher:
                    self._poll.register(sys.stdout.fileno(), 0)  # errors only: nobody reads it any more
            self._poll.register(self._signals, select.POLLIN)
            self._connection = self._connect()
            self._poll.register(self._connection.fileno(), select.POLLIN)
            self._start_standby()
            while True:
                self._serve()
        except DeadpoolError as error:
            say(str(error), to=sys.stderr)
            self._finish(error.exit_code)

    def _start_agent(self) -> None:
        listener = listen_unix(self._socket)
        told = {"DEADPOOL_JOB_TAG": self._job, COMMAND: json.dumps(list(self._command))}
        program = self._agent_program(listener.fileno())
        self._agent = spawn(program, {**self._env, **told}, signal.SIGTERM, pass_fds=[listener.fileno()])
        listener.close()
        self._agent_end = pidfd_open(self._agent)
        self._poll.register(self._agent_end, select.POLLIN)

    def _connect(self) -> LocalConnection:
        """Connect to the agent, whose socket supervisor 0 creates: that may be slower than we are."""
        deadline = time.monotonic() + CONNECT_S
        while True:
            try:
                return LocalConnection.to(self._socket)
            except ConnectionClosed as error:
                if time.monotonic() > deadline:
                    found = f"no agent on this host after {CONNECT_S:g} s"
                    raise TransportError(found, "supervisor 0 to start it", "see its output") from error
            if select.select([self._signals], [], [], 0.02)[0]:
                self._finish(128 + os.read(self._signals, 1)[0])

    def _start_standby(self) -> None:
        read_end, write_end = os.pipe()
        env = {**self._env, proc.TAG: self._tag}
        self._standby = spawn(self._standby_program, env, signal.SIGKILL, output=write_end)
        os.close(write_end)
        self._tell(local.SupervisorHello(self._local_rank, self._standby), read_end)
        os.close(read_end)
        self._standby_end = pidfd_open(self._standby)
        self._poll.register(self._standby_end, select.POLLIN)

    def _serve(self) -> None:
        ready = self._poll.poll(max(0.0, self._leave_by - time.monotonic()) * 1000 if self._left_for else None)
        if not ready:
            self._finish(128 + self._left_for)
        for fd, _ in ready:
            if fd == self._signals:
                number = os.read(fd, 1)[0]
                if number in self._caught:
                    self._leave(number)
            elif fd == self._agent_end:
                self._finish(self._reap_agent(0) or self._hear())
            elif fd == self._standby_end:
                self._poll.unregister(fd)
                os.close(fd)
                _, status = os.waitpid(self._standby, 0)
                self._standby, self._standby_end = 0, -1
                proc.sweep(self._tag)
                self._tell(local.StandbyExited(os.waitstatus_to_exitcode(status)))
            elif fd == sys.stdout.fileno():  # the launcher is gone
                self._poll.unregister(fd)
                self._leave(signal.SIGHUP)
            else:
                self._finish(self._hear())

    def _tell(self, message: local.LocalMessage, *descriptors: int) -> None:
        try:
            present(self._connection, "there is no agent to tell").send(message, descriptors)
        except ConnectionClosed:
            self._finish(self._hear())

    def _hear(self) -> int:
        """Return the exit code the agent wants (it may have said so before it ended); without one this node is out."""
        with contextlib.suppress(ConnectionClosed):
            while True:
                message, _ = present(self._connection, "there is no agent to hear").recv()
                if isinstance(message, local.End):
                    return message.exit_code
        return EXIT_FENCED

    def _leave(self, number: int) -> None:
        """Leave, told by a signal: the agent has a moment to tell the others and to say how."""
        self._tell(local.Leaving(number))
        if not self._left_for or number != signal.SIGTERM:
            within_s = self._leave_s + (SIGTERM_S if number == signal.SIGTERM else 0.0)
            self._left_for, self._leave_by = number, time.monotonic() + within_s

    def _finish(self, exit_code: int) -> NoReturn:
        if self._standby:
            os.kill(self._standby, signal.SIGKILL)
            os.waitpid(self._standby, 0)
        proc.sweep(self._tag)
        if self._connection is not None:
            self._connection.close()
        if self._agent:  # it ends by itself once all supervisors have closed their connections; if not, it is made to
            for number, within_s in ((0, self._leave_s), (signal.SIGTERM, LEAVE_S), (signal.SIGKILL, LEAVE_S)):
                os.kill(self._agent, number)
                if await_end(self._agent_end, within_s):
                    break
            self._reap_agent(number)
        sys.stdout.flush()
        os._exit(shell_code(exit_code))

    def _reap_agent(self, sent: int) -> int:
        """Return its exit code. If a signal has ended it that we have not `sent`, only we are left to say so."""
        _, status = os.waitpid(self._agent, 0)
        self._agent = 0
        exit_code = os.waitstatus_to_exitcode(status)
        if exit_code < 0 and not sent:
            memory = " (out of memory? see dmesg)" if exit_code == -signal.SIGKILL else ""
            say(f"the agent of {os.uname().nodename} was {proc.described_exit(exit_code)}{memory}", to=sys.stderr)
        return exit_code
