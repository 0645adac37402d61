"""Megatron-LM and DeepSpeed training jobs that survive the permanent loss of nodes without being terminated.

Two ways in, and no others: launch with `--module deadpool_plugin.run` (the script stays as it is), or make
`import deadpool_plugin; deadpool_plugin.activate()` the script's first statement.
"""

from __future__ import annotations

import sys

__version__ = "0.1.0.dev0"


def activate() -> None:
    """Protect this job if its command line has `--deadpool-config FILE`; otherwise do nothing.

    The first statement of a training script, before torch is imported: this process turns into the supervisor,
    which runs the same command line again as the worker, where `activate` returns at once.
    """
    from .launch.activate import activate

    activate()


def is_rehearsal() -> bool:
    """Whether this process only rehearses a rank on a spare: a script that writes files of its own asks this first.

    Becomes False when the process takes over.
    """
    output = sys.modules.get("deadpool_plugin.worker.output")
    return bool(output is not None and output.Mute.active)
