"""The trainer's part of mirroring on a real card: is a snapshot whole, how fast is the copy, what does a step cost?

    python scripts/gpu/mirror.py --out DIR                 by gpu_evidence.sh
    python scripts/gpu/mirror.py --out DIR --device cpu    small and over plain memory, to try this script

The plugin's own Stager copies into its own arena; what an agent would answer (the step before is committed) is answered
here, so the figures are of PCIe and of the host's part in it only: no network, no agent.

Rules of this file: what is compared takes turns; a figure comes with a confidence interval.
"""

from __future__ import annotations

import queue
import random
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path[:1] = [str(Path(__file__).resolve().parents[number]) for number in (1, 2)]  # started by path

import torch
from bench.mirror_report import interval

from deadpool_plugin.mirror.arena import SlotPair
from deadpool_plugin.worker.staging import Layout, Stager
from gpu.checks import Checks, Figures, parse_args

HEADER_BYTES = 1 << 16
SIZES = {"cuda": 1 << 30, "cpu": 1 << 22}
"""Bytes of a snapshot, for its rate and its wholeness."""
TENSORS = 8
COPIES = 20
RATE_MIN = 0.9
"""Of the rate of one plain copy into pinned memory."""
STEP_RATIO_MAX = 1.002
ROUNDS, STEPS = {"cuda": 12, "cpu": 3}, 6
TRIES = 10


class CommittingLink:
    """The agent's answers: every step is committed at once. Counts what was staged."""

    def __init__(self) -> None:
        self.staged: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._changed: queue.SimpleQueue[None] = queue.SimpleQueue()

    def event(self, kind: str, **fields: Any) -> None:
        raise RuntimeError(f"{kind}: {fields}")  # memory that could not be page-locked, most of all

    def send(self, message: Any) -> None:
        self.staged.put(message)

    def wake(self) -> None:
        self._changed.put(None)

    def wait_for_commit(self, step: int, cancelled: Callable[[], bool]) -> bool:
        return True

    def wait_until(self, done: Callable[[], bool], interruptible: bool = True) -> None:
        while not done():
            self._changed.get()


class Mirror:
    """A Stager over `tensors`, and the steps it was given so far."""

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        self.layout, self.step = Layout(tensors), -1
        self.slots = SlotPair.create(0, HEADER_BYTES, self.layout.payload_bytes)
        self.link = CommittingLink()
        self.stager = Stager(0, self.layout, [], self.slots, self.link)  # type: ignore[arg-type]

    def begin(self) -> None:
        self.step += 1
        self.stager.stage(self.step, 0, b"", b"")

    def snapshot(self) -> list[torch.Tensor]:
        """The newest one, once it is whole."""
        self.link.staged.get()
        return self.layout.views(self.slots.payload(self.step))


def shard(device: str, size: int) -> list[torch.Tensor]:
    generator = torch.Generator(device).manual_seed(1)
    count = size // TENSORS // 4
    return [torch.randn(count, generator=generator, device=device) for _ in range(TENSORS)]


def rest(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def whole_snapshots(device: str) -> Figures:
    """An update waits for the copy, so a snapshot is of one step. Without that wait it would not be: the same is done
    without it, which must be seen, or this check proves nothing."""
    tensors = shard(device, SIZES[device])
    mirror, torn = Mirror(tensors), {True: 0, False: 0}
    for number in range(2 * TRIES):
        waits, expected = number % 2 == 0, [tensor.clone() for tensor in tensors]
        rest(device)
        mirror.begin()
        if waits:
            mirror.stager.wait()
        for tensor in tensors:
            tensor.add_(1.0)
        found = mirror.snapshot()
        rest(device)
        torn[waits] += not all(torch.equal(a, b.cpu()) for a, b in zip(found, expected, strict=True))
        mirror.stager.wait()
    assert torn[True] == 0, f"{torn[True]} of {TRIES} snapshots were torn by the update behind them"
    assert torn[False] > 0, "no update overtook a copy although none waited: this check could not have seen one"
    return {"snapshots": TRIES, "torn": torn[True], "torn_if_updates_did_not_wait": torn[False]}


def rate(device: str) -> Figures:
    """Bytes a second of a snapshot, beside one plain copy of as much into memory pinned by torch."""
    size = SIZES[device]
    tensors = shard(device, size)
    flat = torch.cat(tensors)
    pinned = torch.empty_like(flat, device="cpu", pin_memory=device == "cuda")
    mirror = Mirror(tensors)

    def staged() -> None:
        mirror.begin()
        mirror.snapshot()
        mirror.stager.wait()

    def plain() -> None:
        pinned.copy_(flat, non_blocking=True)
        rest(device)

    seconds: dict[str, list[float]] = {"staged": [], "plain": []}
    for number in range(COPIES + 1):  # the first round warms up
        for name, copy in (("staged", staged), ("plain", plain)):
            rest(device)
            began = time.perf_counter()
            copy()
            if number:
                seconds[name].append(time.perf_counter() - began)
    rates = {name: size / statistics.median(times) / 1e9 for name, times in seconds.items()}
    ratio = rates["staged"] / rates["plain"]
    if device == "cuda":
        assert ratio >= RATE_MIN, f"{rates['staged']:.1f} GB/s, {ratio:.2f} of a plain copy's {rates['plain']:.1f}"
    return {"bytes": size, "staged_gb_s": rates["staged"], "plain_gb_s": rates["plain"], "ratio": ratio}


def step_time(device: str) -> Figures:
    """Steps of a model that keeps the card busy, with and without a snapshot of an eighth of its optimizer's state
    (the shard of a rank of eight) each, in turns. PCIe and host part only."""
    width, layers, batch = {"cuda": (8192, 6, 8192), "cpu": (64, 2, 64)}[device]
    torch.manual_seed(0)
    with torch.device(device):
        model = torch.nn.Sequential(*(torch.nn.Linear(width, width, bias=False) for _ in range(layers)))
        data = torch.randn(batch, width, dtype=torch.bfloat16)
    model.bfloat16()
    optimizer = torch.optim.AdamW(model.parameters(), fused=device == "cuda")
    mirror: Mirror | None = None

    def step(mirrored: bool) -> float:
        began = time.perf_counter()
        optimizer.zero_grad()
        loss = (model(data) ** 2).mean()
        loss.backward()
        if mirrored and mirror is not None:
            mirror.stager.wait()
        optimizer.step()
        if mirrored and mirror is not None:
            mirror.begin()
        loss.item()
        return time.perf_counter() - began

    step(False)
    state = [value for entry in optimizer.state.values() for value in entry.values() if value.dim()]
    state = [value for value, _ in zip(state, range(max(1, len(state) // 8)), strict=False)]
    size = sum(value.numel() * value.element_size() for value in state)
    mirror = Mirror(state)
    ratios, times = [], {True: [], False: []}  # type: ignore[var-annotated]
    draw = random.Random(0)
    for number in range(ROUNDS[device] + 1):
        order = draw.sample([True, False], 2)
        found = {mirrored: [step(mirrored) for _ in range(STEPS)][1:] for mirrored in order}
        mirror.stager.wait()
        if number:
            ratios.append(statistics.fmean(found[True]) / statistics.fmean(found[False]))
            for mirrored in order:
                times[mirrored] += found[mirrored]
    low, high = interval(ratios)
    figures: Figures = {"label": "PCIe and host part only", "snapshot_bytes": size, "steps_each": len(times[True])}
    figures |= {"plain_ms": 1e3 * statistics.median(times[False]), "mirrored_ms": 1e3 * statistics.median(times[True])}
    figures |= {"ratio": statistics.fmean(ratios), "ratio_95": [low, high]}
    if device == "cuda":
        assert high <= STEP_RATIO_MAX, f"step time times {high:.4f} (upper limit), wanted: {STEP_RATIO_MAX}"
    return figures


def main() -> int:
    args = parse_args(__doc__)
    checks = Checks("mirror", args.out)
    if args.device == "cuda":
        checks.run("snapshots are of one step", lambda: whole_snapshots(args.device))
    checks.run("device-to-host rate", lambda: rate(args.device))
    checks.run("step time with and without", lambda: step_time(args.device))
    return min(1, checks.failed)


if __name__ == "__main__":
    sys.exit(main())
