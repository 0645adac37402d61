"""Saving a checkpoint is one call: begun when its step is committed, done again as a whole, skipped by a follower.

Rules of this file: collectives inside a save are the save's own and are not logged one by one. What goes on behind
the script's back after the call returned (a thread or process that writes) is a `Flight`: a swap cancels all flights,
waits until their writers are gone and removes what they left, unless the checkpoint could be complete. A process
that follows writes nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import os
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..core import local
from . import raised
from .adapter import CallHandler, CallKind, Followed
from .folders import Folders

if TYPE_CHECKING:
    from ..comm.groups import Groups
    from .link import AgentLink


MARK = ".metadata"
"""The file that makes a folder of torch's or Megatron-core's a complete checkpoint."""
LEFT = ("__*_*.distcp", "__*_*.distcp.tmp", "common.pt", f"{MARK}.tmp")
"""The files that writers have written before it. Source: torch 2.13 filesystem.py; megatron-core 0.16.1 strategies/."""


class SaveCall(Followed):
    """One call that saves; calling it does it (again).

    `gated`: it begins to write, so it waits until the step it would save is committed.
    """

    name = "save"
    gated = True

    def outcome(self, value: Any) -> Any:
        return None

    def failed(self, error: BaseException) -> Any:
        """The script is told, and may go on; a redo does it again all the same."""
        return raised.encode(error)

    def skipped(self, outcome: Any) -> Any:
        """A follower writes nothing."""
        return None


class Flight:
    """One save that goes on after its call returned. `path` and `files`: what it writes; empty if unknown.

    `ends_by_itself`: nobody need ask for it.
    """

    ends_by_itself = False

    def __init__(self, saves: Saves, path: str, files: Sequence[str] = ()) -> None:
        self.step, self.path, self.files, self._saves = saves.step, path, list(files), saves
        self.began = time.monotonic()
        self.keep_files = False
        """Its files are not to be removed: the checkpoint may be complete, or overwrites an older one."""
        self.cancelled = self.complete = False

    def check(self) -> None:
        """Before every collective of a thread of its own. Raises: GenerationChanged."""

    def stop(self) -> None:
        """Make its writers end soon. Thread: any, the main thread may be waiting for them. Never blocks for long."""

    def settle(self) -> None:
        """Block, after `stop`, until its writers are gone and nothing in this process will complete it."""

    def completed(self) -> None:
        self.complete = True
        self._saves.landed(self)

    def failed(self) -> None:
        """It has ended by itself; what it wrote is as it would be without us."""
        self._saves.dropped(self)

    def remove_files(self) -> None:
        """Remove it, after `settle`. Raises: OSError if a file cannot be looked for, or removed."""
        if self.keep_files or self.complete or not self.path:
            return
        for file in self.files:
            Path(file).unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # another rank was faster, or has written here
            os.rmdir(self.path)


_own = threading.local()


def adopt_thread(flight: Flight) -> None:
    """The calling thread does nothing but `flight` from here on."""
    _own.flight = flight


def own_flight() -> Flight | None:
    """The save that the calling thread carries out, if it is one that writes in the background."""
    return getattr(_own, "flight", None)


class Saves:
    """The saves of one process. Thread: `abort` the link's, `landed` and `dropped` any; all else main thread only."""

    def __init__(self, link: AgentLink, groups: Groups, handler: CallHandler) -> None:
        self._link, self._groups, self._handler = link, groups, handler
        self._flights: list[Flight] = []
        self._pid = os.getpid()
        self.step = 0
        """The step whose state the save call under way saves."""
        self._inside = False
        self.folders = Folders(link)
        self.on_cancel: list[Callable[[], None]] = []
        """Further things to forget when a swap begins, so that survivors are like a new process."""

    @property
    def generation(self) -> int:
        return self._groups.generation

    def foreign(self) -> bool:
        """Return whether this is a writer's thread or process: its saves are no calls."""
        return threading.current_thread() is not threading.main_thread() or os.getpid() != self._pid

    def do(self, call: SaveCall) -> Any:
        """Hand `call` to whoever decides what becomes of it now. The script's main thread only."""
        return self._handler(call.name, CallKind.SAVE, call, (), {})

    def wrapped(
        self,
        original: Callable[..., Any],
        make: Callable[[tuple[Any, ...], dict[str, Any]], SaveCall],
        unless: Callable[[], bool] = lambda: False,
    ) -> Callable[..., Any]:
        """`original` as the call that `make(args, kwargs)` describes; as it is in a writer, or `unless`."""

        @functools.wraps(original)
        def save(*args: Any, **kwargs: Any) -> Any:
            return original(*args, **kwargs) if unless() or self.foreign() else self.do(make(args, kwargs))

        return save

    def written(self, path: str, began: float, step: int | None = None, *, whole: bool = True) -> None:
        """Tell the agent that the checkpoint at `path` is complete as far as this rank is concerned.

        `whole`: it is all that a job needs to go on from there, as far as anybody can tell.
        """
        step = self.step if step is None else step
        self._link.send(local.Saved(step, path, whole))
        self._link.event("CheckpointSaved", step=step, path=path, duration_s=time.monotonic() - began)

    def wait_until(self, done: Callable[[], bool]) -> None:
        """Block until `done()`; `wake` after changing what it looks at. Raises: GenerationChanged."""
        self._link.wait_until(done)

    def wake(self) -> None:
        self._link.wake()

    # ---- flights

    @property
    def flights(self) -> list[Flight]:
        return list(self._flights)

    def launch(self, flight: Flight) -> None:
        self._flights.append(flight)

    def wait_for_threads(self) -> None:
        """Block until every flight that ends by itself has. Raises: GenerationChanged."""
        self.wait_until(lambda: not any(flight.ends_by_itself for flight in self.flights))

    def landed(self, flight: Flight) -> None:
        if flight.path:
            self.written(flight.path, flight.began, flight.step)
        self.dropped(flight)

    def dropped(self, flight: Flight) -> None:
        with contextlib.suppress(ValueError):  # a swap has cancelled it
            self._flights.remove(flight)
        self._link.wake()

    @contextlib.contextmanager
    def under_way(self) -> Iterator[None]:
        """Around a save that no interruption of collectives ends. Raises: GenerationChanged."""
        self._inside = True
        try:
            self._link.check()  # whoever announced that could not yet know of this
            yield
        finally:
            self._inside = False

    def abort(self, generation: int) -> None:
        """A swap begins: the main thread may be in a save, or be waiting for a writer."""
        if self._inside:
            self._link.send(local.Saving(generation))
        for flight in list(self._flights):
            flight.cancelled = True
            flight.stop()

    def cancel(self) -> list[Flight]:
        """End every flight, then remove what they wrote. Returns them. Blocks: until their writers are gone."""
        flights, self._flights = list(self._flights), []
        for flight in flights:
            flight.cancelled = True
            flight.stop()
        for flight in flights:
            flight.settle()
        for flight in flights:
            try:
                flight.remove_files()
            except OSError as error:  # without its mark it is no checkpoint to anybody
                what = f"of the cancelled checkpoint of step {flight.step} in {flight.path}"
                self._link.event("Note", text=f"the files {what} could not be removed: {error}")
        for forget in self.on_cancel:
            forget()
        return flights

    def sweep(self, flights: Sequence[Flight], restore_step: int) -> None:
        """Remove what a lost process has left of `flights` that are not done again: it cannot do so itself.

        All survivors are in the new generation, so none of them writes any more. A flight whose files were to be
        removed here cannot have been completed anywhere.
        """
        for flight in flights:
            if flight.step >= restore_step or flight.keep_files or flight.complete or not flight.path:
                continue
            folder = Path(flight.path)
            if (folder / MARK).exists():
                continue
            with contextlib.suppress(OSError):  # another rank is at it, too; without its mark it is no checkpoint
                for file in (file for pattern in LEFT for file in folder.glob(pattern)):
                    file.unlink(missing_ok=True)
                folder.rmdir()

    def report_cancelled(self, flights: Sequence[Flight], restore_step: int) -> None:
        for flight in [flight for flight in flights if not flight.complete]:
            again = flight.step >= restore_step
            reason = "it is done again" if again else f"training goes on from step {restore_step}, behind it"
            self._link.event("CheckpointCancelled", step=flight.step, path=flight.path, reason=reason)


class CompleteMark:
    """The files that make `folder` a complete checkpoint (of this rank): torch and Megatron write them last."""

    def __init__(self, folder: str, rank: int) -> None:
        self._files = [Path(folder, name) for name in (MARK, f"__{rank}.metadata")] if folder else []
        self._overwrites: bool | None = None

    def is_there(self) -> bool:
        return any(file.exists() for file in self._files)

    def begin_attempt(self) -> bool:
        """Return whether an older checkpoint is overwritten. If not, what an earlier attempt of this save completed is
        no longer complete from here on: its files are written again, and that may be interrupted for good."""
        if self._overwrites is None:
            self._overwrites = self.is_there()
        elif not self._overwrites:
            for file in self._files:
                file.unlink(missing_ok=True)
        return self._overwrites


def replace(wrappers: dict[Any, Any]) -> None:
    """Put each wrapper in the place of its original under whatever name a module has it, the script's own included.

    All at once where there are several: looking at everything costs a forked process a copy of most of its pages.
    """
    found = {id(original): wrapper for original, wrapper in wrappers.items()}
    for module in list(sys.modules.values()):
        names = getattr(module, "__dict__", None) or {}
        for name in [name for name, value in list(names.items()) if id(value) in found]:
            names[name] = found[id(names[name])]


def structure(value: Any, copies: dict[int, Any] | None = None) -> Any:
    """`value` with its plain containers copied, and all else (tensors, the script's own containers) by reference.

    Saving functions change the dicts and shard descriptions they are given; doing it again needs them as they were.
    `copies`: of what was met before, so that what is shared stays shared.
    """
    copies = {} if copies is None else copies
    if id(value) in copies:
        return copies[id(value)]
    kind = type(value)
    if kind is tuple:
        made: Any = tuple(structure(item, copies) for item in value)
        return copies.setdefault(id(value), made)  # it may hold itself, in a list
    if kind is list:
        made = copies[id(value)] = []
        made.extend(structure(item, copies) for item in value)
    elif kind is dict or kind is OrderedDict:
        made = copies[id(value)] = kind()
        made.update((key, structure(item, copies)) for key, item in value.items())
        if kind is OrderedDict:
            made.__dict__.update((key, structure(item, copies)) for key, item in vars(value).items())
    elif kind is argparse.Namespace:  # Megatron-LM's arguments count what has been consumed
        made = copies[id(value)] = kind()
        vars(made).update((name, structure(item, copies)) for name, item in vars(value).items())
    elif dataclasses.is_dataclass(value) and not isinstance(value, type) and hasattr(value, "__dict__"):
        made = copies[id(value)] = object.__new__(kind)
        for name, item in vars(value).items():
            copied = structure(item, copies) if isinstance(item, (dict, list, tuple)) else item
            object.__setattr__(made, name, copied)
    else:
        return value
    return made
