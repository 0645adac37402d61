"""Output of a rehearsing process: what it prints is kept apart, and it leaves no files, until it takes over.

Rules of this file: what the script writes of a step that is long over would be wrong now (the file that names the
latest checkpoint). Descriptors 1 and 2 are a pipe to the agent, never a file: on a full disk the writes of C code and
of children would fail. What goes past Python's `open` and `os` is not caught. Standard library only.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import io
import mmap
import os
import shutil
import sys
import threading
import weakref
from pathlib import Path
from typing import Any

from ..transport import linux
from .patching import Function, PatchSet
from .trackers import Trackers

RELEASED, STARTS, LOOPS = range(3)  # stages of a rehearsal: it may change any file; all but logs; none


class Mute:
    """Redirects file descriptors 1 and 2 into `private`, a descriptor that is ours from now on, until `lift`."""

    active = False

    def __init__(self, private: int) -> None:
        self._saved = [os.dup(fd) for fd in (1, 2)]
        for fd in (1, 2):
            os.dup2(private, fd)
        os.close(private)
        self._streams = sys.stdout, sys.stderr
        self._ours = sys.stdout, sys.stderr = [  # as they are, but unbuffered (so are ours: python -u)
            io.TextIOWrapper(_Unfailing(fd, "w", closefd=False), stream.encoding, stream.errors, write_through=True)
            for fd, stream in enumerate(self._streams, 1)
        ]
        self._trackers = Trackers()
        self._stage = mmap.mmap(-1, 1)  # shared with what the script forks
        self._stage[0] = STARTS
        self._silent = weakref.WeakKeyDictionary[Any, str]()  # files that were opened as /dev/null, and their paths
        self._own: set[str] = set()  # files that this process has made, or written anew, in start-up
        self._unsaid: list[str] = []
        os.register_at_fork(after_in_child=self._renew_lock)
        self._renew_lock()
        self._patches = PatchSet()
        self._patches.wrap_open(self._open)
        # `os.mkdir` is left: it makes Python's own temporary folders.
        self._patches.wrap(self._change, os, "rename", "replace", "remove", "unlink", "rmdir", "makedirs")
        self._patches.wrap(self._change, Path, "mkdir")
        # A tree goes in parts, by os.unlink that knows no path: it is kept as a whole also in a compiler's cache.
        self._patches.wrap(functools.partial(self._change, in_caches=True), shutil, "rmtree")
        Mute.active = True

    def keep_files(self) -> None:
        """Leave files as they are from here on: what the script writes in its loop has been written already.

        Opening one to write gives /dev/null instead; renaming, removing and making directories do nothing. That goes
        for every thread but the plugin's own, and for every process it forks but those of a DataLoader (what they
        write, they read again). Exceptions: files that an `opener` makes (Python's temporary ones), compilers' caches.
        Before, only logs are left as they are: a file that is appended to, unless it is empty or this process has made
        it, and the folders that TensorBoard logs to.
        """
        self._stage[0] = LOOPS

    def release_files(self) -> None:
        """Let the script write its files again: open ones at the end of what the rank itself has written."""
        with self._releasing:
            self._stage[0] = RELEASED
        self._patches.undo()
        for file, path in list(self._silent.items()):
            try:
                # It is closed, by a thread maybe; or nobody would see what the rank writes there either.
                with contextlib.suppress(ValueError, FileNotFoundError):
                    file.flush()
                    access = fcntl.fcntl(file.fileno(), fcntl.F_GETFL) & os.O_ACCMODE
                    descriptor = os.open(path, access | os.O_CREAT | os.O_APPEND, 0o666)
                    os.dup2(descriptor, file.fileno(), inheritable=False)
                    os.close(descriptor)
            except OSError as error:
                self._unsaid.append(f"the script's output to {path}, which it opened before, is lost: {error}")
        self._silent.clear()

    def lift(self) -> None:
        flush()
        for fd, saved in zip((1, 2), self._saved, strict=True):
            os.dup2(saved, fd)
            os.close(saved)
        for name, ours, stream in zip(("stdout", "stderr"), self._ours, self._streams, strict=True):
            if getattr(sys, name) is ours:  # else the script has put another one there
                setattr(sys, name, stream)
        for line in self._unsaid:
            print(f"[deadpool] {line}", file=sys.stderr, flush=True)
        Mute.active = False
        linux.name_process(f"python-rank{os.environ.get('RANK', '')}")
        self._trackers.resume()

    def _renew_lock(self) -> None:  # a process that is forked while another thread has the lock has one of its own
        self._releasing = threading.RLock()

    # ---- functions in the place of Python's, which a script may hold on to: each asks for the stage at each call

    def _open(self, original: Function, file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        writes = any(letter in mode for letter in "wax+") and isinstance(file, (str, bytes, os.PathLike))
        opener = kwargs.get("opener", args[5] if len(args) > 5 else None)  # the sixth behind the mode
        if writes and opener is None:
            with self._releasing:
                if self._is_kept(file) or self._is_kept_log(file, mode):
                    opened = original(os.devnull, mode.replace("x", "w"), *args, **kwargs)
                    self._silent[opened] = os.path.abspath(os.fsdecode(file))
                    return opened
        return original(file, mode, *args, **kwargs)

    def _change(self, original: Function, *args: Any, in_caches: bool = False, **kwargs: Any) -> Any:
        given = [*args[:1], *(kwargs[name] for name in ("path", "src", "name") if name in kwargs)]
        return None if given and self._is_kept(given[0], in_caches) else original(*args, **kwargs)

    def _is_kept(self, path: Any, in_caches: bool = False) -> bool:
        """Return whether the caller's file is left as it is. `in_caches`: in compilers' too."""
        if threading.current_thread().name.startswith("deadpool-") or reads_data():
            return False  # the plugin's own threads may remove a checkpoint behind the script's back
        if self._stage[0] == STARTS:
            folders = self._trackers.folders()
            whole = os.path.abspath(os.fsdecode(path)) if folders else ""
            if not any(whole.startswith(os.path.abspath(folder) + os.sep) for folder in folders):
                return False
        return self._stage[0] != RELEASED and (in_caches or not _is_compilers(path))

    def _is_kept_log(self, path: Any, mode: str) -> bool:
        """Return whether the rank appends to it, and not this process alone."""
        if self._stage[0] != STARTS or reads_data():
            return False
        whole = os.path.abspath(os.fsdecode(path))
        appends = "a" in mode and "+" not in mode and whole not in self._own and not _is_compilers(path)
        kept = appends and os.path.isfile(whole) and os.path.getsize(whole) > 0
        if not kept:
            self._own.add(whole)
        return kept


class _Unfailing(io.FileIO):
    """Drops what it cannot write."""

    def write(self, data: Any) -> int:
        with contextlib.suppress(OSError):
            super().write(data)
        return memoryview(data).nbytes


def flush() -> None:
    """Hand over what has been printed so far: at a cut, so that the agent knows what was printed before it."""
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            with contextlib.suppress(OSError):  # one of the script's own, on a full disk, says so when it prints again
                stream.flush()


def reads_data() -> bool:
    """Return whether this is a worker process of a DataLoader: the files it makes (a cache) are for itself."""
    loading = sys.modules.get("torch.utils.data")
    return loading is not None and loading.get_worker_info() is not None


def _is_compilers(path: Any) -> bool:
    """Return whether it is in a cache of compiled code: Inductor's, Triton's or that of torch's extensions."""
    environ, home = os.environ, os.path.expanduser("~")
    cache = environ.get("XDG_CACHE_HOME") or f"{home}/.cache"
    folders = (
        environ.get("TORCHINDUCTOR_CACHE_DIR"),
        environ.get("TRITON_CACHE_DIR") or f"{environ.get('TRITON_HOME') or home}/.triton",
        environ.get("TORCH_EXTENSIONS_DIR") or f"{cache}/torch_extensions",
    )
    real = os.path.realpath(os.fsdecode(path)) + os.sep
    return any(real.startswith(os.path.realpath(folder) + os.sep) for folder in folders if folder)
