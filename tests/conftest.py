"""Rules for every test: no time is asserted anywhere; `--quick` leaves out what is marked slow, and lists it.

`--durations-to=FILE` records how long the tests of each file took, the longest first, and on which machine.
"""

import gc
import json
import os
import platform
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")
LEFT_OUT = pytest.StashKey[Counter[str]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--quick", action="store_true", help="leave out tests marked slow, and list their files at the end"
    )
    parser.addoption("--durations-to", type=Path, metavar="FILE", help="record the seconds of each file as JSON")


def pytest_configure(config: pytest.Config) -> None:
    config.stash[LEFT_OUT] = Counter()


@pytest.hookimpl(trylast=True)  # other options have left out theirs
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("quick") and not any("::" in argument for argument in config.args):  # who names one wants it
        slow = [item for item in items if item.get_closest_marker("slow")]
        config.stash[LEFT_OUT].update(item.nodeid.partition("::")[0] for item in slow)
        config.hook.pytest_deselected(items=slow)
        items[:] = [item for item in items if not item.get_closest_marker("slow")]


@pytest.fixture(autouse=True)
def parsing_is_not_interrupted(request: pytest.FixtureRequest) -> Iterator[None]:
    """Disable garbage collection in tests of modules that parse."""
    parses = hasattr(request.module, "ast")
    if parses:
        gc.disable()  # Python 3.11.7 fails if a finalizer parses while `ast` does (CPython gh-106905)
    yield
    if parses:
        gc.enable()


def pytest_sessionfinish(session: pytest.Session) -> None:
    """In a process of xdist's, what it left out goes to the one that reports; both have left out the same."""
    if hasattr(session.config, "workeroutput"):
        left_out = session.config.stash[LEFT_OUT]
        session.config.workeroutput["left_out"] = dict(left_out)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    node.config.stash[LEFT_OUT] |= Counter(getattr(node, "workeroutput", {}).get("left_out", {}))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if left_out := config.stash[LEFT_OUT]:
        terminalreporter.section(f"{left_out.total()} tests are run by --all only")
        for file, tests in sorted(left_out.items()):
            terminalreporter.line(f"{file}: {tests}")
    if path := config.getoption("durations_to"):
        path.write_text(json.dumps(durations(terminalreporter), indent=1) + "\n")


def durations(terminalreporter: pytest.TerminalReporter) -> dict[str, Any]:
    seconds: defaultdict[str, float] = defaultdict(float)
    tests = Counter[str]()
    for report in (report for group in terminalreporter.stats.values() for report in group):
        if isinstance(report, pytest.TestReport):
            file = report.nodeid.partition("::")[0]
            seconds[file] += report.duration
            tests[file] += report.when == "call"
    slowest = sorted(seconds, key=lambda file: seconds[file], reverse=True)
    return {
        "at": time.strftime("%Y-%m-%dT%H:%MZ", time.gmtime()),
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        "load at the end": [round(load, 1) for load in os.getloadavg()],
        "seconds": round(sum(seconds.values())),
        "files": {file: {"tests": tests[file], "seconds": round(seconds[file], 1)} for file in slowest},
    }


@pytest.fixture(autouse=True)
def _limits_of_production_are_far() -> Iterator[None]:
    """A machine may be busy enough for them to pass; tests that are about one of them set it."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("deadpool_plugin.host.output._CLOSE_S", 60.0)
        patched.setattr("deadpool_plugin.host.proc.EXEC_LOOKS_MAX", 60_000)
        patched.setattr("deadpool_plugin.launch.running_job.ASK_S", 60.0)
        yield
