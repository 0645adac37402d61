"""The steps of which all ranks take a snapshot, and how far they are apart.

Rules of this file: a generation's chain begins with its restore step. With snapshots p, q, r in order nobody stages q
before p is committed, and that commit says r. So whoever has staged q knows r before the update after q, and all ranks
take the same snapshots without a wait of their own. Only the lowest member of the generation may choose: two nodes that
both take themselves for the coordinator must not choose differently.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from .types import NO_STEP, Step

AUTO = 0  # of `Policy.mirror_every`
SLACK = 1.1  # a snapshot has so many times the steps that mirroring took
UP_AFTER, DOWN_AFTER = 2, 8  # snapshots in a row whose mirroring took too long; or less than a smaller distance gives


class Chain:
    """The snapshots of one generation, as far as one node or process knows them.

    `every` steps apart: always if `fixed`; else the first three, and from there on those that were announced.
    """

    def __init__(self, first: Step = 0, every: int = 1, fixed: bool = True) -> None:
        self.first, self.every, self.fixed = first, every, fixed
        self._known = set[Step]() if fixed else {first, first + every, first + 2 * every}
        self._void = set[Step]()

    def __contains__(self, step: Step) -> bool:
        return step in self._known or self._is_regular(step)

    def _is_regular(self, step: Step) -> bool:
        return self.fixed and step >= self.first and (step - self.first) % self.every == 0

    def after(self, step: Step) -> Step:
        """Return the next snapshot after `step`, NO_STEP if it is not known yet."""
        found = [known for known in self._known if known > step]
        if self.fixed:
            found.append(self.first + max(0, (step - self.first) // self.every + 1) * self.every)
        return min(found, default=NO_STEP)

    def before(self, step: Step) -> Step:
        """Return the snapshot before `step`, NO_STEP if there is none."""
        found = [known for known in self._known if known < step]
        if self.fixed and step > self.first:
            found.append(step - 1 - (step - 1 - self.first) % self.every)
        return max(found, default=NO_STEP)

    def may_stage(self, step: Step, committed: Step) -> bool:
        """Return whether the gate is open: `step` overwrites what is needed until the one before it is committed."""
        before = self.before(step)
        return before <= 0 or committed >= before

    def is_void(self, step: Step) -> bool:
        """Return whether `step` was to be a snapshot, and is none after all."""
        return step in self._void

    def learn(self, steps: Iterable[Step], void: Iterable[Step] = ()) -> bool:
        """Take in what was announced. Returns: whether that is news."""
        fresh = {step for step in steps if step not in self and step not in self._void}
        voided = {*void} - self._void
        self._known |= fresh
        self._void |= voided
        self._known -= voided
        return bool(fresh or voided)

    def forget_before(self, committed: Step) -> None:
        """Forget what nobody asks for once `committed` is."""
        newest = max((step for step in self._known if step <= committed), default=NO_STEP)
        self._known = {step for step in self._known if step >= newest}
        self._void = {step for step in self._void if step > committed}

    def announced(self, committed: Step) -> tuple[Step, ...]:
        """List the snapshots after `committed` that no rule gives."""
        return tuple(sorted(step for step in self._known if step > committed))

    def voided(self) -> tuple[Step, ...]:
        return tuple(sorted(self._void))


class Pace:
    """The distance of snapshots that mirroring keeps up with, from how many steps it takes."""

    def __init__(self, every: int) -> None:
        self.every = every
        self.steps = 0.0  # that mirroring took, by the newest change
        self._took: deque[float] = deque(maxlen=DOWN_AFTER)

    def note(self, steps: float, limit: int) -> bool:
        """Note how many steps the mirroring of a snapshot took. Returns: whether the distance is another one now."""
        self._took.append(steps)
        least, most = min([*self._took][-UP_AFTER:]), max(self._took)
        is_behind = len(self._took) >= UP_AFTER and least > self.every
        has_room = len(self._took) == DOWN_AFTER and self._enough(most) < self.every
        every = min(limit, self._enough(least) if is_behind else self._enough(most) if has_room else self.every)
        if every == self.every:
            return False
        self.every, self.steps = every, least if is_behind else most
        self._took.clear()
        return True

    def _enough(self, steps: float) -> int:
        return max(1, int(-(-(steps if steps <= 1.0 else SLACK * steps) // 1)))
