"""The call log keeps what a swap may go back by, and can do each call again from its entry state."""

import itertools
import random

import pytest
import torch
from support import present

from deadpool_plugin.config import Config
from deadpool_plugin.errors import Unsupported
from deadpool_plugin.mirror.records import KEPT_MIN, ROW_STEPS, CallHistory
from deadpool_plugin.worker import calls, codec, proof, rng
from deadpool_plugin.worker.calls import Call, CallKind, CallLog, LoggedCall, forget
from deadpool_plugin.worker.copies import COPIED_BYTES_MAX


def nothing() -> None:
    pass


def plain(name, segment, iterators=()):
    return LoggedCall(Call(name, CallKind.PLAIN, int), segment, nothing, list(iterators))


def logged(log, segment, name="f", kind=CallKind.PLAIN, source=None):
    iterators = []
    if source is not None:
        wrapped, found = log.iterators.wrap(source)
        iterators = [(one, one.position) for one in found]
    function = lambda: next(wrapped) if source is not None else None  # noqa: E731
    call = LoggedCall(Call(name, kind, function), segment, nothing, iterators)
    value = call.call()
    log.add(call, value)
    return call, value


def test_calls_after_a_cut_are_redone_with_the_items_they_had():
    log, source = CallLog(), iter(range(100))
    for segment in range(6):
        logged(log, segment, "forward", source=source)
        logged(log, segment, "step", CallKind.UPDATE)
        log.prune(segment + 1, segment - 1)
    redo = log.after_cut(5)
    assert [logged.call.name for logged in redo] == ["forward", "step"]
    redo[0].rewind()
    assert redo[0].call() == 5
    assert [call.segment for call in log.after_cut(0)] == [4, 4, 5, 5]


def test_records_say_name_outcome_and_pulls():
    log = CallLog()
    logged(log, 0, "forward", source=iter([7]))
    assert codec.decode(log.records(0)) == [["forward", 7, [[1, [], proof.combined([proof.digest(7)])]], 0]]
    assert codec.decode(log.records(3)) == []


def test_results_above_the_limit_are_not_recorded_and_nothing_after_them_until_the_next_cut(monkeypatch):
    monkeypatch.setattr(calls, "RECORDS_BYTES_MAX", 4000)
    log = CallLog()
    results = [bytes(1000), bytes(3000), bytes(10)]
    lacking = [log.add(plain(f"f{number}", 0), one) for number, one in enumerate(results)]
    log.drew({"torch": bytes(10)})
    assert lacking[0] is None and "more than" in present(lacking[1]).description and lacking[2] is not None
    first, *others = codec.decode(log.records(0))
    assert first == ["f0", bytes(1000), [], 0]
    assert [name for name, *_ in others] == ["f1", "f2"], "nobody who follows may come past f1 unharmed"
    assert all(isinstance(value, codec.TooLarge) for _, value, *_ in others)
    log.prune(1, -1)
    assert log.add(plain("f", 1), bytes(3000)) is None


def test_records_since_a_snapshot_travel_together_and_are_limited_together(monkeypatch):
    monkeypatch.setattr(calls, "RECORDS_BYTES_MAX", 5000)
    log, lacking = CallLog(), []
    for step in range(9):
        lacking.append(log.add(plain("f", step), bytes(2000)))
        snapshot = (step + 1) // 4 * 4
        log.prune(step + 1, max(0, step // 4 * 4 - 4), snapshot)
        assert sum(len(log.records(segment)) for segment in range(snapshot, step + 1)) <= 5000
    assert [one is None for one in lacking] == [True, True, False, False, True, True, False, False, True]


LARGE = COPIED_BYTES_MAX // 4 + 1


def reused():
    """A loader with one buffer, too large to be copied."""
    buffer = torch.zeros(LARGE)
    for number in range(9):
        yield buffer.fill_(number)


def test_a_buffer_that_a_loader_uses_again_is_refused_at_the_cut_after_that():
    log, source = CallLog(), reused()
    logged(log, 0, "forward", source=source)
    log.prune(1, -1)
    logged(log, 1, "forward", source=source)
    with pytest.raises(Unsupported, match=rf"a tensor of \[{LARGE}\] in a batch"):
        log.prune(2, 0)


@pytest.mark.parametrize("every", [1, 2, 5])
def test_what_a_call_has_read_is_looked_at_until_it_is_forgotten(every):
    """Also if it is changed long after the call, by when it is not looked at in each cut."""
    batch = torch.zeros(LARGE)

    def make_steps(used, changed):
        log, snapshots = CallLog(), [0]
        for segment in range(3 * every + 1):
            if segment == changed:
                batch.zero_()
            logged(log, segment, source=iter([batch]) if segment == used else None)
            log.prune(segment + 1, snapshots[-2:][0])
            if (segment + 1) % every == 0:
                snapshots.append(segment + 1)

    for used, changed in itertools.combinations(range(2 * every), 2):
        with pytest.raises(Unsupported, match="in a batch that a training call had read"):
            make_steps(used, changed)


def test_what_the_script_reads_between_calls_may_change():
    log, source = CallLog(), reused()
    it, _ = log.iterators.wrap(source)
    for segment in range(4):
        call = plain("forward", segment, [(it, it.position)])
        log.add(call, None)
        next(it)
        log.prune(segment + 1, segment - 1)


def test_forgetting_an_interruption_runs_the_finally_of_its_frames_now():
    closed = []

    def generator():
        try:
            yield
            yield
        finally:
            closed.append(True)

    def interrupted():
        suspended = generator()
        next(suspended)
        raise KeyboardInterrupt

    try:
        interrupted()
    except KeyboardInterrupt as error:
        assert not closed
        forget(error)
    assert closed


def of_megatron(log, step, draw):
    """Record what train_gpt.py's loop does in a step: losses, a norm, a mean over all ranks; batches are read."""
    losses = [{"lm loss": torch.tensor(draw.random() + 2)} for _ in range(2)]
    call = plain("forward_backward_no_pipelining", step)
    log.add(call, losses, draw.getrandbits(32))
    log.add(plain("step", step), (True, draw.random(), None))
    log.add(plain("step", step), None)
    log.add(plain("allreduce", step), [[torch.tensor(draw.random() + 4)], -1])
    log.add(plain("zero_grad_buffer", step), None)
    log.add(plain("zero_grad", step), None)


def of_deepspeed(log, step, draw):
    """Record what train_deepspeed.py's does: two micro-batches, with counters, and an evaluation every ten steps."""
    for number in range(2 + 4 * (step % 10 == 9)):
        outputs = ['[1, {"type": null, "context": null, "children_spec": []}]', [[True, torch.tensor(draw.random())]]]
        if number == 2:  # a loader's iterator, in between
            before = rng.capture_host()
            torch.empty((), dtype=torch.int64).random_()
            log.drew(rng.drawn(before, rng.capture_host()))
        log.add(plain("engine.forward", step), outputs, draw.getrandbits(32))
        if number < 2:
            log.add(plain("engine.backward", step), torch.tensor(draw.random()))
            counters = {"global_steps": step, "global_samples": 4 * step, "micro_steps": 2 * step + number}
            rates = {"lr": draw.random(), "betas": (0.9, 0.999), "eps": 1e-08, "weight_decay": 0.01, "fused": False}
            visible = {"frozen": "99aa06d3014798d86001c324468d497f", "attributes": [counters], "groups": [rates]}
            log.add(plain("engine.step", step), visible | {"objects": [[{"last_batch_iteration": step}], [], []]})
    torch.bernoulli(torch.full((100,), 0.1))  # dropout


@pytest.mark.parametrize(("record", "count"), [(of_megatron, 10**6), (of_deepspeed, 4 * ROW_STEPS)])
def test_a_million_steps_fit_into_the_default_limit(record, count):
    log, history, draw, steps = CallLog(), CallHistory(Config().history_limit_bytes), random.Random(0), []
    with rng.preserved():
        torch.manual_seed(0)
        for step in range(2 * ROW_STEPS):
            record(log, step, draw)
            log.prune(step + 1, step - 1)
            steps.append(log.records(step))
    for last in range(len(steps) - 1, count, len(steps)):
        history.append(last, *steps)  # a row knows nothing of those before it
    history.append(history.last + KEPT_MIN, *steps[:KEPT_MIN])  # so that all others are in rows
    assert history.first == 0 and history.last > count - len(steps)
    assert history.held_bytes / history.last * 10**6 < Config().history_limit_bytes / 2
    assert sum(map(len, steps)) / len(steps) > 200, "as few as a real loop's"
    assert history.get(count // 2, count // 2) == [steps[count // 2 % len(steps)]]
