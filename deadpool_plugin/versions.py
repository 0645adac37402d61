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
    Row("3.12", "2.11.0", "0.17.1", "0.18.9"),
    Row("3.11", "2.11.0", "0.15.3", "0.19.8", pins=OLD_NUMPY),
    Row("3.11", "2.9.1", "0.14.0", "0.18.9", pins=OLD_NUMPY),
    Row("3.13", "2.15.0", "0.19.2", "0.19.8"),
    Row("3.13", "2.13.0", "0.18.2", "0.19.8"),
)
"""The newest first."""
NEWEST = ROWS[0]


@dataclass(frozen=True)
class Checkout:
    """A tag of NVIDIA/Megatron-LM whose unedited pretrain_gpt.py is run in the environment of a row."""

    tag: str
    row: Row
    held: bool = False


CHECKOUTS = (
    Checkout("main", NEWEST),
    Checkout("core_v0.19.0", NEWEST),
    Checkout("core_v0.18.2", ROWS[1]),
    Checkout("core_v0.17.1", ROWS[3]),
    Checkout("core_v0.16.1", ROWS[2]),
    Checkout("core_v0.15.3", ROWS[4]),
    Checkout("core_v0.14.0", ROWS[5]),
)


def ran(package: str) -> tuple[str, ...]:
    """The versions of `package` ("Python" is one) in rows that held, the newest first."""
    found = {{"Python": row.python, **row.packages}[package] for row in ROWS if row.held}
    return tuple(sorted(found, key=_numbers, reverse=True))


def check(framework: str, version: str, torch: str) -> str:
    """Refuse a combination that was run and failed. `framework`: "megatron-core" or "deepspeed".

    Returns: a sentence if the versions (patch levels aside) are in no row that held, else "".
    Raises: Unsupported, naming the combination and those that held.
    """
    found = (platform.python_version(), torch, version)
    for row in ROWS:
        if framework in row.refused and _series(row, framework) == tuple(_minor(one) for one in found):
            held = [f"torch {other.torch} with {framework} {other.packages[framework]}" for other in ROWS if other.held]
            raise Unsupported(
                f"torch {torch} with {framework} {version} on Python {found[0]}: {row.refused[framework]}",
                " or ".join(held),
                "install one of these combinations on every host",
            )
    unknown = [
        f"{package} {installed} (run: {', '.join(ran(package)) or 'none'})"
        for package, installed in ((framework, version), ("torch", torch), ("Python", found[0]))
        if _minor(installed) not in map(_minor, ran(package))
    ]
    return f"versions that this release was not run with: {'; '.join(unknown)}" if unknown else ""


def _series(row: Row, framework: str) -> tuple[tuple[int, ...], ...]:
    return _minor(row.python), _minor(row.torch), _minor(row.packages[framework])


def _minor(version: str) -> tuple[int, ...]:
    return _numbers(version)[:2]


def _numbers(version: str) -> tuple[int, ...]:
    found = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(map(int, found[0].split("."))) if found else ()
