"""Faults in evaluation, in saving, in the last step and after it: the curves and every checkpoint stay bit for bit.

As test_worker_swap.py, with the three formats of scripts/gpt/checkpoint.py, synchronous and not. Every checkpoint that
says it is complete must load and hold what the undisturbed run's holds; the newest is the last step's, and is named.
"""

import functools
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "scripts"), str(ROOT)]

from support.checkpoints import content, equal  # noqa: E402
from support.killed_ranks import assert_alike, run_with_kills, undisturbed  # noqa: E402
from support.zygote import in_zygote  # noqa: E402

pytestmark = [pytest.mark.long]

try:
    import megatron.core.datasets.blended_megatron_dataset_builder
    import megatron.core.distributed
    import megatron.core.models.gpt
    import megatron.core.optimizer.distrib_optimizer  # noqa: F401

    from patches.cpu import saving
except ImportError:
    pytestmark += [pytest.mark.skip(reason="megatron-core is not installed")]

from faults import inject  # noqa: E402

STEPS, INTERVAL = 8, 3
LATEST = "latest_checkpointed_iteration.txt"


def arguments(corpus, folder, kind):
    """`kind`: a format, with "+async" behind it for asynchronous saves."""
    name, _, behind = kind.partition("+")
    return [
        str(ROOT / "scripts" / "train_gpt.py"), "--data-path", corpus, "--tp", "2", "--pp", "2", "--dtype", "bf16",
        "--distributed-optimizer", "--train-iters", str(STEPS), "--eval-interval", "4", "--log-all-ranks", "--digest",
        "--save", str(folder / "checkpoints"), "--save-interval", str(INTERVAL), "--ckpt-format", name,
        *(["--async-save"] if behind else []),
    ]  # fmt: skip


def prepare():
    """In every process of a run, before its script begins."""
    saving.results_by_pipe()
    saving.same_padding()


def prepared(injector):
    prepare()
    inject.install(injector)


def prepared_by_the_clock(injector):
    """The script names its folder by the time at which its process began."""
    from gpt import checkpoint

    from deadpool_plugin import is_rehearsal

    prepared(injector)
    original = checkpoint.Checkpoints.__init__

    def init(self, args, *others):
        args.save = args.save / ("later" if is_rehearsal() else "first")
        original(self, args, *others)

    checkpoint.Checkpoints.__init__ = init


def reference(references, corpus, kind):
    """A run without the plugin; formats do not change what is computed or saved, only how."""
    name = kind.partition("+")[0]
    folder = Path(references) / f"saving-{name}"
    return undisturbed(folder, arguments(corpus, folder, name), 4, prepare)


def run_with_kill(tmp_path, argv, rank, step, phase, hook=prepared):
    return run_with_kills(tmp_path, argv, 4, [(rank, step, phase)], [], hook)


# Files on disk


@functools.cache
def expected_content(folder):
    return content(folder)


def is_complete(folder):
    return (folder / ".metadata").exists() or len(list(folder.glob("*.pt"))) == 4


def check_checkpoints(expected, run, may_lack=(), where="checkpoints"):
    saved = run / where
    wanted = sorted(path.name for path in (expected / "checkpoints").glob("iter_*"))
    complete = sorted(path.name for path in saved.glob("iter_*") if is_complete(path))
    assert [name for name in wanted if name not in may_lack] == [name for name in complete if name not in may_lack]
    for name in complete:
        left, right = expected_content(expected / "checkpoints" / name), content(saved / name)
        assert left.keys() == right.keys() and len(left) >= 4, f"{name}: {left.keys() ^ right.keys()}"
        differing = [key for key in left if not equal(left[key], right[key])]
        assert not differing, f"{name} differs in {differing[:3]}"
    assert (saved / LATEST).read_text() == str(STEPS)
    left_over = [str(path) for path in saved.rglob("*.writing")]
    assert not left_over, left_over


def lines(outcome, kind):
    return [fields for events in outcome.events.values() for name, fields in events if name == kind]


# The cases: format, rank, step, phase


CASES = [
    ("torch_dist", 3, 6, "planned"),
    ("torch_dist", 1, 6, "write"),
    ("torch_dist", 0, 6, "finishing"),
    ("torch_dist+async", 0, 8, "finishing"),
    ("torch_dcp", 0, 3, "write"),
    ("torch_dcp", 0, 8, "finishing"),
    ("torch", 2, 6, "write"),
    ("torch", 3, 4, "evaluate"),
    ("torch", 1, 8, "optimizer"),
    ("torch", 0, 8, "exit"),
]


@pytest.mark.parametrize(("kind", "rank", "step", "phase"), CASES)
@in_zygote
def test_curves_and_checkpoints_are_those_of_the_undisturbed_run(tmp_path, corpus, references, kind, rank, step, phase):
    expected = reference(references, corpus, kind)
    outcome = run_with_kill(tmp_path, arguments(corpus, tmp_path, kind), rank, step, phase)
    assert_alike(expected, tmp_path)
    check_checkpoints(expected, tmp_path)
    assert {line["step"] for line in lines(outcome, "CheckpointSaved")} == {3, 6, 8}


@pytest.mark.parametrize(("kind", "rank"), [("torch_dist+async", 2), ("torch_dist+async", 0), ("torch_dcp+async", 1)])
@in_zygote
def test_a_save_in_flight_is_cancelled_on_all_ranks_and_later_ones_work(tmp_path, corpus, references, kind, rank):
    expected = reference(references, corpus, kind)
    outcome = run_with_kill(tmp_path, arguments(corpus, tmp_path, kind), rank, 3, "write")
    assert_alike(expected, tmp_path)
    check_checkpoints(expected, tmp_path, may_lack=["iter_0000003"])
    cancelled = {line["step"] for line in lines(outcome, "CheckpointCancelled")}
    again = outcome.restore_steps[0] <= 3
    assert cancelled == {3} or (again and not cancelled), cancelled  # no survivor may have got as far as the writing
    assert is_complete(tmp_path / "checkpoints" / "iter_0000003") == again, outcome.restore_steps
    assert again or not (tmp_path / "checkpoints" / "iter_0000003").exists(), "the killed rank's files stay"


@pytest.mark.parametrize(("kind", "step", "phase"), [("torch_dist", 6, "finishing"), ("torch", 8, "write")])
@in_zygote
def test_checkpoints_in_a_folder_named_by_the_clock_are_whole_and_named(
    tmp_path, corpus, references, kind, step, phase
):
    """Rank 0, which names the newest one with `open`, is lost in a save: what replaces it names another folder."""
    expected = reference(references, corpus, kind)
    outcome = run_with_kill(tmp_path, arguments(corpus, tmp_path, kind), 0, step, phase, prepared_by_the_clock)
    assert_alike(expected, tmp_path)
    check_checkpoints(expected, tmp_path, where="checkpoints/first")
    assert not [path for path in (tmp_path / "checkpoints" / "later").rglob("*") if path.is_file()]
    for rank in (1, 2, 3) if kind == "torch_dist" else ():  # a file of one rank's own is no checkpoint
        seen = [
            name for name, fields in outcome.events[rank] if fields.get("step") == step or name == "WorkerUnblocked"
        ]
        assert seen.index("WorkerUnblocked") < seen.index("CheckpointSaved"), seen
    said = [fields["text"] for fields in lines(outcome, "Note")]
    assert sum("rank 0 saves to" in text and "checkpoints/first" in text for text in said) == 1, said
