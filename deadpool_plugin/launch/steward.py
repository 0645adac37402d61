"""`python -m deadpool_plugin.launch.steward`: the end of `deadpool launch` on one host, held by an ssh connection.

It puts configuration and secret in place, ends the job's processes when it is told to, and says at the end what the
node's event log says. When the launcher falls silent or its connection ends, `on_launcher_loss` decides.
Rules of this file: the job's processes are known by the configuration they were started with; nothing of this host's
job, and no secret, outlives this process, unless the host does not let it live.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import time
from pathlib import Path
from typing import NoReturn

import msgspec

from .. import events
from ..agent.links import versions
from ..agent.world import first_difference
from ..config import Config, load
from ..errors import ConfigError, DeadpoolError
from ..host import proc
from . import carried, leash, roles
from .argv import missing_file
from .carriers import carriers, kill_all, supervisors

ENDING = (signal.SIGTERM, signal.SIGHUP)
POLL_S = 0.5
ALONE_POLL_S = 5.0
"""Between looks at a job that goes on without its launcher: each is at every process of the host."""
PREPARE_S = 60.0


class Ear:
    """The launcher's words from a descriptor. `heard_at`: when the last one came; `closed`: there will be no more."""

    def __init__(self, fd: int) -> None:
        self._fd, self._rest = fd, b""
        self._words: list[leash.Said] = []
        self.closed, self.heard_at = False, time.monotonic()

    def next(self, timeout_s: float) -> leash.Said | None:
        """None if nothing comes in time. Blocks: so long."""
        if not self._words:
            if self.closed:
                time.sleep(timeout_s)
            elif select.select([self._fd], [], [], timeout_s)[0]:
                self._read()
        return self._words.pop(0) if self._words else None

    def _read(self) -> None:
        data = os.read(self._fd, 1 << 16)
        self.closed, self.heard_at = not data, time.monotonic()
        *lines, self._rest = (self._rest + data).split(b"\n")
        self._words += [word for word in map(leash.decode, lines) if word is not None]


class Steward:
    """One job on this host, from `Ready` on."""

    def __init__(self, ear: Ear, folder: Path, config: Config, node: int) -> None:
        self._ear, self._folder, self._config, self._node = ear, folder, config, node
        self._log = events.log_of(config.output_dir, node)
        self._log_begins = self._log.stat().st_size if self._log.exists() else 0
        self._signal, self._deadline = 0, float("inf")
        self._signalled: set[int] = set()
        self._asked = self._asked_unseen = self._seen = self._formed = False
        self._known: dict[int, int] = {}
        self._report_at = 0.0
        self._killed: set[int] = set()

    def serve(self) -> None:
        """Until the job is over here, and the launcher asks for it or is gone."""
        while True:
            alone = self._seen and self._launcher_is_gone() and not self._signal
            word = self._ear.next(ALONE_POLL_S if alone else POLL_S)
            if not self._seen and (self._is_here() or self._logged() or self._last_word()):  # it may have been short
                self._seen, self._ear.heard_at = True, time.monotonic()
            if isinstance(word, leash.Stop):
                self._end(signal.SIGINT, word.grace_s)
            elif isinstance(word, leash.Tell):
                self._asked, self._asked_unseen = True, word.even_if_unseen
            elif self._launcher_is_gone() and self._config.on_launcher_loss == "stop" and not self._signal:
                self._end(signal.SIGHUP, self._config.phase_timeout_s)
            if self._signal:
                self._press()
            self._report()
            asked = self._asked and (self._seen or self._asked_unseen)
            if (asked or self._launcher_is_gone()) and not self._is_here():
                return

    def _is_here(self) -> bool:
        """Return whether a process of the job is on this host. All of the host's are looked at only if none that was
        found before is left."""
        looks = {pid: proc.look(pid) for pid in self._known}
        there = {pid for pid, seen in looks.items() if seen is not None and not seen.ending}
        self._known = {pid: began for pid, began in self._known.items() if pid in there and _began(pid) == began}
        self._known = self._known or {pid: _began(pid) for pid in carriers(self._folder)}
        return bool(self._known)

    def _report(self) -> None:
        """Tell the launcher that the job runs here. A launcher that is gone would let our words pile up until a write
        blocks."""
        if not self._seen or self._ear.closed or self._launcher_is_gone():
            return
        formed = self._formed or self._has_formed()
        if formed is self._formed and time.monotonic() < self._report_at:
            return
        looks = [proc.look(pid) for pid in self._known]
        if any(seen is not None and not seen.ending and not seen.stopped for seen in looks):
            self._formed, self._report_at = formed, time.monotonic() + self._config.silent_after_s / 5
            say(leash.Running(formed))

    def _has_formed(self) -> bool:
        return any(isinstance(event, events.NodeJoined) for event in self._logged())

    def _launcher_is_gone(self) -> bool:
        """One that is only silent, before anything was started, may be slow."""
        is_silent = time.monotonic() - self._ear.heard_at > self._config.silent_after_s
        return self._ear.closed or (self._seen and is_silent)

    def _end(self, number: int, grace_s: float) -> None:
        self._signal, self._deadline = number, min(self._deadline, time.monotonic() + grace_s)

    def _press(self) -> None:
        """The supervisors are asked, once each; who is left at the deadline is killed."""
        if time.monotonic() > self._deadline:
            self._killed |= kill_all(self._folder)
        for pid in supervisors(self._folder) - self._signalled:
            self._signalled.add(pid)
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, self._signal)

    def told(self) -> leash.Told:
        """Gather this job's fate from the node's event log (it may hold earlier jobs too) and its agent's exit code."""
        return leash.Told([*self._last_word(), *self._logged()], len(self._killed))

    def _logged(self) -> list[leash.FateEvent]:
        """Read this job's fate from the node's event log."""
        found: list[leash.FateEvent] = []
        decoder: msgspec.json.Decoder[leash.FateEvent] = msgspec.json.Decoder(leash.FateEvent)
        if self._log.exists():
            with self._log.open("rb") as file:
                file.seek(self._log_begins)
                for line in file:
                    with contextlib.suppress(msgspec.DecodeError):  # lines a full disk has cut off and joined
                        if _tells(line):
                            found.append(decoder.decode(line))
        return found

    def _last_word(self) -> list[leash.FateEvent]:
        """The exit code of an agent that has come to its end, as events; 0 is that of a job that has finished."""
        try:
            exit_code = int(carried.last_word(str(self._folder / carried.CONFIG), self._node).read_text())
        except (OSError, ValueError):
            return []
        ended = events.NodeEnded(exit_code=exit_code, node=self._node)
        return [ended] if exit_code else [events.JobFinished(node=self._node), ended]


def _began(pid: int) -> int:
    """Its start time, 0 if it has gone."""
    try:
        return proc.start_time(pid)
    except OSError:
        return 0


_KINDS = tuple(f'"event":"{kind.__name__}"'.encode() for kind in leash.FateEvent.__args__)


def _tells(line: bytes) -> bool:
    """Whole lines only: most say nothing of the job's fate, and are not worth decoding."""
    return line.endswith(b"\n") and any(kind in line for kind in _KINDS)


def check(prepare: leash.Prepare) -> None:
    """Check, before the job starts anywhere, that nothing would stop it on this host. Raises: ConfigError."""
    if differs := first_difference(versions(), prepare.versions):
        package, here, there = differs
        raise ConfigError(f"{package} is {here} here and {there} where it was launched", "the same", "install it alike")
    roles.check_versions()
    if missing := missing_file(prepare.command, Path.cwd()):
        raise ConfigError(missing, "the training script, on every host", "copy it there")


def _end(number: int, frame: object) -> NoReturn:
    """The secret goes first, whatever signals follow this one."""
    for other in ENDING:
        signal.signal(other, signal.SIG_IGN)  # which holds until the interpreter has ended, a handler does not
    sys.exit(128 + number)


def main() -> int:
    """Entry point; the exit code."""
    ear = Ear(sys.stdin.fileno())
    deadline = time.monotonic() + PREPARE_S
    prepare = None
    while not isinstance(prepare, leash.Prepare):
        if ear.closed or time.monotonic() > deadline:
            return 1
        prepare = ear.next(POLL_S)
    for number in ENDING:
        signal.signal(number, _end)
    try:
        check(prepare)
        with carried.installed(prepare.job, prepare.config, prepare.secret) as folder:
            config = load(folder / carried.CONFIG)
            roles.check_interface(config)
            roles.check_host(config)
            steward = Steward(ear, folder, config, prepare.node)
            say(leash.Ready(os.uname().nodename))
            steward.serve()
            told = steward.told()
        say(told)  # when nothing is left here
    except DeadpoolError as error:
        say(leash.Ready(os.uname().nodename, str(error)))
        return error.exit_code
    return 0


def say(word: leash.Word) -> None:
    """Nobody may be listening any more."""
    with contextlib.suppress(BrokenPipeError):
        os.write(sys.stdout.fileno(), leash.encode(word))


if __name__ == "__main__":
    sys.exit(main())
