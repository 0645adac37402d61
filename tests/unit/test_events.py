"""Events: every kind survives the line it is written as."""

from __future__ import annotations

import msgspec
import pytest

from deadpool_plugin import events
from deadpool_plugin.errors import InvariantViolated

EXAMPLES = {
    int: 7,
    str: "text",
    float: 1.5,
    bool: True,
    dict[str, tuple[int, ...]]: {"3": (1, 2)},
}


def example(kind):
    """An event of `kind` with its required fields filled in."""
    fields: dict[str, object] = {"time": 12.5}
    for field in msgspec.structs.fields(kind):
        if field.required:
            fields[field.name] = EXAMPLES.get(field.type, (1, 2))
    return events.make(kind.__name__, fields, node=3, generation=2)


@pytest.mark.parametrize("kind", events.KINDS.values(), ids=events.KINDS)
def test_round_trip(kind):
    event = example(kind)
    line = events.encode(event)
    assert line.count(b"\n") == 1 and line.endswith(b"\n") and events.decoder.decode(line) == event
    assert (event.time, event.node, event.generation) == (12.5, 3, 2)


def test_unknown_kinds_and_wrong_fields_are_refused():
    with pytest.raises(InvariantViolated):
        events.make("Nonsense", {}, node=0, generation=0)
    with pytest.raises(msgspec.ValidationError):
        events.make("StepDone", {"rank": "x", "step": 1}, node=0, generation=0)


def test_a_given_time_wins():
    assert events.make("Note", {"time": 5.0, "text": ""}, node=0, generation=0).time == 5.0
