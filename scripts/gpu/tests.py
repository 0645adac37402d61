"""The tests that need a card, each outcome kept as soon as it is known: a part that is cut off goes on where it was.

    python scripts/gpu/tests.py --out DIR

Rules of this file: which tests there are is pytest's to say; a skipped one has proven nothing.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])  # started by path

import pytest
from clusters.launched import REPOSITORY

from gpu.checks import Checks, parse_args

COLLECTED = (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED, pytest.ExitCode.NO_TESTS_COLLECTED)


class Outcomes:
    """A plugin of pytest's: leaves out what has held, keeps what becomes of the rest."""

    def __init__(self, checks: Checks) -> None:
        self._checks = checks
        self._line: dict[str, Any] = {}

    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        held = [item for item in items if self._checks.holds(item.name)]
        items[:] = [item for item in items if item not in held]
        config.hook.pytest_deselected(items=held)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "setup" or not report.passed:
            self._line = self._told(report)
        if report.when == "teardown":
            self._checks.keep(self._line)

    def _told(self, report: pytest.TestReport) -> dict[str, Any]:
        crash = getattr(report.longrepr, "reprcrash", None)
        said = (
            report.longrepr[2] if isinstance(report.longrepr, tuple) else getattr(crash, "message", report.longreprtext)
        )
        problem = "" if report.passed else said.strip().partition("\n")[0]
        line: dict[str, Any] = {"part": "tests", "check": report.nodeid.rpartition("::")[2], "ok": report.passed}
        return line | {"problem": problem, "figures": {}}


def files() -> list[str]:
    """Those with such tests: collecting all would import what need not be there."""
    return [str(path) for path in sorted((REPOSITORY / "tests").rglob("test_*.py")) if "mark.gpu" in path.read_text()]


def main() -> int:
    checks = Checks("tests", parse_args(__doc__).out)
    code = pytest.main(["-v", "-m", "gpu", "--rootdir", str(REPOSITORY), *files()], plugins=[Outcomes(checks)])
    problem = "" if code in COLLECTED else f"pytest ended with {code!r}, see tests.txt"
    checks.keep({"part": "tests", "check": "collection", "ok": not problem, "problem": problem, "figures": {}})
    return min(1, checks.failed)


if __name__ == "__main__":
    sys.exit(main())
