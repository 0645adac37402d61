"""Saves as calls: begun when their step is committed, redone as a whole, skipped by a follower.

Rules of this file: collectives inside a save are its own and are not logged one by one. A thread or process that goes
on writing after the call returned is a `Flight`: a swap cancels all flights, waits until their writers are gone and
removes what they left, unless the checkpoint could be complete. A process that follows writes nothing. A file that a
script writes in one call past Python's `open` is a save, too: written beside its place and renamed, so that doing it
again never endangers what is there.
"""

from __future__ import annotations

import contextlib
import inspect
import io
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import torch

from ..comm.groups import Groups
from ..core import local
from . import codec
from .calls import Call, CallHandler, CallKind
from .copies import structure
from .folders import Folders
from .link import AgentLink
from .mute import Mute, reads_data
from .patching import Function, around, replace, when_imported

MARK = ".metadata"  # makes a folder of torch's or Megatron-core's a complete checkpoint
LEFT = ("__*_*.distcp", "__*_*.distcp.tmp", "common.pt", f"{MARK}.tmp")
"""The files that writers have written before it. Source: torch 2.13 filesystem.py; megatron-core 0.16.1 strategies/."""
SAFETENSORS = "safetensors.torch"  # need not be installed; its `save_model` writes by its `save_file`, too


class SaveCall(Call):
    """A call of a function that saves, which is given its arguments as they were at the first time."""

    name, kind = "", CallKind.SAVE
    gated = True  # it writes, so it begins when the step it would save is committed
    path: str | None = None  # what is whole once it is written, for the agent; None: nothing is
    whole = True  # a job may go on from there

    def __init__(self, saves: Saves, function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = structure(dict(inspect.signature(function).bind(*args, **kwargs).arguments))
        super().__init__(self.name or function.__qualname__, CallKind.SAVE, function, (), given)
        self._saves = saves

    def __call__(self) -> Any:
        began = time.monotonic()
        value = self.write()
        if self.path is not None:
            self._saves.written(self.path, began, whole=self.whole)
        return value

    def write(self) -> Any:
        return self.function(**structure(self.kwargs))

    def failed(self, error: BaseException) -> Any:
        return codec.encode_error(error)  # the script may go on; a redo does it again all the same


SaveKind = Callable[["Saves", Function, tuple[Any, ...], dict[str, Any]], SaveCall]


class Flight:
    """One save that goes on after its call returned. `path` and `files`: what it writes; empty if unknown.

    `keep_files`: they are not to be removed, as the checkpoint may be complete, or overwrites an older one.
    """

    ends_by_itself = False  # nobody need ask for it

    def __init__(self, saves: Saves, path: str, files: Sequence[str] = (), *, keep_files: bool = False) -> None:
        self.step, self.path, self.files, self._saves = saves.step, path, list(files), saves
        self.keep_files, self.began = keep_files, time.monotonic()
        self.cancelled = self.complete = False

    def check(self) -> None:
        """Allow a collective of a thread of its own. Raises: GenerationChanged."""

    def stop(self) -> None:
        """Cancel it: its writers end soon. Thread: any, the main thread may be waiting for them. Blocks: briefly."""
        self.cancelled = True

    def settle(self) -> None:
        """Block, after `stop`, until its writers are gone and nothing in this process will complete it."""

    def completed(self) -> None:
        """Note that it has ended by itself, and well. Thread: any."""
        self.complete = True
        if self.path:
            self._saves.written(self.path, self.began, self.step)
        self._saves.drop(self)

    def may_be_removed(self) -> bool:
        return not (self.keep_files or self.complete or not self.path)

    def remove_files(self) -> None:
        """Remove it, after `settle`. Raises: OSError if a file cannot be looked for, or removed."""
        if not self.may_be_removed():
            return
        for file in self.files:
            Path(file).unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # another rank was faster, or has written here
            os.rmdir(self.path)


own_flight: ContextVar[Flight | None] = ContextVar("own_flight", default=None)
"""The save that the calling thread carries out, if it does nothing else."""


class Saves:
    """The saves of one process. Thread: `abort` the link's, `drop` any; all else main thread only.

    `do` does a call, or skips it. `step`: whose state the save call under way saves. `on_cancel` forgets what a new
    process does not know, when a swap begins.
    """

    def __init__(self, link: AgentLink, groups: Groups, do: CallHandler) -> None:
        self.link, self.groups, self.do = link, groups, do
        self._pid, self._inside = os.getpid(), False
        self.step, self.folders = 0, Folders(link)
        self.flights: list[Flight] = []
        self.on_cancel: list[Callable[[], None]] = []

    def foreign(self) -> bool:
        """Return whether this is a writer's thread or process: its saves are no calls."""
        return threading.current_thread() is not threading.main_thread() or os.getpid() != self._pid

    def wrapped(self, original: Function, kind: SaveKind, unless: Callable[[], bool] = lambda: False) -> Function:
        """Return `original` as a call of that `kind`; as it is in a writer, or `unless`."""

        def save(original: Function, *args: Any, **kwargs: Any) -> Any:
            if unless() or self.foreign():
                return original(*args, **kwargs)
            return self.do(kind(self, original, args, kwargs))

        return around(original, save)

    def written(self, path: str, began: float, step: int | None = None, *, whole: bool = True) -> None:
        """Tell the agent that this rank's part at `path` is complete. `whole`: a job may go on from there."""
        step = self.step if step is None else step
        self.link.send(local.CheckpointSaved(step, path, whole))
        self.link.event("CheckpointSaved", step=step, path=path, duration_s=time.monotonic() - began)

    @contextlib.contextmanager
    def under_way(self) -> Iterator[None]:
        """Enclose a save that no interruption of collectives ends. Raises: GenerationChanged."""
        self._inside = True
        try:
            self.groups.generations.check()  # whoever announced that could not yet know of this
            yield
        finally:
            self._inside = False

    def drop(self, flight: Flight) -> None:
        """Forget a flight that has ended by itself; what it wrote is as it would be without us."""
        with contextlib.suppress(ValueError):  # a swap has cancelled it
            self.flights.remove(flight)
        self.link.wake()

    def wait_for_threads(self) -> None:
        """Block until every flight that ends by itself has. Raises: GenerationChanged."""
        self.link.wait_until(lambda: not any(flight.ends_by_itself for flight in list(self.flights)))

    def abort(self, generation: int) -> None:
        """Begin a swap: the main thread may be in a save, or be waiting for a writer."""
        if self._inside:
            self.link.send(local.Saving(generation))
        for flight in list(self.flights):
            flight.stop()

    def cancel(self) -> list[Flight]:
        """End every flight, then remove what they wrote. Returns them. Blocks: until their writers are gone."""
        flights, self.flights = list(self.flights), []
        for flight in flights:
            flight.stop()
        for flight in flights:
            flight.settle()
        for flight in flights:
            try:
                flight.remove_files()
            except OSError as error:  # without its mark it is no checkpoint to anybody
                what = f"of the cancelled checkpoint of step {flight.step} in {flight.path}"
                self.link.event("Note", text=f"the files {what} could not be removed: {error}")
        for forget in self.on_cancel:
            forget()
        return flights

    def sweep(self, flights: Sequence[Flight], restore_step: int) -> None:
        """Remove what a lost process left of `flights` that are not done again. No survivor writes any more."""
        for flight in flights:
            folder = Path(flight.path)
            # No rank can have completed a checkpoint that was to be removed here.
            if flight.step < restore_step and flight.may_be_removed() and not (folder / MARK).exists():
                with contextlib.suppress(OSError):  # another rank is at it, too; without its mark it is no checkpoint
                    for file in (file for pattern in LEFT for file in folder.glob(pattern)):
                        file.unlink(missing_ok=True)
                    folder.rmdir()

    def report_cancelled(self, flights: Sequence[Flight], restore_step: int) -> None:
        behind = f"training goes on from step {restore_step}, behind it"
        for flight in [flight for flight in flights if not flight.complete]:
            reason = "it is done again" if flight.step >= restore_step else behind
            self.link.event("CheckpointCancelled", step=flight.step, path=flight.path, reason=reason)


class FolderSave(SaveCall):
    """A save of all ranks to one folder."""

    folder_argument: str
    path: str  # the folder; "" if unknown
    rank: int  # by which its files are named
    _overwrites: bool | None = None

    def outcome(self, value: Any) -> None:
        return None

    def begin_attempt(self) -> bool:
        """Agree with all ranks on one folder. Returns: whether an older checkpoint there is overwritten."""
        if self.path and not self.kwargs.get("no_dist"):
            agreed = self._saves.folders.one_folder(self.path, self.kwargs.get("process_group"))
            if agreed != self.path:
                self.kwargs[self.folder_argument] = self.path = agreed
                self._overwrites = None
        if self._overwrites is None:
            self._overwrites = self.is_complete()
        elif not self._overwrites:
            for file in self._marks():  # written again from here on, and that may be interrupted for good
                file.unlink(missing_ok=True)
        return self._overwrites

    def is_complete(self) -> bool:
        return any(file.exists() for file in self._marks())

    def _marks(self) -> list[Path]:
        """List the files that make it a complete checkpoint (of this rank), which are written last."""
        return [Path(self.path, name) for name in (MARK, f"__{self.rank}.metadata")] if self.path else []


# ---- files that a script writes in one call


def install(saves: Saves) -> None:
    """Wrap what writes files; safetensors' as soon as a script imports it. Once, before the script runs."""
    wrappers = {torch.save: save_file(saves, "torch.save", torch.save)}

    def wrap(safetensors: Any) -> None:
        original = safetensors.save_file
        wrappers[original] = safetensors.save_file = save_file(saves, f"{SAFETENSORS}.save_file", original)

    when_imported(SAFETENSORS, wrap)
    replace(wrappers)


def save_file(saves: Saves, name: str, original: Function) -> Function:
    """Return `original`, whose second parameter is where to write, as a call if that is a path."""
    signature = inspect.signature(original)
    where = list(signature.parameters)[1]

    def save(original: Function, *args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs)
        file = given.arguments[where]

        def write(path: Path) -> None:
            given.arguments[where] = path
            original(*given.args, **given.kwargs)

        if isinstance(file, (str, os.PathLike)) and not saves.foreign():
            return saves.do(FileSave(name, saves, os.fspath(file), write))
        if Mute.active and not reads_data() and not isinstance(file, io.BytesIO):
            return None
        return original(*args, **kwargs)

    return around(original, save)


class FileSave(SaveCall):
    """A call of `write`, which makes the file at `path`. Its outcome says where that is."""

    def __init__(self, name: str, saves: Saves, path: str, write: Callable[[Path], Any]) -> None:
        self.name, self._saves, self._path = name, saves, str(Path(path))
        # None once it is done, or has failed: what it was given may have changed since, or the script moved the file.
        self._write: Callable[[Path], Any] | None = write

    def __call__(self) -> None:
        if self._write is not None:
            began = time.monotonic()
            self._path = self._saves.folders.file(self._path)
            write_beside(Path(self._path), self._write)
            self._write = None
            self._saves.written(self._path, began, whole=False)

    def outcome(self, value: Any) -> bytes:
        return os.fsencode(self._path)

    def skipped(self, outcome: bytes | None) -> None:
        if outcome is not None:  # else it comes before the first forward
            self._saves.folders.follow(self._path, os.fsdecode(outcome))

    def failed(self, error: BaseException) -> Any:
        self._write = None
        return super().failed(error)


def write_beside(path: Path, write: Callable[[Path], Any]) -> None:
    """Let `write` make the file at `path` as a whole: until it is done, what was there stays."""
    if path.exists() and not path.is_file():  # a device or pipe is written to, not replaced
        write(path)
        return
    real = Path(os.path.realpath(path))
    beside = real.parent / f".{real.name}.{os.environ['RANK']}.writing"
    shutil.rmtree(beside, ignore_errors=True)  # of a process that was killed while it wrote
    beside.mkdir()
    try:  # the file's name is part of what torch writes, so it has its own from the start
        write(beside / path.name)
        os.replace(beside / path.name, real)
    finally:
        shutil.rmtree(beside, ignore_errors=True)
