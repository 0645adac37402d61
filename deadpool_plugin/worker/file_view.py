"""The files that a rank's script looks for in start-up, shown to a rehearsal of that rank as the rank itself saw them.

A script that resumes from its newest checkpoint, or refuses a folder that is not empty, would otherwise find in a
rehearsal what the job has written since.
Rules of this file: a name is hidden only if the rank's script looked for it in start-up, if it was not there when that
start-up ended, and if it lies in the same directory (inode: hosts may have their own under equal paths). What start-up
itself makes, a cache of indices above all, stays visible to a look by name: nobody builds it a second time. A listing
shows what the rank's own listings showed. What the rank read of a checkpoint is shown even if it is gone
(`loaded_files`). Standard library only. Not seen: what looks past Python (a subprocess, C++).
"""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import stat
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from .loaded_files import Recorded, as_opened, is_same, stat_of
from .patching import Function, PatchSet

MISSING_MAX = 100_000  # paths: a rank that misses more of them has not looked for a checkpoint
OPENED_MAX = 100_000  # files: a rank that opens more of them reads data
ENTRIES_MAX = 10_000  # of a directory: a longer listing is one of data
LISTED_MAX = 200_000
"""Names in all listings. Beyond it the longest are taken for listings of data, until half of the names are left."""
GONE_MAX = 3  # names of a folder, for people
Folder = list[Any]
"""Plain data: path, inode, the names that were not there, all that were there and those that the rank's listings
showed (both None if the script neither listed the folder nor missed it)."""


def absolute(path: Any, kwargs: dict[str, Any]) -> str | None:
    """Return the absolute path; None for a descriptor, and for a path that is relative to one."""
    if isinstance(path, int) or kwargs.get("dir_fd") is not None:
        return None
    try:
        return os.path.abspath(os.fsdecode(path))
    except (TypeError, ValueError, OSError):  # the original function says what is wrong with it
        return None


class Looks:
    """Files that a rank's script looks for in start-up, noted by functions around those of Python. Thread: any."""

    def __init__(self) -> None:
        self._is_on = True
        self.opened: set[str] = set()  # to read, up to OPENED_MAX
        self._missing: set[str] = set()
        self._listed: dict[str, set[str]] = {}  # what listings of each folder showed, up to one above `_entries_max`
        self._names, self._entries_max = 0, ENTRIES_MAX
        self._stat, self._names_in = os.stat, os.listdir
        self._patches = PatchSet()
        self._patches.wrap(self._look, os, "stat", "lstat")
        self._patches.wrap(self._list, os, "listdir", "scandir")
        self._patches.wrap(self._access, os, "access")
        self._patches.wrap_open(self._open)

    def lift(self) -> None:
        """Let the script see files as they are."""
        self._is_on = False
        self._patches.undo()

    def finish(self) -> list[Folder]:
        """End with start-up. Returns: what of it a rehearsal has to know. Blocks: for a look at each place again."""
        self.lift()
        missing: dict[str, set[str]] = {}
        for path in list(self._missing):
            if os.path.isdir(path):  # made since; what the script would have listed was nothing
                self._listed.setdefault(path, set())
            while not os.path.lexists(folder := os.path.dirname(path)):
                path = folder
            if not os.path.lexists(path):
                missing.setdefault(folder, set()).add(os.path.basename(path))
        folders: list[Folder] = []
        for path in sorted(self._listed.keys() | missing.keys()):
            with contextlib.suppress(OSError):  # gone since, or not to be read
                inode, listed, names = str(os.stat(path).st_ino), self._listed.get(path), None
                if listed is not None and len(listed) <= self._entries_max:
                    names = os.listdir(path)
                if names is None or len(names) > self._entries_max:
                    names = listed = None
                if names is not None or path in missing:
                    sets = (missing.get(path, ()), names, listed)
                    said = [None if names is None else sorted(map(os.fsencode, names)) for names in sets]
                    folders.append([os.fsencode(path), inode, *said])
        return folders

    def _watched(self, path: Any, kwargs: dict[str, Any]) -> str | None:
        return absolute(path, kwargs) if self._is_on else None

    # ---- what becomes of a look; a rehearsal's do otherwise

    def _hides(self, path: Any, kwargs: dict[str, Any]) -> bool:
        return False

    def _missed(self, path: Any, kwargs: dict[str, Any]) -> None:
        if len(self._missing) < MISSING_MAX and (missing := self._watched(path, kwargs)):
            self._missing.add(missing)

    def _begin_listing(self, folder: str) -> None:
        self._listed.setdefault(folder, set())

    def _shows(self, folder: str, name: str) -> bool:
        """Return whether a listing of `folder` has `name`."""
        names = self._listed.get(folder)
        if names is not None and len(names) <= self._entries_max:
            names.add(name)
            self._names += 1
            if self._names > LISTED_MAX:
                self._forget_data()
        return True

    def _forget_data(self) -> None:
        self._names = sum(map(len, list(self._listed.values())))  # copies: other threads go on to list
        while self._names > LISTED_MAX // 2:
            self._entries_max //= 2
            listed = list(self._listed.items())
            self._listed = {folder: names for folder, names in listed if len(names) <= self._entries_max}
            self._names = sum(map(len, self._listed.values()))

    # ---- in the place of Python's functions

    def _look(self, original: Function, path: Any, *args: Any, **kwargs: Any) -> Any:
        if self._hides(path, kwargs):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        try:
            return original(path, *args, **kwargs)
        except (FileNotFoundError, NotADirectoryError):
            self._missed(path, kwargs)
            raise

    def _list(self, original: Function, path: Any = ".") -> Any:
        found = self._look(original, path)
        folder = self._watched("." if path is None else path, {})
        if folder is None:
            return found
        self._begin_listing(folder)

        def shows(name: Any) -> bool:
            return not self._is_on or self._shows(folder, os.fsdecode(name))

        if isinstance(found, list):
            return list(filter(shows, found))
        return _Entries(lambda entry: shows(entry.name), found)

    def _access(self, original: Function, path: Any, *args: Any, **kwargs: Any) -> bool:
        found = not self._hides(path, kwargs) and original(path, *args, **kwargs)
        if not found:
            self._missed(path, kwargs)
        return bool(found)

    def _open(self, original: Function, file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        if isinstance(mode, str) and not any(letter in mode for letter in "wax"):
            return self._read(original, file, mode, *args, **kwargs)
        return self._make(original, file, mode, *args, **kwargs)

    def _read(self, original: Function, file: Any, *args: Any, **kwargs: Any) -> Any:
        opened = self._look(original, file, *args, **kwargs)
        if len(self.opened) < OPENED_MAX and (path := self._watched(file, {})):
            self.opened.add(path)
        return opened

    def _make(self, original: Function, path: Any, *args: Any, **kwargs: Any) -> Any:
        return original(path, *args, **kwargs)


class _Entries(filter):  # type: ignore[type-arg]
    """The entries of `os.scandir` that `shows` accepts."""

    def __init__(self, shows: Callable[[Any], bool], entries: Any) -> None:
        self.close = entries.close

    def __enter__(self) -> _Entries:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Listing:
    """Entries of a folder, some of which are gone, as `os.scandir` gives them."""

    def __init__(self, entries: list[Any]) -> None:
        self._entries = iter(entries)

    def __iter__(self) -> Iterator[Any]:
        return self._entries

    def __next__(self) -> Any:
        return next(self._entries)

    def __enter__(self) -> _Listing:
        return self

    def __exit__(self, *_: object) -> None: ...

    def close(self) -> None: ...


class _Entry:
    """An entry of a listing, in the place of an `os.DirEntry`."""

    def __init__(self, path: str, found: os.stat_result) -> None:
        self.path, self.name, self._found = path, os.path.basename(path), found

    def __fspath__(self) -> str:
        return self.path

    def is_dir(self, *, follow_symlinks: bool = True) -> bool:
        return stat.S_ISDIR(self._found.st_mode)

    def is_file(self, *, follow_symlinks: bool = True) -> bool:
        return stat.S_ISREG(self._found.st_mode)

    def is_symlink(self) -> bool:
        return False

    def stat(self, *, follow_symlinks: bool = True) -> os.stat_result:
        return self._found

    def inode(self) -> int:
        return self._found.st_ino


class FileView(Looks):
    """Looks of a rehearsal's script. Until `lift` they hide what the rank's own (`looks`, by `finish`) did not find.

    `files`: what the rank has read of checkpoints, shown where they are gone or were changed.
    """

    def __init__(self, looks: list[Folder], files: Iterable[Recorded] = ()) -> None:
        self._files = {os.fsdecode(record[0]): record for record in files}
        self.gone: list[str] = []  # files that the rank's listings showed and its start-up left, deleted since
        self.own: set[str] = set()  # files made by this process itself, as the rank may have done (and removed them)
        self._folders: dict[str, list[Any]] = {}
        for path, inode, *said in looks:
            known = (None if names is None else set(map(os.fsdecode, names)) for names in said)
            self._folders[os.fsdecode(path)] = [int(inode), *known]
        super().__init__()
        self._patches.wrap(self._make, os, "mkdir", "open")
        self._patches.wrap(self._move, os, "rename", "replace", "link", "symlink")

    def _hides(self, path: Any, kwargs: dict[str, Any]) -> bool:
        place = self._watched(path, kwargs) if self._folders else None
        while place and place not in self.own:
            folder, name = os.path.split(place)
            if name and self._hides_in(folder, name):
                return True
            place = name and folder
        return False

    def _look(self, original: Function, path: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return super()._look(original, path, *args, **kwargs)
        except (FileNotFoundError, NotADirectoryError):
            record = self._files.get(self._watched(path, kwargs) or "")
            if record is None or self._hides(path, kwargs):
                raise
            if original.__name__ in ("stat", "lstat"):
                return stat_of(record)
            if original.__name__ in ("listdir", "scandir"):  # `_list` has what was in it
                return [] if original.__name__ == "listdir" else _Listing([])
            raise

    def _list(self, original: Function, path: Any = ".") -> Any:
        found, folder = super()._list(original, path), self._watched("." if path is None else path, {})
        below = [one for one in self._files if folder and os.path.dirname(one) == folder]
        gone = [one for one in below if not self._is_there(one)]
        if not gone:
            return found
        if isinstance(found, list):
            names = [os.path.basename(one) for one in gone]
            return found + (list(map(os.fsencode, names)) if isinstance(path, bytes) else names)
        given = os.fsdecode(path)
        entries = [_Entry(os.path.join(given, os.path.basename(one)), stat_of(self._files[one])) for one in gone]
        with found:
            return _Listing([*found, *entries])

    def _is_there(self, path: str) -> bool:
        try:
            self._stat(path)
        except OSError:
            return False
        return True

    def _access(self, original: Function, path: Any, *args: Any, **kwargs: Any) -> bool:
        found = super()._access(original, path, *args, **kwargs)
        place = self._watched(path, kwargs) or ""
        return found or (place in self._files and not self._is_there(place))

    def _read(self, original: Function, file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        place = self._watched(file, {}) or ""
        record = self._files.get(place)
        if record is not None and len(record) > 2 and place not in self.own:
            try:
                is_changed = not is_same(record, self._stat(place))
            except OSError:
                is_changed = True
            if is_changed:
                return as_opened(record, mode, lambda path: original(path, "rb"), *args, **kwargs)
        return self._look(original, file, mode, *args, **kwargs)

    def _missed(self, path: Any, kwargs: dict[str, Any]) -> None: ...

    def _hides_in(self, folder: str, name: str, *, listing: bool = False) -> bool:
        inode, missing, names, listed = self._folders.get(folder, (0, (), None, None))
        shown = listed if listing else names
        if name not in missing and (shown is None or name in shown):
            return False
        with contextlib.suppress(OSError):
            return bool(self._stat(folder).st_ino == inode)
        return False

    def _begin_listing(self, folder: str) -> None:
        inode, _, names, listed = self._folders.get(folder, (0, (), None, None))
        if names and listed:
            with contextlib.suppress(OSError):  # the folder itself is gone since it was listed
                here = self._names_in(folder) if self._stat(folder).st_ino == inode else names
                lost = sorted(names & listed - {*here})
                paths = [os.path.join(folder, name) for name in lost[:GONE_MAX]]
                self.gone += [path for path in paths if path not in self.gone and path not in self._files]

    def _shows(self, folder: str, name: str) -> bool:
        return os.path.join(folder, name) in self.own or not self._hides_in(folder, name, listing=True)

    def _make(self, original: Function, path: Any, *args: Any, **kwargs: Any) -> Any:
        made = original(path, *args, **kwargs)
        if own := self._watched(path, kwargs):
            self.own.add(own)
        return made

    def _move(self, original: Function, src: Any, dst: Any, *args: Any, **kwargs: Any) -> None:
        self._make(functools.partial(original, src), dst, *args, **kwargs)
