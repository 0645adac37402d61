"""The call log keeps two steps and the current one, and can do each call again from its entry state."""

import pytest
import torch
from support import present

from deadpool_plugin.errors import Unsupported
from deadpool_plugin.worker import calls, codec, proof
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
        log.prune(segment + 1)
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
    log.prune(1)
    assert log.add(plain("f", 1), bytes(3000)) is None


LARGE = COPIED_BYTES_MAX // 4 + 1


def reused():
    """A loader with one buffer, too large to be copied."""
    buffer = torch.zeros(LARGE)
    for number in range(9):
        yield buffer.fill_(number)


def test_a_buffer_that_a_loader_uses_again_is_refused_at_the_cut_after_that():
    log, source = CallLog(), reused()
    logged(log, 0, "forward", source=source)
    log.prune(1)
    logged(log, 1, "forward", source=source)
    with pytest.raises(Unsupported, match=rf"a tensor of \[{LARGE}\] in a batch"):
        log.prune(2)


def test_what_the_script_reads_between_calls_may_change():
    log, source = CallLog(), reused()
    it, _ = log.iterators.wrap(source)
    for segment in range(4):
        call = plain("forward", segment, [(it, it.position)])
        log.add(call, None)
        next(it)
        log.prune(segment + 1)


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
