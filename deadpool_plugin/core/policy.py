"""The user's decisions about losses, the waits of the protocol, and budgets of repetitions.

Rules of this file: `Policy` and `Timing` are frozen and the same on every node; the caller derives them from the
configuration. All times are in seconds of the caller's monotonic clock.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Hashable
from dataclasses import dataclass


@dataclass(frozen=True)
class Policy:
    """See the fields of the same names in the configuration."""

    copies: int = 1  # on how many other nodes each snapshot must be before its step is committed
    restarts_max: int = 3  # of one rank's process on its own node, within the window; at one more loss that is lost
    wait_for_hosts: bool = False  # without a spare wait, holding everything, until a host joins; else the job ends
    witness: bool = False  # in a tie the half whose plan it keeps decides, instead of that with the first active node
    restarts_window_s: float = 3600.0  # losses longer ago than this do not count
    spares: int = 0  # how many nodes stand by in a job that has all the hosts it was given
    spare_command: bool = False  # there is one, which brings a host in the place of a lost one
    spare_command_limit_s: float = 1800.0  # for so long its host may take to join once it has ended
    mirror_every: int = 1  # how many steps snapshots are apart; AUTO: as many as mirroring keeps up with (chain.py),
    mirror_every_max: int = 16  # but no more than this
    store_every_s: float | None = None  # seconds between two steps that all write to disk; None: none is

    @property
    def begins_every(self) -> int:
        """How many steps the first snapshots of a job are apart."""
        return max(1, self.mirror_every)


@dataclass(frozen=True)
class Timing:
    """The time limits of one job."""

    heartbeat_interval_s: float = 0.5  # every member speaks to the coordinator, and it to them, at least this often
    silent_after_s: float = 10.0  # a member whose host has given no sign of life for this long is lost
    slow_after_s: float = 10.0  # one that has said nothing for this long is lost, although its host's kernel answers
    phase_timeout_s: float = 20.0  # a phase of a swap is repeated without who has not answered by then: it is lost
    decision_timeout_s: float = 300.0  # who waits longer for the next generation, or to be taken in, leaves
    start_timeout_s: float = 1800.0
    """After the start and after each swap all ranks must be in training within this time; else the job stops. It
    begins anew with each rank that gets there, and whenever a newcomer on its way through past steps gets on."""
    stall_timeout_s: float | None = None
    """In training: if for so long no step is committed and no process says that it gets on, that is a hang. Infinite:
    never. None: what stalls.py finds."""
    saving_timeout_s: float = 300.0  # of a process in a save, and none of its own saves has taken an eighth of it

    @property
    def lease_s(self) -> float:
        """Seconds from the sending of a node's newest certain report until its workers stand still: see README.md."""
        return 0.9 * self.silent_after_s

    @property
    def linking_s(self) -> float:
        """Seconds that hosts have to link up: a dead one holds them up for little more than `slow_after_s`."""
        return 3 * self.slow_after_s

    @property
    def own_pause_s(self) -> float:
        """A longer gap between two inputs means that this node itself stood still."""
        return 3 * self.heartbeat_interval_s


class Budget:
    """A budget for each key: `most` times within any stretch of `window_s` seconds; 0: never.

    What follows within `storm_s` of one that counts belongs to it, and does not count.
    """

    # Source: systemd's StartLimitBurst within StartLimitIntervalSec; Erlang/OTP's restart intensity of a supervisor.

    def __init__(self, most: int, window_s: float, storm_s: float = 0.0) -> None:
        self._most, self._window_s, self._storm_s = most, window_s, storm_s
        self._spent: defaultdict[Hashable, deque[float]] = defaultdict(deque)

    def spend(self, key: Hashable, now: float) -> bool:
        """Count one more for `key`, at `now`. Returns: whether it is within the budget."""
        spent = self._spent[key]
        while spent and now - spent[0] >= self._window_s:
            spent.popleft()
        if spent and now - spent[-1] < self._storm_s:
            return True
        if len(spent) >= self._most:
            return False
        spent.append(now)
        return True

    def __str__(self) -> str:
        return f"{self._most} times within {self._window_s:g} s"
