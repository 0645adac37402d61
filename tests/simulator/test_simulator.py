"""The simulator itself: the same seed is the same run, its parts do what they say, and a broken run says so."""

from __future__ import annotations

import asyncio
import random
import re
import socket
import sys
import warnings
from collections.abc import Coroutine, Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml

from deadpool_plugin.errors import ConfigError
from deadpool_plugin.transport.sockets import address_towards
from simulator.campaign import campaign
from simulator.clock import Timeline
from simulator.loop import HostLoop, simulated
from simulator.network import Network, Socket, address_of, faked
from simulator.rules import Cut, Delay, Loss, Rule, Rules
from simulator.run import Outcome, run
from simulator.schedule import Fault, Ranges, Scenario, as_file, fixed_fields, read_faults, scenario
from simulator.shrink import shrunk
from simulator.transcript import Transcript

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))
import simulate

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
    """Two hosts, the first of which is connected with the second and sends it numbers; what each of them meets."""

    def __init__(self) -> None:
        self.timeline = Timeline()
        rng = random.Random(5)
        self.network = Network(self.timeline, Rules(rng), rng, latency_s=0.1)
        self.loops = [HostLoop(self.timeline, 1.0, 0.0) for _ in range(2)]  # type: ignore[abstract]
        self.kernels = [self.network.attach(number, loop) for number, loop in enumerate(self.loops)]
        self.heard: list[int] = []
        self.ended: dict[int, BaseException | None] = {}
        self.sock = Socket(self.kernels[0])
        self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 10_000)
        listener = Socket(self.kernels[1])
        listener.listen(80)
        self.start(1, self._hear(listener))
        self.start(0, self.sock.connect((address_of(1), 80)))
        self.go_on()
        self.start(0, self._await_end(self.sock))

    def start(self, host: int, work: Coroutine[Any, Any, None]) -> None:
        self.loops[host].call_soon(self.loops[host].create_task, work)

    async def _hear(self, listener: Socket) -> None:
        sock = await listener.accept()
        try:
            while data := await sock.receive(4):
                self.heard.append(int.from_bytes(data, "big"))
            self.ended[1] = None
        except OSError as error:
            self.ended[1] = error

    async def _await_end(self, sock: Socket) -> None:
        try:
            assert not await sock.receive(1)
        except OSError as error:
            self.ended[0] = error

    def go_on(self, for_s: float = 1000.0) -> None:
        with simulated():
            self.timeline.run(self.timeline.now + for_s, 100_000)

    def send(self, numbers: Iterable[int], rules: Sequence[Rule] = ()) -> None:
        self.network.rules.add(self.timeline.now, list(rules))
        for number in numbers:
            self.sock.send(number.to_bytes(4, "big"))
        self.go_on()


@pytest.mark.parametrize(
    "rule", [Loss("loss", {0}, {1}, 100.0, probability=0.5), Delay("delay", {0}, {1}, 100.0, delay_s=3.0)]
)
def test_a_lossy_or_slow_connection_keeps_order_and_loses_nothing(rule):
    ends = Ends()
    ends.send(range(50), [rule])
    assert ends.heard == list(range(50)) and not ends.ended and rule.effects


def test_a_short_cut_delays_and_a_long_one_ends_the_connection_at_its_sender():
    ends = Ends()
    began = ends.timeline.now
    ends.send(range(3), [Cut("partition", {0}, {1}, until=began + 5.0)])
    assert ends.heard == [0, 1, 2] and not ends.ended
    ends.send(range(3, 6), [Cut("partition", {0}, {1}, until=ends.timeline.now + 60.0)])
    assert ends.heard == [0, 1, 2] and isinstance(ends.ended.pop(0), TimeoutError) and not ends.ended


def test_a_reset_loses_a_suffix_and_tells_both_ends():
    ends = Ends()
    for number in range(20):
        ends.sock.send(number.to_bytes(4, "big"))
    assert ends.network.break_links(0, 1)
    ends.go_on()
    assert ends.heard == list(range(len(ends.heard))) and len(ends.heard) <= 20
    assert {type(error) for error in ends.ended.values()} == {ConnectionResetError} and len(ends.ended) == 2
    with pytest.raises(ConnectionResetError):
        ends.sock.send(b"more")


def test_where_nobody_listens_the_kernel_says_so_and_a_dark_host_says_nothing():
    ends, met = Ends(), []

    async def connect(port: int) -> None:
        began = ends.timeline.now
        try:
            await Socket(ends.kernels[0]).connect((address_of(1), port))
        except OSError as error:
            met.append((type(error), ends.timeline.now - began > 100.0))

    ends.start(0, connect(81))
    ends.go_on()
    ends.network.vanish(1)
    ends.start(0, connect(80))
    ends.go_on()
    assert met == [(ConnectionRefusedError, False), (TimeoutError, True)]
    assert isinstance(ends.ended[0], TimeoutError), "nothing that is sent to it is acknowledged"


def test_a_host_knows_which_of_its_addresses_leads_to_another_one():
    ends = Ends()
    ends.go_on()
    with faked(), warnings.catch_warnings(record=True) as said:
        ends.loops[0].run_from_here()
        assert address_towards(address_of(1), 80) == address_of(0)
    assert not said, said[0].message


def test_a_host_that_stands_still_finds_everything_and_one_that_is_gone_runs_nothing():
    timeline, ran = Timeline(), list[str]()
    loop = HostLoop(timeline, 1.0, 500.0)  # type: ignore[abstract]

    async def work(name: str) -> None:
        try:
            await asyncio.sleep(1.0)
            ran.append(f"{name} at {loop.time():g}")
            await asyncio.sleep(1.0)
        finally:
            ran.append(f"{name} ends")

    loop.call_soon(loop.create_task, work("a"))
    timeline.at(0.5, loop.pause)
    timeline.at(6.0, loop.wake, True)
    timeline.at(6.5, loop.end)
    with simulated():
        timeline.run(20.0, 1000)
    assert ran == ["a at 506"], "not even what is to happen at the end"


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
    assert simulate.main(["--seeds", "0:4", "--nodes", "5:6", "--jobs", "1", "--pairs"]) == 0
    printed = capsys.readouterr().out
    for what in ("seeds      4", "faults", "swaps", "verdicts", "covered", "violations 0", "when WAITING member"):
        assert what in printed


@pytest.mark.parametrize("path", sorted(Path(__file__).parent.glob("[!t]*.py")), ids=lambda path: path.stem)
def test_the_simulator_knows_no_other_time_or_chance_than_its_own(path):
    if path.stem == "record":  # which says how long a campaign took
        return
    text = path.read_text()
    assert not re.search(r"^(?:import|from) (?:time|secrets|threading|datetime|uuid)\b", text, re.MULTILINE)
    assert not re.search(r"\brandom\.(?!Random\b|random\(\))|\bhash\(|urandom", text), "chance without a seed"
