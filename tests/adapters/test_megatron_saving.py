"""Megatron-core's asynchronous saves: who carries them out, and what a swap leaves of those that were under way."""

from collections import deque
from types import SimpleNamespace

import pytest
import torch

from deadpool_plugin.adapters.megatron import saving
from deadpool_plugin.errors import Unsupported
from deadpool_plugin.worker import codec


@pytest.fixture
def saves(monkeypatch):
    monkeypatch.setenv("RANK", "0")
    return SimpleNamespace(step=3, generation=1, launch=lambda flight: pytest.fail("nobody will complete it"))


class Process:
    def __init__(self):
        self.pid, self.is_joined = 0, False

    def join(self):
        self.is_joined = True


def caller_of_core_0_16():
    class Caller:
        def __init__(self):
            self.process = Process()

    queue = SimpleNamespace(persistent_caller=Caller(), async_calls=deque())
    return queue.persistent_caller, queue, lambda: queue.persistent_caller


def caller_of_core_0_17():
    class Caller:
        _persistent_process = Process()

        def __init__(self):
            self.process = self._persistent_process

        def close(self, abort=False):
            assert abort and self.process.is_joined
            self.process = Caller._persistent_process = None

    class Queue:
        _persistent_caller = Caller()

        def __init__(self):
            self.async_calls = deque()

    queue = Queue()
    return Queue._persistent_caller, queue, lambda: Queue._persistent_caller or Caller._persistent_process


@pytest.mark.parametrize("version", [caller_of_core_0_16, caller_of_core_0_17])
def test_a_writer_that_was_ended_is_not_asked_again(saves, version, train_gpt):
    caller, queue, left = version()
    process = caller.process
    flight = saving.RequestFlight(saves, "", SimpleNamespace(async_fn_args=()), keep_files=True)
    flight.queue, flight.active = queue, SimpleNamespace(async_caller=caller)
    queue.async_calls.append(flight.active)
    flight.settle()
    assert process.is_joined and left() is None and not queue.async_calls
    flight.settle()


def test_who_follows_is_told_nothing_of_what_is_gathered_to_be_saved():
    class Optimizer:
        def sharded_state_dict(self, model_sharded_state_dict, is_loading=False):
            seen.append((sorted(model_sharded_state_dict), is_loading))
            return {"all of it": torch.zeros(3)}

    seen, calls = [], []
    saving.tell_nothing_gathered(Optimizer, lambda name, kind, call, args, kwargs: calls.append(call) or call())
    given = {"model": 1}
    assert "all of it" in Optimizer().sharded_state_dict(given, is_loading=True)
    given["optimizer"] = "added by the script"
    calls[0]()
    assert seen == [(["model"], True)] * 2
    assert calls[0].skipped(codec.decode(codec.encode(calls[0].outcome(torch.zeros(3))))) == {}


def test_a_request_for_another_librarys_queue_is_refused(saves, tmp_path, train_gpt):
    def save(sharded_state_dict, checkpoint_dir, async_sharded_save=False):
        return SimpleNamespace()

    call = saving.Save(saves, save, ({}, str(tmp_path / "new")), {"async_sharded_save": True})
    with pytest.raises(Unsupported, match="by types.*to do: save with async_strategy='mcore'"):
        call()
