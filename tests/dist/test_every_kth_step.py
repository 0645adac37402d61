"""Every k-th step is mirrored: losses in any phase cost steps that are redone, and no bit; a save need not wait for k.

The places and kinds of all faults at k = 2, 4 and 8 are tried by scripts/fault_matrix.py --mirror-every.
"""

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "scripts"), str(ROOT)]

from support.checkpoints import equal  # noqa: E402
from support.zygote import in_zygote  # noqa: E402

pytest.importorskip("megatron.core")

import torch  # noqa: E402
from clusters import forked_node  # noqa: E402
from clusters.references import reference  # noqa: E402
from faults.job import Job  # noqa: E402
from faults.plan import Kill  # noqa: E402
from gpt.layouts import LAYOUTS  # noqa: E402

forked_node.import_all([name for name in forked_node.PRELOAD if name != "patches.cpu.applied"])  # for the forks

STEPS, EVERY, SAVED = 13, 8, (3, 6, 9, 12)


@in_zygote
def test_steps_between_two_snapshots_are_redone_and_what_one_rank_saves_is_committed_before(
    tmp_path, corpus, references, monkeypatch
):
    """The host of the rank that saves is lost in the middle of a file, another one behind it, then the rank itself."""
    forked_node.preload()
    training = [
        *LAYOUTS["dp4"].arguments,
        "--data-path",
        corpus,
        "--train-iters",
        str(STEPS),
        "--log-all-ranks",
        "--digest",
    ]
    script, plain, mine = ROOT / "tests/dist/saves_alone.py", Path(references) / "alone", tmp_path / "alone"
    for folder in (plain, mine):
        folder.mkdir(exist_ok=True)
    monkeypatch.setenv("ALONE", str(plain))
    undisturbed = reference(Path(references), training, 4, script)
    monkeypatch.setenv("ALONE", str(mine))
    kills = [
        Kill(0, -1, 3, "write", "node", 0, hold=2),
        Kill(1, -1, 5, "backward", "node", 3, hold=4),
        Kill(2, -1, 9, "write", "rank", 0, hold=8),
        Kill(3, -1, 11, "optimizer", "rank", 2, hold=10),
    ]
    job = Job(tmp_path / "job", training, 4, 1, 2, kills, {"mirror_every": EVERY}, script=script)
    verdict = job.run(undisturbed)
    assert verdict.holds and verdict.bit_exact, f"{verdict.as_json()}\nsee {tmp_path}"
    restored = [plan["restore_step"] for plan in job.tail.of("SwapPlanned")]
    assert restored == [3, 3, 9, 9], "what is saved is a snapshot; the others are eight steps apart"
    assert {int(file.stem.removeprefix("step")) for file in mine.iterdir()} == {*SAVED}
    for step in SAVED:
        files = [torch.load(folder / f"step{step}.pt", weights_only=False) for folder in (plain, mine)]
        assert equal(*files), f"the file of step {step}"
