"""Lessons of the first forked process: its imports, and work it names, are done in the standby process too, so
that the next fork starts warm.

Rules of this file: never in the way of training (where a rank runs, the importing thread stands behind everything else;
a host that stands by has nothing better to do), never a thread while the process forks: `pause` before, `resume` after.
A lesson is had once. A module that initialises CUDA as it is imported takes it from every process forked afterwards:
those look for that (`cuda_is_lost`) and begin anew.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
import threading
from collections import deque
from collections.abc import Iterable

NVML_CHECK = "PYTORCH_NVML_BASED_CUDA_CHECK"
"""Set, it lets `torch.cuda.is_available()`, which many modules ask as they are imported, leave CUDA alone."""
_CUDA_DEVICE = "/dev/nvidia-uvm"
"""Open in a process that has initialised CUDA; NVML does not open it."""
_CUDA_CONTROL = "/dev/nvidiactl"
"""There on every host with an NVIDIA driver."""
_NICE = 10
_END = "\0"
"""Said, because the end of file may never come: what the script forked before (a DataLoader) holds the pipe too."""


def preload(names: Iterable[str]) -> None:
    """Import what the configuration names; what cannot be imported is said, and is the script's to fail on."""
    for name in names:
        try:
            importlib.import_module(name)
        except Exception as error:
            print(f"[deadpool] could not preload {name}: {error}", file=sys.stderr, flush=True)


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

    Args: beforehand: `module:function:argument`, what is to be called after these imports.
    """
    if pipe < 0:
        return
    known = [
        name
        for name, module in list(sys.modules.items())
        if "site-packages" in _file_of(module) or name.startswith("deadpool_plugin.")
    ]
    with contextlib.suppress(BrokenPipeError), os.fdopen(pipe, "w") as file:
        file.write("\n".join([*known, *beforehand]) + _END)


def _file_of(module: object) -> str:
    try:
        return str(getattr(module, "__file__", None) or "")
    except Exception:  # a module that imports as it is asked may raise anything
        return ""


class Lessons:
    """Thread: the main one's."""

    def __init__(self) -> None:
        self._pipe = -1
        self._told = b""
        self._names: deque[str] = deque()
        self._pausing = threading.Event()
        self._thread: threading.Thread | None = None
        self._had = self._in_the_way = False

    @property
    def pipes(self) -> list[int]:
        """The descriptors that become readable when `begin` should be called."""
        return [self._pipe] if self._pipe >= 0 else []

    def ask(self, trains: bool) -> int:
        """Return where the process about to be forked shall write its names; -1 if nobody needs them any more.

        Args:
            trains: it runs a rank, beside which the names will be imported.
        """
        self._drop()
        self._in_the_way = trains
        self._told = b""
        if self._had:
            return -1
        self._pipe, tell = os.pipe()
        return tell

    def _drop(self) -> None:
        if self._pipe >= 0:
            os.close(self._pipe)
            self._pipe = -1

    def begin(self) -> None:
        """Some of the names have come (or the process has ended without telling them). Blocks: never."""
        piece = os.read(self._pipe, 1 << 16)
        self._told += piece
        whole = self._told.endswith(_END.encode())
        if whole or not piece:
            self._drop()
        if whole:
            self._had = True
            self._names.extend(self._told.decode().removesuffix(_END).split("\n"))
            self.resume()

    def resume(self) -> None:
        """Go on importing."""
        if self._names and self._thread is None:
            self._pausing.clear()
            self._thread = threading.Thread(target=self._learn, name="deadpool-lessons")
            self._thread.start()

    def pause(self) -> None:
        """No thread is left afterwards. Blocks: for the one module that is being imported."""
        if self._thread is not None:
            self._pausing.set()
            with contextlib.suppress(OSError):  # only a privileged process may hurry it up
                os.setpriority(os.PRIO_PROCESS, self._thread.native_id or 0, 0)
            self._thread.join()
            self._thread = None

    def _learn(self) -> None:
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
