"""Reports of a running job so far, and the questions that whoever injects faults asks of them.

Rules of this file: standard library only; everything is read from the event logs, nothing from the processes.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

Event = dict[str, Any]
_PROTECTION = ("Mirrored", "Protected", "Unprotected", "SwapPlanned")


class Tail:
    """All events of a job's nodes, or those that do not recur with every step; `read` takes in what is new."""

    def __init__(self, folder: Path, recurring: bool = True) -> None:
        self._folder, self._recurring = folder, recurring
        self._read: dict[Path, int] = {}
        self.events: list[Event] = []

    def read(self) -> list[Event]:
        """The new ones. A line that is still being written is left for the next time."""
        new: list[Event] = []
        for path in self._folder.glob("events.*.jsonl"):
            if ".recent" in path.name and not self._recurring:
                continue
            with open(path, "rb") as file:
                begun = self._read.get(path, 0)
                begun = begun if begun <= file.seek(0, 2) else 0  # what recurs is written in turns into two files
                file.seek(begun)
                whole, newline, _ = file.read().rpartition(b"\n")
            self._read[path] = begun + len(whole) + len(newline)
            new += [json.loads(line) for line in whole.splitlines()]
        if new:
            self.events = sorted(self.events + new, key=lambda event: event["time"])
        return new

    def of(self, *kinds: str, since: float = 0.0) -> list[Event]:
        return [event for event in self.events if event["event"] in kinds and event["time"] >= since]

    @property
    def in_training(self) -> bool:
        return bool(self.of("TrainingStarted"))

    @property
    def protected(self) -> bool:
        """Mirrored, and a spare can take any node."""
        told = self.of(*_PROTECTION)
        return bool(told) and told[-1]["event"] == "Protected"

    @property
    def mirrored(self) -> bool:
        """Every rank's state is in other hosts' memory, whether a spare is left or not."""
        told = self.of(*_PROTECTION)
        return bool(told) and told[-1]["event"] in ("Mirrored", "Protected")

    @property
    def ended(self) -> bool:
        return bool(self.of("JobStopped", "JobFinished"))

    @property
    def generation(self) -> int:
        return max((event["generation"] for event in self.events), default=0)

    def spares_ready(self) -> int:
        """Count the hosts that have said that they are ready and have not taken over, been lost or said so twice."""
        ready = {event["node"] for event in self.of("SpareReady")}
        gone = {lost for event in self.of("NodeLost") for lost in event["lost"]}
        takers = {taker for event in self.of("SwapPlanned") for taker in event["takers"].values()}
        return len(ready - gone - takers)

    def resumed(self, generation: int, since: float) -> dict[int, float]:
        """Rank -> when it was back, in the newest generation that any rank has come back in and that is newer."""
        found = [event for event in self.of("WorkerResumed", since=since) if event["generation"] > generation]
        newest = max((event["generation"] for event in found), default=0)
        return {event["rank"]: event["time"] for event in found if event["generation"] == newest}

    def committed(self, before: float) -> int:
        return max((e["step"] for e in self.of("StepCommitted") if e["time"] < before), default=-1)

    def lost_steps(self, fault_time: float) -> int | None:
        """Steps that had been committed before the fault and were given up by the plans after it."""
        restored = [event["restore_step"] for event in self.of("SwapPlanned", since=fault_time)]
        return max(0, self.committed(fault_time) - min(restored)) if restored else None
