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
from collections.abc import Sequence
from typing import NoReturn

from ..agent import proc
from ..agent.meeting import versions
from ..config import Config, load
from ..errors import ConfigError, shell_code
from ..transport.sockets import allow_many_files
from . import carried, leash
from .outcome import Outcome, outcome
from .processes import ending_signals
from .remote import Stewards, keep_alive
from .request import Request, understood
from .secret import ensure

DEEPSPEED = (sys.executable, "-m", "deepspeed.launcher.runner")
LAST_WORD_S = 10.0
"""How much longer than a steward's patience with the job's processes we wait for it."""


def launch(words: Sequence[str]) -> int:
    """The exit code of the job. Raises: ConfigError, before anything was started."""
    request = understood(words)
    config = load(request.config)
    if not request.hosts:
        _become_deepspeed(request)
    _check_this_host()
    try:
        return asyncio.run(Launcher(request, config).run())
    except KeyboardInterrupt:  # nothing was started yet
        return 128 + signal.SIGINT


def _become_deepspeed(request: Request) -> NoReturn:
    """One host, or one `--no_ssh` command per host: nothing to carry anywhere, and its own exit code says it all."""
    os.execv(DEEPSPEED[0], [*DEEPSPEED, *request.deepspeed(request.config)])


def _check_this_host() -> None:
    """Raises: ConfigError."""
    for name in ("ssh", "pdsh"):
        if shutil.which(name) is None:
            raise ConfigError(
                f"there is no `{name}` on this host", "what deepspeed starts jobs with", f"install {name}"
            )
    allow_many_files()  # some for every host, here and in pdsh


class Launcher:
    """One job over ssh; `run` once."""

    def __init__(self, request: Request, config: Config) -> None:
        self._request, self._config, self._job = request, config, carried.new_job()
        self._tag = f"launch.{self._job}."
        self._stewards = Stewards(request, config)
        self._interrupted = 0
        self._stopping = asyncio.Event()
        self._patience_s = config.phase_timeout_s + LAST_WORD_S

    async def run(self) -> int:
        """Raises: ConfigError."""
        keeping = asyncio.create_task(self._stewards.keep())  # some may be ready long before others
        try:
            await self._stewards.prepare(self._what_hosts_need())
            for number in ending_signals():
                asyncio.get_running_loop().add_signal_handler(number, self._interrupt, number)
            code = await self._deepspeed()
            if self._config.on_launcher_loss == "stop":
                self._stopping.set()
            told = await self._stewards.told(self._stopping, self._patience_s)
            for node, word in told.items():
                if word.killed:
                    print(f"[deadpool] {self._request.hosts[node]}: {word.killed} process(es) had to be killed")
            return self._conclude(outcome({k: word.events for k, word in told.items()}, self._request.hosts, code))
        finally:
            keeping.cancel()
            proc.sweep(self._tag)
            await self._stewards.close()

    def _what_hosts_need(self) -> leash.Prepare:
        first = self._request.command[0]
        script = "" if first == "-m" else first
        return leash.Prepare(self._job, -1, self._config.told(), ensure(self._config), script, versions())

    # ---- the real launcher

    async def _deepspeed(self) -> int:
        """Its exit code, 0 or more; an interrupted one is ended once the stewards have ended the job."""
        words = [*DEEPSPEED, *self._request.deepspeed(str(carried.folder_of(self._job) / carried.CONFIG))]
        said = [os.environ.get("PDSH_SSH_ARGS_APPEND", ""), *keep_alive(self._config)]
        env = {**os.environ, proc.TAG: self._tag, "PDSH_SSH_ARGS_APPEND": " ".join(said).strip()}
        process = await asyncio.create_subprocess_exec(
            *words, stdin=asyncio.subprocess.DEVNULL, env=env, start_new_session=True
        )
        ended = asyncio.create_task(process.wait())
        stopping = asyncio.create_task(self._stopping.wait())
        await asyncio.wait([ended, stopping], return_when=asyncio.FIRST_COMPLETED)
        if not ended.done():  # it may wait for a host that does not answer
            await asyncio.wait([ended], timeout=self._patience_s)
        stopping.cancel()
        proc.sweep(self._tag)
        return shell_code(await ended)

    def _interrupt(self, number: int) -> None:
        """The stewards end the job; the second time, at once."""
        grace_s = 0.0 if self._interrupted else self._config.phase_timeout_s
        if self._interrupted:
            proc.sweep(self._tag)
        self._interrupted = self._interrupted or number
        self._stewards.say(leash.Stop(grace_s))
        self._stopping.set()

    def _conclude(self, found: Outcome) -> int:
        if self._interrupted:
            found = Outcome(128 + self._interrupted, "interrupted", found.lost)
        print(f"[deadpool] {found}", flush=True)
        return found.exit_code
