"""`deadpool launch`: the `deepspeed` command with a steward on every host.

The stewards carry configuration and secret to the hosts, end what is left there, and say what became of the job; the
real launcher, in a session of its own, starts it.
Rules of this file: nothing is started anywhere before every host is ready, and nothing is left where we can reach it;
Ctrl-C ends this job and no other one (deepspeed's own handler ends every job of the user on these hosts).
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import sys
import time
from collections.abc import Sequence
from typing import NoReturn

from ..agent.links import versions
from ..agent.world import check_hosts, check_slots
from ..config import Config, load
from ..errors import ConfigError, shell_code
from ..events import JobFinished, JobStopped, NodeEnded, NodeJoined
from ..host import proc
from ..host.output import say
from ..host.spawning import ending_signals
from ..transport.sockets import allow_many_files
from . import carried, leash
from .deepspeed_config import doubts, missing
from .join import check_unused
from .outcome import FAILED, Outcome, outcome, settled
from .remote import Stewards, keep_alive
from .request import Request, understood
from .secret import ensure

DEEPSPEED = (sys.executable, "-m", "deepspeed.launcher.runner")
LAST_WORD_S = 10.0
"""How much longer than a steward waits for the job's processes we wait for the steward."""
POLL_S = 0.5


def launch(words: Sequence[str]) -> int:
    """The exit code of the job. Raises: ConfigError, before anything was started: all that can be checked on this host
    is, for elsewhere it would be found after minutes, and by each host."""
    try:
        request = understood(words)
        config = load(request.config)
        check_slots(request.slots)
        hosts = len(request.slots) or len(request.hosts) or 1
        check_hosts(hosts, config.spares, config.copies)
        ensure(config)
        check_unused(config)
        for doubt in doubts(request.command):
            say(doubt)
        spares = config.spares if isinstance(config.spares, int) else len(config.spares)
        say(f"hosts that train: {hosts - spares} of {hosts}; spares: {spares}")
        named, folder = request.config or "none, all defaults", config.output_dir.absolute()
        say(f"configuration: {named}; output_dir: {folder}")
        if not request.hosts:
            _become_deepspeed(request)
        _check_this_host()
        return asyncio.run(Launcher(request, config).run())
    except KeyboardInterrupt:
        say("interrupted before anything was started")
        return 128 + signal.SIGINT


def _become_deepspeed(request: Request) -> NoReturn:
    """One host, or one `--no_ssh` command per host: nothing to carry anywhere, and its own exit code says it all."""
    os.execv(DEEPSPEED[0], [*DEEPSPEED, *request.deepspeed(request.config)])


def _check_this_host() -> None:
    """Raises: ConfigError."""
    for name in ("ssh", "pdsh"):
        if shutil.which(name) is None:
            raise ConfigError(
                f"{os.uname().nodename} has no `{name}`",
                f"{name}, by which deepspeed starts jobs",
                f"install {name} there",
            )
    allow_many_files()  # some for every host, here and in pdsh


class Launcher:
    """One job over ssh; `run` once."""

    def __init__(self, request: Request, config: Config) -> None:
        self._request, self._config, self._job = request, config, carried.new_job()
        self._tag = f"launch.{self._job}."
        self._stewards = Stewards(request, config)
        self._interrupted, self._interrupted_at = 0, float("inf")
        self._settled: Outcome | None = None
        self._unformed: Outcome | None = None
        self._deadline = float("inf")
        """Until then hosts may end what is left of the job, and tell."""
        self._changed = asyncio.Event()

    async def run(self) -> int:
        """Raises: ConfigError."""
        keeping = asyncio.create_task(self._stewards.keep())  # some may be ready long before others
        try:
            await self._stewards.prepare(self._what_hosts_need())
            for number in ending_signals():
                asyncio.get_running_loop().add_signal_handler(number, self._interrupt, number)
            launched = await self._deepspeed()
            code = await self._follow(launched)
            told = self._stewards.words
            for node, word in told.items():
                if word.killed and not (self._unformed or self._interrupted):
                    say(f"{self._request.hosts[node]}: {word.killed} process(es) had to be killed")
            return self._conclude(outcome({k: word.events for k, word in told.items()}, self._request.hosts, code))
        finally:
            keeping.cancel()
            proc.sweep(self._tag)
            await self._stewards.close()

    def _what_hosts_need(self) -> leash.Prepare:
        command = self._request.command
        return leash.Prepare(self._job, -1, self._config.told(), ensure(self._config), command, versions())

    # ---- the real launcher

    async def _deepspeed(self) -> asyncio.subprocess.Process:
        words = [*DEEPSPEED, *self._request.deepspeed(str(carried.folder_of(self._job) / carried.CONFIG))]
        said = [os.environ.get("PDSH_SSH_ARGS_APPEND", ""), *keep_alive(self._config)]
        env = {**os.environ, proc.TAG: self._tag, "PDSH_SSH_ARGS_APPEND": " ".join(said).strip()}
        return await asyncio.create_subprocess_exec(
            *words, stdin=asyncio.subprocess.DEVNULL, env=env, start_new_session=True
        )

    async def _follow(self, launched: asyncio.subprocess.Process) -> int:
        """Wait for deepspeed and every steward, and no longer than `_deadline` once the others cannot change the
        outcome; deepspeed's exit code, 0 or more.

        A host whose processes stand still never returns, and its sshd keeps deepspeed's connection alive.
        """
        stewards, running = self._stewards, asyncio.create_task(launched.wait())
        stewards.ask()
        asked_all = False
        while stewards.hearing or not running.done():
            if running.done() and not asked_all:
                asked_all = True
                stewards.say(leash.Tell(even_if_unseen=True))
                if self._config.on_launcher_loss == "stop":
                    self._end(self._config.phase_timeout_s)
            if not running.done():
                self._end_unformed()
            self._settle()
            if time.monotonic() >= self._deadline:
                self._give_up(running)
                break
            self._changed.clear()
            changed = asyncio.create_task(self._changed.wait())
            waits = {*stewards.hearing, changed, *([] if running.done() else [running])}
            await asyncio.wait(waits, timeout=POLL_S, return_when=asyncio.FIRST_COMPLETED)
            changed.cancel()
        stewards.stop_asking()
        proc.sweep(self._tag)
        return shell_code(await running)

    def _settle(self) -> None:
        """Note the outcome once it is known, and end what is left of the job."""
        told = {node: word.events for node, word in self._stewards.words.items()}
        hosts = self._request.hosts
        if self._settled is None and not self._interrupted and settled(told, self._stewards.running, len(hosts)):
            self._settled = outcome(told, hosts, 0)
            self._end(self._config.phase_timeout_s)

    def _end_unformed(self) -> None:
        """A host that has ended before the job formed keeps the others waiting for it: end them, too."""
        told = self._stewards.words
        heard = [event for word in told.values() for event in word.events]
        formed = self._stewards.formed or any(isinstance(one, (NodeJoined, JobFinished)) for one in heard)
        if self._unformed or formed or not told or self._interrupted:
            return
        codes = [event.exit_code for event in heard if isinstance(event, NodeEnded)]
        hosts = ", ".join(self._request.hosts[node] for node in sorted(told))
        self._unformed = Outcome(max(codes, default=0) or FAILED, f"{hosts} ended before the job formed", [])
        say(f"{self._unformed.what}: ending it on the other hosts")
        proc.sweep(self._tag)
        self._end(0.0)

    def _end(self, grace_s: float) -> None:
        """The stewards end the job; they have LAST_WORD_S longer than its processes."""
        self._stewards.say(leash.Stop(grace_s))
        self._deadline = min(self._deadline, time.monotonic() + grace_s + LAST_WORD_S)
        self._changed.set()

    def _give_up(self, running: asyncio.Task[int]) -> None:
        if self._stewards.untold:
            left = ", ".join(self._stewards.untold)
            say(f"the job's commands on {left} have not returned: those hosts are not cleaned up")
        elif not running.done():
            say("the job is over on every host, but deepspeed has not returned: ending it")

    def _interrupt(self, number: int) -> None:
        """End the job: at once if it has not formed yet, or the second time. An outcome that is known stays."""
        again, self._interrupted = bool(self._interrupted), self._interrupted or number
        self._interrupted_at = min(self._interrupted_at, time.time())
        hosts, grace_s = len(self._request.hosts), self._config.phase_timeout_s
        if self._settled is not None:
            said, grace_s = f"interrupted after {self._settled.what}: ending the processes that are left", 0.0
        elif again:
            said, grace_s = "interrupted again: killing what is left of the job", 0.0
        elif not self._stewards.formed:
            said, grace_s = f"interrupted before the job has formed: ending it on {hosts} hosts", 0.0
        else:
            said = f"interrupted: ending the job on {hosts} hosts; processes left after {grace_s:g} s are killed"
        say(said)
        if not grace_s:
            proc.sweep(self._tag)
        self._end(grace_s)

    def _conclude(self, found: Outcome) -> int:
        """A signal does not change what became of a job that is over."""
        verdicts = (event for word in self._stewards.words.values() for event in word.events)
        was_over = any(isinstance(one, JobStopped) and one.time < self._interrupted_at for one in verdicts)
        if self._interrupted and self._settled is None and found.exit_code and not was_over:
            # whatever signal it was: hosts are told to end as by Ctrl-C, and their logs say so
            found = Outcome(128 + signal.SIGINT, f"interrupted ({signal.Signals(self._interrupted).name})", found.lost)
        if self._unformed is not None:
            found = self._unformed
        if self._settled is not None:
            found = Outcome(self._settled.exit_code, self._settled.what, found.lost)
        if found.exit_code and not self._interrupted:
            for path in missing(self._request.command):
                say(f"there is no file {path} where the job was launched; to do: correct the command")
        say(str(found))
        return found.exit_code
