"""The fate of a job, as its nodes' events tell it: exit code, and the line for people and schedulers.

Rules of this file: pure. A job has finished if any node says so, however many were lost on the way; a host that is lost
or has no last word is named, so that the scheduler can have it looked at.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import chain
from typing import NamedTuple

from .. import events
from ..agent.reports import named
from ..errors import EXIT_FENCED, EXIT_RUNNING

FAILED = 1
UNREACHABLE = "no host can be reached any more, the job may still run: ask `deadpool outcome OUTPUT_DIR`"
UNREAD = "every host that writes to this folder has left the job, which may still run on others: run this there"


class Outcome(NamedTuple):
    """`lost`: hosts, as in the hostfile, or as they called themselves if they joined later."""

    exit_code: int
    what: str
    lost: Sequence[str] = ()

    def __str__(self) -> str:
        return f"{self.what}; exit code {self.exit_code}; lost hosts: {','.join(self.lost) or 'none'}"


class Fate:
    """The story of a job as its nodes tell it, each as far as it answers or its log says."""

    def __init__(self, told: Mapping[int, Iterable[events.Event]] | None = None) -> None:
        self.hosts: dict[int, str] = {}  # by the names that they gave themselves
        self.codes: dict[int, int] = {}  # of the agents that have ended
        self.stops: list[events.JobStopped] = []
        self.finished, self.tellers, self.members = set[int](), set[int](), set[int]()
        self.replaced, self.fenced = set[int](), set[int]()
        """The nodes that the job goes on without: by a plan, and by their own word."""
        self.stored = ""  # the folder in which hosts have left the job's state
        self._losses: list[events.NodeLost] = []
        self._waits: list[events.WaitingForHost] = []
        for event in chain.from_iterable((told or {}).values()):
            self.add(event)
        self.tellers = set(told or ())

    def add(self, event: events.Event) -> None:
        """Note `event`, of whatever kind."""
        self.tellers.add(event.node)
        match event:
            case events.NodeJoined():
                self.hosts.setdefault(event.node, event.host)
            case events.WorldFormed():
                self.members |= {*event.node_of, *event.spares}
            case events.NodeLost():
                self._losses.append(event)
            case events.SwapPlanned():
                self.members |= {*event.joined}
                self.replaced |= {*event.lost_nodes}
            case events.WaitingForHost():
                self._waits.append(event)
            case events.NodeFenced():
                self.fenced.add(event.node)
            case events.StateWritten():
                self.stored = event.path
            case events.NodeEnded():
                self.codes[event.node] = event.exit_code
            case events.JobFinished():
                self.finished.add(event.node)
            case events.JobStopped():
                self.stops.append(event)

    def outcome(
        self, hosts: Sequence[str] = (), otherwise: int = FAILED, may_run: str = UNREACHABLE, by_logs: bool = False
    ) -> Outcome:
        """Conclude how a job ended that is over.

        Args: hosts: those of the hostfile. otherwise: the exit code if nobody says anything of the job. may_run: said
        if all who answer have left the job, and others may go on; "" if they cannot. by_logs: what was told is the
        nodes' logs, so that hosts without a last word in theirs are lost.
        """
        nodes, silent = range(len(hosts)), self.silent() if by_logs else set()
        found = self._finished() or self._stopped()
        lost = self.removed | self._named_by_the_verdict() | (set(nodes) - self.tellers) | silent
        if found is None and (found := self._abandoned(nodes)):
            lost = self.replaced | silent
        if found is None and may_run and not self.tellers - self.removed:
            return Outcome(EXIT_RUNNING, may_run)
        code, what, _ = found or Outcome(otherwise or FAILED, "the job did not finish")
        names = self.hosts | dict(enumerate(hosts))
        return Outcome(code, named(what, names), [names.get(node, f"node {node}") for node in sorted(lost)])

    def ended(self) -> Outcome | None:
        """Find how the job has ended, as far as its nodes say; None if it has not."""
        return self._finished() or (None if self._is_waiting() else self._stopped()) or self._abandoned()

    def silent(self) -> set[int]:
        """Find the nodes that have no last word in their logs although the job's others have: their hosts are lost."""
        said = self.finished | {event.node for event in self.stops} | self.fenced | self.codes.keys()
        return set() if said <= self.replaced else self.tellers - said

    def settled(self, running: Collection[int], nodes: int) -> bool:
        """Return whether the hosts that have not told cannot change what became of the job any more.

        Args: running: nodes whose hosts have said lately that the job's processes run there.
        """
        if self.ended() is None:
            return False
        # A silent host cannot, nor can one that the job went on without; nor the others after a majority's verdict.
        left = set(range(nodes)) - self.tellers - self.removed
        by_majority = not self.finished and len({event.node for event in self._verdicts}) > len(left)
        return by_majority or left.isdisjoint(running)

    def at_work(self) -> set[int]:
        """Find the nodes whose scripts go on after the training: nobody can know yet how they end."""
        return self.tellers - self.codes.keys() - self.removed if self.finished else set()

    @property
    def removed(self) -> set[int]:
        return self.replaced | self.fenced

    @property
    def _verdicts(self) -> list[events.JobStopped]:
        """The verdicts that count, that of the job first: the first one of the newest generation."""
        # An older one is that of a part cut off, as is a removed node's.
        said = [event for event in self.stops if event.node not in self.removed]
        return sorted(said, key=lambda event: (-event.generation, event.time))

    def _finished(self) -> Outcome | None:
        late = [code for node, code in self.codes.items() if node not in self.removed and code not in (0, EXIT_FENCED)]
        if self.finished and late:
            return Outcome(max(late), "training finished, but a script failed afterwards")
        return Outcome(0, "the job finished") if self.finished else None

    def _stopped(self) -> Outcome | None:
        return next((Outcome(one.exit_code, f"the job stopped: {one.reason}") for one in self._verdicts), None)

    def _abandoned(self, hosts: Iterable[int] = ()) -> Outcome | None:
        """Find the end of a job that every member, and all of `hosts`, left without a verdict, if it formed."""
        members = self.members | (set(hosts) if self.hosts else set())
        left = self.codes.keys() | self.fenced
        if not members or members - left - self.replaced:
            return None
        having = defaultdict[str, list[str]](list)
        for node in sorted(left & members):
            having[f"left with {self.codes[node]}" if node in self.codes else "left"].append(f"node {node}")
        how = ", ".join(f"{', '.join(nodes)} {word}" for word, nodes in having.items())
        found = f"the job is over, and no host says how it ended: {how}"
        return Outcome(FAILED, found if self.stored else f"{found}; start again from the newest checkpoint")

    def _named_by_the_verdict(self) -> set[int]:
        """Find the nodes whose loss has ended the job, so that no plan has removed them."""
        verdicts = self._verdicts
        if not verdicts or self.finished:
            return set()
        generation, reason = verdicts[0].generation, verdicts[0].reason
        speakers = {event.node for event in verdicts if (event.generation, event.reason) == (generation, reason)}
        losses = (one.lost for one in self._losses if one.node in speakers and one.generation == generation)
        return {*chain.from_iterable(losses)} - speakers

    def _is_waiting(self) -> bool:
        """Return whether a node waits for a host, in a generation that none newer than it has a verdict of."""
        # One of two halves that cannot reach each other may give up, and knows nothing of the other.
        newest = max((event.generation for event in self._verdicts), default=0)
        left = {event.node for event in self.stops} | self.codes.keys() | self.removed
        return any(event.generation >= newest and event.node not in left for event in self._waits)
