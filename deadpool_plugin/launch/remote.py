"""The launcher's end of a steward: an ssh connection to one host, kept for as long as the job lasts.

Rules of this file: the secret goes over standard input only; every wait but that for a steward's last word ends with
the connection, and ssh itself ends one whose other side is silent. Thread: the event loop's only.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shlex
import sys
import time
from collections.abc import AsyncIterator, Mapping, Sequence

from ..agent.world import deepspeed_env
from ..config import Config
from ..host.output import say
from . import steward_protocol
from .request import Request
from .steward_protocol import Prepare, Ready, Running, Said, Tell, Told, Word

CONNECT_S = 15
READY_S = 120.0
"""For imports from a file system that all hosts read at once, too."""
COMPLAINT_LINES = 3
CLOSE_S = 5.0
LINE_BYTES_MAX = 64 << 20


def keep_alive(config: Config) -> list[str]:
    """Return ssh's options for noticing within about `patience_s` that the other side is gone."""
    return ["-o", f"ServerAliveInterval={max(1, round(config.patience_s / 3))}", "-o", "ServerAliveCountMax=3"]


def ssh_command(request: Request, config: Config) -> list[str]:
    """Make the command that starts a steward, but for the host before its last word."""
    words = ["ssh", "-T", "-o", "BatchMode=yes", "-o", f"ConnectTimeout={CONNECT_S}", *keep_alive(config)]
    words += ["-p", str(request.ssh_port)] if request.ssh_port is not None else []
    words += shlex.split(os.environ.get("PDSH_SSH_ARGS_APPEND", ""))
    return [*words, shell_command(request, os.environ, os.getcwd())]


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
    """One host's steward, and what it has said."""

    def __init__(self, host: str, node: int) -> None:
        self.host, self.node = host, node
        self.name = self.problem = ""
        """`name`: the host's own, by which `spares` and what it says call it."""
        self.ran_at, self.formed = float("-inf"), False
        """When it said last that the job's processes run there, and whether they had formed the job's first world."""
        self.told: Told | None = None
        self.over = False
        """It has had its last word, or its connection has ended."""
        self._ssh: asyncio.subprocess.Process | None = None

    async def prepare(self, ssh: Sequence[str], prepare: Prepare) -> None:
        """Connect, hand over what the host needs; `problem` says why it is not ready."""
        self._ssh = connection = await asyncio.create_subprocess_exec(
            *ssh[:-1], "--", self.host, ssh[-1], stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE, start_new_session=True, limit=LINE_BYTES_MAX,
        )  # fmt: skip
        self.say(prepare)
        try:
            async with asyncio.timeout(READY_S):
                async for word in self._words():
                    if isinstance(word, Ready):
                        self.name, self.problem = word.host, word.problem
                        self._complaints = asyncio.create_task(self._pass_on_complaints())
                        return
        except TimeoutError:
            self.problem = ": ".join(filter(None, [f"no answer within {READY_S:g} s", await self._complaint()]))
        else:
            self.problem = await self._complaint() or f"ssh ended with {connection.returncode}"

    async def listen(self, changed: asyncio.Event) -> None:
        """Ask for the steward's last word, which it has once the job has been there and is over, and wait for it."""
        self.say(Tell())
        try:
            async for word in self._words():
                if isinstance(word, Running):
                    self.ran_at, self.formed = time.monotonic(), self.formed or word.formed
                if isinstance(word, Told):
                    self.told = word
                    return
        finally:
            self.over = True
            changed.set()

    def say(self, word: Word) -> None:
        """Send `word`; nothing happens if the host is gone."""
        if self._ssh is None or self._ssh.returncode is not None:
            return
        assert self._ssh.stdin is not None
        if not self._ssh.stdin.is_closing():
            self._ssh.stdin.write(steward_protocol.encode(word))

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

    async def _words(self) -> AsyncIterator[Said]:
        """Read until the end of the connection."""
        assert self._ssh is not None and self._ssh.stdout is not None
        while line := await self._ssh.stdout.readline():
            if (word := steward_protocol.decode(line)) is not None:
                yield word

    async def _complaint(self) -> str:
        """Return the last lines ssh says before it ends; a shared ssh connection may keep the pipes open."""
        assert self._ssh is not None and self._ssh.stderr is not None
        said: list[str] = []
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_S):
                while line := await self._ssh.stderr.readline():
                    said.append(line.decode(errors="replace").strip())
                await self._ssh.wait()
        return " / ".join([line for line in said if line][-COMPLAINT_LINES:])

    async def _pass_on_complaints(self) -> None:
        assert self._ssh is not None and self._ssh.stderr is not None
        while line := await self._ssh.stderr.readline():
            say(f"{self.host}: {line.decode(errors='replace').rstrip()}", to=sys.stderr)
