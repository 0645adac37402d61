"""One job with planned faults from start to verdict: release each fault when the job is ready for it, and judge.

Rules of this file: the job is observed through its event logs, the fault's own marker and exit codes; every wait has
a deadline, and a wait that runs out is a hang: all stacks are dumped and the job is ended.
"""

from __future__ import annotations

import functools
import json
import os
import shutil
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import compare_runs
from clusters.events import Tail
from clusters.forked import Cluster, Node
from clusters.launched import REPOSITORY, read_json_lines

from faults.plan import CAUSES, HANGS, INJECTED, LEAVES, Kill, Plan

SCRIPTS = REPOSITORY / "scripts"
POLL_S = 0.01


class Hang(Exception):
    """A deadline passed; the message says what was waited for."""


@dataclass
class Outcome:
    """The outcome of one fault. `problem` is empty if everything promised holds."""

    kill: Kill
    fired: dict[str, Any] | None = None
    ready_s: float | None = None
    lost_steps: int | None = None
    problem: str = ""


@dataclass
class Verdict:
    """The outcome of a job. `bit_exact` is None where there is nothing to compare (it ended with a verdict)."""

    outcomes: list[Outcome]
    bit_exact: bool | None = None
    exit_codes: list[int | None] = field(default_factory=list)
    stopped: str = ""
    hang: str = ""
    left: list[str] = field(default_factory=list)
    difference: str = ""
    seconds: float = 0.0

    @property
    def holds(self) -> bool:
        return not (self.hang or self.left or self.difference or any(one.problem for one in self.outcomes))

    def as_json(self) -> str:
        return json.dumps(asdict(self))


class Job:
    """A job of `world` ranks on nodes of `slots`, whose faults fire in the order of the plan.

    Args:
        training: words behind the training script.
        kills: those with `hold` are released one after the other, each when the job has got over the one before.
        stops: the job is expected to end with this exit code after the last fault, instead of finishing.
        heals: a host joins for each one that was lost (and whenever the job waits for one).
        only_struck: no process may be lost that was not struck, though its replacement would change no bit.
    """

    def __init__(
        self,
        folder: Path,
        training: list[str],
        world: int,
        slots: int,
        spares: int,
        kills: list[Kill],
        settings: dict[str, Any] | None = None,
        stops: int = 0,
        wait_s: float = 120.0,
        heals: bool = False,
        script: Path = SCRIPTS / "train_gpt.py",
        framework: str = "megatron",
        only_struck: bool = False,
    ) -> None:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        self.folder, self.world, self.kills, self.stops, self.spares = folder, world, kills, stops, spares
        self.wait_s = wait_s
        marker = folder / "faults.jsonl"
        self.plan = Plan(kills, marker)
        self.plan.save(folder / "plan.json")
        words = [SCRIPTS / "faults" / "inject.py", "--plan", folder / "plan.json", "--marker", marker]
        words += ["--framework", framework, "--observe", folder / "observe", "--", script, *training]
        before_agent = functools.partial(hook_agents, folder / "plan.json", marker)
        nodes = world // slots + spares
        self.cluster = Cluster(folder, nodes, slots, [str(w) for w in words], spares, settings, before_agent)
        self.tail = Tail(self.cluster.output)
        self.outcomes = {kill.index: Outcome(kill) for kill in kills}
        self.heals, self.only_struck = heals, only_struck
        self.joined = self._generation = 0
        self.guests: list[Node] = []

    # ---- the course of a job

    def run(self, reference: Path | None) -> Verdict:
        """Never raises for what the job does; nothing of it is left afterwards."""
        began = time.monotonic()
        verdict = Verdict(list(self.outcomes.values()))
        try:
            self.cluster.start()
            for node in self.cluster.nodes:
                self.plan.tell_leader(node.index, node.leader)
            for kill in self.kills:
                self._pass(self.outcomes[kill.index])
            self.until("the job's end", self._all_ended, self.wait_s * 2)
        except Hang as hang:
            verdict.hang = str(hang)
            self.cluster.dump_stacks(self.folder / "stacks")
        finally:
            left = self.cluster.close(grace_s=0.0 if verdict.hang else 5.0)
            verdict.left = [] if verdict.hang else left
        self.tail.read()
        verdict.exit_codes = self.cluster.exit_codes()
        verdict.stopped = "; ".join(sorted({event["reason"] for event in self.tail.of("JobStopped")}))
        self._judge(verdict, reference)
        verdict.seconds = round(time.monotonic() - began, 2)
        return verdict

    def _pass(self, outcome: Outcome) -> None:
        """From the job's readiness for a fault to its being over it."""
        kill = outcome.kill
        if kill.hold:
            self.until("protection", lambda: self.tail.in_training and self.tail.mirrored)
            if kill.kind in ("node", "silent") and kill.index == 0 and self.spares:
                self.until("ready spares", lambda: self.tail.spares_ready() == self.spares)
            self.until("hosts that join", lambda: len(self.tail.of("HostJoined")) >= self.joined)
        self.before_fault(outcome)
        if kill.after < 0:  # else it comes in the middle of a swap, which may be over by now
            self._generation = self.tail.generation
        self.plan.release(kill.index)
        if kill.phase == "driver":
            self._strike(kill)
        self.until(f"{kill.phase} of step {kill.step}", lambda: self._fired(outcome) or self._all_ended())
        if outcome.fired is None:
            return
        if kill.kind in ("node", "silent"):
            for node in (outcome.fired["node"], *kill.also):
                self.cluster.nodes[node].killed = True
        if self.stops or kill.kind == "slow" or any(later.after == kill.index for later in self.kills):
            return  # nothing is to be done about it, or the next fault comes in the middle of this one's swap
        self._recover(outcome, self._generation)
        if kill.kind == "silent":
            self.cluster.wake_node(outcome.fired["node"])

    def before_fault(self, outcome: Outcome) -> None:
        """The job is about to meet a fault, everybody waits for its release (for samples)."""

    def _strike(self, kill: Kill) -> None:
        """A fault of a whole node that nothing in the node sees coming."""
        self.plan.record(kill, kill.node, -1, kill.step)
        self.cluster.kill_node(kill.node)

    def _recover(self, outcome: Outcome, generation: int) -> None:
        assert outcome.fired is not None
        since = outcome.fired["time"]
        if outcome.kill.phase == "startup":
            self.until("training", lambda: self.tail.in_training)
            outcome.ready_s = round(self.tail.of("TrainingStarted")[-1]["time"] - since, 3)
            outcome.lost_steps = 0
            return
        if outcome.kill.phase == "rehearsal" and outcome.kill.after < 0:
            return  # nobody in training notices; that another rehearsal takes its place is seen by the next fault
        self.until(
            "everybody's return to training",
            lambda: len(self.tail.resumed(generation, since)) == self.world or self._all_ended(),
        )
        back = self.tail.resumed(generation, since)
        if len(back) == self.world:
            outcome.ready_s = round(max(back.values()) - since, 3)
            outcome.lost_steps = self.tail.lost_steps(since)

    def _fired(self, outcome: Outcome) -> bool:
        lines = read_json_lines(self.plan.marker) if self.plan.marker else []
        outcome.fired = next((line for line in lines if line["index"] == outcome.kill.index), None)
        return outcome.fired is not None

    def _all_ended(self) -> bool:
        return None not in self.cluster.exit_codes()

    def until(self, what: str, done: Callable[[], object], wait_s: float | None = None) -> None:
        """Raises: Hang at the deadline."""
        deadline = time.monotonic() + (wait_s or self.wait_s)
        while True:
            self.tail.read()
            if done():
                return
            if time.monotonic() > deadline:
                raise Hang(f"waited for {what} for {wait_s or self.wait_s:g} s")
            if self._all_ended():
                raise Hang(f"waited for {what}, but all hosts have ended")
            self._heal()
            time.sleep(POLL_S)

    def _heal(self) -> None:
        """A lost host comes back as another one as soon as training goes on, or earlier if the job waits for it.

        None comes after the last fault unless the job waits: it could meet a job that has just ended.
        """
        lost = {node for event in self.tail.of("NodeLost") for node in event["lost"]}
        swaps, waits = len(self.tail.of("SwapDone")), len(self.tail.of("WaitingForHost"))
        due = self.heals and self.joined < len(lost) and max(swaps, waits) > self.joined
        if due and (waits > self.joined or len(read_json_lines(self.folder / "faults.jsonl")) < len(self.kills)):
            self.joined += 1
            self.guests.append(self.cluster.join())
        for guest in self.guests:
            if guest.exit_code not in (None, 0) and not guest.killed and not self.tail.ended:
                raise Hang(f"node {guest.index} could not join (exit code {guest.exit_code}); waiting is in vain")

    # ---- the verdict

    def _judge(self, verdict: Verdict, reference: Path | None) -> None:
        lines = read_json_lines(self.folder / "faults.jsonl")
        for outcome in verdict.outcomes:
            times = sum(line["index"] == outcome.kill.index for line in lines)
            if times != 1:
                outcome.problem = f"fired {times} times"
            elif self.stops:
                continue
            elif outcome.ready_s is None and self._ought_to_recover(outcome):
                outcome.problem = "did not recover"
            elif outcome.kill.kind == "abort-hangs" and not self._is_lost(outcome):
                outcome.problem = "its abort did not hang: the process was not replaced"
            elif outcome.lost_steps:
                outcome.problem = f"{outcome.lost_steps} committed steps lost"
            elif outcome.kill.kind in HANGS and self._ought_to_recover(outcome) and not self._is_named(outcome):
                outcome.problem = "it was cured, and no stall named its rank"
        expected = {87, -9, 137} if self.stops == 0 else {self.stops, -9, 137}
        asked = any(kill.kind in LEAVES for kill in self.kills)  # which host leaves for it is the job's choice
        left = {event["node"] for event in self.tail.of("NodeFenced")} if asked else set()
        for node, code in zip(self.cluster.nodes, verdict.exit_codes, strict=True):
            gone = node.killed or node.index in left
            if code not in (expected if gone else {self.stops}) and not verdict.hang:
                verdict.difference = f"node {node.index} ended with {code}: {verdict.stopped or 'see its output'}"
        verdict.difference = verdict.difference or "; ".join(self._raised())
        if self.only_struck:
            verdict.difference = verdict.difference or "; ".join(self._not_struck(lines))
        if reference is not None and not verdict.hang and not self.stops:
            compared = compare_runs.compare(reference, self.cluster.output)
            verdict.bit_exact = compared["bit_exact"]
            verdict.difference = verdict.difference or compared["difference"] or ""

    def _not_struck(self, fired: list[dict[str, Any]]) -> list[str]:
        """Why processes were lost that no fault had struck; a host's own are not told one by one.

        A fault whose place is in an agent kills another process than the one that records it: it is told by its rank.
        """
        killed = {line["rank"] for line in fired if line["kind"] == "rank"}
        struck = [f"process {line['pid']} " for line in fired]
        planned = (INJECTED, *(text for kill in self.kills for text in CAUSES.get(kill.kind, ())))
        return [
            event["reason"]
            for event in self.tail.of("RankLost")
            if not any(text in event["reason"] for text in (*struck, *planned))
            and not (event["rank"] in killed and "killed by SIGKILL" in event["reason"])
        ]

    def _is_lost(self, outcome: Outcome) -> bool:
        fired = outcome.fired or {}
        ranks = [event["rank"] for event in self.tail.of("RankLost") if event["time"] > fired.get("time", 0.0)]
        return fired.get("rank") in ranks

    def _is_named(self, outcome: Outcome) -> bool:
        fired = outcome.fired or {}
        acted = [event for event in self.tail.of("Stalled") if event["cure"] and event["time"] > fired["time"]]
        # A rank that waits for a message of one that waits for it, through others, is one of a circle.
        right = ([fired["rank"]], *([[]] if outcome.kill.kind == "absent" else []))
        return bool(acted) and acted[0]["ranks"] in right

    def _raised(self) -> list[str]:
        """List errors that scripts raised and no fault did, and take-overs that failed though their sources were there.

        Such a rank is replaced in place, which hides that a redo or a replay failed.
        """
        planned = (INJECTED, *(text for kill in self.kills for text in CAUSES.get(kill.kind, ())))
        reasons = [event["reason"] for event in self.tail.of("RankLost")]
        reasons = [reason for reason in reasons if not any(text in reason for text in planned)]
        alone = all(kill.after < 0 and not kill.also for kill in self.kills)
        return [
            reason
            for reason in reasons
            if reason.startswith("script of rank") or (alone and "could not be taken over" in reason)
        ]

    def _ought_to_recover(self, outcome: Outcome) -> bool:
        overtaken = any(later.after == outcome.kill.index for later in self.kills)
        rehearsal = outcome.kill.phase == "rehearsal" and outcome.kill.after < 0
        return not (self.stops or overtaken or rehearsal or outcome.kill.kind == "slow")


def hook_agents(plan: Path, marker: Path) -> None:
    """Install the places of faults in every agent's process."""
    from faults import hooks
    from faults.inject import Injector

    os.environ.setdefault("RANK", "-1")
    hooks.hook_agent(Injector(Plan.load(plan, marker).kills, marker, None, 0))
