"""`deadpool patch FRAMEWORK PATH [--check | --revert]`: put the plugin's flag and first statement into a checkout.

Rules of this file: `git apply` changes all files of a checkout or none, wherever in them the lines of the patch stand;
a checkout that already has the patch is left as it is.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sysconfig
from dataclasses import dataclass
from pathlib import Path

from .. import versions
from ..errors import EXIT_OK, ConfigError

EXIT_ABSENT = 1
"""Exit code of --check: the patch is not in, and fits."""
_VERSION = Path("megatron/core/package_info.py")
_PATCHES = "patches/megatron-lm"
_ROOT, _SHARE = Path(__file__).resolve().parents[2], "share/deadpool_plugin"
_PLACES = (
    _ROOT,  # a checkout
    _ROOT / _SHARE,  # pip install --target
    Path(sysconfig.get_path("data")) / _SHARE,
    Path(sysconfig.get_path("data", f"{os.name}_user")) / _SHARE,
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("framework", choices=["megatron-lm"])
    parser.add_argument("path", type=Path, help="the checkout, whatever else has been changed in it")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--check", action="store_true", help="say whether the patch is in (exit code 0) or fits (1)")
    what.add_argument("--revert", action="store_true", help="take it out again")


def run(args: argparse.Namespace) -> int:
    """Raises: ConfigError, naming the file and the hunk that does not fit."""
    version = version_of(args.path)
    patches = [Patch(tag, args.path) for tag in nearest_first(version)]
    patch = next((patch for patch in patches if not patch.complaint("--check", "--reverse")), None)
    if patch is None and args.revert:
        print(f"{args.path}: there is nothing to take out")
        return EXIT_OK
    done, exit_code = "is in", EXIT_OK
    if patch is None:
        patch = next((patch for patch in patches if not patch.complaint("--check")), patches[0])
        patch.apply(*(["--check"] if args.check else []))
        done, exit_code = ("fits", EXIT_ABSENT) if args.check else ("put into", EXIT_OK)
    elif args.revert:
        patch.apply("--reverse")
        done = "taken out of"
    number = ".".join(map(str, version))
    print(f"the patch for {patch.tag} {done} {args.path} (Megatron-LM {number})")
    for path, why in patch.hunks():
        print(f"  {path}: {why}")
    ran = [one for one in versions.CHECKOUTS if one.held]
    git = ["git", "-C", str(args.path), "rev-parse", "HEAD"]
    here = subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip()
    was = "was" if any(one.commit == here if one.commit else one.tag == f"core_v{number}" for one in ran) else "was not"
    said = ", ".join(one.said for one in ran) or "none"
    print(f"pretrain_gpt.py of this version {was} put through losses with this release; run: {said}")
    return exit_code


def shipped(path: str) -> Path:
    """Find `path` of the repository in a checkout, or where pip has put it. Raises: ConfigError."""
    found = next((place / path for place in _PLACES if (place / path).exists()), None)
    if found is None:
        raise ConfigError(f"no {path} in {' or '.join(map(str, _PLACES))}", remedy="install deadpool_plugin again")
    return found


@dataclass(frozen=True)
class Patch:
    """The patch of one tag, and the checkout it is meant for."""

    tag: str
    checkout: Path

    @property
    def file(self) -> Path:
        return shipped(_PATCHES) / self.tag / "deadpool.patch"

    def hunks(self) -> list[tuple[str, str]]:
        """List the file of each hunk, and what stands behind its second `@@`: why it is there."""
        return re.findall(r"^\+\+\+ b/(.*)\n@@ .* @@ (.*)$", self.file.read_text(), re.MULTILINE)

    def complaint(self, *options: str) -> str:
        """Run `git apply`; return what is wrong, "" if nothing is. Raises: ConfigError without git."""
        # A hunk whose context begins at line 1 fits elsewhere, too. The checkout need not be the top of a repository.
        git = ["git", "apply", "--unidiff-zero", *options, "-"]
        settings = ("GIT_DIR", "GIT_CONFIG_GLOBAL", "GIT_CONFIG_SYSTEM")  # they change how git applies a patch
        env = {**os.environ, **dict.fromkeys(settings, os.devnull), "LC_ALL": "C"}
        try:
            done = subprocess.run(git, input=self._text(), cwd=self.checkout, env=env, capture_output=True, check=False)
        except FileNotFoundError as error:
            raise ConfigError(
                f"{os.uname().nodename} has no `git`",
                "git, by which patches are put in",
                f"install git, or put the lines in by hand: {self.file}",
            ) from error
        said = " / ".join(done.stderr.decode(errors="replace").replace("error: ", "").splitlines())
        return (said or f"git ended with {done.returncode}") if done.returncode else ""

    def _text(self) -> bytes:
        """Return the patch, with the ends of lines that each of its files has in the checkout."""

        def section(found: re.Match[bytes]) -> bytes:
            path = self.checkout / os.fsdecode(found["path"])
            has_crlf = path.is_file() and path.open("rb").readline().endswith(b"\r\n")
            return found["head"] + (found["lines"].replace(b"\n", b"\r\n") if has_crlf else found["lines"])

        parts = rb"(?P<head>^--- .*\n\+\+\+ b/(?P<path>.*)\n@@ .*\n)(?P<lines>(?:(?!--- ).*\n)+)"
        return re.sub(parts, section, self.file.read_bytes(), flags=re.MULTILINE)

    def apply(self, *options: str) -> None:
        """Raises: ConfigError that says what does not fit, and what of the patch is in."""
        if not (complaint := self.complaint(*options)):
            return
        failed = re.search(r"patch failed: (.*):(\d+)", complaint)
        found = f"{failed[1]}: the hunk made for line {failed[2]} does not fit" if failed else complaint
        paths = [path for path, _ in self.hunks()]
        there = [path for path in paths if not self.complaint("--check", "--reverse", f"--include={path}")]
        partly = f"; only part of the patch is in: {', '.join(there)}" if there else ""
        raise ConfigError(f"{found}{partly}", remedy=f"put it in by hand: {self.file}")


def version_of(checkout: Path) -> tuple[int, ...]:
    """Read the version that a checkout of Megatron-LM says it is. Raises: ConfigError if it is none."""
    if not (checkout / _VERSION).is_file():
        found = f"{checkout}: there is no {_VERSION}"
        raise ConfigError(found, "a checkout of NVIDIA/Megatron-LM", "name its top folder")
    text = (checkout / _VERSION).read_text(encoding="utf-8")
    numbers = dict(re.findall(r"^(MAJOR|MINOR|PATCH)\s*=\s*(\d+)", text, re.MULTILINE))
    return tuple(int(numbers.get(name, 0)) for name in ("MAJOR", "MINOR", "PATCH"))


def nearest_first(version: tuple[int, ...]) -> list[str]:
    """Sort the tags that have a patch: the version's own first, then those nearest to it."""
    numbers = {
        path.parent.name: tuple(map(int, path.parent.name.removeprefix("core_v").split(".")))
        for path in shipped(_PATCHES).glob("core_v*/deadpool.patch")
    }
    tags = sorted(numbers, key=lambda tag: [abs(mine - its) for mine, its in zip(version, numbers[tag], strict=True)])
    return ["main", *tags] if version > max(numbers.values()) else [*tags, "main"]  # which is newer than every tag
