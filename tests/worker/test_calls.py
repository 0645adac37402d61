"""The call log keeps two steps and the current one, and can do each call again from its entry state."""

from deadpool_plugin.worker import codec
from deadpool_plugin.worker.adapter import CallKind
from deadpool_plugin.worker.calls import Call, CallLog, forget


def logged(log, segment, name="f", kind=CallKind.PLAIN, source=None):
    iterators = []
    if source is not None:
        wrapped, found = log.iterators.wrap(source)
        iterators = [(one, one.position) for one in found]
    call = Call(name, kind, segment, lambda: next(wrapped) if source is not None else None, lambda: None, iterators)
    value = call.run()
    log.add(call, value)
    return call, value


def test_calls_after_a_cut_are_redone_with_the_items_they_had():
    log, source = CallLog(), iter(range(100))
    for segment in range(6):
        logged(log, segment, "forward", source=source)
        logged(log, segment, "step", CallKind.UPDATE)
        log.prune(segment + 1)
    redo = log.after_cut(5)
    assert [call.name for call in redo] == ["forward", "step"]
    redo[0].rewind()
    assert redo[0].run() == 5
    assert [call.segment for call in log.after_cut(0)] == [4, 4, 5, 5]


def test_records_say_name_outcome_and_pulls():
    log = CallLog()
    logged(log, 0, "forward", source=iter([7]))
    assert [codec.decode(one) for one in codec.decode(log.records(0))] == [["forward", 7, [[1, []]]]]
    assert codec.decode(log.records(3)) == []


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
