"""The launcher's end of its stewards: one ssh connection per host, kept for as long as the job lasts.

Rules of this file: the secret goes over standard input only; every wait but that for a steward's last word ends with
the connection, and ssh itself ends one whose other side is silent. A host whose processes stand still is silent
although its sshd answers: so stewards say that the job runs. Thread: the event loop's only.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shlex
import sys
import time
from collections.abc import Mapping, Sequence

import msgspec

from ..agent.world import deepspeed_env, spare_nodes
from ..config import Config
from ..errors import ConfigError
from ..host.output import say
from . import leash
from .request import Request

CONNECT_S = 15
READY_S = 120.0
"""For imports from a file system that all hosts read at once, too."""
COMPLAINT_LINES = 3
CLOSE_S = 5.0
STANDING_STILL = 6
"""A host that says nothing for so many times `silent_after_s` stands still. What a script does after the training is
ended there, so that a short pause of the host must not count."""
LINE_BYTES_MAX = 64 << 20


def keep_alive(config: Config) -> list[str]:
    """ssh's options for noticing within about `patience_s` that the other side is gone."""
    return ["-o", f"ServerAliveInterval={max(1, round(config.patience_s / 3))}", "-o", "ServerAliveCountMax=3"]


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
    """One host's steward. `ran_at`: when it said last that the job's processes run there, and are `formed`."""

    def __init__(self, host: str, node: int) -> None:
        self.host, self.node = host, node
        self.name = self.problem = ""
        """`name`: the host's own, by which `spares` and what it says call it."""
        self.ran_at, self.formed = float("-inf"), False
        self._ssh: asyncio.subprocess.Process | None = None

    async def prepare(self, ssh: Sequence[str], prepare: leash.Prepare) -> None:
        """Connect, hand over what the host needs; `problem` says why it is not ready."""
        self._ssh = connection = await asyncio.create_subprocess_exec(
            *ssh[:-1], "--", self.host, ssh[-1], stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE, start_new_session=True, limit=LINE_BYTES_MAX,
        )  # fmt: skip
        self.say(prepare)
        try:
            async with asyncio.timeout(READY_S):
                ready = await self._hear(leash.Ready)
        except TimeoutError:
            self.problem = ": ".join(filter(None, [f"no answer within {READY_S:g} s", await self._complaint()]))
            return
        if isinstance(ready, leash.Ready):
            self.name, self.problem = ready.host, ready.problem
            self._complaints = asyncio.create_task(self._pass_on_complaints())
        else:
            self.problem = await self._complaint() or f"ssh ended with {connection.returncode}"

    def say(self, word: leash.Word) -> None:
        """To a host that is gone: nothing."""
        if self._ssh is None or self._ssh.returncode is not None:
            return
        assert self._ssh.stdin is not None
        if not self._ssh.stdin.is_closing():
            self._ssh.stdin.write(leash.encode(word))

    async def told(self) -> leash.Told | None:
        """The steward's last word, once the job has been there and is over; None at the end of the connection."""
        self.say(leash.Tell())
        word = await self._hear(leash.Told)
        return word if isinstance(word, leash.Told) else None

    async def close(self) -> None:
        """End the connection; a steward that is left at its other side ends itself."""
        if self._ssh is None:
            return
        assert self._ssh.stdin is not None
        self._ssh.stdin.close()
        with contextlib.suppress(ProcessLookupError):
            self._ssh.kill()
        with contextlib.suppress(TimeoutError):  # a shared ssh connection may keep the pipes open
            async with asyncio.timeout(CLOSE_S):
                await self._ssh.wait()

    async def _hear(self, kind: type[leash.Word]) -> leash.Word | None:
        """The next word of `kind`; None at the end of the connection."""
        assert self._ssh is not None and self._ssh.stdout is not None
        while line := await self._ssh.stdout.readline():
            word = leash.decode(line)
            if isinstance(word, leash.Running):
                self.ran_at, self.formed = time.monotonic(), self.formed or word.formed
            if isinstance(word, kind):
                return word
        return None

    async def _complaint(self) -> str:
        """The last lines ssh says before it ends; a shared ssh connection may keep the pipes open."""
        said: list[str] = []

        async def listen(ssh: asyncio.subprocess.Process) -> None:
            assert ssh.stderr is not None
            while line := await ssh.stderr.readline():
                said.append(line.decode(errors="replace").strip())
            await ssh.wait()

        assert self._ssh is not None
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_S):
                await listen(self._ssh)
        return " / ".join([line for line in said if line][-COMPLAINT_LINES:])

    async def _pass_on_complaints(self) -> None:
        assert self._ssh is not None and self._ssh.stderr is not None
        while line := await self._ssh.stderr.readline():
            say(f"{self.host}: {line.decode(errors='replace').rstrip()}", to=sys.stderr)


class Stewards:
    """All hosts' stewards of one job."""

    def __init__(self, request: Request, config: Config) -> None:
        self._request, self._config = request, config
        self.connections = [Connection(host, node) for node, host in enumerate(request.hosts)]
        self._hearing: dict[asyncio.Task[leash.Told | None], Connection] = {}

    async def prepare(self, word: leash.Prepare) -> None:
        """Raises: ConfigError that names every host that is not ready, or the spare that no host is."""
        words = ["ssh", "-T", "-o", "BatchMode=yes", "-o", f"ConnectTimeout={CONNECT_S}", *keep_alive(self._config)]
        words += ["-p", str(self._request.ssh_port)] if self._request.ssh_port is not None else []
        words += shlex.split(os.environ.get("PDSH_SSH_ARGS_APPEND", ""))
        words.append(shell_command(self._request, os.environ, os.getcwd()))
        each = ((one, msgspec.structs.replace(word, node=one.node)) for one in self.connections)
        await asyncio.gather(*(one.prepare(words, its_own) for one, its_own in each))
        wrong: dict[str, list[str]] = {}
        for one in self.connections:
            if one.problem:
                wrong.setdefault(one.problem.replace(f" on {one.name}", ""), []).append(one.host)
        if wrong:
            each_group = [f"{', '.join(hosts)}: {problem}" for problem, hosts in wrong.items()]
            if all("; to do: " in problem for problem in wrong):
                raise ConfigError("\n[deadpool] ".join(each_group))
            found = "; ".join(each_group)
            expected, remedy = "all hosts of the hostfile ready", "mend these hosts, or remove them from the hostfile"
            raise ConfigError(found, expected, remedy)
        if not isinstance(self._config.spares, int):
            spare_nodes(self._config.spares, [one.name for one in self.connections])

    async def keep(self) -> None:
        """Tell them, for ever, that somebody is here."""
        while True:
            self.say(leash.Alive())
            await asyncio.sleep(self._config.silent_after_s / 5)

    def say(self, word: leash.Word) -> None:
        for connection in self.connections:
            connection.say(word)

    def ask(self) -> None:
        """Begin to hear each steward: what it says last comes into `words`, node by node."""
        for one in self.connections:
            self._hearing[asyncio.create_task(one.told())] = one

    @property
    def hearing(self) -> set[asyncio.Task[leash.Told | None]]:
        """Ends one by one, each with a steward's last word or its connection."""
        return {task for task in self._hearing if not task.done()}

    @property
    def words(self) -> dict[int, leash.Told]:
        """Node -> its last word, of those that have had one."""
        ended = {one.node: task.result() for task, one in self._hearing.items() if task.done() and not task.cancelled()}
        return {node: word for node, word in ended.items() if word is not None}

    @property
    def untold(self) -> list[str]:
        """The hosts that are still asked."""
        return [one.host for task, one in self._hearing.items() if not task.done()]

    @property
    def running(self) -> set[int]:
        """Nodes whose hosts have said lately that the job's processes run there."""
        since = time.monotonic() - STANDING_STILL * self._config.silent_after_s
        return {one.node for one in self.connections if one.ran_at > since}

    @property
    def formed(self) -> bool:
        """Return whether any of them has seen the job's first world."""
        return any(one.formed for one in self.connections)

    def stop_asking(self) -> None:
        for task in self._hearing:
            task.cancel()

    async def close(self) -> None:
        await asyncio.gather(*(one.close() for one in self.connections))
