"""Jobs of Megatron-LM's pretrain_gpt.py: an undisturbed run to compare with, and what both must share.

Rules of this file: the checkout is read, never written to; jobs run on clusters/forked.py, so that nothing is imported
twice. Words may say `{folder}`: the run's own folder.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from clusters import forked_node
from clusters.references import reference
from faults.job import Job, Verdict
from faults.plan import Kill

PRETRAIN = Path(__file__).resolve().with_name("pretrain.py")


class Training:
    """One training job of a checkout: `words` are pretrain_gpt.py's arguments. `cache` keeps undisturbed runs."""

    def __init__(self, checkout: Path, words: Sequence[str], cache: Path, world: int = 8) -> None:
        self.command = [str(checkout / "pretrain_gpt.py"), *words]
        self.cache, self.world = cache, world

    def undisturbed(self) -> Path:
        """Folder of a run without the plugin."""
        return reference(self.cache, self.command, self.world, PRETRAIN)

    def protected(
        self, folder: Path, kills: list[Kill], slots: int = 2, spares: int = 1, **settings: Any
    ) -> tuple[Verdict, Job]:
        """The same job under the plugin, with faults, judged against the undisturbed run."""
        words = [word.replace("{folder}", str(folder)) for word in self.command]
        job = Job(folder, words, self.world, slots, spares, kills, settings, script=PRETRAIN)
        return job.run(self.undisturbed()), job


def preload(checkout: Path) -> None:
    """Prepare the process that plays the cluster, before it forks; megatron.core too is the checkout's then."""
    sys.path.insert(0, str(checkout))
    forked_node.preload()
    from megatron_lm import pretrain

    pretrain.preload(checkout)
    forked_node.preload()


TIMES = (
    re.compile(r"\[?\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d(\.\d+)?\]?"),
    re.compile(r"(?<=elapsed time per iteration \(ms\): )[0-9.]+"),
    re.compile(r"(?<=\.: )\([0-9.]+, [0-9.]+\)"),
)
"""In what Megatron-LM prints: a date, the time of an iteration, those of a timer."""
OBSERVED = ("metrics ", "digest ", "[deadpool]")


def printed(folder: Path, rank: int) -> list[str]:
    """Return what `rank` printed in a run, in the order of time, whichever nodes it was on: without times, and without
    observers' lines."""
    files = sorted(folder.rglob(f"rank{rank:04d}*.log"), key=lambda path: path.stat().st_mtime_ns)
    lines = [line for path in files for line in path.read_text(errors="replace").splitlines()]
    return [without_times(line) for line in lines if not line.startswith(OBSERVED)]


def without_times(line: str) -> str:
    for times in TIMES:
        line = times.sub("", line)
    return line.strip()


def iterations(folder: Path, rank: int) -> list[str]:
    """The lines about iterations and validation among them."""
    return [line for line in printed(folder, rank) if re.search(r"iteration +\d+/|validation loss at", line)]
