"""`python -m deadpool_plugin.launch.steward`: the end of `deadpool launch` on one host, held by an ssh connection.

It puts configuration and secret in place, ends the job's processes when it is told to, and says at the end what the
node's event log says. When the launcher falls silent or its connection ends, `on_launcher_loss` decides. Both talk in
JSON lines; a line that is not one of ours (a login script's greeting) is passed over.
Rules of this file: the job's processes are known by the configuration they were started with, read from /proc; nothing
of this host's job, and no secret, outlives this process, unless the host does not let it live.
"""

from __future__ import annotations

import contextlib
import math
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
ALONE_POLL_S = 5.0  # between looks at a job without its launcher: each is at every process of the host
PREPARE_S = 60.0
LAUNCHERS_OWN = f"{proc.TAG}=launch.".encode()
"""In the environment of deepspeed's runner, pdsh and its ssh clients, where the launcher is on a host of the job: they
name the folder, too, and are the launcher's to end."""

FateEvent = (  # what became of a job
    events.NodeJoined | events.NodeLost | events.SwapPlanned | events.NodeFenced | events.NodeEnded
    | events.JobFinished | events.JobStopped | events.StateWritten
)  # fmt: skip
_KINDS = tuple(f'"event":"{kind.__name__}"'.encode() for kind in FateEvent.__args__)
_fate: msgspec.json.Decoder[FateEvent] = msgspec.json.Decoder(FateEvent)


class Prepare(msgspec.Struct, frozen=True, tag=True):
    """Launcher -> steward, first: what this host needs for the job."""

    job: str
    node: int
    config: str
    secret: bytes
    command: list[str]
    versions: dict[str, str]


class Ready(msgspec.Struct, frozen=True, tag=True):
    """Steward -> launcher: all is in place, or `problem` says what is wrong."""

    host: str
    problem: str = ""


class Order(msgspec.Struct, frozen=True, tag=True):
    """Launcher -> steward, several times within `slow_after_s`: what holds until the next one. `leave`: once the job is
    not here, even if it never was. `grace_s`: end it, and kill what is left after so long; None: let it run."""

    leave: bool = False
    grace_s: float | None = None


class Running(msgspec.Struct, frozen=True, tag=True):
    """Steward -> launcher, several times within `slow_after_s` while processes of the job run on this host: one that
    stands still does not. `formed`: the job's first world has formed here."""

    formed: bool


class Told(msgspec.Struct, frozen=True, tag=True):
    """Steward -> launcher, last: the events of this host's node, and how many processes had to be killed."""

    events: list[FateEvent]
    killed: int


Word = Prepare | Ready | Order | Running | Told
_words: msgspec.json.Decoder[Word] = msgspec.json.Decoder(Word)


def encode(word: Word) -> bytes:
    """Return a line of its own, whatever stands before it."""
    return b"\n" + msgspec.json.encode(word) + b"\n"


def decode(line: bytes) -> Word | None:
    with contextlib.suppress(msgspec.DecodeError):
        return _words.decode(line)
    return None


def say(word: Word) -> None:
    with contextlib.suppress(BrokenPipeError):  # nobody may be listening any more
        os.write(sys.stdout.fileno(), encode(word))


class Ear:
    """The launcher's words from a descriptor. `heard_at`: when the last one came; `closed`: there will be no more."""

    def __init__(self, fd: int) -> None:
        self._fd, self._rest = fd, b""
        self._words: list[Word] = []
        self.closed, self.heard_at = False, time.monotonic()

    def next(self, timeout_s: float) -> Word | None:
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


def job_processes(folder: Path) -> dict[int, list[bytes]]:
    """Find the processes of this user that were started with the configuration in `folder`: pid -> command line."""
    wanted, found = os.fsencode(folder) + b"/", {}
    for pid, environment in proc.environments():
        with contextlib.suppress(OSError):
            command = Path(f"/proc/{pid}/cmdline").read_bytes()
            # Supervisors and their ancestors (launch.py, its shell) name it there, descendants in the environment.
            named = wanted in command and RUN.encode() in command and LAUNCHERS_OWN not in environment
            if named or b"DEADPOOL_CONFIG=" + wanted in environment:
                found[pid] = command.split(b"\0")
    return found


def supervisors(folder: Path) -> set[int]:
    """Find those of `job_processes` that pass a signal on to the job. launch.py names our module too."""
    run, found = (b"-m", RUN.encode()), job_processes(folder).items()
    return {pid for pid, words in found if b"deepspeed.launcher.launch" not in words and run in pairwise(words)}


class Steward:
    """One job on this host, from `Ready` on."""

    def __init__(self, ear: Ear, folder: Path, config: Config, node: int) -> None:
        self._ear, self._folder, self._config, self._node = ear, folder, config, node
        self._log = events.log_of(config.output_dir, node)
        self._log_begins = self._log.stat().st_size if self._log.exists() else 0  # it may hold earlier jobs
        self._seen = self._formed = False
        self._known: dict[int, float] = {}  # processes of the job -> their start times
        self._report_at = 0.0

    def serve(self) -> Told:
        """Serve until the job is over here, or the launcher has no use for us any more; this host's last word."""
        order, ends_by, deadline = Order(), 0, math.inf
        signalled, killed = set[int](), set[int]()
        while True:
            alone = self._seen and self._launcher_is_gone() and not ends_by
            word = self._ear.next(ALONE_POLL_S if alone else POLL_S)
            order = word if isinstance(word, Order) else order
            if not self._seen and (self._is_here() or self._events()):  # it may have been short
                self._seen, self._ear.heard_at = True, time.monotonic()
            if order.grace_s is not None:
                ends_by, deadline = signal.SIGINT, min(deadline, time.monotonic() + order.grace_s)
            elif self._launcher_is_gone() and self._config.on_launcher_loss == "stop" and not ends_by:
                ends_by, deadline = signal.SIGHUP, time.monotonic() + self._config.ending_timeout_s
            if time.monotonic() > deadline:
                killed |= proc.kill_all(lambda: job_processes(self._folder))
            for pid in supervisors(self._folder) - signalled if ends_by else ():
                signalled.add(pid)
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, ends_by)
            self._report()
            if (self._seen or order.leave or self._launcher_is_gone()) and not self._is_here():
                return Told(self._events(), len(killed))

    def _is_here(self) -> bool:
        # All processes of the host are looked at only if none known before is left.
        left = {pid: began for pid, began in self._known.items() if _began(pid) == began}
        self._known = left or {pid: _began(pid) for pid in job_processes(self._folder)}
        return bool(self._known)

    def _report(self) -> None:
        # A launcher that is gone would let our words pile up until a write blocks.
        if not self._seen or self._launcher_is_gone():
            return
        formed = self._formed or any(isinstance(event, events.NodeJoined) for event in self._events())
        if formed is self._formed and time.monotonic() < self._report_at:
            return
        looks = [proc.look(pid) for pid in self._known]
        if any(seen is not None and not seen.ending and not seen.stopped for seen in looks):
            self._formed, self._report_at = formed, time.monotonic() + self._config.slow_after_s / 5
            say(Running(formed))

    def _launcher_is_gone(self) -> bool:
        # One that is only silent, before anything was started, may be slow.
        is_silent = time.monotonic() - self._ear.heard_at > self._config.slow_after_s
        return self._ear.closed or (self._seen and is_silent)

    def _events(self) -> list[FateEvent]:
        found: list[FateEvent] = []
        with contextlib.suppress(OSError, ValueError):
            file = job_files.exit_code_file(str(self._folder / job_files.CONFIG), self._node)
            ended = events.NodeEnded(exit_code=int(file.read_text()), node=self._node)
            found = [ended] if ended.exit_code else [events.JobFinished(node=self._node), ended]
        with contextlib.suppress(FileNotFoundError, NotADirectoryError), self._log.open("rb") as log:
            log.seek(self._log_begins)
            for line in log:
                # Most lines say nothing of the job's fate, and are not worth decoding.
                if line.endswith(b"\n") and any(kind in line for kind in _KINDS):
                    with contextlib.suppress(msgspec.DecodeError):  # lines a full disk has cut off and joined
                        found.append(_fate.decode(line))
        return found


def _began(pid: int) -> float:
    """Return its start time; NaN, which equals nothing, if it has gone or is ending."""
    with contextlib.suppress(OSError):
        if (seen := proc.look(pid)) is not None and not seen.ending:
            return proc.start_time(pid)
    return math.nan


def main() -> int:
    ear, deadline = Ear(sys.stdin.fileno()), time.monotonic() + PREPARE_S
    while not isinstance(prepare := ear.next(POLL_S), Prepare):
        if ear.closed or time.monotonic() > deadline:
            return 1
    for number in ENDING:
        signal.signal(number, _exit)
    host = os.uname().nodename
    try:
        if differs := first_difference(versions(), prepare.versions):
            found = "{} is {} here and {} where it was launched".format(*differs)
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
