"""The folders and names of checkpoints on which all ranks agree, whatever a replacement's script calls them.

A script that names its folder by the clock names another one in a process that starts later.
Rules of this file: ranks that were there from the start decide; a process that takes a rank over saves where they do,
its own files included, and says so once.
"""

from __future__ import annotations

import contextlib
import operator
import os
import tempfile
from collections.abc import Container
from pathlib import Path
from typing import Any

import torch.distributed as dist

from ..core.types import listed
from ..errors import Unsupported
from .file_view import absolute
from .link import AgentLink
from .patching import Function, PatchSet

MOVED_MAX = 64  # folders named otherwise that are kept in mind: a script may name a new one at every save


class Folders:
    """The names of one process. Thread: main; the file functions' other names any."""

    def __init__(self, link: AgentLink) -> None:
        self._link = link
        self.took_over = False  # this process has its rank from another one, which may have named folders otherwise
        self.made: Container[str] = ()  # by this process in start-up: the rank had started up long before it
        self._agreed: set[str] = set()  # folders to which this process has saved with all others
        self._moved: dict[str, Path] = {}  # absolute folders of this process's script, and their names in the job
        self._patches: PatchSet | None = None  # of Python's file functions, once there is one of these
        self._followed: dict[str, tuple[str, int]] = {}
        """Folders that a follower's script names otherwise than the rank did, the rank's name ("": it has changed), and
        at how many saves. After a take-over: those whose names may not stay."""
        self._said: set[str] = set()  # kinds of notes

    # ---- checkpoints of all ranks

    def one_folder(self, given: str, group: Any = None) -> str:
        """Return the folder in which all ranks of `group` save one checkpoint; `given` is what this rank's script says.

        Blocks: for all of them. Raises: Unsupported if ranks name different ones, and no replacement is the reason.
        """
        if not dist.is_initialized() or dist.get_world_size(group) < 2:
            return given
        agreed = self.moved(given)
        others, said = self._ask(given, agreed, agreed != given, group)
        if len({os.path.normpath(name) for name, doubt in said if not doubt}) > 1:
            ranks: dict[str, list[int]] = {}
            for rank, (name, _) in zip(dist.get_process_group_ranks(group or dist.group.WORLD), said, strict=True):
                ranks.setdefault(name, []).append(rank)
            where = "; ".join(f"rank(s) {listed(numbers)} to {name}" for name, numbers in ranks.items())
            raise Unsupported(
                f"the ranks save one checkpoint to different folders, where it cannot be loaded: {where}",
                "one folder for all of them",
                "let rank 0 choose the name (a clock's is not the same everywhere) and broadcast it",
            )
        if os.path.normpath(agreed) != os.path.normpath(others):
            agreed = others
            self._move(given, agreed)
            self.moved(given)  # says so
        self._agreed.add(agreed)
        return agreed

    def one_tag(self, folder: str, given: str) -> str:
        """Return the name of one checkpoint in `folder`, as `one_folder`.

        Ranks that differ from the start use the first one's, and say so: each may have asked a clock just then.
        """
        if not dist.is_initialized() or dist.get_world_size() < 2:
            return given
        own = os.path.join(folder, given)
        agreed, said = self._ask(own, given, False, None)
        others = [rank for rank, (name, _) in enumerate(said) if name != agreed]
        if others and dist.get_rank() == others[0]:
            text = f"name a checkpoint in {folder} {given}; the job saves it as {agreed}"
            self._say("tag", f"{text}: does the script name it by the clock?", f"rank(s) {listed(others)}")
        self._move(own, os.path.join(folder, agreed))
        self._agreed.add(os.path.join(folder, agreed))
        return agreed

    def _ask(self, path: str, name: str, was_agreed: bool, group: Any) -> tuple[str, list[tuple[str, int]]]:
        """Gather the name that each rank of `group` gives for its `path`, and how much it doubts that.

        Returns: also the first of the least doubted names. Blocks: for all ranks.
        """
        # 0: the process was there from the start, or has saved to `path` with all others (as in a redo). 1: the name
        # was agreed on for another checkpoint. 2: a later clock may have said it.
        doubt = 0 if not self.took_over or path in self._agreed else 1 if was_agreed else 2
        said: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(said, (name, doubt), group)
        return min(said, key=operator.itemgetter(1))[0], said

    # ---- files of this rank's own

    def follow(self, given: str, recorded: str) -> None:
        """Note, in a follower, that its script saves to `given` what the rank itself has saved to `recorded`."""
        folder, its = os.path.dirname(os.path.abspath(given)), os.path.dirname(os.path.abspath(recorded))
        if folder == its or _is_temporary(folder):
            return
        here, there = _parted(folder, its)
        before, times = self._followed.pop(here, (there, 0))
        self._followed[here] = (there if before == there else "", times + 1)
        if len(self._followed) > MOVED_MAX:
            del self._followed[next(iter(self._followed))]

    def take_over(self) -> None:
        """Become the rank: the script's files go where the rank's own went."""
        self.took_over = True
        for here, (there, times) in list(self._followed.items()):
            if there and (times > 1 or here in self.made):  # else the name may be another one at the next save
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
        if len(self._moved) > MOVED_MAX:
            del self._moved[next(iter(self._moved))]
        if self._patches is None:
            self._patches = PatchSet()
            names = ("stat", "lstat", "listdir", "scandir", "access", "open", "mkdir", "rmdir", "remove", "unlink")
            self._patches.wrap(self._one, os, *names)
            self._patches.wrap(self._two, os, "rename", "replace", "link")
            self._patches.wrap_open(self._open)

    def _found(self, path: str) -> tuple[Path, Path] | None:
        """Find the job's names of the folder that `path` lies in and of `path`, if the script has others."""
        whole = os.path.abspath(path)
        for here, there in self._moved.items():
            if _lies_in(whole, here) and not _lies_in(whole, os.path.abspath(there)):
                return there, there / os.path.relpath(whole, here)
        return None

    def _say(self, kind: str, what: str, who: str = "") -> None:
        if kind not in self._said:
            self._said.add(kind)
            who = who or f"{'the replacement of ' if self.took_over else ''}rank {os.environ['RANK']}"
            self._link.event("Note", text=f"{who} {what}")

    # ---- in the place of Python's file functions. Thread: any

    def _at(self, path: Any, kwargs: dict[str, Any]) -> Any:
        whole = absolute(path, kwargs)
        found = None if whole is None else self._found(whole)
        if found is None or not os.path.isdir(found[0]):  # another host may have a folder of its own
            return path
        return os.fsencode(found[1]) if isinstance(path, bytes) else str(found[1])

    def _one(self, original: Function, path: Any = ".", *args: Any, **kwargs: Any) -> Any:
        return original(self._at(path, kwargs), *args, **kwargs)

    def _two(self, original: Function, src: Any, dst: Any, *args: Any, **kwargs: Any) -> Any:
        return original(self._at(src, kwargs), self._at(dst, kwargs), *args, **kwargs)

    def _open(self, original: Function, file: Any, *args: Any, **kwargs: Any) -> Any:
        return original(self._at(file, {}), *args, **kwargs)


def _parted(own: str, others: str) -> tuple[str, str]:
    """Drop the names at the ends of both that are the same."""
    here, there = Path(own), Path(others)
    while here.name and here.name == there.name:
        here, there = here.parent, there.parent
    return "" if here == Path() else str(here), str(there)


def _lies_in(path: str, folder: str) -> bool:
    return path == folder or path.startswith(os.path.join(folder, ""))


def _is_temporary(folder: str) -> bool:
    """Return whether `tempfile` has made it, for this process alone."""
    with contextlib.suppress(OSError):
        is_private = os.stat(folder).st_mode & 0o7777 == 0o700
        return is_private and _lies_in(folder, os.path.abspath(tempfile.gettempdir()))
    return False
