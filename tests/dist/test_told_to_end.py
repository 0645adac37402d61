"""Every process of a host is told to end (SIGTERM), as deepspeed's launcher and schedulers do: a script that handles it
itself saves and ends the job well; any other loses the host and goes on."""

import os
import signal
import sys
import time
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "scripts"), str(ROOT)]

from support.zygote import in_zygote  # noqa: E402

pytest.importorskip("megatron.core")

from clusters import forked_node, processes  # noqa: E402
from clusters.events import Tail  # noqa: E402
from clusters.forked import Cluster  # noqa: E402
from gpt.layouts import LAYOUTS  # noqa: E402

forked_node.import_all([name for name in forked_node.PRELOAD if name != "patches.cpu.applied"])  # for the forks

PATIENCE_S = 120.0


def run(folder, script, corpus, over):
    """A job of four ranks whose last rank's host is told to end in training, until it is `over` (by exit codes and
    events): both."""
    forked_node.preload()
    words = ["--data-path", corpus, "--train-iters", 100_000, "--eval-interval", 0]
    training = [str(script), *LAYOUTS["dp4"].arguments, *map(str, words)]
    cluster = Cluster(folder, 3, 2, training)
    tail = Tail(cluster.output)

    def until(what, done):
        deadline = time.monotonic() + PATIENCE_S
        while not done():
            if time.monotonic() > deadline:
                cluster.dump_stacks(folder / "stacks")
                raise AssertionError(f"waited for {what}; see {folder}")
            tail.read()
            time.sleep(0.01)

    try:
        cluster.start()
        until("steps", lambda: tail.spares_ready() and tail.protected and len(tail.of("StepDone")) > 20)
        leader = cluster.nodes[1].leader
        for pid in processes.living(leader) - {leader}:
            processes.send(pid, signal.SIGTERM)
        until("the end", lambda: over(cluster.exit_codes(), tail))
        codes = cluster.exit_codes()
        assert None in codes or cluster.close(grace_s=5.0) == []
    finally:
        cluster.close(grace_s=0.0)
    tail.read()
    return codes, tail


@in_zygote
def test_a_script_that_handles_it_saves_and_ends_the_job(tmp_path, corpus):
    os.environ["SAVED"] = str(tmp_path)
    codes, tail = run(tmp_path / "job", HERE / "saving_handler.py", corpus, lambda codes, _: None not in codes)
    assert codes == [0, 0, 0]
    assert sorted(path.name for path in tmp_path.glob("*.pt")) == [f"rank{rank}.pt" for rank in range(4)]
    assert any("the script handles that itself" in event["text"] for event in tail.of("Note"))
    assert not tail.of("NodeLost") and not tail.of("RankLost")


@in_zygote
def test_any_other_script_goes_on_without_the_host(tmp_path, corpus):
    script = ROOT / "scripts" / "train_gpt.py"
    codes, tail = run(tmp_path / "job", script, corpus, lambda codes, tail: codes[1] and tail.of("SwapDone"))
    assert codes[0] is codes[2] is None
    assert [event["lost"] for event in tail.of("NodeLost")] == [[1]]
