"""Calls of a rank in training: a value means something only if nothing was cut meanwhile, and errors are not caught."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from fakecuda import control
from support.live_rank import Rank
from support.stand_in import fake
from support.zygote import in_zygote

from deadpool_plugin.comm.collective import Operation
from deadpool_plugin.comm.fabric import HandleWork
from deadpool_plugin.errors import Unsupported, present
from deadpool_plugin.worker import calls, codec, copies, live
from deadpool_plugin.worker.calls import Call, CallKind
from deadpool_plugin.worker.codec import TENSOR_LIMIT_BYTES
from deadpool_plugin.worker.copies import COPIED_BYTES_MAX, Inputs
from deadpool_plugin.worker.live import Live


def test_what_a_call_returns_after_its_communicators_were_cut_is_not_believed():
    rank, values = Rank(), iter(["cut short", "whole"])

    def forward():
        value = next(values)
        if value == "cut short":
            rank.generations.announce(1)
        return value

    assert rank.call(Call("forward", CallKind.PLAIN, forward)) == "whole"
    assert rank.swaps == 1 and not rank.inside


def test_what_a_call_raises_after_its_communicators_were_cut_is_not_the_scripts_error():
    rank, losses = Rank(), iter([float("nan"), 0.5])

    def forward():
        loss = next(losses)
        if loss != loss:
            rank.generations.announce(1)
            raise ValueError("the loss is not a number")
        return loss

    assert rank.call(Call("forward", CallKind.PLAIN, forward)) == 0.5
    assert rank.swaps == 1 and not rank.inside and not rank._error


def test_a_script_that_catches_what_a_call_raised_is_refused_at_its_next_one():
    def forward():
        raise ValueError("a bad batch")

    rank = Rank()
    with pytest.raises(ValueError):
        rank.call(Call("forward", CallKind.PLAIN, forward))
    with pytest.raises(Unsupported, match=r"forward raised ValueError: a bad batch; .*to do: let the error end"):
        rank.call(Call("step", CallKind.PLAIN, int))
    with pytest.raises(Unsupported, match="a bad batch"):
        rank.collective(fake(), Operation("allreduce"))


def test_a_save_that_fails_is_the_scripts_own_affair():
    def full():
        raise OSError("disk full")

    rank = Rank()
    with pytest.raises(OSError):
        rank.call(Call("save", CallKind.SAVE, full))
    assert rank.call(Call("step", CallKind.PLAIN, lambda: 7)) == 7


def test_a_script_that_writes_into_the_shard_between_calls_is_told_once():
    rank = Rank()
    rank.stages_nothing(swap_began=0.0)

    def step():
        return rank.call(Call("step", CallKind.UPDATE, lambda: rank.weights.add_(1)))

    step()
    step()
    assert [text for kind, text in rank.said if kind == "Note"] == []
    for _ in range(2):
        rank.weights.clamp_(0, 1)
        step()
    ((_, text),) = [note for note in rank.said if note[0] == "Note"]
    assert "weights or optimizer state of rank 3 after step 2, outside of any training call" in text


def test_a_result_that_followers_cannot_have_is_said_once_where_it_is_made():
    rank, large = Rank(), {"logits": [torch.zeros(TENSOR_LIMIT_BYTES // 4 + 1)]}
    rank.call(Call("step", CallKind.PLAIN, lambda: {"loss": torch.zeros(3)}))
    assert rank.said == []
    for _ in range(2):
        rank.call(Call("forward", CallKind.PLAIN, lambda: large))
    ((kind, text),) = rank.said
    assert kind == "Note" and "forward in the loop of step 1 gave rank 3 a tensor of float32 [262145]" in text


def test_a_step_is_told_as_one_of_the_generation_it_was_done_in():
    """Its agent may hear of it after it has gone on to the next one."""
    rank, told = Rank(), []
    rank.stages_nothing(swap_began=0.0)
    rank.groups.generation = 4
    rank._link.event = lambda kind, **fields: told.append((kind, fields["generation"], fields["step"]))
    rank.call(Call("step", CallKind.UPDATE, int))
    assert told == [("StepDone", 4, 1), ("FirstStepDone", 4, 1)]


def test_too_many_results_for_followers_in_one_step_are_said_once_and_the_job_goes_on(monkeypatch):
    monkeypatch.setattr(calls, "RECORDS_BYTES_MAX", 10_000)
    rank = Rank()
    for number in range(30):
        assert rank.call(Call("evaluate", CallKind.PLAIN, lambda: bytes(1000))) == bytes(1000), number
    ((kind, text),) = rank.said
    assert kind == "Note" and "evaluate in the loop of step 1 gave rank 3 results of more than" in text
    assert "no other process can take this rank over" in text


class Forward(Call):
    """A call with one static input buffer."""

    def __init__(self, buffer: torch.Tensor) -> None:
        super().__init__("forward", CallKind.FORWARD, list)
        self._inputs = Inputs((buffer,), {}, "forward")

    def outcome(self, value: object) -> None:
        pass

    def check(self) -> None:
        self._inputs.check()


def test_an_input_that_the_script_fills_anew_each_step_is_refused_before_anything_is_lost():
    rank, buffer = Rank(), torch.zeros(COPIED_BYTES_MAX)
    rank.stages_nothing()
    for step in range(2):
        rank.call(Forward(buffer.fill_(step)))
        if step == 0:
            rank.call(Call("step", CallKind.UPDATE, int))
    with pytest.raises(Unsupported, match="was changed in place after forward had used it"):
        rank.call(Call("step", CallKind.UPDATE, int))


class Pair(NamedTuple):
    first: torch.Tensor
    second: torch.Tensor


class Listed(list[torch.Tensor]):
    """A list of the script's own."""


CONTAINERS = [list, tuple, Listed, lambda tensors: Pair(*tensors), lambda tensors: dict(enumerate(tensors))]


@pytest.mark.parametrize("container", CONTAINERS, ids=["list", "tuple", "list of its own", "namedtuple", "dict"])
def test_a_collective_is_done_again_on_what_it_was_given_whatever_that_is_in(container):
    rank, given = Rank(), []

    def issue(handle, operation):
        tensors = operation.tensors()
        given.append([float(tensor) for tensor in tensors])
        for tensor in tensors:
            tensor.add_(1)
        return HandleWork(operation)

    tensors = [torch.zeros(1), torch.ones(1)]
    rank.groups.issue = issue
    rank.collective(fake(), Operation("allreduce", (container(tensors),)))
    assert tensors == [1, 2]
    (call,) = rank._log.after_cut(0)
    rank._redo(call)
    rank._redo(call)
    assert given == [[0, 1]] * 3 and tensors == [1, 2]


def test_nor_is_it_if_only_a_neighbour_has_heard_so_far():
    """NCCL's kernels of this process end well, with garbage, once those of another one on the host were aborted."""
    rank, values = Rank(), iter(["garbage", "whole"])

    def forward():
        value = next(values)
        if value == "garbage":
            rank._slots.announce(1)
            threading.Timer(0.1, rank.generations.announce, args=(1,)).start()
        return value

    assert rank.call(Call("forward", CallKind.PLAIN, forward)) == "whole"
    assert rank.swaps == 1


class Unwound(Exception):
    """An exception that ends a test where it got to."""


@pytest.mark.parametrize("device_is_dead", [False, True])
def test_a_rank_says_that_it_has_unwound_when_its_device_rests(monkeypatch, device_is_dead):
    done = []

    def synchronize():
        done.append("rest")
        if device_is_dead:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

    def give_up(reason):
        done.append(reason)
        raise Unwound

    def wait_for_join():
        done.append("join")
        raise Unwound

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    monkeypatch.setattr(live, "give_up", give_up)
    rank = Rank()
    rank._context.saves = fake(cancel=list)
    rank._link.wait_for_join = wait_for_join
    rank._stager = fake(settle=lambda: done.append("no copy is under way"))
    with pytest.raises(Unwound):
        Live._swap(rank)
    dead = "its CUDA context is dead: CUDA error: an illegal memory access was encountered"
    assert done == ["no copy is under way", "rest", dead if device_is_dead else "join"]


def _counted(does: Callable[[], Any]) -> tuple[int, int, int]:
    """How often the host waits for the device in `does`, kernels, and blocks that torch's allocator is asked for."""
    torch.cuda.synchronize()
    names = ("stream_waits", "copy_waits", "form_waits", "event_waits", "device_waits", "launches")
    before, blocks = control.report(), torch.cuda.memory_stats()["allocation.all.allocated"]
    does()
    after, blocks = control.report(), torch.cuda.memory_stats()["allocation.all.allocated"] - blocks
    *waits, launches = (after[name] - before[name] for name in names)
    return sum(waits), launches, blocks


def _on_device() -> Rank:
    rank = Rank()
    rank._stager, rank._cut = fake(wait=lambda: None), lambda: None  # type: ignore[method-assign]
    return rank


def _parts() -> dict[str, Any]:
    return {"loss": torch.full((), 2.0, device="cuda"), "counts": [torch.arange(3, device="cuda"), 7]}


RESULTS: dict[str, tuple[CallKind, Callable[[], Any], int]] = {
    "nothing": (CallKind.PLAIN, lambda: None, 0),
    "no losses, but gradients": (CallKind.FORWARD, list, 1),
    "numbers": (CallKind.PLAIN, lambda: (True, 0.5, None, {"steps": 3}), 0),
    "tensors": (CallKind.FORWARD, lambda: [_parts(), _parts()], 1),
    "unknown": (CallKind.PLAIN, object, 1),
    "a step": (CallKind.UPDATE, lambda: (True, 0.5), 1),
}


@pytest.mark.gpu
@control.only_here
@pytest.mark.parametrize("name", RESULTS)
@in_zygote
def test_the_host_waits_for_the_device_once_for_what_can_be_read_and_else_not(name):
    kind, function, waits = RESULTS[name]
    rank = _on_device()
    if name == "unknown":
        rank._log.add = lambda *args: None  # which it refuses
    made = function()
    torch.cuda.synchronize()
    costs = [_counted(lambda: rank.call(Call("call", kind, lambda: made))) for _ in range(3)]
    assert costs == [(waits, 0, 0)] * 3


@pytest.mark.gpu
@control.only_here
@in_zygote
def test_what_is_recorded_of_results_on_a_device_is_what_they_were_and_comes_back_there():
    rank, large = _on_device(), torch.zeros(TENSOR_LIMIT_BYTES, device="cuda")
    rank.call(Call("forward", CallKind.FORWARD, _parts))
    rank.call(Call("forward", CallKind.FORWARD, lambda: [_parts(), large]))
    ((_, parts, _, _), (_, lacking, _, _)) = codec.decode(rank._log.records(0))
    assert parts["loss"].is_cuda and parts["loss"].item() == 2.0
    assert parts["counts"][0].is_cuda and parts["counts"][0].tolist() == [0, 1, 2] and parts["counts"][1] == 7
    assert isinstance(lacking, codec.TooLarge)


class Told(Call):
    """A call that returns nothing, and tells a number on the device; the snapshot after it has that too."""

    def __init__(self, number: torch.Tensor) -> None:
        super().__init__("step", CallKind.UPDATE, lambda: None)
        self.number = number

    def told(self, value: object) -> list[torch.Tensor]:
        return [self.number]

    def outcome(self, value: object) -> dict[str, torch.Tensor]:
        return {"norm": self.number}

    def loss(self, value: object, on_host: Callable[[Any], Any]) -> float:
        return float(on_host(self.number))


@pytest.mark.gpu
@control.only_here
@in_zygote
def test_the_one_wait_of_a_call_is_enough_for_its_record_its_loss_and_the_snapshot_after_it():
    rank, number, staged = _on_device(), torch.full((), 2.0, device="cuda"), []
    rank._adapter.state.scalars = lambda: {"norm": number}
    rank._context.tapes = Tapes()  # type: ignore[assignment]
    rank.groups.cut = lambda step: 0
    rank._stager.newest = 0
    rank._stager.stage = lambda step, generation, state, *rest: staged.append(state)
    rank._cut = lambda: rank.stage(1)  # type: ignore[method-assign]
    costs = [_counted(lambda: rank.call(Told(number))) for _ in range(3)]
    assert costs == [(1, 0, 0)] * 3
    norm = codec.decode(codec.encode(staged[0]))["scalars"]["norm"]
    assert rank._loss == 2.0 and norm.is_cuda and norm.item() == 2.0


class Tapes(list[Any]):
    """No sources of data."""

    def states(self) -> list[bytes]:
        return []

    def take_digest(self) -> int:
        return 0


@pytest.mark.gpu
@control.only_here
@in_zygote
def test_inputs_on_a_device_are_kept_in_host_memory_and_come_back_there():
    batch = {"tokens": torch.arange(8, device="cuda"), "mask": torch.ones(4, 2, device="cuda").t()}
    Inputs((batch,), {}, "forward")  # the first page-locked block
    inputs: list[Inputs] = []
    assert _counted(lambda: inputs.append(Inputs((batch,), {}, "forward"))) == (0, 0, 0)
    for tensor in batch.values():
        tensor.zero_()
    ((kept,), _) = inputs[0].again()
    assert kept["tokens"].is_cuda and kept["tokens"].tolist() == list(range(8))
    assert kept["mask"].is_cuda and kept["mask"].sum() == 8 and kept["mask"].stride() == batch["mask"].stride()


@pytest.mark.gpu
@control.only_here
@in_zygote
def test_a_long_evaluation_keeps_a_bounded_part_of_its_inputs_in_host_memory():
    batch = torch.arange(COPIED_BYTES_MAX // 8, device="cuda")
    fitting = copies.ON_HOST_BYTES_MAX // COPIED_BYTES_MAX
    kept = [Inputs((batch,), {}, "forward") for _ in range(fitting)]
    assert copies.Kept.on_host_bytes == copies.ON_HOST_BYTES_MAX
    assert _counted(lambda: kept.append(Inputs((batch,), {}, "forward")))[2] == 1, "a block of the device"
    assert torch.equal(kept[-1].again()[0][0], batch) and torch.equal(kept[0].again()[0][0], batch)
    kept.clear()
    assert copies.Kept.on_host_bytes == 0


@pytest.mark.gpu
@control.only_here
@in_zygote
def test_a_collective_between_calls_allocates_nothing_on_the_device_and_is_waited_for_once():
    rank, given = _on_device(), torch.arange(4.0, device="cuda")
    rank.groups.issue = lambda handle, operation: (operation.args[0][0].mul_(2), HandleWork(operation))[1]
    costs = [_counted(lambda: rank.collective(fake(), Operation("allreduce", ([given],)))) for _ in range(3)]
    assert costs == [(1, 1, 0)] * 3, "its own kernel only"
    (call, *_), *_ = [rank._log.after_cut(0)]
    present(call.restore_entry, "a collective is not light")()
    assert given.tolist() == [0.0, 8.0, 16.0, 24.0], "the script has it; what it was is a copy"
    call.rewind()
    call.call()
    names = [record[1][0][0].tolist() for record in codec.decode(rank._log.records(0))]
    assert names == [[0.0, 2.0, 4.0, 6.0], [0.0, 4.0, 8.0, 12.0], [0.0, 8.0, 16.0, 24.0]]
