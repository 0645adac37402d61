"""The files that a rank's script looks for in start-up, shown to a rehearsal of that rank as the rank itself saw them.

A script that resumes from its newest checkpoint, or refuses a folder that is not empty, would otherwise find in a
rehearsal what the job has written since.
Rules of this file: a name is hidden only if the rank's script looked for it in start-up, if it was not there when that
start-up ended, and if it lies in the same directory (the same inode: hosts have directories of their own under equal
paths). What start-up itself makes, a cache of indices above all, stays visible to a look by name: nobody builds it a
second time. A listing shows what the rank's own listings showed, whatever start-up went on to log into the folder.
Standard library only. Not seen: what looks past Python (a subprocess, a C++ library).
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable
from typing import Any

from .patching import PatchSet

MISSING_MAX = 100_000
"""Paths. A rank that misses more of them has not looked for a checkpoint."""
ENTRIES_MAX = 10_000
"""Entries of a directory that are kept; a longer listing is one of data."""
LISTED_MAX = 200_000
"""Names in all listings. Beyond it the longest are taken for listings of data, until half of the names are left."""
GONE_MAX = 3
"""Names of a folder, for people."""
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


class _Watch:
    """Functions around those of Python that look for files. Thread: any."""

    def __init__(self) -> None:
        self._is_on = True
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

    def _hides(self, path: Any, kwargs: dict[str, Any]) -> bool:
        """Return whether the script shall not find it."""
        return False

    def _shows(self, folder: str) -> Callable[[Any], bool] | None:
        """Return what is asked of each name in a listing of `folder` whether to show it; None shows all."""
        return None

    def _missed(self, path: Any, kwargs: dict[str, Any]) -> None: ...

    def _made(self, path: Any, kwargs: dict[str, Any]) -> None: ...

    def _look(self, original: Callable[..., Any], path: Any, *args: Any, **kwargs: Any) -> Any:
        if self._hides(path, kwargs):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        try:
            return original(path, *args, **kwargs)
        except (FileNotFoundError, NotADirectoryError):
            self._missed(path, kwargs)
            raise

    def _list(self, original: Callable[..., Any], path: Any = ".") -> Any:
        found = self._look(original, path)
        folder = absolute("." if path is None else path, {}) if self._is_on else None
        shows = None if folder is None else self._shows(folder)
        if shows is None:
            return found
        if isinstance(found, list):
            return list(filter(shows, found))
        return _Entries(lambda entry: shows(entry.name), found)

    def _access(self, original: Callable[..., bool], path: Any, *args: Any, **kwargs: Any) -> bool:
        found = not self._hides(path, kwargs) and original(path, *args, **kwargs)
        if not found:
            self._missed(path, kwargs)
        return found

    def _open(self, original: Callable[..., Any], file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        if isinstance(mode, str) and not any(letter in mode for letter in "wax"):
            return self._look(original, file, mode, *args, **kwargs)
        opened = original(file, mode, *args, **kwargs)
        self._made(file, {})
        return opened


class _Entries(filter):  # type: ignore[type-arg]
    """The entries of `os.scandir` that `shows` accepts."""

    def __init__(self, shows: Callable[[Any], bool], entries: Any) -> None:
        self.close = entries.close

    def __enter__(self) -> _Entries:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Looks(_Watch):
    """The looks of a rank in start-up."""

    def __init__(self) -> None:
        self._missing: set[str] = set()
        self._listed: dict[str, set[str]] = {}
        """The names that the listings of each folder have shown, up to one name more than `_entries_max`."""
        self._names, self._entries_max = 0, ENTRIES_MAX
        super().__init__()

    def _missed(self, path: Any, kwargs: dict[str, Any]) -> None:
        if self._is_on and len(self._missing) < MISSING_MAX and (missing := absolute(path, kwargs)):
            self._missing.add(missing)

    def _shows(self, folder: str) -> Callable[[Any], bool]:
        names = self._listed.setdefault(folder, set())

        def shows(name: Any) -> bool:
            if self._is_on and len(names) <= self._entries_max:
                names.add(os.fsdecode(name))
                self._names += 1
                if self._names > LISTED_MAX:
                    self._forget_data()
            return True

        return shows

    def _forget_data(self) -> None:
        self._names = sum(map(len, list(self._listed.values())))  # copies: other threads go on to list
        while self._names > LISTED_MAX // 2:
            self._entries_max //= 2
            listed = list(self._listed.items())
            self._listed = {folder: names for folder, names in listed if len(names) <= self._entries_max}
            self._names = sum(map(len, self._listed.values()))

    def finish(self) -> list[Folder]:
        """End with start-up. Returns: what of it a rehearsal has to know. Blocks: for a look at each place again."""
        self.lift()
        missing: dict[str, set[str]] = {}
        for path in list(self._missing):
            if os.path.isdir(path):  # made since; what the script would have listed was nothing
                self._listed.setdefault(path, set())
            folder, name = os.path.split(path)
            while folder != path and not os.path.lexists(folder):
                path = folder
                folder, name = os.path.split(path)
            if name and not os.path.lexists(path):
                missing.setdefault(folder, set()).add(name)
        folders: list[Folder] = []
        for path in sorted(self._listed.keys() | missing.keys()):
            with contextlib.suppress(OSError):  # gone since, or not to be read
                inode, names, listed = os.stat(path).st_ino, None, self._listed.get(path)
                if listed is not None:
                    names = self._names_in(path)
                    if max(len(names), len(listed)) > self._entries_max:
                        names = listed = None
                if names is not None or path in missing:
                    sets = (missing.get(path, ()), names, listed)
                    said = [None if names is None else sorted(map(os.fsencode, names)) for names in sets]
                    folders.append([os.fsencode(path), str(inode), *said])
        return folders


class FileView(_Watch):
    """Hides from a rehearsal's script what `looks`, from `Looks.finish`, says, until `lift`."""

    def __init__(self, looks: list[Folder]) -> None:
        self.gone: list[str] = []
        """Files that the rank's listings showed, that its start-up left there, and that were deleted since."""
        self.own: set[str] = set()
        """Files that this process has made itself, as the rank may have done (and removed them again)."""
        self._folders: dict[str, list[Any]] = {}
        for path, inode, *said in looks:
            known = (None if names is None else set(map(os.fsdecode, names)) for names in said)
            self._folders[os.fsdecode(path)] = [int(inode), *known]
        super().__init__()
        self._patches.wrap(self._make, os, "mkdir", "open")
        self._patches.wrap(self._move, os, "rename", "replace", "link", "symlink")

    def _hides(self, path: Any, kwargs: dict[str, Any]) -> bool:
        whole = absolute(path, kwargs) if self._is_on and self._folders else None
        while whole is not None and whole not in self.own:
            folder, name = os.path.split(whole)
            if folder == whole:
                break
            if self._hides_in(folder, name):
                return True
            whole = folder
        return False

    def _hides_in(self, folder: str, name: str, *, listing: bool = False) -> bool:
        inode, missing, names, listed = self._folders.get(folder, (0, (), None, None))
        shown = listed if listing else names
        if name not in missing and (shown is None or name in shown):
            return False
        try:
            return bool(self._stat(folder).st_ino == inode)
        except OSError:
            return False

    def _shows(self, folder: str) -> Callable[[Any], bool] | None:
        if folder not in self._folders:
            return None
        inode, _, names, listed = self._folders[folder]
        if names and listed:
            with contextlib.suppress(OSError):  # the folder itself is gone since it was listed
                here = self._names_in(folder) if self._stat(folder).st_ino == inode else names
                lost = sorted(names & listed - {*here})
                self.gone += [path for name in lost[:GONE_MAX] if (path := os.path.join(folder, name)) not in self.gone]

        def shows(name: Any) -> bool:
            name = os.fsdecode(name)
            own = not self._is_on or os.path.join(folder, name) in self.own
            return own or not self._hides_in(folder, name, listing=True)

        return shows

    def _made(self, path: Any, kwargs: dict[str, Any]) -> None:
        if self._is_on and (own := absolute(path, kwargs)):
            self.own.add(own)

    def _make(self, original: Callable[..., Any], path: Any, *args: Any, **kwargs: Any) -> Any:
        made = original(path, *args, **kwargs)
        self._made(path, kwargs)
        return made

    def _move(self, original: Callable[..., Any], src: Any, dst: Any, *args: Any, **kwargs: Any) -> None:
        original(src, dst, *args, **kwargs)
        self._made(dst, kwargs)
