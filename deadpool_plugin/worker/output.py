"""A rehearsing process is not heard and leaves no files: what it prints is kept apart until it takes over.

Rules of this file: what the script writes in its loop has been written by the rank itself already, and what it writes
of a step that is long over would be wrong now (the file that names the latest checkpoint). Descriptors 1 and 2 are a
pipe to the agent, never a file: on a full disk the writes of C code and of children would fail. Standard library only.
"""

from __future__ import annotations

import builtins
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
from collections.abc import Callable, Iterator, MutableMapping
from pathlib import Path
from typing import Any

from ..transport import linux
from .trackers import Trackers

CHANGING = ((os, "rename"), (os, "replace"), (os, "remove"), (os, "unlink"), (os, "rmdir"), (shutil, "rmtree"),
            (os, "makedirs"), (Path, "mkdir"))  # fmt: skip
"""The functions that a rehearsal may not call. `os.mkdir` is left: it makes Python's own temporary folders."""
RELEASED, STARTS, LOOPS = range(3)
"""Stages of a rehearsal: it may change any file; all but logs; none."""
OPENER = 5
"""Place of that argument of `open` among those after the mode."""


class Lock:
    """Between the threads of one process: what is forked while another thread has it has one of its own."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        os.register_at_fork(after_in_child=self._renew)

    def _renew(self) -> None:
        self._lock = threading.RLock()

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        with self._lock:
            yield


class Mute:
    """Redirects file descriptors 1 and 2 into `private` until `lift`; works for everything below Python too.

    Args: private: a descriptor, ours from now on.
    """

    active = False

    def __init__(self, private: int) -> None:
        self._saved = [os.dup(fd) for fd in (1, 2)]
        self._originals: list[tuple[Any, str, Any]] = []
        self._silent: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()
        self._keeping = mmap.mmap(-1, 1)  # shared with what the script forks
        self._releasing = Lock()
        self._unsaid: list[str] = []
        for fd in (1, 2):
            os.dup2(private, fd)
        os.close(private)
        self._streams = sys.stdout, sys.stderr
        self._ours = sys.stdout, sys.stderr = _unfailing(1, sys.stdout), _unfailing(2, sys.stderr)
        self._trackers = Trackers()
        self._keeping[0] = STARTS
        self._own: set[str] = set()
        """Files that this process has made, or written anew, in start-up."""
        for module in (builtins, io):
            self._replace(module, "open", _reading(module.open, self._silent, self._keeps_open, self._releasing))
        for owner, name in CHANGING:
            # One part of `rmtree` (os.unlink) knows no path: it is nothing as a whole also in a compiler's cache.
            keeps = self._keeps_all if name == "rmtree" else self._keeps
            self._replace(owner, name, _doing_nothing(getattr(owner, name), keeps))
        Mute.active = True

    def keep_files(self) -> None:
        """From here on (the script's loop, where what it writes has been written already) files are left as they are.

        Opening one to write gives /dev/null instead; renaming, removing and making directories do nothing. For every
        thread but the plugin's own and every process it forks but those of a DataLoader (what they write, they read
        again), until `release_files`, which lets files that are still open go on at the end of what the rank itself has
        written. A file that is made by an `opener` is that one's affair (Python's own temporary ones are); compilers
        read from their caches what they have just written there.
        Before it, in start-up, logs are left as they are: a file that is appended to (one that has something in it, and
        that this process has not made), and the folders that TensorBoard logs to.
        What goes past Python's `open` and `os` is not caught: a script can ask `is_rehearsal()`.
        """
        self._keeping[0] = LOOPS

    def _keeps(self, path: Any) -> bool:
        """Return whether the caller's file is left as it is: asked each time, as a script may hold on to `open`."""
        return self._keeps_all(path) and not _is_compilers(path)

    def _keeps_all(self, path: Any) -> bool:
        keeps = self._keeping[0] == LOOPS or (self._keeping[0] == STARTS and self._is_logs(path))
        return keeps and not _is_ours() and not reads_data()

    def _is_logs(self, path: Any) -> bool:
        """Return whether it lies in a folder that a writer logs to which waits for the take-over."""
        folders = self._trackers.folders()
        whole = os.path.abspath(os.fsdecode(path)) if folders else ""
        return any(whole.startswith(os.path.abspath(folder) + os.sep) for folder in folders)

    def _keeps_open(self, path: Any, mode: str) -> bool:
        """Return whether `open` is to give /dev/null for it."""
        if self._keeps(path):
            return True
        if self._keeping[0] != STARTS or reads_data():
            return False
        whole = os.path.abspath(os.fsdecode(path))
        appends = "a" in mode and "+" not in mode and whole not in self._own and not _is_compilers(path)
        if appends and os.path.isfile(whole) and os.path.getsize(whole):
            return True
        self._own.add(whole)
        return False

    def _replace(self, owner: Any, name: str, function: Callable[..., Any]) -> None:
        self._originals.append((owner, name, getattr(owner, name)))
        setattr(owner, name, function)

    def release_files(self) -> None:
        """The script's files are ours to write again. Of one that cannot be, `lift` says so."""
        with self._releasing.held():
            self._keeping[0] = RELEASED
        for owner, name, original in self._originals:
            setattr(owner, name, original)
        self._originals.clear()
        for file, path in list(self._silent.items()):
            try:
                if not file.closed:
                    _go_on(file, path)
            except OSError as error:
                self._unsaid.append(f"the script's output to {path}, which it opened before, is lost: {error}")
            except ValueError:  # a thread of the script's has closed it meanwhile
                continue
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


class _Unfailing(io.FileIO):
    """Drops what it cannot write."""

    def write(self, data: Any) -> int:
        with contextlib.suppress(OSError):
            super().write(data)
        return memoryview(data).nbytes


def _unfailing(fd: int, stream: Any) -> io.TextIOWrapper:
    """A stream over `fd` as `stream` is, but unbuffered (so are ours: python -u)."""
    return io.TextIOWrapper(_Unfailing(fd, "w", closefd=False), stream.encoding, stream.errors, write_through=True)


def flush() -> None:
    """Hand over what has been printed so far: at a cut, so that the agent knows what was printed before it.

    A stream of the script's own that cannot take it (a full disk) says so when the script prints again.
    """
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            with contextlib.suppress(OSError):
                stream.flush()


def _is_ours() -> bool:
    """Return whether the calling thread is the plugin's: a script's own may remove a checkpoint behind its back."""
    return threading.current_thread().name.startswith("deadpool-")


def _is_compilers(path: Any) -> bool:
    """Return whether it is in a cache of compiled code: Inductor's (which names it there before it writes), Triton's,
    that of torch's extensions."""
    environ, home = os.environ, os.path.expanduser("~")
    cache = environ.get("XDG_CACHE_HOME") or os.path.join(home, ".cache")
    folders = [
        environ.get("TORCHINDUCTOR_CACHE_DIR", ""),
        environ.get("TRITON_CACHE_DIR") or os.path.join(environ.get("TRITON_HOME") or home, ".triton"),
        environ.get("TORCH_EXTENSIONS_DIR") or os.path.join(cache, "torch_extensions"),
    ]
    real = os.path.realpath(os.fsdecode(path)) + os.sep
    return any(real.startswith(os.path.realpath(folder) + os.sep) for folder in folders if folder)


def reads_data() -> bool:
    """Return whether this is a worker process of a DataLoader: the files it makes (a cache) are for itself."""
    loading = sys.modules.get("torch.utils.data")
    return loading is not None and loading.get_worker_info() is not None


def _go_on(file: Any, path: str) -> None:
    """Append to `path` from here on what is written to `file`, which was silent so far. Raises: OSError."""
    file.flush()
    access = fcntl.fcntl(file.fileno(), fcntl.F_GETFL) & os.O_ACCMODE
    with contextlib.suppress(FileNotFoundError):  # its folder was removed: nobody would see what the rank writes either
        descriptor = os.open(path, access | os.O_CREAT | os.O_APPEND, 0o666)
        os.dup2(descriptor, file.fileno(), inheritable=False)
        os.close(descriptor)


def _reading(
    original: Callable[..., Any], silent: MutableMapping[Any, str], keeps: Callable[[Any, str], bool], releasing: Lock
) -> Callable[..., Any]:
    @functools.wraps(original)
    def open_to_read(file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        writes = any(letter in mode for letter in "wax+") and isinstance(file, (str, bytes, os.PathLike))
        opener = kwargs.get("opener", args[OPENER] if len(args) > OPENER else None)
        if not writes or opener is not None:
            return original(file, mode, *args, **kwargs)
        with releasing.held():
            if keeps(file, mode):
                opened = original(os.devnull, mode.replace("x", "w"), *args, **kwargs)
                silent[opened] = os.path.abspath(os.fsdecode(file))
                return opened
        return original(file, mode, *args, **kwargs)

    return open_to_read


def _doing_nothing(original: Callable[..., Any], keeps: Callable[[Any], bool]) -> Callable[..., Any]:
    """`original`, whose first argument is a path."""

    @functools.wraps(original)
    def nothing(*args: Any, **kwargs: Any) -> Any:
        path = args[0] if args else next(iter(kwargs.values()))
        return None if keeps(path) else original(*args, **kwargs)

    return nothing
