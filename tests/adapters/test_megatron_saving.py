"""Megatron-core's asynchronous saves: who carries them out, and what a swap leaves of those that were under way."""

import argparse
import functools
import queue
from collections import deque
from typing import Any

import pytest
import torch
from support.stand_in import fake

from deadpool_plugin.adapters.megatron import adapter, saving
from deadpool_plugin.errors import GenerationChanged, Unsupported
from deadpool_plugin.worker import codec
from deadpool_plugin.worker.calls import CallKind
from deadpool_plugin.worker.saving import Saves


@pytest.fixture
def saves(monkeypatch):
    monkeypatch.setenv("RANK", "0")
    folders = fake(one_folder=lambda given, group: given)
    flights = fake(append=lambda flight: pytest.fail("nobody will complete it"))
    return fake(step=3, groups=fake(generation=1), folders=folders, flights=flights)


class Process:
    def __init__(self):
        self.pid, self.is_joined = 0, False

    def join(self):
        self.is_joined = True


def caller_of_core_0_16():
    class Caller:
        def __init__(self):
            self.process = Process()

    calls = fake(persistent_caller=Caller(), async_calls=deque())
    return calls.persistent_caller, calls, lambda: calls.persistent_caller


def caller_of_core_0_17():
    class Caller:
        _persistent_process: Process | None = Process()

        def __init__(self):
            self.process = self._persistent_process

        def close(self, abort=False):
            assert abort and self.process is not None and self.process.is_joined
            self.process = Caller._persistent_process = None

    class Queue:
        _persistent_caller = Caller()

        def __init__(self):
            self.async_calls: deque[object] = deque()

    return Queue._persistent_caller, Queue(), lambda: Queue._persistent_caller or Caller._persistent_process


@pytest.mark.parametrize("version", [caller_of_core_0_16, caller_of_core_0_17])
def test_a_writer_that_was_ended_is_not_asked_again(saves, version, train_gpt):
    caller, calls, left = version()
    process = caller.process
    flight = saving.RequestFlight(saves, "", fake(async_fn_args=()), keep_files=True)
    flight.queue, flight.active = calls, fake(async_caller=caller)
    calls.async_calls.append(flight.active)
    flight.settle()
    assert process.is_joined and left() is None and not calls.async_calls
    flight.settle()


LOOKS_MAX = 20


class Writer:
    """In the place of a persistent caller's process and its `comp_q`: it has been killed, or has written everything."""

    def __init__(self):
        self.looks, self.written = 0, []

    def get_nowait(self):
        if self.written:
            return self.written.pop(0)
        self.looks += 1
        assert self.looks < LOOKS_MAX, "a writer that has been killed is waited for, where no swap can interrupt"
        raise queue.Empty


@pytest.fixture
def waiting(monkeypatch, train_gpt):
    """A queue whose persistent writer has one request, as wrapped; and what its looks at all ranks said."""
    from megatron.core.dist_checkpointing.strategies import async_utils

    class Calls(async_utils.AsyncCallsQueue):
        def schedule_async_request(self, request):
            self.call_idx += 1
            active = async_utils._ActiveAsyncRequest(self.call_idx, self._get_async_caller(), request)
            self.async_calls.append(active)
            return self.call_idx

    monkeypatch.setattr(async_utils, "sleep", lambda seconds: None)
    monkeypatch.setattr(saving, "LOOK_EVERY_S", 0)
    groups, do = fake(generation=1), lambda call: call()
    saves = fake(step=3, groups=groups, flights=[], foreign=lambda: False, do=do, drop=lambda flight: None)
    saves.wrapped = functools.partial(Saves.wrapped, saves)
    for name, call in (
        ("schedule_async_request", saving.Schedule), ("maybe_finalize_async_calls", saving.Finalize),
        ("close", saving.QueueCall),
    ):  # fmt: skip
        saving._wrap(saves, Calls, name, call)
    calls, writer, seen = Calls(persistent=True), Writer(), []
    caller = calls._get_async_caller()
    caller.process = caller.comp_q = caller._persistent_comp_q = writer  # the last is of 0.17 and later
    monkeypatch.setattr(caller, "sync_all_async_calls", lambda is_alive: seen.append(is_alive) or not is_alive)
    monkeypatch.setattr(caller, "close", lambda abort=False: setattr(caller, "process", None))
    calls.schedule_async_request(async_utils.AsyncRequest(print, (), []))
    yield calls, writer, seen
    caller.process = None


@pytest.mark.parametrize("how", ["maybe_finalize_async_calls", "close", "schedule_async_request"])
def test_who_waits_for_a_writer_that_a_swap_has_killed_can_be_interrupted(waiting, how, monkeypatch):
    calls, _, seen = waiting
    request = calls.async_calls[0].async_request
    arguments = {"maybe_finalize_async_calls": (True, True), "close": (), "schedule_async_request": (request,)}[how]

    def look(is_alive):
        seen.append(is_alive)
        if len(seen) == 3:
            raise GenerationChanged(2)
        return False

    monkeypatch.setattr(calls._get_async_caller(), "sync_all_async_calls", look)
    with pytest.raises(GenerationChanged):
        getattr(calls, how)(*arguments)
    assert seen == [True] * 3 and len(calls.async_calls) == 1


def test_who_waits_for_a_writer_looks_until_all_is_written(waiting):
    calls, writer, seen = waiting
    request = calls.async_calls[0].async_request
    assert calls.maybe_finalize_async_calls(blocking=False) == [] and seen == [True]
    writer.written = [0]
    assert calls.maybe_finalize_async_calls(blocking=True) == [0] and not calls.async_calls
    assert calls.maybe_finalize_async_calls(blocking=True) == []
    calls.schedule_async_request(request)
    writer.written = [1]
    calls.schedule_async_request(request)  # the one before is finalized first
    assert [active.idx for active in calls.async_calls] == [2]


def test_who_follows_is_told_nothing_of_what_is_gathered_to_be_saved():
    seen = []

    class Optimizer:
        def sharded_state_dict(self, model_sharded_state_dict, is_loading=False):
            seen.append((sorted(model_sharded_state_dict), is_loading))
            return {"all of it": torch.zeros(3)}

    calls: list[Any] = []
    handler = lambda call: calls.append(call) or call()  # noqa: E731
    adapter.wrap(handler, Optimizer, "sharded_state_dict", CallKind.PLAIN, made=saving.ShardedState)
    given: dict[str, object] = {"model": 1}
    assert "all of it" in Optimizer().sharded_state_dict(given, is_loading=True)
    given["optimizer"] = "added by the script"
    calls[0]()
    assert seen == [(["model"], True)] * 2
    assert calls[0].skipped(codec.decode(codec.encode(calls[0].outcome(torch.zeros(3))))) == {}


def test_a_save_that_is_done_again_saves_the_arguments_as_they_were(saves, tmp_path):
    args, saved = argparse.Namespace(consumed_valid_samples=8), []
    saves.written = lambda path, began: None

    def save(sharded_state_dict, checkpoint_dir):
        saved.append(sharded_state_dict["args"].consumed_valid_samples)

    call = saving.DistCheckpointSave(saves, save, ({"args": args}, str(tmp_path / "new")), {})
    call()
    args.consumed_valid_samples += 8  # by an evaluation, while all of it is written
    call()
    assert saved == [8, 8]


def test_a_request_for_another_librarys_queue_is_refused(saves, tmp_path, train_gpt):
    def save(sharded_state_dict, checkpoint_dir, async_sharded_save=False):
        return fake()

    call = saving.DistCheckpointSave(saves, save, ({}, str(tmp_path / "new")), {"async_sharded_save": True})
    with pytest.raises(Unsupported, match="by types.*to do: save with async_strategy='mcore'"):
        call()


def test_a_save_goes_to_the_folder_all_ranks_agree_on(saves, tmp_path):
    saves.folders.one_folder = lambda given, group: given.replace("tuesday", "monday")
    folders: list[str] = []
    saves.written = lambda path, began: folders.append(path)

    def save(sharded_state_dict, checkpoint_dir, sharded_strategy=None, async_sharded_save=False):
        folders.append(checkpoint_dir)

    saving.DistCheckpointSave(saves, save, ({}, str(tmp_path / "tuesday")), {})()
    assert folders == [str(tmp_path / "monday")] * 2
