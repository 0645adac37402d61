"""`deadpool launch`: the `deepspeed` command with a steward on every host.

The stewards carry configuration and secret to the hosts, end what is left there, and say what became of the job; the
real launcher, in a session of its own, starts it.
Rules of this file: nothing is started anywhere before every host is ready, and nothing is left where we can reach it.
Ctrl-C ends this job and no other one (deepspeed's own handler ends every job of the user on these hosts). The secret
goes over a steward's standard input only. Every wait but that for its last word ends with the connection, and ssh
itself ends one whose other side is silent.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import shlex
import shutil
import signal
import sys
import time
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import Mapping, Sequence
from pathlib import Path

from ..agent.links import versions
from ..agent.world import check_hosts, check_slots, deepspeed_env, spare_nodes
from ..config import Config, load
from ..errors import ConfigError, refusing, shell_code
from ..host import files, proc
from ..host.output import say
from ..host.proc import ending_signals
from ..transport.sockets import allow_many_files
from . import job_files
from .argv import deepspeed_configs, doubts
from .fate import FAILED, Fate, Outcome
from .request import Request, understood
from .running_job import check_unused
from .steward import Order, Prepare, Ready, Running, Told, Word, decode, encode

DEEPSPEED = (sys.executable, "-m", "deepspeed.launcher.runner")
LAST_WORD_S = 10.0  # how much longer than a steward waits for the job's processes we wait for the steward
POLL_S = 0.5
STANDING_STILL = 6
"""A host that says nothing for so many times `slow_after_s` stands still, although its sshd answers. What a script
does after the training is ended there, so that a short pause of the host must not count."""
CONNECT_S = 15
READY_S = 120.0  # for imports from a file system that all hosts read at once, too
COMPLAINT_LINES = 3
CLOSE_S = 5.0
LINE_BYTES_MAX = 64 << 20


def launch(words: Sequence[str]) -> int:
    """Run the job; its exit code. Raises: ConfigError, before anything was started, for all this host can check."""
    try:
        resume, words = _resumed(words)
        request = understood(words)
        config = load(request.config)
        if resume is not None:
            config = config.model_copy(update={"resume": resume})
        check_slots(request.slots)
        hosts = len(request.slots) or len(request.hosts) or 1
        check_hosts(hosts, config.spares, config.copies)
        secret = job_files.ensure_secret(config)
        check_unused(config, secret)
        for doubt in doubts(request.command):
            say(doubt)
        spares = config.spares_total
        say(f"hosts that train: {hosts - spares} of {hosts}; spares: {spares}")
        say(f"configuration: {request.config or 'none, all defaults'}; output_dir: {config.output_dir.absolute()}")
        if not request.hosts:  # nothing to carry anywhere, and its own exit code says it all
            file = request.config if resume is None else _written(config)
            os.execv(DEEPSPEED[0], [*DEEPSPEED, *request.deepspeed(file)])
        for name in ("ssh", "pdsh"):
            if shutil.which(name) is None:
                found = f"{os.uname().nodename} has no `{name}`"
                raise ConfigError(found, f"{name}, by which deepspeed starts jobs", f"install {name} there")
        allow_many_files()  # some for every host, here and in pdsh
        return asyncio.run(Launcher(request, config, secret, words).run())
    except KeyboardInterrupt:
        say("interrupted before anything was started")
        return 128 + signal.SIGINT


def _resumed(words: Sequence[str]) -> tuple[Path | None, Sequence[str]]:
    """Take `--resume DIR` off the front; a script may have an option of that name."""
    name, equals, value = (words[0] if words else "").partition("=")
    if name != "--resume":
        return None, words
    if not equals and len(words) < 2:
        raise ConfigError("--resume is the last word", "`--resume STORE_DIR/JOB`", "name the folder")
    folder, rest = (value, words[1:]) if equals else (words[1], words[2:])
    return Path(folder).expanduser().absolute(), rest


def _written(config: Config) -> str:
    """Write a configuration where a job on this host alone finds it. Raises: ConfigError."""
    path = config.output_dir.absolute() / "resumed.yaml"
    with refusing(f"{path} cannot be written", "an output_dir that can be", "correct it"):
        path.parent.mkdir(parents=True, exist_ok=True)
        files.put(path, config.told().encode())
    return str(path)


class Launcher:
    """One job, from the stewards' start to its last line. `words`: those of the command line, to say them again."""

    def __init__(self, request: Request, config: Config, secret: bytes, words: Sequence[str] = ()) -> None:
        self._words = words
        self._request, self._config, self._secret, self._job = request, config, secret, job_files.new_job()
        self._tag = f"launch.{self._job}."
        self._stewards = [Connection(host, node) for node, host in enumerate(request.hosts)]
        self._order = Order()
        self._interrupted, self._interrupted_at = 0, math.inf
        self._settled: Outcome | None = None
        self._unformed: Outcome | None = None
        self._deadline = math.inf  # until then hosts may end what is left of the job, and tell

    async def run(self) -> int:
        """Raises: ConfigError."""
        keeping = asyncio.create_task(self._keep())  # some may be ready long before others
        try:
            await self._prepare()
            for number in ending_signals():
                asyncio.get_running_loop().add_signal_handler(number, self._interrupt, number)
            code = await self._follow(await self._deepspeed())
            for one in self._stewards:
                if one.told and one.told.killed and not (self._unformed or self._interrupted):
                    say(f"{one.host}: {one.told.killed} process(es) had to be killed")
            return self._conclude(self._fate().outcome(self._request.hosts, code))
        finally:
            keeping.cancel()
            proc.sweep(self._tag)
            await asyncio.gather(*(one.close() for one in self._stewards))

    async def _keep(self) -> None:
        while True:
            self._give(self._order)
            await asyncio.sleep(self._config.slow_after_s / 5)

    def _give(self, order: Order) -> None:
        self._order = order
        for one in self._stewards:
            one.say(order)

    def _end(self, grace_s: float) -> None:
        self._give(Order(self._order.leave, grace_s))
        self._deadline = min(self._deadline, time.monotonic() + grace_s + LAST_WORD_S)

    def _fate(self) -> Fate:
        return Fate({one.node: one.told.events for one in self._stewards if one.told})

    async def _prepare(self) -> None:
        """Raises: ConfigError that names every host that is not ready, or the spare that no host is."""
        request, shared = self._request, (self._config.told(), self._secret, self._request.command, versions())
        ssh = ["ssh", "-T", "-o", "BatchMode=yes", "-o", f"ConnectTimeout={CONNECT_S}", *keep_alive(self._config)]
        ssh += ["-p", str(request.ssh_port)] if request.ssh_port is not None else []
        ssh += [*shlex.split(os.environ.get("PDSH_SSH_ARGS_APPEND", "")), "--"]
        command = shell_command(request, os.environ, os.getcwd())
        await asyncio.gather(
            *(one.prepare([*ssh, one.host, command], Prepare(self._job, one.node, *shared)) for one in self._stewards)
        )
        wrong: dict[str, list[str]] = {}
        for one in self._stewards:
            if one.problem:
                wrong.setdefault(one.problem.replace(f" on {one.name}", ""), []).append(one.host)
        each = [f"{', '.join(hosts)}: {problem}" for problem, hosts in wrong.items()]
        if wrong and all("; to do: " in problem for problem in wrong):
            raise ConfigError("\n".join(each))
        if wrong:
            expected, remedy = "all hosts of the hostfile ready", "mend these hosts, or remove them from the hostfile"
            raise ConfigError("; ".join(each), expected, remedy)
        spare_nodes(self._config.spares, [one.name for one in self._stewards])

    async def _deepspeed(self) -> Process:
        config = str(job_files.folder_of(self._job) / job_files.CONFIG)
        options = [os.environ.get("PDSH_SSH_ARGS_APPEND", ""), *keep_alive(self._config)]
        env = {**os.environ, proc.TAG: self._tag, "PDSH_SSH_ARGS_APPEND": " ".join(options).strip()}
        words = [*DEEPSPEED, *self._request.deepspeed(config)]
        return await asyncio.create_subprocess_exec(*words, stdin=DEVNULL, env=env, start_new_session=True)

    async def _follow(self, launched: Process) -> int:
        """Wait for deepspeed and every steward; deepspeed's exit code, 0 or more."""
        running = asyncio.create_task(launched.wait())
        waited = {running, *(asyncio.create_task(one.listen()) for one in self._stewards)}
        while pending := {task for task in waited if not task.done()}:
            if running.done() and not self._order.leave:
                self._give(Order(True, self._order.grace_s))
                if self._config.on_launcher_loss == "stop":
                    self._end(self._config.ending_timeout_s)
            self._settle(running.done())
            # A host whose processes stand still never returns, and its sshd keeps deepspeed's connection alive.
            if time.monotonic() >= self._deadline:
                if left := ", ".join(one.host for one in self._stewards if not one.over):
                    say(f"the job's commands on {left} have not returned: those hosts are not cleaned up")
                elif not running.done():
                    say("the job is over on every host, but deepspeed has not returned: ending it")
                break
            await asyncio.wait(pending, timeout=POLL_S, return_when=asyncio.FIRST_COMPLETED)
        for task in waited - {running}:
            task.cancel()
        proc.sweep(self._tag)
        return shell_code(await running)

    def _settle(self, has_returned: bool) -> None:
        """Note the outcome once it is known, and end what is left of the job. `has_returned`: deepspeed."""
        if self._interrupted:
            return
        fate, hosts = self._fate(), self._request.hosts
        has_formed = any(one.formed for one in self._stewards) or fate.hosts or fate.finished
        # A host that has ended before the job formed keeps the others waiting for it: end them, too.
        if fate.tellers and not (has_formed or has_returned or self._unformed):
            ended = ", ".join(hosts[node] for node in sorted(fate.tellers))
            code = max(fate.codes.values(), default=0) or FAILED
            self._unformed = Outcome(code, f"{ended} ended before the job formed")
            say(f"{self._unformed.what}: ending it on the other hosts")
            proc.sweep(self._tag)
            self._end(0.0)
        since = time.monotonic() - STANDING_STILL * self._config.slow_after_s
        running = {one.node for one in self._stewards if one.ran_at > since}
        if self._settled is None and fate.settled(running, len(hosts)):
            self._settled = fate.outcome(hosts, 0)
            self._end(self._config.ending_timeout_s)

    def _interrupt(self, number: int) -> None:
        """End the job: at once if it has not formed yet, or the second time. An outcome that is known stays."""
        again, self._interrupted = bool(self._interrupted), self._interrupted or number
        self._interrupted_at = min(self._interrupted_at, time.time())
        hosts, grace_s = len(self._request.hosts), 0.0
        if self._settled is not None:
            said = f"interrupted after {self._settled.what}: ending the processes that are left"
        elif again:
            said = "interrupted again: killing what is left of the job"
        elif not any(one.formed for one in self._stewards):
            said = f"interrupted before the job has formed: ending it on {hosts} hosts"
        else:
            grace_s = self._config.ending_timeout_s
            said = f"interrupted: ending the job on {hosts} hosts; processes left after {grace_s:g} s are killed"
        say(said)
        if not grace_s:
            proc.sweep(self._tag)
        self._end(grace_s)

    def _conclude(self, found: Outcome) -> int:
        """A signal does not change what became of a job that is over."""
        was_over = any(one.time < self._interrupted_at for one in self._fate().stops)
        if self._settled is not None:
            found = self._settled._replace(lost=found.lost)
        elif self._unformed is not None:
            found = self._unformed
        elif self._interrupted and found.exit_code and not was_over:
            # whatever signal it was: hosts are told to end as by Ctrl-C, and their logs say so
            found = Outcome(128 + signal.SIGINT, f"interrupted ({signal.Signals(self._interrupted).name})", found.lost)
        if found.exit_code and not self._interrupted:
            for path in deepspeed_configs(self._request.command):
                if not os.path.isfile(path):
                    say(f"there is no file {path} where the job was launched; to do: correct the command")
        say(str(found))
        if found.exit_code and (path := self._fate().stored):
            say(f"to go on: {shlex.join(['deadpool', 'launch', '--resume', path, *self._words])}")
        return found.exit_code


def keep_alive(config: Config) -> list[str]:
    """Return ssh's options for noticing within about `slow_after_s` that the other side is gone."""
    return ["-o", f"ServerAliveInterval={max(1, round(config.slow_after_s / 3))}", "-o", "ServerAliveCountMax=3"]


def shell_command(request: Request, environ: Mapping[str, str], directory: str) -> str:
    """Make the host's command: the interpreter, the directory and the variables deepspeed exports there, too."""
    path = os.pathsep.join([directory, *filter(None, [environ.get("PYTHONPATH")])])
    exports = {name: value for name, value in environ.items() if name.startswith("PYTHON")} | {"PYTHONPATH": path}
    said = "".join(f"export {name}={shlex.quote(value)}; " for name, value in exports.items())
    for name, value in deepspeed_env(environ, directory).items():  # an interpreter may need its LD_LIBRARY_PATH
        said += f"export {name}={value}; "
    source = f". {shlex.quote(request.venv_script)}; " if request.venv_script else ""
    steward = shlex.join([sys.executable, "-m", "deadpool_plugin.launch.steward"])
    return f"{source}{said}cd {shlex.quote(directory)} && exec {steward}"


class Connection:
    """The ssh connection to one host's steward, and what it has said."""

    def __init__(self, host: str, node: int) -> None:
        self.host, self.node = host, node
        self.name = self.problem = ""  # the host's own name, by which `spares` and what it says call it
        self.ran_at, self.formed = -math.inf, False
        """When it said last that the job's processes run there, and whether they had formed the job's first world."""
        self.told: Told | None = None
        self.over = False  # it has had its last word, or its connection has ended
        self._ssh: Process | None = None

    async def prepare(self, ssh: Sequence[str], prepare: Prepare) -> None:
        """Connect, hand over what the host needs; `problem` says why it is not ready."""
        self._ssh = connection = await asyncio.create_subprocess_exec(
            *ssh, stdin=PIPE, stdout=PIPE, stderr=PIPE, start_new_session=True, limit=LINE_BYTES_MAX
        )
        assert connection.stdin is not None and connection.stdout is not None and connection.stderr is not None
        self._stdin, self._stdout, self._stderr = connection.stdin, connection.stdout, connection.stderr
        self.say(prepare)
        try:
            async with asyncio.timeout(READY_S):
                async for line in self._stdout:
                    if isinstance(word := decode(line), Ready):
                        self.name, self.problem = word.host, word.problem
                        self._complaints = asyncio.create_task(self._pass_on_complaints())
                        return
        except TimeoutError:
            self.problem = ": ".join(filter(None, [f"no answer within {READY_S:g} s", await self._complaint()]))
        else:
            self.problem = await self._complaint() or f"ssh ended with {connection.returncode}"

    async def listen(self) -> None:
        """Hear the steward until its last word, which it has once the job has been there and is over."""
        try:
            async for line in self._stdout:
                if isinstance(word := decode(line), Running):
                    self.ran_at, self.formed = time.monotonic(), self.formed or word.formed
                if isinstance(word, Told):
                    self.told = word
                    return
        finally:
            self.over = True

    def say(self, word: Word) -> None:
        """Send `word`; nothing happens if the host is gone."""
        if self._ssh is not None and self._ssh.returncode is None and not self._stdin.is_closing():
            self._stdin.write(encode(word))

    async def close(self) -> None:
        """End the connection; a steward that is left at its other side ends itself."""
        if self._ssh is None:
            return
        self._stdin.close()
        with contextlib.suppress(ProcessLookupError):
            self._ssh.kill()
        with contextlib.suppress(TimeoutError):  # a shared ssh connection may keep the pipes open
            async with asyncio.timeout(CLOSE_S):
                await self._ssh.wait()

    async def _complaint(self) -> str:
        """Return the last lines ssh says before it ends; a shared ssh connection may keep the pipes open."""
        said: list[str] = []
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_S):
                async for line in self._stderr:
                    said.append(line.decode(errors="replace").strip())
                if self._ssh is not None:
                    await self._ssh.wait()
        return " / ".join([line for line in said if line][-COMPLAINT_LINES:])

    async def _pass_on_complaints(self) -> None:
        async for line in self._stderr:
            say(f"{self.host}: {line.decode(errors='replace').rstrip()}", to=sys.stderr)
