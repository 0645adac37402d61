"""The outcome of each test of a folder, as a JSON line in the file that an environment variable names."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from typing import Any


def keep(report: Any, folder: str, variable: str, with_what: Callable[[], dict[str, str]]) -> None:
    """For pytest_runtest_logreport. `with_what`: versions of what was tested."""
    place = f"tests/{folder}/"
    if report.when == "call" and place in report.nodeid and variable in os.environ:
        line = {"test": report.nodeid.removeprefix(place), "outcome": report.outcome}
        line |= {"seconds": round(report.duration, 1), **with_what()}
        with open(os.environ[variable], "a") as file:
            file.write(json.dumps(line) + "\n")
