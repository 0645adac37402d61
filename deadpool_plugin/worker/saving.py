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
import stat
import sys
import tempfile
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Container, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from ..core.types import listed
from ..errors import Unsupported
from ..transport import local
from . import raised
from .adapter import CallHandler, CallKind, Followed
from .file_view import Elsewhere

if TYPE_CHECKING:
    from ..comm.groups import Groups
    from .link import AgentLink


MARK = ".metadata"
"""The file that makes a folder of torch's or Megatron-core's a complete checkpoint."""
MOVED_MAX = 64
"""Folders named otherwise that are kept in mind: a script may name a new one at every save."""
LEFT = ("__*_*.distcp", "__*_*.distcp.tmp", "common.pt", f"{MARK}.tmp")
"""What writers have written before it. Source: torch 2.13 filesystem.py; megatron-core 0.16.1 strategies/."""


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
        """What it leaves is not to be removed: the checkpoint may be complete, or overwrites an older one."""
        self.cancelled = self.complete = False

    def check(self) -> None:
        """Before every collective of a thread of its own. Raises: GenerationChanged."""

    def stop(self) -> None:
        """Make its writers end soon. Thread: any, the main thread may be waiting for them. Never blocks for long."""

    def settle(self) -> None:
        """After `stop`: block until its writers are gone and nothing in this process will complete it."""

    def completed(self) -> None:
        self.complete = True
        self._saves.landed(self)

    def failed(self) -> None:
        """It has ended by itself; what it wrote is as it would be without us."""
        self._saves.dropped(self)

    def remove_files(self) -> None:
        """After `settle`. Raises: OSError if a file cannot be looked for, or removed."""
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
        self.took_over = False
        """This process has taken its rank over from another one, which may have named folders otherwise."""
        self._agreed: set[str] = set()
        """Folders to which this process has saved with all others."""
        self._moved: dict[str, Path] = {}
        """Folders that this process's script names otherwise than the job (absolute), and their names there."""
        self._elsewhere = Elsewhere(self._existing)
        self._followed: dict[str, tuple[str, int]] = {}
        """Folders that a follower's script names otherwise than the rank did, the rank's name ("": it has changed), and
        at how many saves."""
        self.made: Container[str] = ()
        """What this process has made in start-up: the rank had started up long before it."""
        self._move_said = self._tag_said = False
        self.on_cancel: list[Callable[[], None]] = []
        """What else must be forgotten when a swap begins, so that survivors are like a new process."""

    @property
    def generation(self) -> int:
        return self._groups.generation

    def foreign(self) -> bool:
        """Whether this is not the script's main thread, but a writer's thread or process: its saves are no calls."""
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

    def one_folder(self, given: str, group: Any = None) -> str:
        """The folder in which all ranks of `group` save one checkpoint; `given` is what this rank's script names.

        A script that names it by the clock gets another name in a process that starts later: that one saves where the
        others do. Every rank of `group` calls this before it writes. Blocks: for all of them.
        Raises: Unsupported if ranks name different folders, and no replacement is the reason: nobody could load that.
        """
        if not dist.is_initialized() or dist.get_world_size(group) < 2:
            return given
        mine = self.moved(given)
        said = _gathered((mine, self._doubt(given, mine, given)), group)
        if len({os.path.normpath(name) for name, _ in said}) == 1:
            self._agreed.add(mine)
            return mine
        # Where every process is a replacement nothing was saved before it; the first one's name is as good as any.
        least = min(doubt for _, doubt in said)
        settled = [name for name, doubt in said if doubt == least]
        if not least and len({os.path.normpath(name) for name in settled}) > 1:
            ranks: dict[str, list[int]] = {}
            for rank, (name, _) in zip(dist.get_process_group_ranks(group or dist.group.WORLD), said, strict=True):
                ranks.setdefault(name, []).append(rank)
            where = "; ".join(f"rank(s) {listed(numbers)} to {name}" for name, numbers in ranks.items())
            raise Unsupported(
                f"the ranks save one checkpoint to different folders, where it cannot be loaded: {where}",
                "one folder for all of them",
                "let rank 0 choose the name (a clock's is not the same everywhere) and broadcast it",
            )
        if os.path.normpath(mine) != os.path.normpath(settled[0]):
            self._move(given, settled[0])
            self.moved(given)  # says so
        self._agreed.add(settled[0])
        return str(settled[0])

    def one_tag(self, folder: str, given: str) -> str:
        """The name of one checkpoint in `folder`, the same folder on all ranks; `given` is what this rank names it.

        As `one_folder`, but ranks that differ from the start do not end the job: a clock's name differs now and then
        between ranks that ask at the same moment. The first one's name is used then, and that is said.
        """
        if not dist.is_initialized() or dist.get_world_size() < 2:
            return given
        own = os.path.join(folder, given)
        said = _gathered((given, self._doubt(own, given, given)), None)
        agreed = min(said, key=lambda one: one[1])[0]
        others = [rank for rank, (name, _) in enumerate(said) if name != agreed]
        if others and dist.get_rank() == others[0] and not self._tag_said:
            self._tag_said = True
            text = (
                f"rank(s) {listed(others)} name a checkpoint in {folder} otherwise ({given}) than the job, which saves"
            )
            self._link.event("Note", text=f"{text} it as {agreed}: does the script name it by the clock?")
        self._move(own, os.path.join(folder, agreed))
        self._agreed.add(os.path.join(folder, agreed))
        return str(agreed)

    def _doubt(self, path: str, mine: str, given: str) -> int:
        """The lower, the more others go by it. 0: this process was there from the start, or has saved to `path` with
        all others (as in a redo). 1: `mine` was agreed on for another checkpoint. 2: a later clock may have said it."""
        if not self.took_over or path in self._agreed:
            return 0
        return 1 if mine != given else 2

    def follow(self, given: str, recorded: str) -> None:
        """In a follower: its script saves to `given` what the rank itself has saved to `recorded`."""
        folder, its = os.path.dirname(os.path.abspath(given)), os.path.dirname(os.path.abspath(recorded))
        if folder == its or _is_temporary(folder):
            return
        here, there = _parted(folder, its)
        before, times = self._followed.pop(here, (there, 0))
        self._followed[here] = (there if before == there else "", times + 1)
        _bound(self._followed)

    def take_over(self) -> None:
        """This process is the rank from here on: its script's files go where the rank's own went.

        Only by a name that stays: one that the script makes at every save may be anything by the next one.
        """
        self.took_over = True
        for here, (there, times) in self._followed.items():
            if there and (times > 1 or here in self.made):
                self._move(here, there)

    def _move(self, own: str, others: str) -> None:
        """What the script calls `own` is `others` from here on, which may be the same again."""
        here, there = _parted(own, others)
        self._moved = {one: its for one, its in self._moved.items() if not _lies_in(os.path.abspath(own), one)}
        if not here or os.path.abspath(own) == os.path.abspath(others):
            return
        self._moved[os.path.abspath(here)] = Path(there)
        _bound(self._moved)
        self._elsewhere.begin()

    def _found(self, path: str) -> tuple[Path, Path] | None:
        """The job's name of the folder that `path` lies in, and of `path` itself, if the script has others."""
        whole = os.path.abspath(path)
        for here, there in self._moved.items():
            if _lies_in(whole, here) and not _lies_in(whole, os.path.abspath(there)):
                return there, there / os.path.relpath(whole, here)
        return None

    def _existing(self, path: str) -> str:
        """As `moved`, where the job's folder is there: another host may have one of its own."""
        found = self._found(path)
        return str(found[1]) if found and os.path.isdir(found[0]) else path

    def moved(self, path: str) -> str:
        """Where the job saves what this rank's script would save to `path`. What is not there is said once."""
        found = self._found(path)
        return path if found is None else self._say_moved(path, str(found[1]))

    def file(self, path: str) -> str:
        """As `moved`, for a file of this rank's own: there is no other rank to ask, and the folder may not be here."""
        found = self._found(path)
        if found is not None and found[1].parent.is_dir():
            return self._say_moved(path, str(found[1]))
        if self.took_over and any(str(one) in self.made for one in Path(os.path.abspath(path)).parents):
            text = f"saves {path}, in a folder that its script made anew, and the other ranks' files may lie elsewhere"
            self._say_once(f"{text}: does the script name it by the clock? Let rank 0 choose a name and broadcast it")
        return path

    def _say_moved(self, path: str, moved: str) -> str:
        text = f"saves to {moved}, where the job does, and not to {path}, as its script says"
        self._say_once(f"{text}: does the script name it by the clock?")
        return moved

    def _say_once(self, what: str) -> None:
        if not self._move_said:
            self._move_said = True
            who = f"{'the replacement of ' if self.took_over else ''}rank {os.environ['RANK']}"
            self._link.event("Note", text=f"{who} {what}")

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


def _parted(own: str, others: str) -> tuple[str, str]:
    """Both without the names at their ends that are the same."""
    here, there = list(Path(own).parts), list(Path(others).parts)
    while here and there and here[-1] == there[-1]:
        here.pop()
        there.pop()
    return (str(Path(*here)) if here else "", str(Path(*there)))


def _lies_in(path: str, folder: str) -> bool:
    return path == folder or path.startswith(os.path.join(folder, ""))


def _bound(folders: dict[str, Any]) -> None:
    while len(folders) > MOVED_MAX:
        del folders[next(iter(folders))]


def _gathered(mine: tuple[str, int], group: Any) -> list[tuple[str, int]]:
    """What each rank of `group` says, and how much it doubts that. Blocks: for all of them."""
    said: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(said, mine, group)
    return said


def _is_temporary(folder: str) -> bool:
    """Whether `tempfile` has made it, for this process alone."""
    if not _lies_in(folder, os.path.abspath(tempfile.gettempdir())):
        return False
    try:
        return stat.S_IMODE(os.stat(folder).st_mode) == stat.S_IRWXU
    except OSError:
        return False


class CompleteMark:
    """The files that make `folder` a complete checkpoint (of this rank): torch and Megatron write them last."""

    def __init__(self, folder: str, rank: int) -> None:
        self._files = [Path(folder, name) for name in (MARK, f"__{rank}.metadata")] if folder else []
        self._overwrites: bool | None = None

    def is_there(self) -> bool:
        return any(file.exists() for file in self._files)

    def begin_attempt(self) -> bool:
        """Whether an older checkpoint is overwritten. If not, what an earlier attempt of this save completed is no
        longer complete from here on: its files are written again, and that may be interrupted for good."""
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
