"""Processes that hang and do not die, in a whole emulated cluster: found, named and cured, bit for bit."""

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "scripts"), str(ROOT)]

from support import slow_but  # noqa: E402
from support.zygote import in_zygote  # noqa: E402

pytest.importorskip("megatron.core")

from clusters import forked_node  # noqa: E402
from clusters.references import reference  # noqa: E402
from faults.job import Job  # noqa: E402
from faults.plan import Kill  # noqa: E402
from gpt.layouts import LAYOUTS  # noqa: E402

from deadpool_plugin.core import stalls  # noqa: E402

forked_node.import_all([name for name in forked_node.PRELOAD if name != "patches.cpu.applied"])  # for the forks

FLOOR_S = 3.0
STEPS = 24
WHERE = {  # words of the innermost frame of the script's own process, by kind
    "gil": "plan.py",
    "file": "plan.py",
    "absent": "",
}


def hang(index, kind, phase, rank, step):
    return Kill(index, -1, step, phase, kind, rank, hold=step - 1)


def run(tmp_path, corpus, references, kills, layout, floor_s=FLOOR_S, spares=1, more=(), **settings):
    """The job under `stall_timeout_s: auto`, and its events. Fails unless all bits are those of an undisturbed one."""
    stalls.FLOOR_S = floor_s  # of the agents, which are forks of this process
    forked_node.preload()
    words = ["--data-path", corpus, "--train-iters", STEPS, "--eval-interval", 4, "--eval-iters", 1, *more]
    training = [*LAYOUTS[layout].arguments, *map(str, words), "--log-all-ranks", "--digest"]
    world = LAYOUTS[layout].world_size
    undisturbed = reference(Path(references), training, world)
    job = Job(tmp_path / "job", training, world, 1, spares, kills, {"restarts_max": 100, **settings})
    verdict = job.run(undisturbed)
    assert verdict.holds and verdict.bit_exact, f"{verdict.as_json()}\nsee {tmp_path}"
    return job.tail


def cures(tail):
    return [event for event in tail.of("Stalled") if event["cure"]]


@pytest.mark.parametrize("layout", slow_but(["dp4", "tp2-dp2"], 0))
@in_zygote
def test_each_hang_is_cured_and_named(tmp_path, corpus, references, layout):
    """One host after the other hangs once. Then the second one again, and it is replaced."""
    kills = [
        hang(0, "gil", "forward", 1, 4),
        hang(1, "file", "backward", 2, 8),
        hang(2, "absent", "before", 3, 12),
        hang(3, "gil", "evaluate", 0, 16),
        hang(4, "file", "optimizer", 1, 20),
    ]
    tail = run(tmp_path, corpus, references, kills, layout)
    found = cures(tail)
    assert [event["ranks"] for event in found] == [[kill.rank] for kill in kills], found
    for kill, event in zip(kills, found, strict=True):
        assert f"rank {kill.rank} on node {kill.rank} has not come to collective" in event["what"], event
        assert WHERE[kill.kind] in event["stack"][0], event
    assert all("interrupted" in event["cure"] for event in found[:-1]) and "asked to leave" in found[-1]["cure"]
    lost = {event["rank"] for event in tail.of("RankLost")}
    assert lost == {0, 1, 2}, "who waits in a collective of its own is interrupted, and keeps its process"
    assert [event["lost"] for event in tail.of("NodeLost")] == [[1]]
    for kill in kills:
        log = next(path for path in tmp_path.rglob(f"rank{kill.rank:04}.node{kill.rank}.log"))
        assert "which gets no further" in log.read_text(), log


@pytest.mark.slow
@in_zygote
def test_what_is_slow_is_not_taken_for_a_hang(tmp_path, corpus, references):
    """The first step of a process, an evaluation and a save take 20 times a step and more, and ten times the floor."""
    kills = [
        Kill(0, -1, 1, "forward", "slow", 1),
        Kill(1, -1, 4, "evaluate", "slow", 2),
        Kill(2, -1, 0, "write", "slow", -1, after=1),
    ]
    more = ("--save", tmp_path / "saved", "--save-interval", 6, "--ckpt-format", "torch")
    tail = run(tmp_path, corpus, references, kills, "dp4", floor_s=1.0, more=more)
    assert not tail.of("SwapPlanned") and not cures(tail) and not tail.of("RankLost")


@pytest.mark.slow
@in_zygote
def test_a_save_and_a_snapshot_that_hang_are_cured(tmp_path, corpus, references):
    """The first save of a process may take as long as a start, here 20 s: far longer than a step."""
    kills = [Kill(0, -1, 6, "write", "file", 3), hang(1, "file", "staging", 2, 14)]
    more = ("--save", tmp_path / "saved", "--save-interval", 6, "--ckpt-format", "torch")
    tail = run(tmp_path, corpus, references, kills, "dp4", more=more, start_timeout_s=20)
    save, snapshot = cures(tail)
    assert save["ranks"] == [3] and "first save" in save["what"] and save["waited_s"] >= 20, save
    assert snapshot["ranks"] == [2] and snapshot["waited_s"] < 20, snapshot
    assert all("interrupted" in event["cure"] for event in (save, snapshot))
    saved = sorted(path.name for path in (tmp_path / "saved").glob("iter_*"))
    assert len(saved) == STEPS // 6, saved
