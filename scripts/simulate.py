"""Run whole jobs of simulated hosts under faults: the real agents over simulated time, network, processes and memory.

    python scripts/simulate.py --seeds 0:1000                          a thousand jobs of 5 to 32 hosts
    python scripts/simulate.py --seeds 7:8 --show                      one, and what its controllers took in and did
    python scripts/simulate.py --seeds 0:10 --nodes 64 --spares 4      large ones
    python scripts/simulate.py --seeds 0:20000 --out campaign.json     a long campaign, gone on with at any time

No GPU, no training job. The exit code is 0 if no invariant was violated. A seed that breaks one is shown in a sentence
with the command that runs it again, and made smaller.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path

import yaml

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from simulator.campaign import FAULTS_MIN, Summary, campaign
from simulator.coverage import unseen
from simulator.record import go_on, opened
from simulator.run import Outcome, run as run_one
from simulator.schedule import Ranges, Scenario, as_file, read_faults, scenario
from simulator.shrink import shrunk
from simulator.transcript import Transcript

from deadpool_plugin.errors import ConfigError, DeadpoolError, present

PROGRESS_S = 5.0
SHRUNK_MAX = 3
"""Failing seeds that are made smaller."""


def parse_args(words: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=_range, default=(0, 100), metavar="A:B", help="from A up to B - 1")
    parser.add_argument("--nodes", type=_range, default=(5, 32), metavar="N or LOW:HIGH", help="hosts, spares included")
    parser.add_argument("--spares", type=_range, default=(1, 3), metavar="S or LOW:HIGH")
    parser.add_argument("--steps", type=int, default=20, help="training steps of each job (default 20)")
    parser.add_argument(
        "--faults", type=Path, metavar="FILE", help="YAML: fields of a scenario that are not drawn (`faults` above all)"
    )
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes (default: one a CPU)")
    parser.add_argument("--until-broken", action="store_true", help="end with the first seed that breaks an invariant")
    parser.add_argument("--out", type=Path, metavar="FILE", help="record the campaign there; go on with the one there")
    parser.add_argument("--piece", type=int, default=1000, metavar="N", help="seeds between two writes of --out")
    parser.add_argument("--pairs", action="store_true", help="list the (state, event) pairs that did not occur")
    parser.add_argument("--show", action="store_true", help="print the transcript of every seed (few seeds, please)")
    parser.add_argument("--save", type=Path, metavar="DIR", help="where shrunk scenarios go (default: a temporary one)")
    return parser.parse_args(words)


def main(words: list[str] | None = None) -> int:
    """0 if no invariant was broken, 1 otherwise."""
    try:
        return run(parse_args(words))
    except DeadpoolError as error:
        print(f"[simulate] {error}", file=sys.stderr)
        return error.exit_code


def run(args: argparse.Namespace) -> int:
    """Raises: ConfigError."""
    ranges = Ranges(nodes=args.nodes, spares=args.spares, steps=args.steps)
    fixed = read_faults(args.faults)
    if args.save is not None:
        _make(args.save)
    seeds = range(args.seeds[0], max(args.seeds[1], args.seeds[0] + 1))
    if args.show:
        for seed in seeds:
            _show(scenario(seed, ranges, fixed))
    jobs = min(args.jobs, len(seeds))
    if args.out is None:
        began = time.monotonic()
        summary = campaign(seeds, ranges, fixed, jobs, _Progress(len(seeds)), args.until_broken)
        took_s = time.monotonic() - began
    else:
        record = opened(args.out, seeds.start, ranges, fixed, jobs)
        record = go_on(args.out, record, seeds.stop, args.piece, _Progress(len(seeds), record.summary))
        summary, took_s = record.summary, record.wall_s
    print("\n".join(described(summary, took_s)))
    if args.pairs:
        print("\n".join(f"never met when {state}: {', '.join(gap)}" for state, gap in unseen(summary.pairs).items()))
    if summary.findings:
        folder = args.save or Path(tempfile.mkdtemp(prefix="deadpool-simulate-"))
        for outcome in summary.findings[:SHRUNK_MAX]:
            _explain(outcome, scenario(outcome.seed, ranges, fixed), args, folder)
    return 1 if summary.findings else 0


def _range(text: str) -> tuple[int, int]:
    """`A:B`, or `N` for N:N."""
    low, colon, high = text.partition(":")
    try:
        return int(low), int(high) if colon else int(low)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is neither a number nor LOW:HIGH") from None


def _make(folder: Path) -> None:
    """Before the simulation, which may take hours. Raises: ConfigError."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{folder} cannot be made ({error.strerror})", "a directory", "name another one") from error


class _Progress:
    """A line on standard error every few seconds."""

    def __init__(self, total: int, before: Summary | None = None) -> None:
        self._total, self._began = total, time.monotonic()
        self._seeds, self._events = (before.seeds, before.events) if before is not None else (0, 0)
        self._said_at = self._began

    def __call__(self, summary: Summary) -> None:
        now = time.monotonic()
        if now - self._said_at < PROGRESS_S:
            return
        self._said_at, took_s = now, now - self._began
        left_s = took_s / (summary.seeds - self._seeds) * (self._total - summary.seeds)
        events = summary.events - self._events
        print(
            f"[simulate] {summary.seeds} of {self._total} seeds, {events / took_s:,.0f} events/s, "
            f"{summary.swaps} swaps, {len(summary.findings)} violations, {left_s:.0f} s left",
            file=sys.stderr,
            flush=True,
        )


def described(summary: Summary, took_s: float) -> list[str]:
    """The summary in lines."""
    faults = ", ".join(f"{kind} {count}" for kind, count in summary.faults.most_common())
    verdicts = ", ".join(f"{verdict} {count}" for verdict, count in summary.verdicts.most_common())
    seeds = max(summary.seeds, 1)
    return [
        f"seeds      {summary.seeds} in {took_s:.1f} s ({summary.thin} of them with fewer than {FAULTS_MIN} faults)",
        f"events     {summary.events} ({summary.events / max(took_s, 1e-9):,.0f}/s)",
        f"faults     {sum(summary.faults.values())} effective: {faults}",
        f"steps      {summary.steps} committed ({summary.steps / seeds:.1f} a seed)",
        f"swaps      {summary.swaps}",
        f"verdicts   {verdicts}",
        f"covered    {len(summary.pairs)} (state, event) pairs",
        f"violations {len(summary.findings)}",
    ]


def _explain(outcome: Outcome, failing: Scenario, args: argparse.Namespace, folder: Path) -> None:
    """One sentence, the command, and the same made smaller, in `folder`."""
    finding = present(outcome.finding, "a seed that found nothing is explained")
    given = f" --faults {args.faults}" if args.faults else ""
    seed = f"--seeds {outcome.seed}:{outcome.seed + 1}"
    print(f"\nseed {outcome.seed}: {finding.invariant}: {finding.sentence}")
    print(
        f"  again:  python scripts/simulate.py {seed} --nodes {args.nodes[0]}:{args.nodes[1]} "
        f"--spares {args.spares[0]}:{args.spares[1]} --steps {args.steps}{given} --show"
    )
    if args.until_broken:  # whoever looks for one has no time to make it smaller
        return
    small = shrunk(failing)
    path = folder / f"seed-{outcome.seed}.yaml"
    path.write_text(yaml.safe_dump(as_file(small), sort_keys=False), encoding="utf-8")
    print(
        f"  shrunk: {small.active}+{small.spares} hosts, {len(small.faults)} fault(s): "
        f"python scripts/simulate.py {seed} --faults {path} --show"
    )


def _show(one: Scenario) -> None:
    transcript = Transcript()
    outcome = run_one(one, transcript)
    print(f"---- seed {one.seed}: {one.active}+{one.spares} hosts, {len(one.faults)} faults")
    print("\n".join(transcript.lines))
    print(f"---- {outcome.verdict}, {outcome.swaps} swap(s), {outcome.events} events")


if __name__ == "__main__":
    sys.exit(main())
