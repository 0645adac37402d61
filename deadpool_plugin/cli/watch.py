"""`deadpool watch OUTPUT_DIR [--once] [--json]`: what a job is doing, from the event logs in its `output_dir`.

On a terminal a table that stays in place, one row per node; elsewhere one plain line per important event and now
and then one about the steps. Rules of this file: drawing only, what is known is in `JobView`; no torch.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import time
from collections.abc import Iterator
from itertools import count, groupby
from pathlib import Path
from typing import Any

from rich.columns import Columns
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from ..agent.reports import named, sentence
from ..errors import ConfigError
from ..host.output import say
from .jobview import Follower, JobView, Row, Swap

POLL_S = 0.25
LINES_SHOWN = 6
SWAPS_SHOWN = 4
STALLED_S = 60.0
"""Seconds without a step that are worth red, and a line; fewer may be a save or an evaluation."""
STYLES = {
    **dict.fromkeys(("active", "Protected"), "green"),
    "spare": "cyan",
    **dict.fromkeys(("joining", "rehearsing", "Mirrored", "not yet"), "yellow"),
    **dict.fromkeys(("lost", "fenced", "Unprotected"), "red"),
}


# ---- the table


def picture(console: Console, view: JobView, now: float, height: int | None = None) -> Group:
    """Draw everything. `now` is in epoch seconds. `height`: the terminal's lines; hosts that do not fit are counted,
    those in trouble last, and of swaps and lines the newest are shown."""

    def lines_of(*parts: RenderableType) -> int:
        return len(console.render_lines(Group(*parts)))

    bad = view.exit_code or view.swapping_since is not None or view.stalled_s(now) >= STALLED_S
    style = "bold red" if bad or view.doing(now) == "silent" else "bold"
    head = Text.assemble(("deadpool  ", "dim"), (headline(view, now), style))
    above: list[RenderableType] = [Text(), head, _figures(view)]
    below: list[Text] = []
    for swap in view.swaps[-SWAPS_SHOWN:]:
        said = named(described(swap, superseded=swap is not view.swaps[-1]), view.fate.hosts)
        below.append(Text.assemble((f"swap {swap.plan.generation + 1}  ", "dim"), said))
    for line in list(view.lines)[-LINES_SHOWN:]:
        below.append(Text.assemble((f"{_clock(line.time)}  node {line.node}  ", "dim"), line.text))
    rows = view.rows()
    room = len(rows)
    if height is not None:
        left = height - lines_of(*above) - 1  # the cursor's line
        least = lines_of(*_nodes(rows, max(1, min(room, height // 3))))
        while len(below) > 1 and lines_of(*below) > left - least:
            del below[0]
        left -= lines_of(*below)
        room = max(1, min(room, left))
        while room > 1 and lines_of(*_nodes(rows, room)) > left:
            room -= 1
    return Group(*above, *_nodes(rows, room), *below)


def _figures(view: JobView) -> Columns:
    left = len(view.world.spares) if view.world is not None else -1
    figures = [
        ("generation", str(view.generation), "bold"),
        ("newest step", _number(view.step), "bold"),
        ("committed step", _number(view.committed), "bold"),
        ("newest loss", _loss(view.loss), "bold"),
        ("spares left", _number(left), "bold red" if left == 0 else "bold"),
        ("protection", protection(view), _style(view)),
    ]
    if view.spare_command:
        style = "yellow" if view.spare_command in ("running", "awaited") else "bold red"
        figures.append(("spare_command", view.spare_command, style))
    cells = [Text.assemble((f"{name} ", "dim"), (value, style), no_wrap=True) for name, value, style in figures]
    return Columns(cells, padding=(0, 3))


def _nodes(rows: list[Row], room: int) -> Iterator[RenderableType]:
    """Yield as many rows as there is room for: those that are not as they should be first, the others by number."""
    shown = sorted(sorted(rows, key=lambda row: row.state in ("active", "spare"))[:room], key=lambda row: row.node)
    table = Table(header_style="bold", expand=False)
    table.add_column("node", justify="right", no_wrap=True)
    table.add_column("host", overflow="fold", min_width=4)
    table.add_column("state", no_wrap=True, min_width=10)  # so that it does not jump about
    table.add_column("ranks", min_width=10)
    for name in ("generation", "newest step", "loss"):
        table.add_column(name, justify="right", no_wrap=name != "newest step", min_width=7)
    for row in shown:
        ranks = ranges(row.ranks) or (f"stands in for {ranges(row.stands_in_for)}" if row.stands_in_for else "-")
        state, style = Text(row.state, STYLES[row.state]), "dim" if row.state in ("lost", "fenced") else None
        figures = str(row.generation), _number(row.step), _loss(row.loss)
        table.add_row(str(row.node), escape(row.host) or "-", state, ranks, *figures, style=style)
    yield table
    if left := [row.state for row in rows if row not in shown]:
        states = ", ".join(f"{left.count(state)} {state}" for state in sorted(set(left)))
        yield Text(f"and {len(left)} more node(s): {states}", "dim")


# ---- words


def headline(view: JobView, now: float) -> str:
    match view.doing(now):
        case "ending":
            return f"{view.outcome}; some hosts are still at work"
        case "ended":
            return str(view.fate.outcome(by_logs=True))
        case "silent":
            silent = span(now - view.heard_at)
            return f"no event for {silent}: the job is gone, or its hosts cannot write to its output_dir"
        case "waiting":
            return "waiting for a host to join (`deadpool join`)"
        case "swapping":
            steps = [swap.plan.restore_step for swap in view.swaps if swap.duration_s is None]
            back = f"all ranks go back to step {steps[-1]}" if steps else "agreeing on who takes over"
            who = f"; {named(sentence(view.catching_up), view.fate.hosts)}" if view.catching_up is not None else ""
            return f"swap for {_since(view.swapping_since, now):.1f} s: {back}{who}"
        case "training":
            stalled_s, stall = view.stalled_s(now), view.holds_up
            why = f": {named(stall.what, view.fate.hosts)}" if stall is not None else ""
            return f"in training, but no step for {span(stalled_s)}{why}" if stalled_s else "in training"
        case "starting":
            return "starting"
    return "waiting for the first event"


def described(swap: Swap, superseded: bool = False) -> str:
    """Describe a swap in one line. `superseded`: another one came after it."""
    plan, said = swap.plan, [f"node {taker} takes over from node {lost}" for lost, taker in swap.plan.takers.items()]
    if idle := tuple(node for node in plan.lost_nodes if str(node) not in plan.takers):
        said.append(f"lost node {ranges(idle)}")
    if plan.joined:
        said.append(f"node {ranges(plan.joined)} joined")
    if plan.vacated:
        said.append(f"node {ranges(plan.vacated)} stands by, since an error came back there")
    if plan.lost_ranks:
        said.append(f"new process for rank {ranges(plan.lost_ranks)}")
    what = ", ".join(said if plan.takers else [*said, "no rank moves"])
    took = "went into the next swap" if superseded else "under way"
    if swap.duration_s is not None:
        took = f"in training again after {swap.duration_s:.2f} s"
    first = f", first step done after {swap.first_step_s:.2f} s" if swap.first_step_s is not None else ""
    return f"{what}, back to step {plan.restore_step}: {took}{first}"


def span(seconds: float) -> str:
    """Say a while, roughly: `40 s`, `12 min`, `2 h`."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.0f} h"


def ranges(numbers: tuple[int, ...]) -> str:
    """List numbers as runs: `0-3, 6`."""
    counter = count()
    runs = [list(run) for _, run in groupby(sorted(numbers), lambda number: number - next(counter))]
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs)


def protection(view: JobView) -> str:
    return "Mirrored only" if view.protection == "Mirrored" else view.protection


def _style(view: JobView) -> str:
    """Choose green only where a spare is left: a log of an older version may call a job without one protected."""
    without = view.protection == "Protected" and view.world is not None and not view.world.spares
    return STYLES["Mirrored" if without else view.protection]


def _since(then: float | None, now: float) -> float | None:
    return None if then is None else max(0.0, now - then)  # hosts' clocks differ


def _known(step: int) -> int | None:
    return step if step >= 0 else None


def _number(step: int) -> str:
    return str(step) if step >= 0 else "-"


def _loss(loss: float | None) -> str:
    return f"{loss:.4f}" if loss is not None else "-"


def _clock(at: float) -> str:
    return time.strftime("%m-%d %H:%M:%S", time.localtime(at))


# ---- plain lines


class PlainLines:
    """Lines for where there is no terminal: every new sentence, and the steps at most every `every_s` seconds."""

    def __init__(self, every_s: float) -> None:
        self._every_s, self._step, self._step_at = every_s, -1, float("-inf")
        self._doing, self._stalled_s = ("", ""), 0.0

    def update(self, view: JobView, now: float) -> list[str]:
        """Take the view's lines away, and return what is to be printed."""
        lines = [f"{_clock(line.time)} node {line.node}: {line.text}" for line in view.lines]
        view.lines.clear()
        if view.step not in (-1, self._step) and (now - self._step_at >= self._every_s or view.outcome):
            self._step, self._step_at = view.step, now
            lines.append(
                f"{_clock(now)} generation {view.generation}, step {view.step}, committed {_number(view.committed)}, "
                f"loss {_loss(view.loss)}, protection: {protection(view)}"
            )
        stalled_s, doing = view.stalled_s(now), (view.doing(now), view.outcome)
        is_news = doing[0] in ("silent", "ending", "ended") and doing != self._doing
        if doing[0] != "silent" and stalled_s >= max(STALLED_S, 2 * self._stalled_s):  # at first, and when it doubles
            is_news, self._stalled_s = True, stalled_s
        self._stalled_s = self._stalled_s if stalled_s else 0.0
        self._doing = doing
        return [*lines, f"{_clock(now)} {headline(view, now)}"] if is_news else lines


# ---- one JSON object


def figures(view: JobView, now: float) -> dict[str, Any]:
    """Describe a job to programs. Names and units are for good, new ones may be added (configs/README.md lists them);
    what is not known is null. `now` is in epoch seconds."""
    unprotected = view.protection in ("Mirrored", "Unprotected")
    members = [{**row._asdict(), "step": _known(row.step)} for row in view.rows()]
    members = [{name: value for name, value in member.items() if name != "loss"} for member in members]
    return {
        "time_s": now,
        "state": view.doing(now),
        "outcome": view.outcome or None,
        "exit_code": view.exit_code if view.over(now) else None,
        "silent_s": _since(view.heard_at or None, now),
        "generation": view.generation,
        "step": _known(view.step),
        "loss": view.loss,
        "committed_step": _known(view.committed),
        "committed_age_s": _since(view.committed_at or None, now),
        "stalled_s": view.stalled_s(now),
        "stalled": stall.what if (stall := view.holds_up) is not None else None,
        "stalled_ranks": stall.ranks if stall is not None else (),
        "spares_left": len(view.world.spares) if view.world is not None else None,
        "spare_command": view.spare_command or None,
        "mirrored": view.protection in ("Mirrored", "Protected"),
        "uncovered": view.uncovered,
        "protected": view.protection == "Protected",
        "unprotected_s": _since(view.protection_at, now) if unprotected else None,
        "swaps": len(view.swaps),
        "swapping_s": _since(view.swapping_since, now),
        "last_swap_s": next((swap.duration_s for swap in reversed(view.swaps) if swap.duration_s is not None), None),
        "catching_up": None
        if (newcomer := view.catching_up) is None
        else {
            "rank": newcomer.rank,
            "step": newcomer.step,
            "target_step": _known(newcomer.target),
            "left_s": newcomer.left_s if newcomer.left_s >= 0 else None,
        },
        "history": view.history,
        "members": members,
    }


# ---- the command


def add_arguments(parser: argparse.ArgumentParser) -> None:
    line = "`output_dir` of the job's configuration; waited for, except with --once"
    parser.add_argument("output_dir", type=Path, help=line)
    parser.add_argument("--every-s", type=float, default=10.0, help="without a terminal: seconds between step lines")
    parser.add_argument("--once", action="store_true", help="what is known now, and no more")
    parser.add_argument("--json", action="store_true", help="the same as one JSON object, for programs")


def run(args: argparse.Namespace) -> int:
    """Watch until the job is over, or Ctrl-C, or once; return the job's exit code, 0 while it has not ended."""
    if args.output_dir.exists() and not args.output_dir.is_dir():
        raise ConfigError(f"{args.output_dir} is a file", "the job's output_dir", "name the folder it writes to")
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    follower, view, console = Follower(args.output_dir), JobView(), Console()
    is_there = args.output_dir.is_dir()
    if not any(args.output_dir.glob("events.*.jsonl")):
        missing = f"no event log of a job in {args.output_dir}" if is_there else f"{args.output_dir} is not there"
        if (args.once and not args.json) or (args.json and not is_there):  # as JSON it is a state
            raise ConfigError(missing, "the job's output_dir", "name the folder it writes to")
        if not args.json:
            say(f"{missing} yet: waiting for a job that writes to it", to=sys.stderr)
    try:
        if args.json:
            next(updates(follower, view))
            print(json.dumps(figures(view, time.time())))
        elif console.is_terminal and not console.is_dumb_terminal:
            show_table(follower, view, console, args.once)
        else:
            plain = PlainLines(args.every_s)
            for _ in updates(follower, view, args.once):
                for line in plain.update(view, time.time()):
                    print(line, flush=True)
    except KeyboardInterrupt:
        return 130
    if follower.unreadable:
        print(f"{follower.unreadable} line(s) of the event logs were left out: no event known here", file=sys.stderr)
    return view.exit_code


def show_table(follower: Follower, view: JobView, console: Console, once: bool = False) -> None:
    with Live(console=console, auto_refresh=False) as live:
        for _ in updates(follower, view, once):
            height = None if once else console.size.height
            live.update(picture(console, view, time.time(), height), refresh=True)


def updates(follower: Follower, view: JobView, once: bool = False) -> Iterator[None]:
    """Yield once per poll, until the job is over. Blocks: between polls."""
    while True:
        for event in follower.poll():
            view.apply(event)
        yield
        if once or view.over(time.time()):
            return
        time.sleep(POLL_S)
