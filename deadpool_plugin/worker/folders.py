"""The folders and names of checkpoints on which all ranks agree, whatever a replacement's script calls them.

A script that names its folder by the clock names another one in a process that starts later. That process saves where
the job does, its rank's own files included.

Rules of this file: ranks that were there from the start decide; a process that takes a rank over follows them, and says
so once.
"""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Callable, Container
from pathlib import Path
from typing import Any

import torch.distributed as dist

from ..core.types import listed
from ..errors import Unsupported
from .file_view import absolute
from .link import AgentLink
from .patching import PatchSet

MOVED_MAX = 64
"""Folders named otherwise that are kept in mind: a script may name a new one at every save."""


class Folders:
    """The names of one process. Thread: main; the file functions' other names any."""

    def __init__(self, link: AgentLink) -> None:
        self._link = link
        self.took_over = False
        """This process has taken its rank over from another one, which may have named folders otherwise."""
        self.made: Container[str] = ()
        """Paths that this process has made in start-up: the rank had started up long before it."""
        self._agreed: set[str] = set()
        """Folders to which this process has saved with all others."""
        self._moved: dict[str, Path] = {}
        """Folders that this process's script names otherwise than the job (absolute), and their names there."""
        self._patches: PatchSet | None = None
        """Patches of Python's file functions, once a folder is named otherwise."""
        self._followed: dict[str, tuple[str, int]] = {}
        """Folders that a follower's script names otherwise than the rank did, the rank's name ("": it has changed), and
        at how many saves. After a take-over: those whose names may not stay."""
        self._said: set[str] = set()

    # ---- checkpoints of all ranks

    def one_folder(self, given: str, group: Any = None) -> str:
        """Return the folder in which all ranks of `group` save one checkpoint; `given` is what this rank's script says.

        Every rank of `group` calls this before it writes. Blocks: for all of them.
        Raises: Unsupported if ranks name different folders, and no replacement is the reason: nobody could load that.
        """
        if not dist.is_initialized() or dist.get_world_size(group) < 2:
            return given
        mine = self.moved(given)
        said = _gathered((mine, self._doubt(given, mine, given)), group)
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
        agreed = mine
        if os.path.normpath(mine) != os.path.normpath(settled[0]):
            agreed = settled[0]
            self._move(given, agreed)
            self.moved(given)  # says so
        self._agreed.add(agreed)
        return agreed

    def one_tag(self, folder: str, given: str) -> str:
        """Return the name of one checkpoint in `folder`, the same folder on all ranks; `given` is what this rank says.

        As `one_folder`, but ranks that differ from the start do not end the job: a clock's name differs now and then
        between ranks that ask at the same moment. The first one's name is used then, and that is said.
        """
        if not dist.is_initialized() or dist.get_world_size() < 2:
            return given
        own = os.path.join(folder, given)
        said = _gathered((given, self._doubt(own, given, given)), None)
        agreed = min(said, key=lambda one: one[1])[0]
        others = [rank for rank, (name, _) in enumerate(said) if name != agreed]
        if others and dist.get_rank() == others[0]:
            text = f"name a checkpoint in {folder} {given}; the job saves it as {agreed}"
            self._say("tag", f"{text}: does the script name it by the clock?", f"rank(s) {listed(others)}")
        self._move(own, os.path.join(folder, agreed))
        self._agreed.add(os.path.join(folder, agreed))
        return agreed

    def _doubt(self, path: str, mine: str, given: str) -> int:
        """Rate what this process says: the lower, the more others go by it.

        0: this process was there from the start, or has saved to `path` with all others (as in a redo). 1: `mine` was
        agreed on for another checkpoint. 2: a later clock may have said it.
        """
        if not self.took_over or path in self._agreed:
            return 0
        return 1 if mine != given else 2

    # ---- files of this rank's own

    def follow(self, given: str, recorded: str) -> None:
        """Note, in a follower, that its script saves to `given` what the rank itself has saved to `recorded`."""
        folder, its = os.path.dirname(os.path.abspath(given)), os.path.dirname(os.path.abspath(recorded))
        if folder == its or _is_temporary(folder):
            return
        here, there = _parted(folder, its)
        before, times = self._followed.pop(here, (there, 0))
        self._followed[here] = (there if before == there else "", times + 1)
        _bound(self._followed)

    def take_over(self) -> None:
        """Become the rank: the script's files go where the rank's own went.

        Only by a name that stays: one that the script makes at every save may be anything by the next one.
        """
        self.took_over = True
        for here, (there, times) in list(self._followed.items()):
            if there and (times > 1 or here in self.made):
                self._move(here, there)
                del self._followed[here]

    def file(self, path: str) -> str:
        """Move a file of this rank's own as `moved`: there is no other rank to ask, and the folder may not be here."""
        found = self._found(path)
        if found is not None and found[1].parent.is_dir():
            return self.moved(path)
        if self.took_over and (why := self._why_apart(os.path.abspath(path))):
            self._say(
                "apart",
                f"saves {path}, {why}, and the other ranks' files may lie elsewhere: look for them before you load it. "
                "Does the script name the folder by the clock? Let rank 0 choose a name and broadcast it",
            )
        return path

    def _why_apart(self, whole: str) -> str:
        """Say why others may save elsewhere what this replacement saves to `whole`; "" if nothing speaks for it."""
        for here, (there, _) in self._followed.items():
            if here and _lies_in(whole, here):
                return f"in {here}, where the rank itself had saved to {there or 'other folders'}"
        is_new = any(str(one) in self.made for one in Path(whole).parents)
        return "in a folder that its script made anew" if is_new else ""

    # ---- moved folders

    def moved(self, path: str) -> str:
        """Return where the job saves what this rank's script would save to `path`."""
        found = self._found(path)
        if found is None:
            return path
        text = f"saves to {found[1]}, where the job does, and not to {path}, as its script says"
        self._say("moved", f"{text}: does the script name it by the clock?")
        return str(found[1])

    def _move(self, own: str, others: str) -> None:
        """Use `others` for what the script calls `own` from here on; they may be the same again."""
        here, there = _parted(own, others)
        self._moved = {one: its for one, its in self._moved.items() if not _lies_in(os.path.abspath(own), one)}
        if not here or os.path.abspath(own) == os.path.abspath(others):
            return
        self._moved[os.path.abspath(here)] = Path(there)
        _bound(self._moved)
        self._patches = self._patches or use_names(self._existing)

    def _found(self, path: str) -> tuple[Path, Path] | None:
        """Find the job's name of the folder that `path` lies in, and of `path` itself, if the script has others."""
        whole = os.path.abspath(path)
        for here, there in self._moved.items():
            if _lies_in(whole, here) and not _lies_in(whole, os.path.abspath(there)):
                return there, there / os.path.relpath(whole, here)
        return None

    def _existing(self, path: str) -> str:
        """Move `path` as `moved`, where the job's folder is there: another host may have one of its own."""
        found = self._found(path)
        return str(found[1]) if found and os.path.isdir(found[0]) else path

    def _say(self, kind: str, what: str, who: str = "") -> None:
        """Say it once for each kind. `who`: if not this rank."""
        if kind not in self._said:
            self._said.add(kind)
            who = who or f"{'the replacement of ' if self.took_over else ''}rank {os.environ['RANK']}"
            self._link.event("Note", text=f"{who} {what}")


def use_names(name: Callable[[str], str]) -> PatchSet:
    """Let Python's file functions use the names that `name` gives for the script's absolute ones. Thread: any."""

    def at(path: Any, kwargs: dict[str, Any]) -> Any:
        whole = absolute(path, kwargs)
        if whole is None or (other := name(whole)) == whole:
            return path
        return os.fsencode(other) if isinstance(path, bytes) else other

    def one(original: Callable[..., Any], path: Any = ".", *args: Any, **kwargs: Any) -> Any:
        return original(at(path, kwargs), *args, **kwargs)

    def two(original: Callable[..., Any], src: Any, dst: Any, *args: Any, **kwargs: Any) -> Any:
        return original(at(src, kwargs), at(dst, kwargs), *args, **kwargs)

    def opened(original: Callable[..., Any], file: Any, *args: Any, **kwargs: Any) -> Any:
        return original(at(file, {}), *args, **kwargs)

    patches = PatchSet()
    names = ("stat", "lstat", "listdir", "scandir", "access", "open", "mkdir", "rmdir", "remove", "unlink")
    patches.wrap(one, os, *names)
    patches.wrap(two, os, "rename", "replace", "link")
    patches.wrap_open(opened)
    return patches


def _parted(own: str, others: str) -> tuple[str, str]:
    """Drop the names at the ends of both that are the same."""
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
    """Gather what each rank of `group` says, and how much it doubts that. Blocks: for all of them."""
    said: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(said, mine, group)
    return said


def _is_temporary(folder: str) -> bool:
    """Return whether `tempfile` has made it, for this process alone."""
    if not _lies_in(folder, os.path.abspath(tempfile.gettempdir())):
        return False
    try:
        return stat.S_IMODE(os.stat(folder).st_mode) == stat.S_IRWXU
    except OSError:
        return False
