"""What became of a job, from what its nodes' event logs say: exit code and the line for people and schedulers.

Rules of this file: pure. A job has finished if any node says so, however many were lost on the way; a host that is lost
or has no last word is named, so that the scheduler can have it looked at.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from .. import events
from ..errors import EXIT_FENCED

FAILED = 1


class Outcome(msgspec.Struct, frozen=True):
    """`lost`: hosts, as in the hostfile, or as they called themselves if they joined later."""

    exit_code: int
    what: str
    lost: list[str]

    def __str__(self) -> str:
        return f"{self.what}; exit code {self.exit_code}; lost hosts: {','.join(self.lost) or 'none'}"


def outcome(told: Mapping[int, Sequence[events.Event]], hosts: Sequence[str], launcher_code: int) -> Outcome:
    """
    Args:
        told: node -> its events; nodes that do not answer are left out.
        hosts: their names by node id.
        launcher_code: deepspeed's own exit code, for a job that nobody says anything of.
    """
    heard = [event for said in told.values() for event in said]
    removed = {node for event in heard if isinstance(event, events.SwapPlanned) for node in event.lost_nodes}
    removed |= {event.node for event in heard if isinstance(event, events.NodeFenced)}
    names = dict(enumerate(hosts))
    for event in heard:
        if isinstance(event, events.NodeJoined):
            names.setdefault(event.node, event.host)
    lost = sorted(removed | (set(range(len(hosts))) - told.keys()))
    exit_code, what = _verdict(heard, removed, launcher_code)
    return Outcome(exit_code, what, [names.get(node, f"node {node}") for node in lost])


def _verdict(heard: Sequence[events.Event], removed: set[int], launcher_code: int) -> tuple[int, str]:
    if not any(isinstance(event, events.JobFinished) for event in heard):
        return _stopped(heard, removed) or (launcher_code or FAILED, "the job did not finish")
    ends = {event.node: event.exit_code for event in heard if isinstance(event, events.NodeEnded)}
    late = [code for node, code in ends.items() if node not in removed and code not in (0, EXIT_FENCED)]
    if late:
        return max(late), "training finished, but a script failed afterwards"
    return 0, "the job finished"


def _stopped(heard: Sequence[events.Event], removed: set[int]) -> tuple[int, str] | None:
    """The first verdict of the newest generation; an older one, or a removed node's, is that of a part cut off."""
    verdicts = [event for event in heard if isinstance(event, events.JobStopped) and event.node not in removed]
    if not verdicts:
        return None
    found = min(verdicts, key=lambda event: (-event.generation, event.time))
    return found.exit_code, f"the job stopped: {found.reason}"
