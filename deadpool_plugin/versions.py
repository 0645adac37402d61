"""The combinations of versions that were run, and what became of them.

Rules of this file: standard library only. A row says "held" only with a record in scripts/results, which
`scripts/versions.py` wrote (tests/unit/test_versions.py compares). Nothing is promised of a version that no row has.
"""

from __future__ import annotations

import platform
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from .errors import Unsupported


@dataclass(frozen=True)
class Row:
    """One environment: a Python and the packages installed with it."""

    python: str
    torch: str
    megatron_core: str
    deepspeed: str
    held: bool = False
    """Every check of scripts/versions.py held."""
    refused: Mapping[str, str] = field(default_factory=dict)
    """Framework ("megatron-core", "deepspeed") to the reason why training with it does not begin in this row."""
    pins: tuple[str, ...] = ()
    """Other packages that this combination needs in a version of their own."""

    @property
    def name(self) -> str:
        return f"py{self.python}-torch{self.torch}-mcore{self.megatron_core}-ds{self.deepspeed}"

    @property
    def packages(self) -> dict[str, str]:
        return {"torch": self.torch, "megatron-core": self.megatron_core, "deepspeed": self.deepspeed}


OLD_NUMPY = ("numpy==1.26.4",)
"""megatron-core before 0.16 asks for numpy below 2."""

ROWS = (
    Row("3.12", "2.15.0", "0.19.2", "0.19.8", held=True),
    Row("3.12", "2.13.0", "0.18.2", "0.19.8", held=True),
    Row("3.11", "2.13.0", "0.16.1", "0.19.8", held=True),
    Row("3.12", "2.11.0", "0.17.1", "0.18.9", held=True),
    Row("3.11", "2.11.0", "0.15.3", "0.19.8", held=True, pins=OLD_NUMPY),
    Row("3.11", "2.9.1", "0.14.0", "0.18.9", held=True, pins=OLD_NUMPY),
    Row("3.13", "2.15.0", "0.19.2", "0.19.8", held=True),
    Row("3.13", "2.13.0", "0.18.2", "0.19.8", held=True),
)
"""The newest first."""
NEWEST = ROWS[0]


@dataclass(frozen=True)
class Checkout:
    """A tag of NVIDIA/Megatron-LM whose unedited pretrain_gpt.py is run in the environment of a row."""

    tag: str
    row: Row
    held: bool = False
    commit: str = ""
    """The commit that was run, of a branch; "" for a tag, which stays where it is."""

    @property
    def said(self) -> str:
        return f"{self.tag} at {self.commit[:12]}" if self.commit else self.tag


CHECKOUTS = (
    Checkout("main", NEWEST, held=True, commit="d98e8a64ddf34856e74b24714e3bedb2f5a39553"),
    Checkout("core_v0.19.0", NEWEST, held=True),
    Checkout("core_v0.18.2", ROWS[1], held=True),
    Checkout("core_v0.17.1", ROWS[3], held=True),
    Checkout("core_v0.16.1", ROWS[2], held=True),
    Checkout("core_v0.15.3", ROWS[4], held=True),
    Checkout("core_v0.14.0", ROWS[5], held=True),
)


def check(framework: str, version: str, torch: str) -> str:
    """Refuse a combination that was run and failed. `framework`: "megatron-core" or "deepspeed".

    Returns: a sentence if no row that held has these versions together (patch levels aside), else "".
    Raises: Unsupported, naming the combination and those that held.
    """
    python = platform.python_version()
    found = _said(python, torch, f"{framework} {version}")
    held = [_said(row.python, row.torch, f"{framework} {row.packages[framework]}") for row in ROWS if row.held]
    if framework == "megatron-core":
        branches = [one for one in CHECKOUTS if one.held and one.commit]
        held += [_said(one.row.python, one.row.torch, f"a checkout of {one.said}") for one in branches]
    ran, series = "; ".join(held), _series(python, torch, version)
    alike = [row for row in ROWS if _series(row.python, row.torch, row.packages[framework]) == series]
    for row in alike:
        if framework in row.refused:
            remedy = "install one of these combinations on every host"
            raise Unsupported(f"{found}: {row.refused[framework]}", ran, remedy)
    if any(row.held for row in alike):
        return ""
    return f"versions that this release was not run with: {found} (run: {ran or 'none'})"


def _said(python: str, torch: str, what: str) -> str:
    return f"Python {python} with torch {torch} and {what}"


def _series(*versions: str) -> list[list[str]]:
    """Return the major and minor number of each."""
    return [re.findall(r"\d+", version)[:2] for version in versions]
