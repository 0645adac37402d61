"""A picture of one swap, as SVG, from the events of a demonstration's job.

    python scripts/draw_swap.py scripts/results/2026-11-23-swap.jsonl > scripts/results/2026-11-23-swap.svg

The first line of the file is the injector's (`Killed`); the others are lines of `demo-out/events.jsonl`. A lane is a
node. A bar lasts from the first beginning to the last end over the node's ranks.

Rules of this file: standard library only; it draws what the events say, in seconds since the kill.
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

Event = dict[str, Any]
LEFT, TOP, LANE, WIDTH, FROM_S, UNTIL_S = 108, 76, 34, 960, -0.8, 2.8
FONT = 'font-family="Helvetica, Arial, sans-serif" font-size="12"'
GROUPS, SCRIPT, FETCHED, RESTORED, STEP = "#9ec5e8", "#f5c38b", "#9b59b6", "#5fb376", "#d5d8dc"


def x(at_s: float) -> float:
    return LEFT + (at_s - FROM_S) / (UNTIL_S - FROM_S) * (WIDTH - LEFT - 12)


def y(node: int) -> int:
    return TOP + LANE * node


def text(at: float, height: float, said: str, more: str = "") -> str:
    return f'<text x="{at:.1f}" y="{height:.1f}" {FONT} {more}>{said}</text>'


def bar(node: int, begin_s: float, end_s: float, color: str, said: str = "") -> str:
    """A bar with a label, which is left out where it would not fit."""
    size = x(end_s) - x(begin_s)
    from_y, height = (y(node) + 11, 5) if color == FETCHED else (y(node) - 11, 22)
    shape = f'<rect x="{x(begin_s):.1f}" y="{from_y}" width="{max(size, 1.5):.1f}" height="{height}" fill="{color}"/>'
    return shape + (text(x(begin_s) + 5, y(node) + 4, said) if 6.2 * len(said) < size else "")


def line(at_s: float, nodes: int, said: str, height: int) -> str:
    shape = f'<path d="M{x(at_s):.1f} {height + 5}V{y(nodes) - 8}" stroke="#444" stroke-dasharray="3 3"/>'
    return shape + text(x(at_s) - 4, height, said)


def axis(nodes: int) -> str:
    """The seconds since the kill, below the lanes."""
    ticks = [tenth / 10 for tenth in range(math.ceil(10 * FROM_S), math.ceil(10 * UNTIL_S)) if tenth % 5 == 0]
    height = y(nodes) - 8
    drawn = f'<path d="M{LEFT} {height}H{WIDTH - 12}" stroke="#444"/>'
    for at_s in ticks:
        drawn += f'<path d="M{x(at_s):.1f} {height}v5" stroke="#444"/>'
        drawn += text(x(at_s), height + 18, f"{at_s:g}", 'text-anchor="middle"')
    return drawn + text((LEFT + WIDTH) / 2, height + 36, "time since the kill (s)", 'text-anchor="middle"')


def lane(node: int, events: list[Event], plan_s: float, taker: int) -> str:
    """Draw what a node did: the events' own spans, or the time between two of its events."""
    found = {name: [e for e in events if e["node"] == node and e["event"] == name] for name in SPANS}
    drawn = ""
    if found["Rehearsed"]:
        end_s = max(e["at_s"] for e in found["Rehearsed"])
        drawn += bar(node, plan_s, end_s, SCRIPT, "new processes run the script")
    for name, (color, said) in SPANS.items():
        spans = found[name] if color else []
        if name == "FirstStepDone" and spans:
            begin_s = max(e["at_s"] for e in found["WorkerResumed"])
        elif spans:
            begin_s = min(e["at_s"] - e["duration_s"] for e in spans)
        if spans:
            label = said.format(taker=taker) if node != taker or name != "GroupsRebuilt" else ""
            drawn += bar(node, begin_s, max(e["at_s"] for e in spans), color, label)
    for event in events:
        if event["node"] == node and event["event"] == "StepDone":
            at = x(event["at_s"])
            drawn += f'<path d="M{at:.1f} {y(node) - 11}v22" stroke="#333" stroke-width="1.4"/>'
    return drawn


SPANS = {
    "Rehearsed": ("", ""),
    "WorkerResumed": ("", ""),
    "GroupsRebuilt": (GROUPS, "waits for node{taker}, then groups are rebuilt"),
    "FirstStepDone": (STEP, "first step"),
    "StateRestored": (RESTORED, ""),
    "SnapshotFetched": (FETCHED, ""),
}


def svg(kill: Event, events: list[Event]) -> str:
    for event in events:
        event["at_s"] = event["time"] - kill["time"]
    events = [event for event in events if FROM_S < event["at_s"] < UNTIL_S]
    when = {event["event"]: event["at_s"] for event in events}
    plan = next(event for event in events if event["event"] == "SwapPlanned")
    taker = plan["takers"][str(kill["node"])]
    nodes = 1 + max(event["node"] for event in events)
    height = y(nodes) + 56
    title = f"node{kill['node']} is killed in step {kill['step']}; node{taker} takes over its ranks"
    title += ", which nobody had rehearsed" if "Rehearsed" in when else ""
    parts = [f'<rect width="{WIDTH}" height="{height}" fill="white"/>', text(12, 18, title, 'font-weight="bold"')]
    for node in range(nodes):
        parts.append(text(12, y(node) + 4, f"node{node}" + (" (spare)" if node == taker else "")))
        parts.append(f'<path d="M{LEFT} {y(node)}H{WIDTH - 12}" stroke="#ddd"/>')
        parts.append(lane(node, events, plan["at_s"], taker))
    parts.append(f'<rect x="{x(0):.1f}" y="{y(kill["node"]) - 11}" width="{WIDTH}" height="22" fill="white"/>')
    parts.append(text(x(0), y(kill["node"]) + 5, "&#10007;", 'fill="#c0392b" font-weight="bold"'))
    done_s = max(event["at_s"] for event in events if event["event"] == "FirstStepDone")
    said = {0.0: f"node{kill['node']} killed", plan["at_s"]: f"node{taker} takes over: {plan['at_s']:.2f} s"}
    said[done_s] = f"step done: {done_s:.2f} s"
    said[when["WorkerResumed"]] = f"all train again: {when['WorkerResumed']:.2f} s"
    for index, (at_s, words) in enumerate(sorted(said.items())):
        parts.append(line(at_s, nodes, words, 38 + 15 * (index % 2)))
    parts.append(axis(nodes))
    legend = "A black mark is a step that a rank has done, purple is the fetch of the lost shards, "
    legend += "green the restoring of the state (two busy CPU cores)."
    parts.append(text(LEFT, height - 10, legend, 'fill="#555"'))
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}">'
    return "\n".join([head, *parts, "</svg>\n"])


if __name__ == "__main__":
    killed, *others = (json.loads(words) for words in Path(sys.argv[1]).read_text().splitlines())
    print(svg(killed, others), end="")
