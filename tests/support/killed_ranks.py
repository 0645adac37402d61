"""The same training script twice, as processes without agents: undisturbed, and with ranks killed, bit for bit alike.

Rules of this file: the one way in which tests kill ranks of a ScriptedAgent's job; what is compared is every rank's
metrics and the digests of its state at the end (scripts/compare_runs.py).
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import compare_runs
from faults import inject
from faults.plan import Kill

from support import plain_job
from support.scripted_agent import Outcome, ScriptedAgent


def undisturbed(
    folder: Path, argv: list[str], world_size: int, before_script: Callable[[], None] = plain_job.nothing
) -> Path:
    """The output of the script without the plugin; it is run once for a folder."""
    if not folder.exists():
        folder.mkdir(parents=True)
        plain_job.run(argv, world_size, folder, before_script)
    return folder


def run_with_kills(
    folder: Path,
    argv: list[str],
    world_size: int,
    kills: list[tuple[int, int, str]],
    rehearse: list[int],
    hook: Callable[[inject.Injector], None] = inject.install,
) -> Outcome:
    """Kill ranks, and go on to the end.

    Args:
        kills: rank, step, phase of each; they fire in whatever order the script meets them.
        rehearse: ranks that are rehearsed before they are lost; the others only then.
        hook: what puts faults into the framework (faults/inject.py, faults/deepspeed_hooks.py).
    """
    folder.mkdir(exist_ok=True)
    marker = folder / "kills.jsonl"

    def before_script(rank: int, incarnation: int) -> None:
        os.environ.update(DEMO_NODE=str(rank), DEMO_JOB="test")
        plan = [Kill(index, *kill, kind="rank") for index, kill in enumerate(kills)]
        hook(inject.Injector(plan, marker, None, 0))

    outcome = ScriptedAgent(world_size, argv, folder, before_script, rehearse).run()
    assert len(marker.read_text().splitlines()) == len(kills), "a fault did not fire"
    assert outcome.swaps == len(kills)
    assert set(outcome.exit_codes.values()) == {0}
    for rehearsal in folder.glob("rehearsal*"):
        rehearsal.unlink()  # a rehearsal's own output is nobody's
    return outcome


def assert_alike(expected: Path, run: Path) -> None:
    result = compare_runs.compare(expected, run)
    assert result["bit_exact"], result["difference"]
