"""The fixture of tests that drive a simulated job."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from simulator.job import Job
from simulator.run import simulation


@pytest.fixture
def start() -> Iterator[Callable[..., Job]]:
    """Return what begins a job; its arguments are fields of the scenario that differ from job.QUIET."""
    with simulation() as clusters:

        def begin(**fields: Any) -> Job:
            job = Job(**fields)
            clusters.append(job)
            return job

        yield begin
