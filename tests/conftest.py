"""What holds for every test: no time is asserted anywhere."""

from collections.abc import Iterator

import pytest
from hypothesis import settings

settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")


@pytest.fixture(autouse=True)
def _limits_of_production_are_far() -> Iterator[None]:
    """A machine may be busy enough for them to pass; tests that are about one of them set it."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("deadpool_plugin.agent.output._CLOSE_S", 60.0)
        patched.setattr("deadpool_plugin.agent.proc.EXEC_LOOKS_MAX", 60_000)
        for command in ("join", "stop"):
            patched.setattr(f"deadpool_plugin.launch.{command}.ASK_S", 60.0)
        yield
