"""The simulator itself: the same seed is the same run, its parts do what they say, and a broken run says so."""

from __future__ import annotations

import random

import msgspec
import pytest
import yaml
from support import expect

from deadpool_plugin.cli import main as cli
from deadpool_plugin.cli.simulate import read_faults
from deadpool_plugin.core.messages import Report
from deadpool_plugin.errors import ConfigError
from deadpool_plugin.sim.campaign import campaign
from deadpool_plugin.sim.clock import Timeline
from deadpool_plugin.sim.network import Network
from deadpool_plugin.sim.rules import Cut, Delay, Duplicate, Loss, Rules
from deadpool_plugin.sim.run import Outcome, run
from deadpool_plugin.sim.schedule import Fault, Ranges, Scenario, as_file, fixed_fields, scenario
from deadpool_plugin.sim.shrink import shrunk
from deadpool_plugin.sim.transcript import Transcript

QUIET = {"faults": (), "drift": 0.0, "wait_for_hosts": False}


def transcript_of(one: Scenario) -> tuple[str, Outcome]:
    transcript = Transcript()
    outcome = run(one, transcript)
    return "\n".join(transcript.lines), outcome


@pytest.mark.parametrize("seed", range(4))
def test_the_same_seed_gives_the_same_transcript_byte_for_byte(seed):
    first, second = transcript_of(scenario(seed)), transcript_of(scenario(seed))
    assert first == second and first[0].count("\n") > 100
    assert first[0] != transcript_of(scenario(seed + 1))[0]


def test_a_job_without_faults_trains_to_its_end():
    outcome = run(scenario(1, fixed=QUIET))
    assert (outcome.verdict, outcome.swaps, outcome.finding) == ("finished", 0, None)
    assert outcome.steps >= 19, "the last step need not be committed"


@pytest.mark.parametrize("kind", ["crash", "kill", "process", "give_up"])
def test_one_loss_is_one_swap(kind):
    fault = Fault(kind, at_step=6, who="active", pick=1)
    outcome = run(scenario(3, fixed={**QUIET, "faults": (fault,), "spares": 2, "restarts_max": 3}))
    assert (outcome.verdict, outcome.swaps, outcome.faults) == ("finished", 1, {kind: 1})


class Ends:
    """A network between nodes 0 and 1 that notes what arrives."""

    def __init__(self) -> None:
        self.heard: list[int] = []
        self.lost: list[tuple[int, str]] = []
        self.timeline = Timeline()
        rng = random.Random(5)
        self.network = Network(self.timeline, Rules(rng), rng, latency_s=0.1, user_timeout_s=10.0)
        self.network.deliver = lambda target, source, message: self.heard.append(expect(Report, message).generation)
        self.network.lost = lambda target, source, reason: self.lost.append((target, reason))
        self.network.link(0, 1)

    def send(self, numbers, rules=(), after_s=0.0) -> None:
        self.network.rules.add(self.timeline.now, list(rules))
        for number in numbers:
            self.network.send(0, 1, Report(number))
        while self.timeline.step():
            pass


@pytest.mark.parametrize(
    "rule", [Loss("loss", {0}, {1}, 100.0, probability=0.5), Delay("delay", {0}, {1}, 100.0, delay_s=3.0)]
)
def test_a_lossy_or_slow_link_keeps_order_and_loses_nothing(rule):
    ends = Ends()
    ends.send(range(50), [rule])
    assert ends.heard == list(range(50)) and not ends.lost and rule.effects


def test_a_duplicate_arrives_right_behind_its_original():
    ends, rule = Ends(), Duplicate("duplicate", {0}, {1}, 100.0, probability=0.5)
    ends.send(range(50), [rule])
    assert sorted(set(ends.heard)) == list(range(50)) and ends.heard == sorted(ends.heard)
    assert len(ends.heard) == 50 + rule.effects > 50


def test_a_short_cut_delays_and_a_long_one_ends_the_link_at_its_sender():
    ends = Ends()
    ends.send(range(3), [Cut("partition", {0}, {1}, until=5.0)])
    assert ends.heard == [0, 1, 2] and ends.timeline.now > 5.0
    ends.send(range(3, 6), [Cut("partition", {0}, {1}, until=ends.timeline.now + 60.0)])
    assert ends.heard == [0, 1, 2] and [target for target, _ in ends.lost] == [0]


def test_a_break_loses_a_suffix_and_tells_both_ends():
    ends = Ends()
    for number in range(20):
        ends.network.send(0, 1, Report(number))
    assert ends.network.break_link(0, 1, "reset")
    ends.send([99])
    assert ends.heard == list(range(len(ends.heard))) and len(ends.heard) <= 20
    assert sorted(ends.lost) == [(0, "reset"), (1, "reset")]


def test_a_campaign_is_the_same_in_one_process_or_two():
    one, two = (campaign(range(6), Ranges(nodes=(5, 7)), jobs=jobs) for jobs in (1, 2))
    assert one == two and one.seeds == 6 and one.swaps and len(one.pairs) > 50


def test_a_scenario_goes_through_a_file(tmp_path):
    found = scenario(7)
    path = tmp_path / "s.yaml"
    path.write_text(yaml.safe_dump(as_file(found)))
    assert scenario(7, fixed=read_faults(path)) == found


@pytest.mark.parametrize("data", [[1], {"faults": [{"kind": "meteor"}]}, {"nodes": 3}, {"active": "x"}])
def test_a_wrong_file_is_refused_in_a_sentence(data, tmp_path):
    with pytest.raises(ValueError):
        fixed_fields(data)
    path = tmp_path / "s.yaml"
    path.write_text(yaml.safe_dump(data))
    with pytest.raises(ConfigError, match="s.yaml"):
        read_faults(path)


def test_shrinking_keeps_what_fails():
    """A toy failure: it needs two of the faults and at least three active hosts."""

    def attempt(one: Scenario) -> Outcome:
        fails = one.active >= 3 and {"crash", "pause"} <= {fault.kind for fault in one.faults}
        found = run(scenario(0, fixed={**QUIET, "active": 1, "spares": 0, "steps": 2}))
        finding = {"invariant": "LIVENESS", "sentence": "it hangs", "at_s": 1.0} if fails else None
        return msgspec.convert({**msgspec.to_builtins(found), "finding": finding}, Outcome)

    faults = tuple(Fault(kind, at_step=3) for kind in ("kill", "crash", "join", "pause", "break"))
    small = shrunk(scenario(0, fixed={"faults": faults, "active": 9, "spares": 2, "slots": 2}), attempt)
    assert small.active == 3 and small.spares == 0 and small.slots == 1
    assert [fault.kind for fault in small.faults] == ["crash", "pause"]


def test_the_command_says_what_was_run(capsys):
    assert cli.main(["simulate", "--seeds", "0:4", "--nodes", "5:6", "--jobs", "1", "--pairs"]) == 0
    printed = capsys.readouterr().out
    for what in ("seeds      4", "faults", "swaps", "verdicts", "covered", "violations 0", "when WAITING member"):
        assert what in printed
