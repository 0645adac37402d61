"""Events: every kind survives the file; a torn last line does no harm."""

from __future__ import annotations

import msgspec
import pytest

from deadpool_plugin import events
from deadpool_plugin.errors import InvariantViolated

EXAMPLES = {
    int: 7,
    str: "text",
    float: 1.5,
}


def example(kind):
    """An event of `kind` with its required fields filled in."""
    fields = {}
    for field in msgspec.structs.fields(kind):
        if field.required:
            fields[field.name] = EXAMPLES.get(field.type, (1, 2))
    return events.make(kind.__name__, fields, node=3, generation=2, at=12.5)


@pytest.mark.parametrize("kind", events.KINDS.values(), ids=events.KINDS)
def test_round_trip(tmp_path, kind):
    event = example(kind)
    log = events.EventLog(tmp_path / "logs" / "events.3.jsonl")
    log.write(event)
    log.close()
    assert events.read_events([log.path]) == [event]
    assert (event.time, event.node, event.generation) == (12.5, 3, 2)


def test_read_in_order_of_time_and_without_a_torn_line(tmp_path):
    for node, times in enumerate([(3.0, 5.0), (1.0, 4.0)]):
        log = events.EventLog(tmp_path / f"events.{node}.jsonl")
        for at in times:
            log.write(events.make("StepCommitted", {"step": int(at)}, node=node, generation=0, at=at))
        log.close()
    with (tmp_path / "events.1.jsonl").open("ab") as file:
        file.write(b'{"event":"StepCom')
    assert [event.time for event in events.read_events(tmp_path.glob("*.jsonl"))] == [1.0, 3.0, 4.0, 5.0]


def test_unknown_kinds_and_wrong_fields_are_refused():
    with pytest.raises(InvariantViolated):
        events.make("Nonsense", {}, node=0, generation=0)
    with pytest.raises(msgspec.ValidationError):
        events.make("StepDone", {"rank": "x", "step": 1}, node=0, generation=0)


def test_a_given_time_wins():
    assert events.make("Note", {"time": 5.0, "text": ""}, node=0, generation=0).time == 5.0
