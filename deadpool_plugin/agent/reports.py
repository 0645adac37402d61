"""Reports for people and programs: the event log of this node, and a few plain lines on standard output.

Rules of this file: one line for what changes a person's picture of the job, nothing per step; only the coordinator
speaks for the job, a node speaks for itself. However long a job takes, a node's files stay within a bound: events that
recur go where only the newest are kept. Once the log is full, so do all but those of the job's state and end.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from .. import events
from ..core.types import NO_STEP, Generation, NodeId, Rank, World, listed
from ..errors import InvariantViolated
from ..host.output import Ring, Writer

NOTES_MAX = 20  # that a node says on its terminal in one generation; the log has all of them
LOG_BYTES_MAX = 16 << 20  # of one job; beyond it only events.FATE goes there
RECENT_BYTES = 2 << 20  # in each of the two files for events that recur: 6,000 steps and more
SILENCE_S = 30.0  # without a line of ours, before one says which ranks the job waits for; doubles with each such line
NODES_MAX = 4  # that such a line names
_TH = {2: "nd", 3: "rd"}

SENTENCES: dict[type[events.Event], str] = {
    events.TrainingStarted: "all ranks are in training",
    events.NodeLost: "{0.evidence}",
    events.RankLost: "rank {0.rank} was lost; its node {0.node} starts a new process: {0.reason}",
    events.ContactLost: "node {0.node}: {0.reason}; its processes are paused",
    events.ContactRegained: "node {0.node} has contact again; its processes continue; "
    "they were paused for {0.duration_s:.2f} s",
    events.HostJoined: "node {0.joined} has joined the job",
    events.WaitingForHost: "waiting for a host to join (`deadpool join`); all state stays in memory: {0.reason}",
    events.SpareCommandDone: "spare_command has ended well: {0.said}; its host may take {0.limit_s:.0f} s to join",
    events.SpareCommandFailed: "spare_command has brought no host: {0.reason}; it is run again in {0.retry_s:.0f} s",
    events.SwapDone: "swap done, all ranks are in training again after {0.duration_s:.2f} s",
    events.Unprotected: "unprotected: {0.reason}",
    events.Protected: "protected: step {0.step} survives the loss of any node",
    events.NodeFenced: "node {0.node} leaves the job: {0.reason}",
    events.JobFinished: "the job has finished",
    events.PeerRefused: "{0.reason}",
    events.StateWritten: "node {0.node}: the state of step {0.step} is in {0.path} ({0.gib:.2f} GiB in "
    "{0.duration_s:.1f} s); once the job has ended, `resume: {0.path}` goes on from it",
    events.StateLost: "node {0.node}: its state is lost: {0.reason}",
    events.JobResumed: "the job goes on from step {0.step} of the job in {0.path}",
    events.RehearsalFailed: "node {0.node} cannot stand in for rank {0.rank}: {0.reason}",
}


class Reports:
    """The event log and the terminal of one node."""

    def __init__(self, node: NodeId, writer: Writer, output_dir: Path) -> None:
        self.node, self._writer = node, writer
        self.hosts: dict[NodeId, str] = {}  # of all nodes that were ever known, for the terminal
        self._log, self._log_bytes = writer.open(events.log_of(output_dir, node)), 0
        self.follows_another_job = self._log.tell() > 0
        self._recent = Ring(writer, events.recent_of(output_dir, node), RECENT_BYTES)
        self._newest_step = {True: (-1, -1), False: (-1, -1)}
        self.generation: Generation = 0
        self.leads = self._has_spoken = False
        self._cancelled = (-1, "")
        self._noted_in, self._noted = 0, set[str]()
        self._awaited_in: Generation | None = None
        self._swap = events.SwapPlanned(restore_step=NO_STEP)  # the newest one
        self._awaited_since, self._quiet_since, self._silence_s = 0.0, 0.0, SILENCE_S

    def emit(self, event: events.Event) -> None:
        """Log an event, and say it if it is one for people."""
        event = events.stamped(event, node=self.node, generation=self.generation)
        self._keep(event)
        if isinstance(event, events.SwapPlanned):
            self._swap = event
        line = sentence(event)
        if isinstance(event, (events.Note, events.RehearsalFailed)):
            self._say_once(line)
        elif line and (self.leads or not isinstance(event, (events.JobStopped, events.JobFinished))):
            self.say(line)

    def worker_event(self, kind: str, fields: dict[str, object]) -> None:
        """Keep an event of a worker; one that cannot be read is kept as a note."""
        try:
            event = events.make(kind, fields, node=self.node, generation=self.generation)
        except (msgspec.ValidationError, InvariantViolated) as error:
            text = f"unreadable worker event {kind} {fields}: {error}"
            event = events.stamped(events.Note(text=text), node=self.node, generation=self.generation)
        if isinstance(event, events.StepDone):
            # The lines of a step do not grow with the ranks: the first rank that has done it, and the first that knows
            # its loss.
            has_loss, step = event.loss is not None, (event.generation, event.step)
            if step <= self._newest_step[True] or (not has_loss and step <= self._newest_step[False]):
                return
            self._newest_step[has_loss] = step
        self._keep(event)
        if isinstance(event, events.CheckpointCancelled) and self.leads and (event.step, event.path) != self._cancelled:
            self._cancelled = (event.step, event.path)  # every rank says so
            self.say(sentence(event))
        elif isinstance(event, events.Note):
            self._say_once(sentence(event))

    def _keep(self, event: events.Event) -> None:
        line = events.encode(event)
        full = self._log_bytes + len(line) > LOG_BYTES_MAX and not isinstance(event, events.FATE)
        if full or isinstance(event, events.RECURRING):
            self._recent.write(line)
        else:
            self._log_bytes += len(line)
            self._writer.write(self._log, line)

    def _say_once(self, line: str) -> None:
        if self._noted_in != self.generation:
            self._noted_in, self._noted = self.generation, set()
        known = re.sub(r"\d+", "", line)  # every rank says the same, and what fails is tried again
        if known not in self._noted and len(self._noted) < NOTES_MAX:
            self._noted.add(known)
            self.say(line)

    def await_ranks(self, ranks: Sequence[Rank], world: World | None, now: float) -> None:
        """Name the ranks that are waited for (() if another node coordinates) after too long a silence. Call often."""
        if world is None or not ranks:
            self._awaited_in = None
            return
        if self._awaited_in != world.generation:
            self._awaited_in, self._awaited_since = world.generation, now
            self._silence_s, self._has_spoken = SILENCE_S, True
        if self._has_spoken:
            self._has_spoken, self._quiet_since = False, now
        if now - self._quiet_since >= self._silence_s:
            ranks_of: dict[str, tuple[Rank, ...]] = {}
            takers, replaced = self._swap.takers.values(), self._swap.lost_ranks
            # First those that the others wait for.
            for rank in sorted(ranks, key=lambda rank: world.node_of[rank] not in takers and rank not in replaced):
                node = str(world.node_of[rank])
                ranks_of[node] = (*ranks_of.get(node, ()), rank)
            self.emit(events.RanksAwaited(ranks_of, len(world.node_of), waited_s=now - self._awaited_since))
            self._has_spoken, self._quiet_since = False, now
            self._silence_s *= 2

    def say(self, line: str) -> None:
        self._has_spoken = True
        self._writer.forward(f"[deadpool] {named(line, self.hosts)}\n".encode())


def _each(every: int) -> str:
    return "every step" if every == 1 else f"every {every}{_TH.get(every, 'th')} step"


def sentence(event: events.Event) -> str:
    """Return the sentence for people, "" if there is none."""
    match event:
        case events.RanksAwaited(ranks_of=by_node, of=total, waited_s=waited_s):
            parts = [f"rank(s) {listed(own)} on node {node}" for node, own in by_node.items()][:NODES_MAX]
            if len(by_node) > NODES_MAX:
                parts.append(f"{len(by_node) - NODES_MAX} more node(s)")
            node, ranks = next(iter(by_node.items()))
            return (
                f"waiting for {sum(map(len, by_node.values()))} of {total} ranks to reach training, "
                f"for {waited_s:.0f} s: {'; '.join(parts)}; "
                f"their output is in rank{ranks[0]:04}.node{node}.log and so on"
            )
        case events.SpareReady(spare=spare, ranks=ranks, covered=covered, hosts=hosts):
            of_all = f" ({covered} of {hosts} hosts)" if hosts > 1 else ""
            return f"spare node {spare} is ready for rank(s) {listed(ranks)}{of_all}"
        case events.SpareFull(spare=spare, covered=covered, hosts=hosts):
            return (
                f"spare node {spare} rehearses no further host ({covered} of {hosts} are rehearsed; see "
                "park_memory_gib, or failures above): another one's loss costs a start-up of the script"
            )
        case events.CoverLost(spare=spare, ranks=ranks):
            return f"spare node {spare} has no rehearsed process of rank(s) {listed(ranks)} any more"
        case events.CheckpointCancelled(step=step, path=path, reason=reason):
            return f"the save of step {step} in {path} was interrupted: {reason or 'it is done again'}"
        case events.SwapPlanned(restore_step=step, lost_ranks=lost, duration_s=duration):
            moves = [f"node {taker} takes over from node {node}" for node, taker in event.takers.items()]
            moves += [f"rank(s) {listed(lost)} get new processes on their hosts"] if lost else []
            moves += [f"node {node} stands by from now on, since an error came back there" for node in event.vacated]
            back = f"all ranks go back to step {step}" if step >= 0 else "every rank begins its script again"
            return f"swap: {', '.join(moves) or 'no rank moves'}; {back} (decided in {duration:.2f} s)"
        case events.SpareCommandStarted(hosts=hosts, attempt=attempt):
            missing = "1 host is missing" if hosts == 1 else f"{hosts} hosts are missing"
            return f"{missing}; spare_command runs (attempt {attempt})"
        case events.SpareCommandExhausted(attempts=attempts, window_s=window_s):
            often = f"{attempts} times within {window_s / 3600:.0f} h"
            return f"spare_command has brought no host {often} and is not run for now; to do: deadpool join"
        case events.Stalled(step=step, waited_s=waited_s, limit_s=limit_s, what=what, cure=cure):
            at = f" (at {' < '.join(frames)})" if (frames := _shown(event.stack)) else ""
            then = cure or (f"after {limit_s:.0f} s it counts as a hang" if limit_s >= 0 else "it may take for ever")
            return f"no progress for {waited_s:.0f} s since step {step}: {what}{at}; {then}"
        case events.MirroringPaced(every=every, steps=steps):
            return f"mirroring takes {steps:.1f} steps: {_each(every)} is mirrored from now on"
        case events.StepsUndone(first=first, last=last, reason=reason):
            which, are = (f"step {last}", "is") if first == last else (f"steps {first} to {last}", "are")
            return f"{which} had been committed and {are} done again: {reason}"
        case events.Mirrored(step=step, reason=missing) if missing:
            if event.spares_left == 0:
                then = "ends the job" if event.on_no_spare == "stop" else "makes the job wait for a host"
                none = "NO SPARE LEFT" if event.generation else "no host is a spare (spares: 0)"
                missing = f"{none}, the next lost node {then} (on_no_spare: {event.on_no_spare})"
            return f"mirrored: step {step} is in other hosts' memory; not protected: {missing}"
        case events.HistoryFilling(rank=rank, step=step, full=full):
            then = (
                f"no longer fit into history_limit_mib at step {step}: from now on only spares that have followed so "
                "far can take over, and no host that joins; restart the job with a larger limit"
                if full
                else f"fill 80 % of history_limit_mib at step {step}; once it is full no further host can take over; "
                "raise it at the next start"
            )
            return f"node {event.node}: rank {rank}'s records of past steps {then}"
        case events.JobStopped(exit_code=code, reason=reason, newest_committed=newest):
            shown = newest if newest >= 0 else "none"
            return f"job stopped (exit code {code}): {reason}; newest committed step: {shown}"
        case events.CatchingUp(rank=rank, step=step, target=target, left_s=left_s):
            far = f"step {step} of {target} ({100 * step // max(1, target)} %)" if target >= step else f"step {step}"
            far = f"{far}; about {left_s:.0f} s are left" if target >= step and left_s >= 0 else far
            return f"rank {rank}'s new process on node {event.node} replays past steps; it has reached {far}"
        case events.Note(text=text):
            return text if text.startswith("node ") else f"node {event.node}: {text}"
    return SENTENCES.get(type(event), "").format(event)


def _shown(stack: Sequence[str]) -> list[str]:
    """Choose the frames of a stack that say most: the innermost one, and the innermost of the script's own."""
    own = (frame for frame in stack if "site-packages" not in frame and "deadpool_plugin" not in frame)
    return list(dict.fromkeys([*stack[:1], *([one] if (one := next(own, "")) else [])]))


def named(line: str, hosts: Mapping[NodeId, str]) -> str:
    """Put the host behind the first mention of each node, unless all nodes are on one host (emulated clusters)."""
    told: set[NodeId] = set()

    def with_host(found: re.Match[str]) -> str:
        node = int(found[0].split()[-1])
        if node not in hosts or node in told or line.startswith(f" {hosts[node]}", found.end()):
            return found[0]
        told.add(node)
        return f"{found[0]} ({hosts[node]})"

    if len({*hosts.values()}) < 2:
        return line
    return re.sub(r"\bnodes? \d+\b(?!, \d|-\d)|(?<= and )\d+(?= cannot reach each other)", with_host, line)
