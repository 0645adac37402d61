"""Preloads into the standby process what the first forked process imported, and does work that it names, so that later
forks start warm.

Rules of this file: never in the way of training (where a rank runs, the importing thread stands behind everything else;
a host that stands by has nothing better to do), never a thread while the process forks: `pause` before, `resume` after.
It is done once. A module that initialises CUDA as it is imported takes it from every process forked afterwards: those
look for that (`cuda_is_lost`) and begin anew.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
import threading
from collections import deque
from collections.abc import Iterable

from ..host.output import say

NVML_CHECK = "PYTORCH_NVML_BASED_CUDA_CHECK"
"""Set, it lets `torch.cuda.is_available()`, which many modules ask as they are imported, leave CUDA alone."""
_CUDA_DEVICE = "/dev/nvidia-uvm"
"""Open in a process that has initialised CUDA; NVML does not open it."""
_CUDA_CONTROL = "/dev/nvidiactl"
"""There on every host with an NVIDIA driver."""
_NICE = 10
_END = b"\0"
"""Said, because the end of file may never come: what the script forked before (a DataLoader) holds the pipe too."""


def preload(names: Iterable[str]) -> None:
    """Import what the configuration names; what cannot be imported is said, and is the script's to fail on."""
    for name in names:
        try:
            importlib.import_module(name)
        except Exception as error:
            say(f"could not preload {name}: {error}", to=sys.stderr)


def cuda_is_lost() -> bool:
    """Return, in a forked process, whether CUDA was initialised in one before it and cannot be initialised again."""
    if "torch" in sys.modules and (cuda := sys.modules["torch"].cuda)._is_in_bad_fork():
        # A torch built for CUDA says so on a host without a device too, where there is nothing to lose.
        return os.path.exists(_CUDA_CONTROL) or cuda.device_count() > 0
    opened = []
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # closed since it was listed
            opened.append(os.readlink(f"/proc/self/fd/{descriptor}"))
    return _CUDA_DEVICE in opened


def tell_modules(pipe: int, beforehand: Iterable[str] = ()) -> None:
    """Tell the names of the installed modules this forked process has imported and of ours, not of the user's own.

    Args: pipe: -1 if nobody asks. beforehand: `module:function:argument`, what is to be called after these imports.
    """
    if pipe < 0:
        return
    known = []
    for name, module in list(sys.modules.items()):
        file = ""
        with contextlib.suppress(Exception):  # a module that imports as it is asked may raise anything
            file = str(getattr(module, "__file__", None) or "")
        if "site-packages" in file or name.startswith("deadpool_plugin."):
            known.append(name)
    with contextlib.suppress(BrokenPipeError), os.fdopen(pipe, "wb") as stream:
        stream.write("\n".join([*known, *beforehand]).encode() + _END)


class Prewarm:
    """The names that are heard from the first forked process, and their import. Thread: the main one's."""

    def __init__(self) -> None:
        self._pipe = -1
        self._heard = b""
        self._names: deque[str] = deque()
        self._pausing = threading.Event()
        self._thread: threading.Thread | None = None
        self._has_names = self._in_the_way = False

    @property
    def pipes(self) -> list[int]:
        """The descriptors that become readable when `begin` should be called."""
        return [self._pipe] if self._pipe >= 0 else []

    def ask(self, trains: bool) -> int:
        """Return the descriptor for the names of the process about to be forked; -1 if nobody needs them any more.

        Args: trains: it runs a rank, beside which the names will be imported.
        """
        self._close()
        self._in_the_way, self._heard = trains, b""
        if self._has_names:
            return -1
        self._pipe, tell = os.pipe()
        return tell

    def begin(self) -> None:
        """Read names: some have come (or the process has ended without telling them). Blocks: never."""
        piece = os.read(self._pipe, 1 << 16)
        self._heard += piece
        self._has_names = self._heard.endswith(_END)
        if self._has_names or not piece:
            self._close()
        if self._has_names:
            self._names.extend(self._heard.removesuffix(_END).decode().split("\n"))
            self.resume()

    def _close(self) -> None:
        if self._pipe >= 0:
            os.close(self._pipe)
            self._pipe = -1

    def resume(self) -> None:
        """Go on importing."""
        if self._names and self._thread is None:
            self._pausing.clear()
            self._thread = threading.Thread(target=self._run, name="deadpool-prewarm")
            self._thread.start()

    def pause(self) -> None:
        """Stop importing; no thread is left. Blocks: for the one module that is being imported."""
        if self._thread is not None:
            self._pausing.set()
            with contextlib.suppress(OSError):  # only a privileged process may hurry it up
                os.setpriority(os.PRIO_PROCESS, self._thread.native_id or 0, 0)
            self._thread.join()
            self._thread = None

    def _run(self) -> None:
        if self._in_the_way:
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
        while self._names and not self._pausing.is_set():
            name, *call = self._names.popleft().split(":", 2)
            # An import that fails here (off the main thread, say) costs a later process its import, no more.
            with contextlib.suppress(Exception):
                module = importlib.import_module(name)
                if call:
                    function, argument = call
                    getattr(module, function)(argument)
