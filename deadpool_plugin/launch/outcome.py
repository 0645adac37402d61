"""The outcome of a job, from its nodes' event logs: exit code and the line for people and schedulers.

Rules of this file: pure. A job has finished if any node says so, however many were lost on the way; a host that is lost
or has no last word is named, so that the scheduler can have it looked at.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

import msgspec

from .. import events
from ..agent.reports import named
from ..errors import EXIT_FENCED, EXIT_RUNNING

FAILED = 1
UNREACHABLE = "no host can be reached any more, the job may still run: ask `deadpool outcome OUTPUT_DIR`"
UNREAD = "every host that writes to this folder has left the job, which may still run on others: run this there"

TELLING = (
    events.NodeJoined, events.WorldFormed, events.NodeLost, events.SwapPlanned, events.NodeFenced,
    events.WaitingForHost, events.NodeEnded, events.JobFinished, events.JobStopped,
)  # fmt: skip
"""The kinds of events that say whether a job has ended, and how."""


class Verdict(NamedTuple):
    exit_code: int
    what: str


class Outcome(msgspec.Struct, frozen=True):
    """`lost`: hosts, as in the hostfile, or as they called themselves if they joined later."""

    exit_code: int
    what: str
    lost: list[str]

    def __str__(self) -> str:
        return f"{self.what}; exit code {self.exit_code}; lost hosts: {','.join(self.lost) or 'none'}"


def outcome(
    told: Mapping[int, Sequence[events.Event]],
    hosts: Sequence[str],
    launcher_code: int,
    may_run: str = UNREACHABLE,
    silent: Collection[int] = (),
) -> Outcome:
    """Find the outcome of a job that is over.

    Args: told: the events of each node that answers. launcher_code: deepspeed's, if nobody says anything of the job.
        may_run: what is said if all who answer have left the job, and others may go on; "" if they cannot.
        silent: nodes that have told of the job, but not of its end.
    """
    heard = [event for said in told.values() for event in said]
    names = dict(enumerate(hosts))
    for event in heard:
        if isinstance(event, events.NodeJoined):
            names.setdefault(event.node, event.host)
    lost = sorted(_removed(heard) | _named_by_the_verdict(heard) | (set(range(len(hosts))) - told.keys()) | {*silent})
    found = _finished(heard) or _stopped(heard)
    if found is None and (found := _abandoned(heard, range(len(hosts)))):
        lost = sorted(_replaced(heard) | {*silent})
    if found is None and may_run and not told.keys() - _removed(heard):
        return Outcome(EXIT_RUNNING, may_run, [])
    found = found or Verdict(launcher_code or FAILED, "the job did not finish")
    return Outcome(found.exit_code, named(found.what, names), [names.get(node, f"node {node}") for node in lost])


def ended(heard: Sequence[events.Event]) -> Verdict | None:
    """Find how the job has ended, as far as its nodes say; None if it has not. Kinds not TELLING may be left out."""
    return _finished(heard) or (None if _waits(heard) else _stopped(heard)) or _abandoned(heard)


def silent_nodes(told: Mapping[int, Sequence[events.Event]]) -> set[int]:
    """Find the nodes that have no last word in their logs although the job's others have: their hosts are lost."""
    last = (events.NodeFenced, events.NodeEnded, events.JobFinished, events.JobStopped)
    said = {node for node, story in told.items() if any(isinstance(event, last) for event in story)}
    replaced = _replaced(event for story in told.values() for event in story)
    return set() if said <= replaced else told.keys() - said


def settled(told: Mapping[int, Sequence[events.Event]], running: Collection[int], nodes: int) -> bool:
    """Return whether the hosts that have not told cannot change what became of the job any more.

    A host that is silent cannot, nor can one that the job went on without. After a verdict the others cannot if those
    who gave it are more than half.

    Args: running: nodes whose hosts have said lately that the job's processes run there.
    """
    heard = [event for said in told.values() for event in said]
    if ended(heard) is None:
        return False
    left = set(range(nodes)) - told.keys() - _removed(heard)
    if left.isdisjoint(running):
        return True
    return not _finished(heard) and len({event.node for event in _verdicts(heard)}) > len(left)


def at_work(heard: Sequence[events.Event]) -> set[int]:
    """Find the nodes whose scripts go on after the training: nobody can know yet how they end."""
    if not any(isinstance(event, events.JobFinished) for event in heard):
        return set()
    said = {event.node for event in heard if isinstance(event, events.NodeEnded)}
    return {event.node for event in heard} - said - _removed(heard)


def _finished(heard: Sequence[events.Event]) -> Verdict | None:
    if not any(isinstance(event, events.JobFinished) for event in heard):
        return None
    removed = _removed(heard)
    ends = {event.node: event.exit_code for event in heard if isinstance(event, events.NodeEnded)}
    late = [code for node, code in ends.items() if node not in removed and code not in (0, EXIT_FENCED)]
    if late:
        return Verdict(max(late), "training finished, but a script failed afterwards")
    return Verdict(0, "the job finished")


def _stopped(heard: Sequence[events.Event]) -> Verdict | None:
    """Find the first verdict of the newest generation; an older one, or a removed node's, is that of a part cut off."""
    found = _verdict(heard)
    return None if found is None else Verdict(found.exit_code, f"the job stopped: {found.reason}")


def _abandoned(heard: Sequence[events.Event], hosts: Iterable[int] = ()) -> Verdict | None:
    """Find the end of a job that every member has left without a verdict. None if one has not, if nobody names them, or
    if the job has not formed.

    Args: hosts: the nodes of the hostfile, where it is known.
    """
    members = set(hosts) if any(isinstance(event, events.NodeJoined) for event in heard) else set[int]()
    for event in heard:
        if isinstance(event, events.WorldFormed):
            members |= {*event.node_of, *event.spares}
        elif isinstance(event, events.SwapPlanned):
            members |= {*event.joined}
    codes = {event.node: event.exit_code for event in heard if isinstance(event, events.NodeEnded)}
    left = codes.keys() | {event.node for event in heard if isinstance(event, events.NodeFenced)}
    if not members or members - left - _replaced(heard):
        return None
    having: dict[str, list[str]] = {}
    for node in sorted(left & members):
        having.setdefault(f"left with {codes[node]}" if node in codes else "left", []).append(f"node {node}")
    how = ", ".join(f"{', '.join(nodes)} {word}" for word, nodes in having.items())
    return Verdict(
        FAILED, f"the job is over, and no host says how it ended: {how}; start again from the newest checkpoint"
    )


def _verdict(heard: Sequence[events.Event]) -> events.JobStopped | None:
    return min(_verdicts(heard), key=lambda event: (-event.generation, event.time), default=None)


def _named_by_the_verdict(heard: Sequence[events.Event]) -> set[int]:
    """Find the nodes whose loss has ended the job, so that no plan has removed them."""
    found = _verdict(heard)
    if found is None or _finished(heard) is not None:
        return set()
    speakers = {
        event.node for event in _verdicts(heard) if (event.generation, event.reason) == (found.generation, found.reason)
    }
    losses = [event for event in heard if isinstance(event, events.NodeLost) and event.node in speakers]
    return {node for event in losses if event.generation == found.generation for node in event.lost} - speakers


def _verdicts(heard: Sequence[events.Event]) -> list[events.JobStopped]:
    removed = _removed(heard)
    return [event for event in heard if isinstance(event, events.JobStopped) and event.node not in removed]


def _waits(heard: Sequence[events.Event]) -> bool:
    """Return whether a node waits for a host, in a generation that none newer than it has a verdict of. Of two halves
    that cannot reach each other one may give up, and knows nothing of the other."""
    newest = max((event.generation for event in _verdicts(heard)), default=0)
    left = {event.node for event in heard if isinstance(event, (events.JobStopped, events.NodeEnded))}
    left |= _removed(heard)
    return any(
        isinstance(event, events.WaitingForHost) and event.generation >= newest and event.node not in left
        for event in heard
    )


def _removed(heard: Sequence[events.Event]) -> set[int]:
    """Find the nodes that the job goes on without, by a plan or their own word."""
    return _replaced(heard) | {event.node for event in heard if isinstance(event, events.NodeFenced)}


def _replaced(heard: Iterable[events.Event]) -> set[int]:
    """Find the nodes that the job goes on without by a plan."""
    return {node for event in heard if isinstance(event, events.SwapPlanned) for node in event.lost_nodes}
