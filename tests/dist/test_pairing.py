"""A process that takes a rank over and issues a collective more than the others: an error with a name, no number."""

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "scripts"), str(ROOT)]

from support import slow_but  # noqa: E402
from support.zygote import in_zygote  # noqa: E402

pytest.importorskip("megatron.core")

from clusters import forked_node  # noqa: E402
from faults.job import Job  # noqa: E402
from faults.pairs import node_lost  # noqa: E402
from gpt.layouts import LAYOUTS  # noqa: E402

SCRIPT = Path(__file__).resolve().with_name("lazy_collective.py")
SETTINGS = {"stall_timeout_s": 15}
NAMED = {
    "int32": "all_reduce int32 x 1 sum",  # read as the float of the loss, were it not found
    "float32": "collectives",  # alike in all but that it is one more
}


@pytest.mark.parametrize("dtype", slow_but(list(NAMED), 0))
@in_zygote
def test_a_newcomer_that_issues_more_than_the_others_is_named(tmp_path, corpus, dtype):
    forked_node.preload()
    marker = tmp_path / "asked"
    words = [
        dtype,
        marker,
        *LAYOUTS["dp4-replicated"].arguments,
        "--data-path",
        corpus,
        "--train-iters",
        12,
        "--log-all-ranks",
    ]
    job = Job(tmp_path / "job", [*map(str, words)], 2, 1, 1, [node_lost(1)], SETTINGS, stops=86, script=SCRIPT)
    verdict = job.run(None)
    assert verdict.holds, f"{verdict.as_json()}\nsee {tmp_path}"
    assert "issue different collectives: group 0+2" in verdict.stopped and NAMED[dtype] in verdict.stopped
    assert "as before rank(s) 1 were replaced" in verdict.stopped
    assert marker.read_text().split().count("1") == 3, "the rank itself, its first newcomer and the next"
    (first, _) = job.tail.of("SwapPlanned")
    steps = [event["step"] for event in job.tail.of("StepCommitted") if event["generation"] > 0]
    assert set(steps) <= {first["restore_step"]}, "a step in which an int was read as a float was committed"
