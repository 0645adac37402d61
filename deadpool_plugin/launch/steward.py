"""`python -m deadpool_plugin.launch.steward`: the end of `deadpool launch` on one host, held by an ssh connection.

It puts configuration and secret in place, ends the job's processes when it is told to, and says at the end what the
node's event log says. When the launcher falls silent or its connection ends, `on_launcher_loss` decides. Both talk in
JSON lines; a line that is not one of ours (a login script's greeting) is passed over.
Rules of this file: the job's processes are known by the configuration they were started with, read from /proc; nothing
of this host's job, and no secret, outlives this process, unless the host does not let it live.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import NoReturn

import msgspec

from .. import events
from ..agent.links import versions
from ..agent.world import first_difference
from ..config import Config, load
from ..errors import ConfigError, DeadpoolError
from ..host import proc
from . import checks, job_files
from .argv import RUN, check_script

ENDING = (signal.SIGTERM, signal.SIGHUP)
POLL_S = 0.5
ALONE_POLL_S = 5.0
"""Between looks at a job that goes on without its launcher: each is at every process of the host."""
PREPARE_S = 60.0
LAUNCHERS_OWN = f"{proc.TAG}=launch.".encode()
"""In the environment of deepspeed's runner, pdsh and its ssh clients, where the launcher is on a host of the job: they
name the folder, too, and are the launcher's to end."""
_LAUNCH_PY = b"deepspeed.launcher.launch"

FateEvent = (
    events.NodeJoined | events.NodeLost | events.SwapPlanned | events.NodeFenced | events.NodeEnded
    | events.JobFinished | events.JobStopped
)  # fmt: skip
"""The events that say what became of a job."""
_KINDS = tuple(f'"event":"{kind.__name__}"'.encode() for kind in FateEvent.__args__)
_fate: msgspec.json.Decoder[FateEvent] = msgspec.json.Decoder(FateEvent)


# ---- what launcher and steward say


class Word(msgspec.Struct, frozen=True, tag=True):
    """Base of all messages."""


class Prepare(Word, frozen=True):
    """Launcher -> steward, first: what this host needs for the job."""

    job: str
    node: int
    config: str
    secret: bytes
    command: list[str]
    versions: dict[str, str]


class Ready(Word, frozen=True):
    """Steward -> launcher: all is in place, or `problem` says what is wrong."""

    host: str
    problem: str = ""


class Alive(Word, frozen=True):
    """Launcher -> steward, several times within `patience_s`."""


class Stop(Word, frozen=True):
    """Launcher -> steward: end the job on this host; what is left after `grace_s` is killed."""

    grace_s: float


class Tell(Word, frozen=True):
    """Launcher -> steward: once the job has been on this host and is over here, say what happened, and leave.
    `even_if_unseen`: also if it has never been here."""

    even_if_unseen: bool = False


class Running(Word, frozen=True):
    """Steward -> launcher, several times within `silent_after_s` while processes of the job run on this host: one that
    stands still does not. `formed`: the job's first world has formed here."""

    formed: bool


class Told(Word, frozen=True):
    """Steward -> launcher, last: the events of this host's node, and how many processes had to be killed."""

    events: list[FateEvent]
    killed: int


Said = Prepare | Ready | Alive | Stop | Tell | Running | Told
_said: msgspec.json.Decoder[Said] = msgspec.json.Decoder(Said)


def encode(word: Word) -> bytes:
    """Return a line of its own, whatever stands before it."""
    return b"\n" + msgspec.json.encode(word) + b"\n"


def decode(line: bytes) -> Said | None:
    with contextlib.suppress(msgspec.DecodeError):
        return _said.decode(line)
    return None


class Ear:
    """The launcher's words from a descriptor. `heard_at`: when the last one came; `closed`: there will be no more."""

    def __init__(self, fd: int) -> None:
        self._fd, self._rest = fd, b""
        self._words: list[Said] = []
        self.closed, self.heard_at = False, time.monotonic()

    def next(self, timeout_s: float) -> Said | None:
        """Return the next word; None if none comes in time. Blocks: so long."""
        if not self._words:
            if self.closed:
                time.sleep(timeout_s)
            elif select.select([self._fd], [], [], timeout_s)[0]:
                data = os.read(self._fd, 1 << 16)
                self.closed, self.heard_at = not data, time.monotonic()
                *lines, self._rest = (self._rest + data).split(b"\n")
                self._words += [word for word in map(decode, lines) if word is not None]
        return self._words.pop(0) if self._words else None


def say(word: Word) -> None:
    """Send `word`; nobody may be listening any more."""
    with contextlib.suppress(BrokenPipeError):
        os.write(sys.stdout.fileno(), encode(word))


# ---- the job on this host


def job_processes(folder: Path) -> dict[int, list[bytes]]:
    """Find the processes of this user that were started with the configuration in `folder`: pid -> command line.

    Supervisors and their ancestors (launch.py, its shell) name it on the command line, descendants in the environment.
    """
    wanted, found = os.fsencode(folder) + b"/", {}
    for pid, environment in proc.environments():
        with contextlib.suppress(OSError):
            command = Path(f"/proc/{pid}/cmdline").read_bytes()
            named = wanted in command and RUN.encode() in command and LAUNCHERS_OWN not in environment
            if named or b"DEADPOOL_CONFIG=" + wanted in environment:
                found[pid] = command.split(b"\0")
    return found


def supervisors(folder: Path) -> set[int]:
    """Find those of `job_processes` that pass a signal on to the job. launch.py names our module too."""
    run, found = (b"-m", RUN.encode()), job_processes(folder)
    return {pid for pid, words in found.items() if _LAUNCH_PY not in words and run in pairwise(words)}


class Steward:
    """One job on this host, from `Ready` on."""

    def __init__(self, ear: Ear, folder: Path, config: Config, node: int) -> None:
        self._ear, self._folder, self._config, self._node = ear, folder, config, node
        self._log = events.log_of(config.output_dir, node)
        self._log_begins = self._log.stat().st_size if self._log.exists() else 0  # it may hold earlier jobs
        self._signal, self._deadline = 0, float("inf")
        self._seen = self._formed = False
        self._known: dict[int, int] = {}
        """Processes of the job -> their start times."""
        self._report_at = 0.0

    def serve(self) -> Told:
        """Serve until the job is over here, and the launcher asks for it or is gone; this host's last word."""
        asked, signalled, killed = None, set[int](), set[int]()
        while True:
            alone = self._seen and self._launcher_is_gone() and not self._signal
            word = self._ear.next(ALONE_POLL_S if alone else POLL_S)
            if not self._seen and (self._is_here() or self._events()):  # it may have been short
                self._seen, self._ear.heard_at = True, time.monotonic()
            if isinstance(word, Stop):
                self._end(signal.SIGINT, word.grace_s)
            elif isinstance(word, Tell):
                asked = word
            elif self._launcher_is_gone() and self._config.on_launcher_loss == "stop" and not self._signal:
                self._end(signal.SIGHUP, self._config.phase_timeout_s)
            if self._signal and time.monotonic() > self._deadline:
                killed |= proc.kill_all(lambda: job_processes(self._folder))
            if self._signal:
                for pid in supervisors(self._folder) - signalled:
                    signalled.add(pid)
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, self._signal)
            self._report()
            shall_tell = asked is not None and (self._seen or asked.even_if_unseen)
            if (shall_tell or self._launcher_is_gone()) and not self._is_here():
                return Told(self._events(), len(killed))

    def _is_here(self) -> bool:
        """Return whether a process of the job is on this host. All are looked at only if none known before is left."""
        looks = {pid: proc.look(pid) for pid in self._known}
        there = {pid for pid, seen in looks.items() if seen is not None and not seen.ending}
        self._known = {pid: began for pid, began in self._known.items() if pid in there and _began(pid) == began}
        self._known = self._known or {pid: _began(pid) for pid in job_processes(self._folder)}
        return bool(self._known)

    def _report(self) -> None:
        # A launcher that is gone would let our words pile up until a write blocks.
        if not self._seen or self._ear.closed or self._launcher_is_gone():
            return
        formed = self._formed or any(isinstance(event, events.NodeJoined) for event in self._events())
        if formed is self._formed and time.monotonic() < self._report_at:
            return
        looks = [proc.look(pid) for pid in self._known]
        if any(seen is not None and not seen.ending and not seen.stopped for seen in looks):
            self._formed, self._report_at = formed, time.monotonic() + self._config.patience_s / 5
            say(Running(formed))

    def _launcher_is_gone(self) -> bool:
        """Return whether it is gone. One that is only silent, before anything was started, may be slow."""
        is_silent = time.monotonic() - self._ear.heard_at > self._config.patience_s
        return self._ear.closed or (self._seen and is_silent)

    def _end(self, number: int, grace_s: float) -> None:
        """End the job: the supervisors are asked, once each, and who is left at the deadline is killed."""
        self._signal, self._deadline = number, min(self._deadline, time.monotonic() + grace_s)

    def _events(self) -> list[FateEvent]:
        found: list[FateEvent] = []
        with contextlib.suppress(OSError, ValueError):
            file = job_files.exit_code_file(str(self._folder / job_files.CONFIG), self._node)
            ended = events.NodeEnded(exit_code=int(file.read_text()), node=self._node)
            found = [ended] if ended.exit_code else [events.JobFinished(node=self._node), ended]
        if self._log.exists():
            with self._log.open("rb") as log:
                log.seek(self._log_begins)
                for line in log:
                    # Most lines say nothing of the job's fate, and are not worth decoding.
                    if line.endswith(b"\n") and any(kind in line for kind in _KINDS):
                        with contextlib.suppress(msgspec.DecodeError):  # lines a full disk has cut off and joined
                            found.append(_fate.decode(line))
        return found


def _began(pid: int) -> int:
    """Return its start time, 0 if it has gone."""
    with contextlib.suppress(OSError):
        return proc.start_time(pid)
    return 0


def main() -> int:
    ear = Ear(sys.stdin.fileno())
    deadline = time.monotonic() + PREPARE_S
    prepare = None
    while not isinstance(prepare, Prepare):
        if ear.closed or time.monotonic() > deadline:
            return 1
        prepare = ear.next(POLL_S)
    for number in ENDING:
        signal.signal(number, _exit)
    host = os.uname().nodename
    try:
        if differs := first_difference(versions(), prepare.versions):
            package, here, there = differs
            found = f"{package} is {here} here and {there} where it was launched"
            raise ConfigError(found, "the same", "install it alike")
        checks.check_versions()
        check_script(prepare.command, Path.cwd())
        with job_files.installed(prepare.job, prepare.config, prepare.secret) as folder:
            config = load(folder / job_files.CONFIG)
            checks.check_host(config)
            steward = Steward(ear, folder, config, prepare.node)
            say(Ready(host))
            told = steward.serve()
        say(told)  # when nothing is left here
    except DeadpoolError as error:
        say(Ready(host, str(error)))
        return error.exit_code
    return 0


def _exit(number: int, frame: object) -> NoReturn:
    """Exit: the secret goes first, whatever signals follow this one."""
    for other in ENDING:
        signal.signal(other, signal.SIG_IGN)  # which holds until the interpreter has ended, a handler does not
    sys.exit(128 + number)


if __name__ == "__main__":
    sys.exit(main())
