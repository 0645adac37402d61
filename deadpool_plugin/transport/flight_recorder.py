"""The flight recorder of a rank: its collectives in each group, in memory that its agent reads while the process hangs.

Beside them the place of its main thread: the activity and call it is in, and the operation that it waits for.

Rules of this file: the rank's process writes, the agent reads, nobody waits. A collective is one code (core/signatures)
in a ring and three words before it; the third tells a reader that it has met the writer half-way. An area
belongs to one generation. Groups that find no room are compared at cuts all the same, but nobody can name their calls.
"""

from __future__ import annotations

import struct
import time
import zlib
from collections.abc import Callable, Sequence

from ..core.messages import GroupCalls, Place
from ..core.signatures import FACTOR, Activity, share
from ..core.types import MASK, Generation, Step

RECENT = 96
"""How many collectives of a group can still be named."""
GROUPS_MAX = 63
"""A rank of Megatron-core 0.19.2 is in 33 groups of more than one member with TP, PP, CP, EP and expert TP, virtual
stages, two optimizer instances, hierarchical and hybrid CP and Gloo twins, on 1,024 ranks; hybrid CP adds one each time
the data ranks double. DeepSpeed's own are fewer: two each for the expert sizes and tied layers, and some 20 more."""
_ENTRY_BYTES = 1024
AREA_BYTES = (GROUPS_MAX + 1) * _ENTRY_BYTES
_HEAD = struct.Struct("<QQ")  # generation, groups
_NAME = struct.Struct("<56s")
_NOW = struct.Struct("<QQQ")  # number, digest, the two xored
_CUT = struct.Struct("<qQQ")  # step, number, digest
_CODE = struct.Struct("<Q")
_NOW_AT = _NAME.size
_CUTS_AT = _NOW_AT + _NOW.size
_RING_AT = _CUTS_AT + 2 * _CUT.size
_NAME_BYTES = 48  # of a call
_PLACE = struct.Struct(f"<QBBqQi{_NAME_BYTES}s32s56s")  # as `Whereabouts` writes it; the first word counts the changes
_PLACE_AT = 64  # behind the head
_BEGIN = 1  # the digest of nothing
_TRIES = 8


class GroupRecord:
    """The collectives of one rank in one group in one generation. Thread: one at a time."""

    __slots__ = ("_entry", "_factor", "count", "digest")

    def __init__(self, entry: memoryview, key: str, place: int, size: int) -> None:
        self.count, self.digest = 0, _BEGIN
        self._factor = share(place, size, zlib.crc32(key.encode()))
        self._entry = entry if len(entry) else memoryview(bytearray(_ENTRY_BYTES))  # for a group that finds no room
        _NAME.pack_into(self._entry, 0, key.encode())
        _NOW.pack_into(self._entry, _NOW_AT, 0, _BEGIN, _BEGIN)
        for cut in (0, 1):
            _CUT.pack_into(self._entry, _CUTS_AT + cut * _CUT.size, -1, 0, 0)

    def note(self, code: int) -> None:
        """Records one more collective, in well under a microsecond."""
        count = self.count
        _CODE.pack_into(self._entry, _RING_AT + count % RECENT * 8, code)
        self.count = count = count + 1
        self.digest = digest = (self.digest * FACTOR + code) & MASK
        _NOW.pack_into(self._entry, _NOW_AT, count, digest, count ^ digest)

    def cut(self, step: Step) -> int:
        """Records the cut of `step`. Returns: the group's part of the rank's sum."""
        _CUT.pack_into(self._entry, _CUTS_AT + step % 2 * _CUT.size, step, self.count, self.digest)
        return self._factor * self.digest & MASK


class FlightRecorder:
    """The records of all groups of this process: by key, this rank's place and size of each."""

    def __init__(self, area: memoryview, generation: Generation, groups: Sequence[tuple[str, int, int]]) -> None:
        if len(area):
            _HEAD.pack_into(area, 0, 0, 0)  # what was there belongs together no longer
        self.records = [GroupRecord(_entry(area, number), *group) for number, group in enumerate(groups, 1)]
        if len(area):
            _HEAD.pack_into(area, 0, generation, min(len(groups), len(area) // _ENTRY_BYTES - 1))

    def cut(self, step: Step) -> int:
        """Sum this rank's collectives up to `step`: the sums of all ranks add up to 0 if they pair."""
        return sum(record.cut(step) for record in self.records) & MASK


class Whereabouts:
    """The place of this process's main thread. Thread: that one only. `clock` gives nanoseconds."""

    def __init__(self, area: memoryview = memoryview(b""), clock: Callable[[], int] = time.monotonic_ns) -> None:
        self._area, self._clock = area if len(area) else memoryview(bytearray(_ENTRY_BYTES)), clock
        self._activity, self._call, self._step = Activity.SCRIPT, b"", -1
        self._changes, self._entered = 0, clock()
        self._longest = [0] * len(Activity)
        self._lasted = [0] * len(Activity)  # as `_longest`, those since the newest step included
        self._waiting = _NOWHERE
        self._write()

    def enter(self, activity: Activity, call: str) -> tuple[Activity, bytes, int]:
        """Begin an activity. Returns: the one before, to `leave` to."""
        before = self._activity, self._call, self._entered
        if not self._longest[activity]:
            activity = _FIRST.get(activity, activity)
        self._activity, self._call, self._entered = activity, call.encode()[-_NAME_BYTES:], self._clock()
        self._waiting = _NOWHERE
        self._write()
        return before

    def leave(self, before: tuple[Activity, bytes, int], whole: bool = True) -> None:
        """End the activity, and whatever it waited for. `whole`: what it took is a measure for the next one."""
        now, kind = self._clock(), _LATER.get(self._activity, self._activity)
        if whole:
            self._lasted[kind] = max(self._lasted[kind], now - self._entered, 1)
        self._activity, self._call, self._entered = before
        if self._activity is Activity.SCRIPT:
            self._entered = now
        self._waiting = _NOWHERE
        self._write()

    def within(self, activity: Activity, call: str) -> _Within:
        """Enclose an activity, which may be within another one."""
        return _Within(self, activity, call)

    def made(self, step: Step) -> None:
        """Note a step. A first save or evaluation ends with it: it may be many calls, and its first one short."""
        self._step, self._longest = step, self._lasted.copy()

    def wait(self, operation: str, group: str, peer: int = -1) -> None:
        """Begin to wait for others in `operation`; `peer`: the one rank it is with."""
        self._waiting = (True, peer, operation.encode(), group.encode())
        self._write()

    def go_on(self) -> None:
        self._waiting = _NOWHERE
        self._write()

    def _write(self) -> None:
        self._changes += 1
        longest = self._longest[_LATER.get(self._activity, self._activity)]
        waits, peer, operation, group = self._waiting
        _PLACE.pack_into(
            self._area, _PLACE_AT, self._changes, self._activity, waits, self._step, longest, peer, self._call,
            operation, group,
        )  # fmt: skip


class _Within:
    __slots__ = ("_activity", "_before", "_call", "_place")

    def __init__(self, place: Whereabouts, activity: Activity, call: str) -> None:
        self._place, self._activity, self._call = place, activity, call

    def __enter__(self) -> None:
        self._before = self._place.enter(self._activity, self._call)

    def __exit__(self, kind: object, *_: object) -> None:
        self._place.leave(self._before, whole=kind is None)


_NOWHERE = (False, -1, b"", b"")  # it waits for nobody
_LATER = {Activity.FIRST_EVALUATION: Activity.EVALUATION, Activity.FIRST_SAVE: Activity.SAVE}
_FIRST = {later: first for first, later in _LATER.items()}


def read_place(area: memoryview) -> Place | None:
    """Read where the process is; None if it has not said, or every look met it at work."""
    for _ in range(_TRIES):
        found = bytes(area[_PLACE_AT : _PLACE_AT + _PLACE.size])
        if found != bytes(area[_PLACE_AT : _PLACE_AT + _PLACE.size]):
            continue
        changes, activity, waits, step, longest, peer, *names = _PLACE.unpack(found)
        if not changes:
            return None
        call, operation, group = (name.rstrip(b"\0").decode(errors="replace") for name in names)
        return Place(activity, call, step, longest / 1e9, bool(waits), operation, group, peer)
    return None


def read_calls(area: memoryview, generation: Generation) -> tuple[GroupCalls, ...]:
    """Read `area`, which a process may be writing just now; nothing if it is of another generation."""
    found, groups = _HEAD.unpack_from(area)
    if found != generation:
        return ()
    calls = [_read_one(_entry(area, number)) for number in range(1, groups + 1)]
    return tuple(filter(None, calls)) if _HEAD.unpack_from(area)[0] == generation else ()


def _entry(area: memoryview, number: int) -> memoryview:
    return area[number * _ENTRY_BYTES : (number + 1) * _ENTRY_BYTES]


def _read_one(entry: memoryview) -> GroupCalls | None:
    """Return None if every look met the writer at work."""
    for _ in range(_TRIES):
        copy = bytes(entry)
        count, digest, check = _NOW.unpack_from(copy, _NOW_AT)
        if count ^ digest != check or bytes(entry[_NOW_AT : _NOW_AT + _NOW.size]) != copy[_NOW_AT:_CUTS_AT]:
            continue
        numbers = range(max(0, count - RECENT + 1), count)  # the oldest may be overwritten just now
        recent = tuple(_CODE.unpack_from(copy, _RING_AT + number % RECENT * 8)[0] for number in numbers)
        cuts = [_CUT.unpack_from(copy, _CUTS_AT + cut * _CUT.size) for cut in (0, 1)]
        key = _NAME.unpack_from(copy)[0].rstrip(b"\0").decode()
        return GroupCalls(key, count, digest, recent, tuple(cut for cut in sorted(cuts) if cut[0] >= 0))
    return None
