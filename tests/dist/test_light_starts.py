"""Processes that take a rank over in a job that began from a checkpoint: they read none of its tensors but those that
a restore does not overwrite, and the job goes on bit for bit."""

import functools
import json
import os
import subprocess
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
REPLACE = 'rm -r "$1" && mkdir "$1" && cd "$1" && echo 99 >latest && echo 99 >latest_checkpointed_iteration.txt'


def count(folder, loses, install, injector):
    """Note, in every process that follows a rank, what its start-up has left unread.

    Before, the folder `loses` is replaced by one with another latest checkpoint, if one is given.
    """
    from deadpool_plugin import is_rehearsal
    from deadpool_plugin.worker.light import Unread

    install(injector)
    if loses and is_rehearsal():
        subprocess.run(["sh", "-c", REPLACE, "sh", loses], check=True)  # not by this process, which knows its own files
    finish = Unread.finish

    def counted(self, restored):
        finish(self, restored)
        Path(folder, f"unread.{os.getpid()}").write_text(json.dumps([self.left_bytes, self.read_bytes]))

    Unread.finish = counted  # type: ignore[method-assign]


def counts(folder):
    """The bytes that each process left unread, and those it read of them after all."""
    return [json.loads(path.read_text()) for path in folder.glob("unread.*")]


def goes_on(tmp_path, saving, argv, kills, install, loses=""):
    """Run `saving`, then `argv` with `kills`. Returns: the counts of those who took over, and what was said of them."""
    undisturbed(tmp_path / "saving", saving, 2)
    expected, run = undisturbed(tmp_path / "plain", argv, 2), tmp_path / "run"
    run.mkdir()
    outcome = run_with_kills(run, argv, 2, kills, [kills[0][0]], functools.partial(count, run, loses, install))
    assert_alike(expected, run)
    assert len(counts(run)) == len(kills)
    notes = [fields["text"] for events in outcome.events.values() for kind, fields in events if kind == "Note"]
    return counts(run), [note for note in notes if "checkpoint" in note]


@pytest.mark.parametrize("is_kept", slow_but([False, True], 0), ids=["gone", "kept"])
@pytest.mark.parametrize("name", slow_but(["torch_dist", "torch", "torch_dcp"], 0, 1))
@in_zygote
def test_no_tensor_of_a_megatron_checkpoint_is_read_again(tmp_path, corpus, name, is_kept):
    pytest.importorskip("megatron.core")
    common = [
        str(ROOT / "scripts" / "train_gpt.py"), "--data-path", corpus, "--dtype", "bf16", "--distributed-optimizer",
        "--eval-interval", "4", "--log-all-ranks", "--digest", "--ckpt-format", name,
    ]  # fmt: skip
    folder = str(tmp_path / "checkpoints")
    saving = [*common, "--train-iters", str(SAVED), "--save", folder]
    argv = [*common, "--train-iters", str(STEPS), "--load", folder]
    kills, loses = [(1, 5, "backward"), (0, 7, "optimizer")], "" if is_kept else folder
    found, notes = goes_on(tmp_path, saving, argv, kills, inject.install, loses)
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
    loses = str(folder) if kept == "nothing" and "--freeze" not in words else ""
    found, notes = goes_on(tmp_path, saving, argv, kills, deepspeed_hooks.install, loses)
    for left, read in found:
        assert left > 100_000 and read < left / 2, found
        assert bool(read) == (kept != "nothing" or "--freeze" in words), found
    assert len(notes) == sum(bool(read) for _, read in found), notes
