"""Whole emulated clusters, agents, supervisors and all: losses that must leave every bit as in an undisturbed run.

The places and kinds of all faults are in scripts/fault_matrix.py; here is one of each sort, for every change.
"""

import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "scripts"), str(ROOT)]

from support.zygote import in_zygote  # noqa: E402

pytest.importorskip("megatron.core")

from clusters import forked_node  # noqa: E402
from clusters.references import reference  # noqa: E402
from faults.job import Job  # noqa: E402
from faults.pairs import during, node_lost  # noqa: E402
from faults.plan import Kill, Plan  # noqa: E402
from gpt.layouts import LAYOUTS  # noqa: E402
from support import slow_but  # noqa: E402

forked_node.import_all([name for name in forked_node.PRELOAD if name != "patches.cpu.applied"])  # for the forks

STEPS = 10


def run(tmp_path, corpus, references, kills, layout="dp4", stops=0, heals=False, spares=1, slots=1, **settings):
    """The job's verdict; fails unless every fault fired once, all bits are equal and nothing is left behind."""
    forked_node.preload()
    words = ["--data-path", corpus, "--train-iters", STEPS, "--eval-interval", 4, "--eval-iters", 1]
    training = [*LAYOUTS[layout].arguments, *map(str, words), "--log-all-ranks", "--digest"]
    undisturbed = reference(Path(references), training, LAYOUTS[layout].world_size)
    world = LAYOUTS[layout].world_size
    job = Job(tmp_path / "job", training, world, slots, spares, kills, settings, stops, heals=heals)
    verdict = job.run(undisturbed)
    assert verdict.holds, f"{verdict.as_json()}\nsee {tmp_path}"
    if not stops:
        assert verdict.bit_exact
        assert [one.lost_steps for one in verdict.outcomes if one.ready_s is not None][-1] == 0
    return verdict, job.tail


@in_zygote
def test_nodes_and_ranks_are_lost_one_after_the_other(tmp_path, corpus, references):
    """The first node, then a rank in place, then the process that had replaced it."""
    kills = [
        node_lost(0),
        Kill(1, -1, 6, "backward", "rank", 2, hold=5),
        Kill(2, -1, 8, "optimizer", "rank", 2, hold=7),
    ]
    _, tail = run(tmp_path, corpus, references, kills)
    assert [(plan["lost_nodes"], plan["lost_ranks"]) for plan in tail.of("SwapPlanned")] == [
        ([0], []), ([], [2]), ([], [2])]  # fmt: skip
    apart = [path for path in tmp_path.rglob("rehearsals/rank*.txt") if path.stat().st_size]
    assert len(apart) >= len(kills), "what a rehearsal prints is kept"


@in_zygote
def test_a_second_node_is_lost_in_the_middle_of_the_swap(tmp_path, corpus, references):
    _, tail = run(tmp_path, corpus, references, [node_lost(1), during("GroupsRebuilt", "node", 3)], spares=2)
    assert {node for event in tail.of("NodeLost") for node in event["lost"]} == {1, 3}


@pytest.mark.slow
@in_zygote
def test_a_node_and_its_buddy_end_the_job_with_a_verdict(tmp_path, corpus, references):
    verdict, _ = run(tmp_path, corpus, references, [node_lost(1, also=(2,))], stops=86, spares=2)
    assert re.search("newest checkpoint|no checkpoint was saved", verdict.stopped)


@pytest.mark.slow
@in_zygote
def test_two_copies_survive_a_node_and_its_buddy(tmp_path, corpus, references):
    _, tail = run(tmp_path, corpus, references, [node_lost(1, also=(2,))], spares=2, copies=2)
    assert {node for event in tail.of("NodeLost") for node in event["lost"]} == {1, 2}


@pytest.mark.slow
@in_zygote
def test_without_a_spare_the_job_waits_for_a_host_that_joins(tmp_path, corpus, references):
    _, tail = run(tmp_path, corpus, references, [node_lost(1)], spares=0, heals=True, on_no_spare="wait")
    assert tail.of("WaitingForHost") and tail.of("HostJoined")


@pytest.mark.slow
@in_zygote
def test_training_connections_that_end_twice_are_no_error_of_the_script(tmp_path, corpus, references):
    """Nobody dies: the first time all go on in place, and the job goes on the second time too, two steps later."""
    kills = [Kill(index, -1, step, "backward", "reset", 1, hold=step - 1) for index, step in ((0, 4), (1, 6))]
    verdict, tail = run(tmp_path, corpus, references, kills)
    first, *later = tail.of("SwapPlanned")
    assert later and (first["lost_nodes"], first["lost_ranks"]) == ([], [])
    assert len({node for plan in later for node in plan["lost_nodes"]}) <= 1, "the one that both have in common"
    assert not verdict.stopped and not tail.of("RankLost")


@pytest.mark.slow
@in_zygote
def test_an_exception_of_one_rank_is_survived(tmp_path, corpus, references):
    _, tail = run(tmp_path, corpus, references, [Kill(0, -1, 4, "forward", "raise", 3, hold=3)])
    assert not tail.of("NodeLost")


@pytest.mark.parametrize("kind", slow_but(["rank", "poison"], 1))
@in_zygote
def test_all_processes_lost_at_once_are_back_from_host_memory(tmp_path, corpus, references, kind):
    """There is no spare, and none is needed. The second time some ranks are in their backward and some are not.

    An error that meets a rank while it is interrupted anyway costs it nothing.
    """
    kills = [
        Kill(0, -1, 4, "optimizer", kind, 3, hold=3, also=(0, 1, 2, 4, 5, 6, 7)),
        Kill(1, -1, 7, "backward", kind, 6, hold=6, also=(0, 1, 2, 3, 4, 5, 7)),
    ]
    _, tail = run(tmp_path, corpus, references, kills, layout="tp2-pp2-dp2", slots=2, spares=0)
    lost = {event["rank"] for event in tail.of("RankLost")}
    assert not tail.of("NodeLost") and lost
    if kind == "rank":
        assert lost == {*range(8)}
    else:
        plan = Plan(kills, tmp_path / "job" / "faults.jsonl")
        assert [plan.poisoned(rank) for rank in range(8)] == [2, 2, 2, 1, 2, 2, 1, 2], "each rank but the first to fail"
