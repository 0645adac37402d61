"""`deadpool patch FRAMEWORK PATH [--check | --revert]`: put the plugin's flag and first statement into a checkout.

Rules of this file: all files of a checkout are changed, or none; nothing is changed that the patch does not name, and
a checkout that already has the patch is left as it is.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from .. import versions
from ..errors import EXIT_OK, ConfigError
from . import hunks
from .config import shipped
from .hunks import Hunk, Misfit

FRAMEWORKS = ("megatron-lm",)
EXIT_ABSENT = 1
"""Exit code of --check: the patch is not in, and fits."""
_NEWEST = "main"
_VERSION = Path("megatron/core/package_info.py")
_PATCHES = "patches/megatron-lm"

Version = tuple[int, ...]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("framework", choices=FRAMEWORKS)
    parser.add_argument("path", type=Path, help="the checkout, whatever else has been changed in it")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--check", action="store_true", help="say whether the patch is in (exit code 0) or fits (1)")
    what.add_argument("--revert", action="store_true", help="take it out again")


def run(args: argparse.Namespace) -> int:
    """Raises: ConfigError, naming the file and the hunk that does not fit."""
    checkout = Checkout.at(args.path)
    if patch := checkout.find(applied=True):
        if args.revert:
            patch.revert()
        say(checkout, patch, "taken out of" if args.revert else "is in")
        return EXIT_OK
    if args.revert:
        print(f"{checkout.path}: there is nothing to take out")
        return EXIT_OK
    patch = checkout.find(applied=False)
    if patch is None:
        raise checkout.patches()[0].misfit()
    if not args.check:
        patch.apply()
    say(checkout, patch, "fits" if args.check else "put into")
    return EXIT_ABSENT if args.check else EXIT_OK


def say(checkout: Checkout, patch: Patch, what: str) -> None:
    print(f"the patch for {patch.tag} {what} {checkout.path} (Megatron-LM {'.'.join(map(str, checkout.version))})")
    for hunk in patch.hunks:
        print(f"  {hunk.path}: {hunk.why}")
    ran = [one for one in versions.CHECKOUTS if one.held]
    was = "was" if any(map(checkout.is_of, ran)) else "was not"
    said = ", ".join(one.said for one in ran) or "none"
    print(f"pretrain_gpt.py of this version {was} put through losses with this release; run: {said}")


@dataclass(frozen=True)
class Patch:
    """The patch of one tag and the checkout it is meant for. `hunks` are in the order of their files."""

    tag: str
    path: Path
    hunks: Sequence[Hunk]

    def fits(self, applied: bool) -> bool:
        """Return whether all of it is in the checkout, or could be put in."""
        try:
            self._changed(backwards=applied)
        except (Misfit, OSError):
            return False
        return True

    def apply(self) -> None:
        self._write(self._changed(backwards=False))

    def revert(self) -> None:
        self._write(self._changed(backwards=True))

    def _changed(self, *, backwards: bool) -> dict[Path, str]:
        """The new content of every file. Raises: Misfit, OSError."""
        files: dict[Path, str] = {}
        for hunk in self.hunks:
            path = self.path / hunk.path
            text = files[path] if path in files else read(path)
            files[path] = hunks.applied(hunk.reversed if backwards else hunk, text)
        return files

    def _write(self, files: dict[Path, str]) -> None:
        for path, text in files.items():
            beside = path.with_name(f".{path.name}.{os.getpid()}.deadpool")
            with open(beside, "w", encoding="utf-8", newline="") as file:
                file.write(text)
            shutil.copymode(path, beside)
            os.replace(beside, path)

    def misfit(self) -> ConfigError:
        """Why it does not fit, and what of it is in."""
        try:
            self._changed(backwards=False)
        except (Misfit, OSError) as error:
            there = [hunk.path for hunk in self.hunks if self._has(hunk)]
            partly = f"; only part of the patch is in: {', '.join(there)}" if there else ""
            return ConfigError(f"{error}{partly}", remedy=f"put it in by hand: {patch_file(self.tag)}")
        return ConfigError(
            f"the patch for {self.tag} fits now", "a checkout that nobody changes meanwhile", "run the command again"
        )

    def _has(self, hunk: Hunk) -> bool:
        path = self.path / hunk.path
        return path.is_file() and hunks.position(hunk.reversed, read(path)) is not None


@dataclass(frozen=True)
class Checkout:
    """A folder that is a checkout of Megatron-LM, and the version it says it is."""

    path: Path
    version: Version

    @staticmethod
    def at(path: Path) -> Checkout:
        """Raises: ConfigError if it is none."""
        if not (path / _VERSION).is_file():
            raise ConfigError(
                f"{path}: there is no {_VERSION}", "a checkout of NVIDIA/Megatron-LM", "name its top folder"
            )
        numbers = dict(re.findall(r"^(MAJOR|MINOR|PATCH)\s*=\s*(\d+)", read(path / _VERSION), re.MULTILINE))
        return Checkout(path, tuple(int(numbers.get(name, 0)) for name in ("MAJOR", "MINOR", "PATCH")))

    def is_of(self, run: versions.Checkout) -> bool:
        """Return whether it is the version, or the commit of a branch, that was run."""
        return self.commit() == run.commit if run.commit else run.tag == f"core_v{'.'.join(map(str, self.version))}"

    def commit(self) -> str:
        """The commit that is checked out; "" of a folder without git."""
        try:
            git = ["git", "-C", str(self.path), "rev-parse", "HEAD"]
            return subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip()
        except OSError:
            return ""

    def find(self, *, applied: bool) -> Patch | None:
        """The first patch that is in (or fits), those of the nearest versions first."""
        return next((patch for patch in self.patches() if patch.fits(applied)), None)

    def patches(self) -> list[Patch]:
        """The one that should fit first."""
        tags = sorted(known_tags(), key=lambda tag: distance(self.version, tag))
        return [Patch(tag, self.path, hunks.parse(read(patch_file(tag)))) for tag in tags]


def patch_file(tag: str) -> Path:
    return shipped(_PATCHES) / tag / "deadpool.patch"


def known_tags() -> list[str]:
    return [path.parent.name for path in shipped(_PATCHES).glob("*/deadpool.patch")]


def distance(version: Version, tag: str) -> tuple[int, ...]:
    """For sorting: the version's own tag first, then those nearest to it; `main` is newer than every tag."""
    if tag == _NEWEST:
        return (1, 0) if version > max(map(tag_version, set(known_tags()) - {_NEWEST})) else (3, 0)
    own = tag_version(tag)
    if own == version:
        return (0, 0)
    return (2, *(abs(mine - its) for mine, its in zip(version, own, strict=True)))


def tag_version(tag: str) -> Version:
    return tuple(map(int, tag.removeprefix("core_v").split(".")))


def read(path: Path) -> str:
    with open(path, encoding="utf-8", newline="") as file:
        return file.read()
