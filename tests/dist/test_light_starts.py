"""Processes that take a rank over in a job that began from a checkpoint: they read none of its tensors but those that
a restore does not overwrite, and the job goes on bit for bit."""

import functools
import json
import os
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "scripts"), str(ROOT)]

from dist import test_deepspeed  # noqa: E402
from faults import deepspeed_hooks, inject  # noqa: E402
from support import slow_but  # noqa: E402
from support.deepspeed_cpu import needs_deepspeed  # noqa: E402
from support.killed_ranks import assert_alike, run_with_kills, undisturbed  # noqa: E402
from support.zygote import in_zygote  # noqa: E402

SAVED, STEPS = 3, 8
LOADING = str(Path(__file__).resolve().with_name("loading.py"))


def count(folder, install, injector):
    """Note, in every process that follows a rank, what its start-up has left unread."""
    from deadpool_plugin.worker.light import Unread

    install(injector)
    finish = Unread.finish

    def counted(self, restored):
        finish(self, restored)
        Path(folder, f"unread.{os.getpid()}").write_text(json.dumps([self.left_bytes, self.read_bytes]))

    Unread.finish = counted  # type: ignore[method-assign]


def counts(folder):
    """The bytes that each process left unread, and those it read of them after all."""
    return [json.loads(path.read_text()) for path in folder.glob("unread.*")]


def goes_on(tmp_path, saving, argv, kills, install):
    """Run `saving`, then `argv` with `kills`. Returns: the counts of those who took over."""
    undisturbed(tmp_path / "saving", saving, 2)
    expected, run = undisturbed(tmp_path / "plain", argv, 2), tmp_path / "run"
    run.mkdir()
    outcome = run_with_kills(run, argv, 2, kills, [kills[0][0]], functools.partial(count, run, install))
    assert_alike(expected, run)
    assert len(counts(run)) == len(kills)
    notes = [fields["text"] for events in outcome.events.values() for kind, fields in events if kind == "Note"]
    return counts(run), [note for note in notes if "checkpoint" in note]


@pytest.mark.parametrize("name", slow_but(["torch_dist", "torch", "torch_dcp"], 0, 1))
@in_zygote
def test_no_tensor_of_a_megatron_checkpoint_is_read_again(tmp_path, corpus, name):
    pytest.importorskip("megatron.core")
    common = [
        str(ROOT / "scripts" / "train_gpt.py"), "--data-path", corpus, "--dtype", "bf16", "--distributed-optimizer",
        "--eval-interval", "4", "--log-all-ranks", "--digest", "--ckpt-format", name,
    ]  # fmt: skip
    folder = str(tmp_path / "checkpoints")
    saving = [*common, "--train-iters", str(SAVED), "--save", folder]
    argv = [*common, "--train-iters", str(STEPS), "--load", folder]
    found, notes = goes_on(tmp_path, saving, argv, [(1, 5, "backward"), (0, 7, "optimizer")], inject.install)
    assert all(left > 100_000 and read == 0 for left, read in found), found
    assert not notes


CASES = [("--zero 1 --dtype bf16", "nothing"), ("--zero 1", "copy"), ("--zero 0 --dtype bf16", "buffer"),
         ("--zero 3", "nothing"), ("--zero 2 --dtype bf16 --freeze mixed", "nothing")]  # fmt: skip


@needs_deepspeed
@pytest.mark.parametrize(("words", "kept"), slow_but(CASES, 0, 1))
@in_zygote
def test_of_a_deepspeed_checkpoint_what_no_restore_overwrites_is_read(tmp_path, corpus, words, kept):
    folder = tmp_path / "checkpoints"
    given = test_deepspeed.arguments(corpus, words)
    saving = [*given, "--save", str(folder), "--save-interval", str(SAVED)]
    saving[saving.index("--train-iters") + 1] = str(SAVED)
    argv = [LOADING, str(folder), kept, *given[1:]]
    kills = [(1, 6, "backward"), (0, 8, "optimizer")]
    found, notes = goes_on(tmp_path, saving, argv, kills, deepspeed_hooks.install)
    for left, read in found:
        assert left > 100_000 and read < left / 2, found
        assert bool(read) == (kept != "nothing" or "--freeze" in words), found
    assert len(notes) == sum(bool(read) for _, read in found), notes
