"""The tests that need a card, each outcome kept as soon as it is known: a part that is cut off goes on where it was.

    python scripts/gpu/tests.py --out DIR

Rules of this file: which tests there are is pytest's to say; a skipped one has proven nothing. A test's figures are
what it has recorded as properties.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path[:1] = [str(Path(__file__).resolve().parents[number]) for number in (1, 2)]  # started by path

import pytest
from clusters.launched import REPOSITORY

from gpu.checks import Checks, parse_args

COLLECTED = (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED)
COLLECTION = "collection"
NAMED_ERROR = re.compile(r"^(?:E +)?[A-Za-z_][\w.]*(?:Error|Exception|Changed|Violated|Unsupported|Exit): .*", re.M)
"""The line of a traceback that says what went wrong."""


class Outcomes:
    """A plugin of pytest's: leaves out what has held, keeps what becomes of the rest."""

    def __init__(self, checks: Checks) -> None:
        self._checks = checks
        self._problem, self._seconds = "", 0.0
        self.all_held = False
        """There are such tests, and each of them has held before."""

    @pytest.hookimpl(trylast=True)  # those that -m deselects are gone
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        wanted = self._checks.plan([item.name for item in items])
        held = [item for item in items if item.name not in wanted]
        items[:] = sorted((item for item in items if item not in held), key=lambda item: wanted.index(item.name))
        self.all_held = bool(held) and not items
        config.hook.pytest_deselected(items=held)

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._checks.begin(name_of(nodeid))
        self._problem, self._seconds = "", 0.0

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._seconds += report.duration
        if not report.passed:
            self._problem = self._problem or problem_of(report)
        if report.when == "teardown":
            self._checks.end(name_of(report.nodeid), self._problem, dict(report.user_properties), self._seconds)


def name_of(nodeid: str) -> str:
    return nodeid.rpartition("::")[2]


def problem_of(report: pytest.TestReport) -> str:
    """One line: the last that names an error (the first is of whoever waited for the process that met it), if any."""
    if isinstance(report.longrepr, tuple):  # why it is skipped
        return report.longrepr[2]
    crash = getattr(report.longrepr, "reprcrash", None)
    said = str(getattr(crash, "message", report.longreprtext)).strip()
    named: list[str] = NAMED_ERROR.findall(said)
    return (named or [said.partition("\n")[0]])[-1]


def files() -> list[str]:
    """Those with such tests: collecting all would import what need not be there. Those for the stand-ins alone prove
    nothing of a card."""
    paths = [path for path in sorted((REPOSITORY / "tests").rglob("test_*.py")) if "fakecuda" not in path.parts]
    texts = {str(path): path.read_text() for path in paths}
    return [path for path, text in texts.items() if "mark.gpu" in text and "control.only_here" not in text]


def main() -> int:
    args = parse_args(__doc__)
    checks = Checks("tests", args.out, args.of)
    checks.begin(COLLECTION)
    outcomes = Outcomes(checks)
    code = pytest.main(["-v", "-m", "gpu and not long", "--rootdir", str(REPOSITORY), *files()], plugins=[outcomes])
    is_well = code in COLLECTED or outcomes.all_held
    checks.end(COLLECTION, "" if is_well else f"pytest ended with {code!r}, see tests.txt")
    return checks.exit_code


if __name__ == "__main__":
    sys.exit(main())
