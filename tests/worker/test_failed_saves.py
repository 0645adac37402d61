"""A save that fails is the script's own affair: a redo does it again, and who follows is told; so is who sent what."""

from __future__ import annotations

import builtins
import contextlib
import errno
import os
from traceback import StackSummary

import pytest
import torch
from support.live_rank import Rank, follower
from support.stand_in import fake
from torch.distributed.checkpoint.api import CheckpointException

from deadpool_plugin.comm.collective import Operation
from deadpool_plugin.core import local
from deadpool_plugin.errors import GenerationChanged
from deadpool_plugin.worker import codec, follow, saving
from deadpool_plugin.worker.calls import Call, CallKind
from deadpool_plugin.worker.follow import Follow
from deadpool_plugin.worker.resumable import Tapes
from deadpool_plugin.worker.starting import Starting


def save(rank, function):
    return rank.call(function)


class Save(saving.SaveCall):
    """Gives or raises what comes next."""

    name = "save"

    def __init__(self, *ends):
        self._ends = iter(ends)

    def __call__(self):
        end = next(self._ends)
        if isinstance(end, BaseException):
            raise end
        return end


def test_who_follows_goes_on_after_a_save_that_failed_in_the_rank_itself():
    full = OSError(errno.ENOSPC, "No space left on device", "/checkpoints/one.pt")
    rank = Rank()
    for is_follower in (False, True):
        one = follower(rank) if is_follower else rank
        with pytest.raises(OSError) as failed:
            one.call(Save(full))
        assert failed.value.errno == errno.ENOSPC and str(failed.value) == str(full)
        assert one.call(Call("step", CallKind.PLAIN, lambda: 7)) == 7


def test_a_failure_that_is_no_exception_of_the_common_kind_is_recorded_too():
    """torch.distributed.checkpoint raises an exception directly below BaseException."""
    rank, failure = Rank(), CheckpointException("write", {1: (OSError("disk full"), StackSummary())})
    with pytest.raises(CheckpointException):
        rank.call(Save(failure))
    with pytest.raises(CheckpointException, match="disk full"):
        follower(rank).call(Save())


class OfTheScript(KeyError):
    def __init__(self, one, two):
        raise AssertionError("nothing of the script's is run to raise it again")

    def __str__(self):
        return "its own text"


def of_the_script():
    return KeyError.__new__(OfTheScript, "a")


def of_a_function():
    class Unknown(OfTheScript, OSError):
        pass

    return OSError.__new__(Unknown, 1, "a")


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (FileNotFoundError(2, "No such file", "/a"), FileNotFoundError),
        (OSError("plain"), OSError),
        (KeyError("a"), KeyError),
        (RuntimeError("of a name that cannot be encoded: \udcff"), RuntimeError),
        (UnicodeDecodeError("ascii", b"\xff", 0, 1, "ordinal"), UnicodeDecodeError),
        (of_the_script(), OfTheScript),
        (of_a_function(), OfTheScript),
        (CheckpointException("write", {}), CheckpointException),
    ],
    ids=lambda value: getattr(value, "__name__", type(value).__name__),
)
def test_what_was_raised_is_raised_again_by_the_nearest_name_that_is_known(error, kind):
    again = codec.decode_error(codec.decode(codec.encode(codec.encode_error(error))))
    assert isinstance(again, kind) and type(again).__name__ == type(error).__name__
    assert str(again) == str(error).encode(errors="backslashreplace").decode()
    assert getattr(again, "errno", None) == getattr(error, "errno", None) or kind is OfTheScript


@pytest.mark.skipif(not hasattr(builtins, "ExceptionGroup"), reason="this Python has none")
def test_a_group_of_exceptions_comes_as_what_it_is_below():
    again = codec.decode_error(codec.encode_error(builtins.ExceptionGroup("two of them", [ValueError(), OSError()])))
    assert isinstance(again, Exception) and "two of them" in str(again)


@pytest.mark.parametrize("outcome", [None, True, 7, "raised", [["a"], "float32", [2]], {}, {"a": 1}])
def test_what_returned_is_not_raised(outcome):
    assert codec.decode_error(outcome) is None


@pytest.mark.parametrize("first", ["saved", OSError("disk full")], ids=["done", "failed"])
@pytest.mark.parametrize("again", ["saved", OSError("disk full"), CheckpointException("write", {})])
def test_a_redo_does_a_save_again_and_its_end_is_not_the_scripts(first, again):
    rank = Rank()
    with contextlib.suppress(OSError):
        save(rank, Save(first, again))
    (call,) = rank._log.after_cut(0)
    rank._redo(call)
    expected = [] if again == "saved" else ["Note"]
    assert [kind for kind, _ in rank.said] == expected
    assert all("save after step 0, done again on rank 3 in a swap, failed" in text for _, text in rank.said)


def test_only_a_save_may_fail_in_a_redo_and_a_swap_ends_its_redo_too():
    rank, ends = Rank(), iter([7, OSError("broken")])

    def forward():
        end = next(ends)
        if isinstance(end, OSError):
            raise end
        return end

    rank.call(Call("forward", CallKind.PLAIN, forward))
    save(rank, Save("saved", GenerationChanged(2)))
    for call, error in zip(rank._log.after_cut(0), (OSError, GenerationChanged), strict=True):
        with pytest.raises(error):
            rank._redo(call)
    assert rank.said == []


def test_a_file_whose_save_failed_is_not_written_in_a_redo(tmp_path, monkeypatch):
    monkeypatch.setenv("RANK", "3")
    errors = iter([OSError("disk full")])

    def write(file):
        for error in errors:
            raise error
        file.write_bytes(b"whole")

    rank = Rank()
    saves = fake(folders=fake(file=str), written=lambda path, began, whole: None)
    with pytest.raises(OSError):
        save(rank, saving.FileSave("torch.save", saves, str(tmp_path / "one.pt"), write))
    for call in rank._log.after_cut(0):
        rank._redo(call)
    assert os.listdir(tmp_path) == [] and not rank.said


def test_a_save_after_the_end_of_the_groups_waits_for_no_commit():
    rank = Rank(step=5)
    rank._restored = 4
    with pytest.raises(AssertionError, match="wait for ever"):
        save(rank, Save("saved"))
    assert rank.finish() == 0
    assert save(rank, Save("saved")) == "saved"


def test_who_follows_is_told_from_whom_a_message_came():
    work = fake(wait=lambda: True, source_rank=lambda: 5)

    def issue(handle, operation):
        operation.args[0][0].fill_(9)
        return work

    rank = Rank()
    rank.groups.issue = issue
    for one in (rank, None):
        received = torch.zeros(2)
        done = (one or follower(rank)).collective(fake(), Operation("recv_anysource", ([received], 0)))
        assert done.source_rank() == 5 and received.tolist() == [9, 9]


class Seen(Exception):
    """An exception that says whether inference mode was on."""


def see(*args, **kwargs):
    raise Seen(torch.is_inference_mode_enabled())


@pytest.mark.parametrize("moment", ["the first forward", "the first forward of a rehearsal", "taking over"])
def test_what_is_made_while_the_script_evaluates_can_be_trained(monkeypatch, moment):
    context = fake(tapes=Tapes(), difference=None, adapter=fake(attach=see), groups=fake(finish_rehearsal=list))
    monkeypatch.setattr(follow, "SlotPair", fake(attach=see))
    following = Follow(context, 3, "", fake(), fake(gone=()), fake(finish=lambda restored: None))
    with torch.inference_mode(), pytest.raises(Seen) as seen:
        if moment == "the first forward":
            Starting(context, 3, 4096)._become_live()
        elif moment == "taking over":
            following._layout = fake()
            following._take_over(local.TakeOver(1, "store", 0, 4096, 64), 0)
        else:
            following._rehearsed()
    assert seen.value.args == (False,)
