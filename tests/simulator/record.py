"""A long campaign of simulations written down as it goes, to be ended and gone on with at any time.

Rules of this file: the record is one JSON object, replaced as a whole; it names the code that ran, so that seeds of
another protocol are never counted with these.
"""

from __future__ import annotations

import ast
import hashlib
import os
import resource
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from deadpool_plugin.errors import ConfigError
from deadpool_plugin.host.files import put

from .campaign import Summary, campaign
from .schedule import Ranges

_ROOT = Path(__file__).resolve().parents[2]
_RUNS = ("agent", "core", "host", "mirror", "transport")
"""The folders of the package that a simulated job runs."""


class Record(msgspec.Struct, frozen=True):
    """The result of the seeds from `first` up to `last` - 1, on `jobs` processes of `cpus` CPUs, and in what time."""

    first: int
    last: int
    ranges: Ranges
    fixed: dict[str, Any]
    code: str
    jobs: int
    cpus: int
    wall_s: float
    cpu_s: float
    summary: Summary


def code() -> str:
    """Name the agent and its simulation: a digest of what runs of them, comments and docstrings left out (another
    Python's may differ)."""
    digest = hashlib.sha256()
    package = _ROOT / "deadpool_plugin"
    files = [path for folder in _RUNS for path in (package / folder).glob("*.py")]
    files += [package / "config.py", package / "errors.py", *(_ROOT / "tests" / "simulator").glob("*.py")]
    for path in sorted(path for path in files if not path.name.startswith("test_")):
        digest.update(path.relative_to(_ROOT).as_posix().encode() + b"\0" + _what_runs(path.read_text()))
    return digest.hexdigest()[:12]


def _what_runs(source: str) -> bytes:
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(body := getattr(node, "body", None), list):
            node.body = [one for one in body if not _is_text(one)]  # type: ignore[attr-defined]
    return ast.dump(tree).encode()


def _is_text(statement: ast.AST) -> bool:
    return (
        isinstance(statement, ast.Expr)
        and isinstance(statement.value, ast.Constant)
        and isinstance(statement.value.value, str)
    )


def opened(path: Path, first: int, ranges: Ranges, fixed: Mapping[str, Any], jobs: int) -> Record:
    """The record in `path`, or an empty one. Raises: ConfigError for one of another campaign or of other code."""
    plain = msgspec.json.decode(msgspec.json.encode(dict(fixed)))
    empty = Record(first, first, ranges, plain, code(), jobs, os.cpu_count() or 1, 0.0, 0.0, Summary())
    if not path.exists():
        return empty
    try:
        found = msgspec.json.decode(path.read_bytes(), type=Record, dec_hook=lambda kind, plain: kind(plain))
    except msgspec.DecodeError as error:
        raise ConfigError(f"{path}: {error}", "a record of `simulate.py --out`", "name another file") from error
    for name in ("first", "ranges", "fixed", "code", "jobs", "cpus"):
        theirs, ours = getattr(found, name), getattr(empty, name)
        if theirs != ours:
            raise ConfigError(
                f"{path} has been recorded with {name} {theirs}",
                f"{name} {ours}, as this campaign",
                "name another file",
            )
    return found


def go_on(path: Path, record: Record, last: int, piece: int, progress: Callable[[Summary], None]) -> Record:
    """Run what is left of the seeds up to `last` - 1, so many at a time, and write `path` after each time."""
    while record.last < last:
        began, used = time.monotonic(), _cpu_s()
        until = min(record.last + piece, last)
        record.summary.merge(campaign(range(record.last, until), record.ranges, record.fixed, record.jobs))
        wall_s, cpu_s = record.wall_s + time.monotonic() - began, record.cpu_s + _cpu_s() - used
        record = msgspec.structs.replace(record, last=until, wall_s=wall_s, cpu_s=cpu_s)
        put(path, msgspec.json.format(msgspec.json.encode(record), indent=1) + b"\n")
        progress(record.summary)
    return record


def _cpu_s() -> float:
    """CPU time of this process and of those it has waited for."""
    return sum(sum(resource.getrusage(whose)[:2]) for whose in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
