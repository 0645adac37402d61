"""The trainer's part of mirroring on a real card: is a snapshot whole, how fast is the copy, what does a step cost?

    python scripts/gpu/mirror.py --out DIR                 by gpu_evidence.sh
    python scripts/gpu/mirror.py --out DIR --device cpu    small and over plain memory, to try this script

The plugin's own Stager copies into its own arena; what an agent would answer (the step before is committed) is answered
here, so the figures are of PCIe and of the host's part in it only: no network, no agent.

Rules of this file: what is compared takes turns; a figure comes with a confidence interval.
"""

from __future__ import annotations

import contextlib
import functools
import queue
import random
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, ClassVar
from unittest import mock

if __name__ == "__main__":
    sys.path[:1] = [str(Path(__file__).resolve().parents[number]) for number in (1, 2)]  # started by path

import torch
from bench.mirror_report import interval
from clusters import card

from deadpool_plugin.core.chain import Chain
from deadpool_plugin.mirror.arena import SlotPair
from deadpool_plugin.worker.staging import Layout, Stager
from gpu.checks import Checks, Figures, parse_args

HEADER_BYTES = 1 << 16
SIZES = {"cuda": 1 << 30, "stand-in": 1 << 24, "cpu": 1 << 22}
"""Bytes of a snapshot, for its rate and its wholeness."""
TENSORS = 8
COPIES = 20
RATE_MIN = 0.9
"""Least share of the rate of one plain copy into pinned memory."""
STEP_RATIO_MAX = 1.002
STATE_BYTES, RANKS = 12, 8
"""Bytes of a parameter's optimizer state, and the number of ranks that share it."""
LR = 1e-6
"""A rate so small that activations stay as they are: their values decide how much power, and what clock, a card has."""
BUDGET_S, ROUNDS_MIN, STEPS = {"cuda": 30.0, "cpu": 1.0}, 3, 6
TRIES = 10
TAKEN_S = 20.0
WAITS = 1000
"""Samples of each kind."""
LATE_CYCLES = 200_000_000
"""About a tenth of a second, by which an update is late."""


class Skipped(Exception):
    """Mark of what cannot be tried here; it does not count as held."""


class CommittingLink:
    """The agent's answers: every step is committed at once. Counts what was staged."""

    def __init__(self) -> None:
        self.staged: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.committed, self.committed_at, self.chain = -1, 0.0, Chain()
        self._changed: queue.SimpleQueue[None] = queue.SimpleQueue()

    def event(self, kind: str, **fields: Any) -> None:
        raise RuntimeError(f"{kind}: {fields}")  # memory that could not be page-locked, most of all

    def send(self, message: Any) -> None:
        self.staged.put(message)

    def wake(self) -> None:
        self._changed.put(None)

    def wait_for_gate(self, step: int, cancelled: Callable[[], bool]) -> int:
        return step - 1

    def locked(self) -> AbstractContextManager[object]:
        return contextlib.nullcontext()

    def wait_until(self, done: Callable[[], bool], interruptible: bool = True) -> None:
        while not done():
            self._changed.get()


class Mirror:
    """A Stager over `tensors`, and the steps it was given so far."""

    kept: ClassVar[list[SlotPair]] = []
    """Slots of all mirrors, twice a snapshot each: page-locked memory must not be unmapped (Stager._pin)."""

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        self.layout, self.step = Layout(tensors), -1
        self.slots = SlotPair.create(0, HEADER_BYTES, self.layout.payload_bytes)
        self.kept.append(self.slots)
        self.link = CommittingLink()
        self.stager = Stager(self.layout, [], self.slots, self.link)  # type: ignore[arg-type]

    def begin(self) -> None:
        self.step += 1
        self.stager.stage(self.step, 0, {}, [b""])

    def taken(self) -> list[torch.Tensor]:
        """The newest snapshot, once it is whole. Raises: queue.Empty if it never is."""
        self.link.staged.get(timeout=TAKEN_S)
        return self.layout.views(self.slots.payload(self.step))

    def holds(self, expected: list[torch.Tensor]) -> bool:
        """Return whether these are in the newest snapshot."""
        return all(torch.equal(a.to(b.device), b) for a, b in zip(self.taken(), expected, strict=True))

    def unordered(self) -> AbstractContextManager[object]:
        """Copies begun inside wait for nothing that the device has still to do."""
        return mock.patch.object(self.stager._side_stream, "wait_stream", lambda other: None)


def is_stand_in(device: str) -> bool:
    return device == "cuda" and card.is_stand_in()


def snapshot_bytes(device: str) -> int:
    return SIZES[card.STAND_IN if is_stand_in(device) else device]


def of_speed(check: Callable[[str, Figures], None]) -> Callable[[str, Figures], None]:
    """Decorate a check of a time or a rate: a stand-in's would say nothing."""

    @functools.wraps(check)
    def checked(device: str, figures: Figures) -> None:
        if is_stand_in(device):
            raise Skipped("a stand-in tells nothing of speed")
        check(device, figures)

    return checked


def shard(device: str, size: int) -> list[torch.Tensor]:
    generator = torch.Generator(device).manual_seed(1)
    count = size // TENSORS // 4
    return [torch.randn(count, generator=generator, device=device) for _ in range(TENSORS)]


def update(tensors: list[torch.Tensor]) -> None:
    for tensor in tensors:
        tensor.add_(1.0)


def rest(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def whole_snapshots(device: str, figures: Figures) -> None:
    """An update waits for the copy before it, so a snapshot is of one step. Without that wait it would not be: the same
    is done without it, which must be seen, or this check proves nothing."""
    tensors = shard(device, snapshot_bytes(device))
    mirror, torn = Mirror(tensors), {True: 0, False: 0}
    for number in range(2 * TRIES):
        waits, expected = number % 2 == 0, [tensor.clone() for tensor in tensors]
        rest(device)
        mirror.begin()
        if waits:
            mirror.stager.wait()
        update(tensors)
        torn[waits] += not mirror.holds(expected)
        mirror.stager.wait()
    figures |= {"snapshots": TRIES, "torn": torn[True], "torn_if_updates_did_not_wait": torn[False]}
    assert torn[True] == 0, f"{torn[True]} of {TRIES} snapshots were torn by the update behind them"
    assert torn[False] > 0, "no update overtook a copy although none waited: this check could not have seen one"


def fresh_snapshots(device: str, figures: Figures) -> None:
    """A copy waits for the update before it, which the device may not even have begun. As above: without that wait a
    snapshot must be seen to lack the update."""
    tensors = shard(device, snapshot_bytes(device))
    mirror, stale = Mirror(tensors), {True: 0, False: 0}
    for number in range(2 * TRIES):
        waits, expected = number % 2 == 0, [tensor + 1.0 for tensor in tensors]
        rest(device)
        torch.cuda._sleep(LATE_CYCLES)
        update(tensors)
        with contextlib.nullcontext() if waits else mirror.unordered():
            mirror.begin()
        mirror.stager.wait()
        stale[waits] += not mirror.holds(expected)
    figures |= {"snapshots": TRIES, "stale": stale[True], "stale_if_copies_did_not_wait": stale[False]}
    assert stale[True] == 0, f"{stale[True]} of {TRIES} snapshots lack the update before them"
    assert stale[False] > 0, "no copy overtook an update although none waited: this check could not have seen one"


@of_speed
def rate(device: str, figures: Figures) -> None:
    """Bytes a second of a snapshot, beside one plain copy of as much into memory pinned by torch."""
    size = snapshot_bytes(device)
    tensors = shard(device, size)
    flat = torch.cat(tensors)
    pinned = torch.empty_like(flat, device="cpu", pin_memory=device == "cuda")
    mirror = Mirror(tensors)

    def staged() -> None:
        mirror.begin()
        mirror.taken()
        mirror.stager.wait()

    def plain() -> None:
        pinned.copy_(flat, non_blocking=True)
        rest(device)

    rates: dict[str, list[float]] = {"staged": [], "plain": []}
    for number in range(COPIES + 1):  # the first round warms up
        for name, copy in (("staged", staged), ("plain", plain)):
            rest(device)
            began = time.perf_counter()
            copy()
            if number:
                rates[name].append(size / (time.perf_counter() - began) / 1e9)
    ratios = [staged / plain for staged, plain in zip(rates["staged"], rates["plain"], strict=True)]
    figures |= {"bytes": size, "ratio": statistics.fmean(ratios), "ratio_95": list(interval(ratios))}
    for name, found in rates.items():
        figures |= {f"{name}_gb_s": statistics.fmean(found), f"{name}_gb_s_95": list(interval(found))}
    low = figures["ratio_95"][0]
    assert device == "cpu" or low >= RATE_MIN, f"{low:.2f} of a plain copy's rate (lower limit), wanted: {RATE_MIN}"


@of_speed
def step_time(device: str, figures: Figures) -> None:
    """Steps of a model that keeps the card busy, with and without a snapshot each, in turns: of as many bytes as a rank
    of eight has of its optimizer's state, masters and two moments in fp32."""
    width, layers, batch = {"cuda": (8192, 6, 8192), "cpu": (64, 2, 64)}[device]
    torch.manual_seed(0)
    with torch.device(device):
        model = torch.nn.Sequential(*(torch.nn.Linear(width, width, bias=False) for _ in range(layers)))
        data = torch.randn(batch, width, dtype=torch.bfloat16)
    model.bfloat16()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, fused=device == "cuda")
    size = STATE_BYTES * sum(parameter.numel() for parameter in model.parameters()) // RANKS
    mirror = Mirror(shard(device, size))

    def step(mirrored: bool) -> float:
        began = time.perf_counter()
        optimizer.zero_grad()
        loss = (model(data) ** 2).mean()
        loss.backward()
        if mirrored:
            mirror.stager.wait()
        optimizer.step()
        if mirrored:
            mirror.begin()
        loss.item()
        return time.perf_counter() - began

    ratios: list[float] = []
    times: dict[bool, list[float]] = {True: [], False: []}
    draw, ends = random.Random(0), time.monotonic() + BUDGET_S[device]
    step(False)
    while time.monotonic() < ends or len(ratios) < ROUNDS_MIN:
        order = draw.sample([True, False], 2)
        found = {mirrored: one_block(step, mirror, mirrored) for mirrored in order}
        ratios.append(statistics.fmean(found[True]) / statistics.fmean(found[False]))
        for mirrored in order:
            times[mirrored] += found[mirrored]
    low, high = interval(ratios)
    figures |= {"label": "staging only; PCIe and host part only", "snapshot_bytes": size, "rounds": len(ratios)}
    figures |= {"plain_ms": 1e3 * statistics.median(times[False]), "mirrored_ms": 1e3 * statistics.median(times[True])}
    figures |= {"ratio": statistics.fmean(ratios), "ratio_95": [low, high]}
    assert device == "cpu" or high <= STEP_RATIO_MAX, f"step time times {high:.4f} (upper limit), not {STEP_RATIO_MAX}"


@of_speed
def synchronization(device: str, figures: Figures) -> None:
    """Measure the host's time for each kind of wait that the plugin adds to a call, and for a kernel's launch. The
    device has nothing to do: this is the way there and back."""
    value, event = torch.ones(1, device=device), torch.cuda.Event()  # type: ignore[no-untyped-call]
    host = torch.empty(1, pin_memory=True)

    def recorded() -> None:
        event.record()
        event.synchronize()

    kinds: dict[str, Callable[[], object]] = {
        "launch": lambda: value.add_(1.0),
        "stream_synchronize": torch.cuda.current_stream().synchronize,
        "event_record_and_synchronize": recorded,
        "copy_to_host": lambda: host.copy_(value, non_blocking=True),
        "item": value.item,
    }
    for name, wait in kinds.items():
        times = []
        for _ in range(WAITS):
            rest(device)
            began = time.perf_counter()
            wait()
            times.append(1e6 * (time.perf_counter() - began))
        figures[f"{name}_us"] = statistics.median(times)


def one_block(step: Callable[[bool], float], mirror: Mirror, mirrored: bool) -> list[float]:
    """Seconds of its steps, without the first, which may have to wait for what the block before left."""
    times = [step(mirrored) for _ in range(STEPS)][1:]
    mirror.stager.wait()
    return times


def main() -> int:
    args = parse_args(__doc__)
    checks: dict[str, Callable[[str, Figures], None]] = {"device-to-host rate": rate}
    if args.device == "cuda":
        checks = {
            "snapshots are of one step": whole_snapshots,
            "snapshots have the step before": fresh_snapshots,
        } | checks
        checks["cost of a wait"] = synchronization
    checks["step time with and without"] = step_time
    found = Checks("mirror", args.out, args.of)
    found.run({name: functools.partial(check, args.device) for name, check in checks.items()})
    return found.exit_code


if __name__ == "__main__":
    sys.exit(main())
