"""The table of time-outs in core/README.md is that of the code, in its order."""

from __future__ import annotations

import re
from pathlib import Path

from deadpool_plugin.config import Config
from deadpool_plugin.core.proposer import RIVAL_INTERVALS
from deadpool_plugin.core.suspicion import PAUSE_INTERVALS
from deadpool_plugin.core.timing import Timing

README = Path(__file__).resolve().parents[3] / "deadpool_plugin" / "core" / "README.md"
ROW = re.compile(r"^\| (.+?) \| ([0-9.]*) ?P(?:/(\d+))? \| .+ \|$", re.MULTILINE)


def test_the_readme_shows_the_time_outs_in_their_order():
    config = Config(patience_s=80.0)
    timing = Timing(
        config.heartbeat_interval_s, config.silent_after_s, config.phase_timeout_s, config.decision_timeout_s
    )
    expected = {
        "tick": config.tick_s,
        "heartbeat interval": timing.heartbeat_interval_s,
        "own pause": PAUSE_INTERVALS * timing.heartbeat_interval_s,
        "wait for a rival": RIVAL_INTERVALS * timing.heartbeat_interval_s,
        "`lease_s`": timing.lease_s,
        "`silent_after_s`": timing.silent_after_s,
        "`phase_timeout_s`": timing.phase_timeout_s,
        "`decision_timeout_s`": timing.decision_timeout_s,
    }
    shown = {
        name: float(times or 1) * 80.0 / float(parts or 1) for name, times, parts in ROW.findall(README.read_text())
    }
    assert shown == expected, "the start time-out, which does not follow from the patience, is not among them"
    assert list(shown.values()) == sorted(shown.values()) and list(shown) == list(expected)
