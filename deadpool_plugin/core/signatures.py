"""The signature of a collective, alike on all members of its group; digests of many; where those of two differ.

A rank numbers the collectives that it issues in each of its groups in a generation, and keeps a digest of them. Those
of two members are compared
- at equal numbers, at any time: the n-th collective is the same on every member, however far apart they are;
- at the cut of a step: numbers and digests are the same, or a swap could not go back to it;
- at the end of a script: a rank whose script has ended issues nothing more, so nobody pairs with what comes after.
A rank's sum over its groups (`Holding.paired`) is made so that those of all ranks add up to 0 if all digests agree.

Rules of this file: a difference is believed only where both sides are known.
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Iterable, Iterator
from typing import NamedTuple, TypeAlias

from .messages import GroupCalls, RankCalls
from .types import MASK, Rank

FACTOR = 0x9E3779B97F4A7C15  # odd, so that the newest collective can be taken off a digest again
_INVERSE = pow(FACTOR, -1, 1 << 64)

OPERATIONS = (
    "?", "all_reduce", "all_reduce_coalesced", "broadcast", "reduce", "all_gather", "gather", "scatter",
    "reduce_scatter", "all_to_all", "barrier",
)  # fmt: skip
DTYPES = (
    "", "uint8", "int8", "int16", "int32", "int64", "float16", "bfloat16", "float32", "float64", "complex64",
    "complex128", "bool", "float8",
)  # fmt: skip
DEVICE = "its device"  # what a process waits for if a communication library works there
REDUCTIONS = ("", "sum", "avg", "product", "min", "max", "band", "bor", "bxor", "premul_sum")


class Activity(enum.IntEnum):
    """The activities of a process in training that have time limits of their own (stalls.py)."""

    SCRIPT = 0  # the script's own code, outside all training calls
    STEP = 1  # a training call
    FIRST_STEP = 2  # the same, before this process has made a step
    STEP_AGAIN = 3  # the same, before this process has made a step in this generation
    FIRST_EVALUATION = 4  # of this process
    EVALUATION = 5
    FIRST_SAVE = 6
    SAVE = 7
    COMPILATION = 8

    def __str__(self) -> str:
        return _ACTIVITIES[self]


_ACTIVITIES = (
    "the script's own code", "a training call", "its first step", "its first step since the swap",
    "its first evaluation", "an evaluation", "its first save", "a save", "a compilation",
)  # fmt: skip


class Signature(NamedTuple):
    """The part of a collective that all members have in common. `size`: elements of `dtype`, bytes if that is "".

    Left at 0 or "" is what may differ by rank: sizes in a gather, a scatter and an all_to_all."""

    operation: str
    dtype: str = ""
    size: int = 0
    reduction: str = ""
    root: int = -1

    def encoded(self) -> int:
        """Encode it in 64 bits, of which the lowest is always set: no collective leaves a digest as it is."""
        size, root = min(self.size, (1 << 38) - 1), self.root + 1 & 0xFFF
        names = REDUCTIONS.index(self.reduction) << 9 | DTYPES.index(self.dtype) << 5 | OPERATIONS.index(self.operation)
        return size << 26 | root << 14 | names << 1 | 1

    def __str__(self) -> str:
        unit = f"{self.dtype} x {self.size}" if self.dtype else f"{self.size} bytes" if self.size else ""
        root = f"root {self.root}" if self.root >= 0 else ""
        return " ".join(part for part in (self.operation, unit, self.reduction, root) if part)


def decoded(code: int) -> Signature:
    operation, dtype, reduction = code >> 1 & 31, code >> 6 & 15, code >> 10 & 15
    return Signature(OPERATIONS[operation], DTYPES[dtype], code >> 26, REDUCTIONS[reduction], (code >> 14 & 0xFFF) - 1)


def share(place: int, size: int, key: int) -> int:
    """The odd number by which the member at `place` of a group of `size` multiplies its digest; those of all members
    add up to 0. `key`: tells groups apart."""
    if place:
        return _scattered(place ^ key) | 1
    return -sum(_scattered(other ^ key) | 1 for other in range(1, size)) & MASK


def _scattered(value: int) -> int:
    """splitmix64."""
    value = (value * FACTOR + FACTOR) & MASK
    value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 & MASK
    value = (value ^ value >> 27) * 0x94D049BB133111EB & MASK
    return value ^ value >> 31


Member: TypeAlias = tuple[Rank, GroupCalls]


class Difference(NamedTuple):
    """Two members of a group that have issued different collectives."""

    ranks: tuple[Rank, Rank]
    what: str


def differences(
    ranks: Iterable[RankCalls], unproven: Collection[Rank], ended: Collection[Rank] = ()
) -> list[Difference]:
    """Find the differences between each group's members and one of them: one that has proved itself and whose script
    has `ended`, if there is one."""
    groups: dict[str, list[Member]] = {}
    for one in ranks:
        for calls in one.groups:
            groups.setdefault(calls.key, []).append((one.rank, calls))
    found = []
    for members in groups.values():
        members.sort(key=lambda member: (member[0] in unproven, member[0] not in ended, member[0]))
        compared = (first_difference(members[0], one, ended) for one in members[1:])
        found += [difference for difference in compared if difference is not None]
    return found


def first_difference(one: Member, other: Member, ended: Collection[Rank] = ()) -> Difference | None:
    """Find the first difference between two members; None if the known calls of both agree.

    Args: ended: ranks whose scripts had ended before their calls were read."""
    found = next(_described(one, other, ended), "")
    return Difference((one[0], other[0]), f"group {one[1].key}: {found}") if found else None


def _described(one: Member, other: Member, ended: Collection[Rank]) -> Iterator[str]:
    """Describe in what two members differ: at a number, at the cut of a step, at the end of a script."""
    (rank, calls), (peer, its) = one, other
    both = min(calls.count, its.count)
    at_both = {next((digest for known, digest, _ in _known(each) if known <= both), None) for each in (calls, its)}
    if len(at_both) > 1:  # hardly ever, for each of thousands of ranks
        known, found = {number: (digest, code) for number, digest, code in _known(calls)}, ""
        for number, digest, code in (each for each in _known(its) if each[0] in known):
            if known[number][0] == digest:
                break
            # `_known` ends with a digest whose collective is known no more.
            mine, yours = (str(decoded(each)) if each else "one no longer known" for each in (known[number][1], code))
            found = f"collective {number} of rank {rank} was {mine}, of rank {peer} {yours}"
        if found:
            yield found
    cuts = {step: (count, digest) for step, count, digest in calls.cuts}
    for step, count, digest in sorted(its.cuts):
        if step in cuts and cuts[step] != (count, digest):
            more = calls if cuts[step][0] > count else its
            newest = f"; the newest was {decoded(more.recent[-1])}" if more.recent else ""
            yield f"rank {rank} had issued {cuts[step][0]} collectives by step {step}, rank {peer} {count}{newest}"
    for (rank, calls), (peer, its) in ((one, other), (other, one)):
        if peer in ended and calls.count > its.count:
            issued = f"{calls.count} collectives{f', the newest {decoded(calls.recent[-1])}' if calls.recent else ''}"
            yield f"rank {rank} has issued {issued}; rank {peer} {its.count}, and its script has ended"


def _known(calls: GroupCalls) -> Iterator[tuple[int, int, int]]:
    """Number, digest after it, and code of each collective still known, the newest first; at last the digest before."""
    digest = calls.digest
    for back, code in enumerate(reversed(calls.recent)):
        yield calls.count - back, digest, code
        digest = (digest - code) * _INVERSE & MASK
    yield calls.count - len(calls.recent), digest, 0
