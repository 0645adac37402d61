"""A run for people: one line for each input of a controller and for each thing it then does.

Rules of this file: the same run gives the same lines, byte for byte; what a job without faults does all the time
(heartbeats, snapshots, commits) is left out, and so is the search for signs of life, but for what it finds.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from deadpool_plugin.core import api
from deadpool_plugin.core.events import StepCommitted
from deadpool_plugin.core.messages import GroupCalls, Probe, Report, Status
from deadpool_plugin.core.signatures import decoded
from deadpool_plugin.core.types import Checkpoint, Holding, NodeId

BESIDES = ("sent_at", "heard", "certain")
"""Times of clocks that start anywhere."""
UNTOLD = ("time", "node", "generation", "duration_s", "spares_left", "on_no_spare")
"""Fields of events that are left out."""


class Transcript:
    """Lines, as they come."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def note(self, now: float, text: str) -> None:
        self.lines.append(f"{now:9.3f}          {text}")

    def stepped(self, now: float, node: NodeId, event: api.Input, actions: Sequence[api.Action]) -> None:
        if is_quiet(event) and all(is_quiet(action) for action in actions):
            return
        self.lines.append(f"{now:9.3f} node {node:<3} <- {described(event)}")
        for line in grouped(actions):
            self.lines.append(f"{'':9} node {node:<3}    {line}")


def is_quiet(thing: api.Input | api.Action) -> bool:
    """Return whether it happens all the time."""
    if isinstance(thing, (api.Received, api.Send)):
        return isinstance(thing.message, (Report, Status, Probe))
    if isinstance(thing, api.Emit):
        return isinstance(thing.event, StepCommitted)
    return isinstance(thing, (api.Ticked, api.SnapshotHeld, api.Commit, api.AskHost))


def grouped(actions: Sequence[api.Action]) -> list[str]:
    """One line each; what is sent to several is one line."""
    lines: dict[str, list[NodeId]] = {}
    found: list[str] = []
    for action in actions:
        if is_quiet(action):
            continue
        if isinstance(action, api.Send):
            what = described(action.message)
            if what not in lines:
                lines[what] = []
                found.append(what)
            lines[what].append(action.to)
        else:
            found.append(described(action))
    return [f"-> {','.join(map(str, lines[what]))}: {what}" if what in lines else what for what in found]


_NOTHING = (("moved", 0), ("paired", 0))


def described(thing: msgspec.Struct) -> str:
    """The value without what is empty in it."""
    if isinstance(thing, api.Received):
        return f"{thing.sender}: {described(thing.message)}"
    if isinstance(thing, GroupCalls):
        return f"{thing.key}: {thing.count}, {'; '.join(str(decoded(code)) for code in thing.recent[-2:])}"
    if isinstance(thing, api.Emit):
        told = msgspec.structs.asdict(thing.event).items()
        fields = ", ".join(f"{key}={value!r}" for key, value in told if key not in UNTOLD)
        return f"{type(thing.event).__name__}({fields})"
    if isinstance(thing, api.Leave):
        thing = msgspec.structs.replace(thing, verdict=None)  # the line before says it
    shown = []
    for field, value in msgspec.structs.asdict(thing).items():
        if field in BESIDES or (isinstance(value, Checkpoint) and not value.path) or (field, value) in _NOTHING:
            continue
        if isinstance(value, tuple) and value and isinstance(value[0], Holding):
            value = f"{len(value)} snapshots"
        if value is not None and value is not False and value != () and value != "":
            shown.append(f"{field}={value if isinstance(value, (str, int, float)) else described_value(value)}")
    return f"{type(thing).__name__}({', '.join(shown)})"


def described_value(value: object) -> str:
    if isinstance(value, msgspec.Struct):
        return described(value)
    if isinstance(value, tuple):
        return f"({', '.join(map(described_value, value))})"
    return str(value)
