"""Report of a demonstration run: the numbers of each swap, the proofs, two pictures.

Rules of this file: everything is computed from what was written during the run (kills, events, observations,
metrics); nothing is estimated. A number that cannot be computed is None and makes the run fail. matplotlib is
imported only when the pictures are drawn.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

Event = dict[str, Any]

WHEN = {
    "forward": "in its forward pass",
    "backward": "in its backward pass",
    "optimizer": "in the optimizer's update",
    "mirror": "while its state goes to the buddies",
    "between": "after the update",
}
"""Where in a step a kill strikes, for people."""
TIMES = ("detect_s", "plan_s", "unblock_s", "groups_s", "restore_s", "ready_s", "first_step_s")


def swaps(kills: list[Event], events: list[Event]) -> list[dict[str, Any]]:
    """One entry per kill, in order of time."""
    return [swap(kill, events) for kill in sorted(kills, key=lambda kill: kill["time"])]


def swap(kill: Event, events: list[Event]) -> dict[str, Any]:
    """The figures of the swap that answered `kill`.

    ready_s and first_step_s count from the kill to the last worker; detect_s to the first agent that knew;
    plan_s from there to the first agent that acts on a plan; the others are the slowest rank's.
    covered: every process that took a rank over had gone through the script's start before the loss.
    """
    after = [event for event in events if event["time"] >= kill["time"]]
    lost = next((e for e in after if e["event"] == "NodeLost" and kill["node"] in e["lost"]), None)
    plan = next((e for e in after if e["event"] == "SwapPlanned" and kill["node"] in e["lost_nodes"]), None)
    generation = plan_generation(plan, after) if plan else None
    mine = first_of_each_rank([e for e in after if generation is not None and e["generation"] >= generation])
    unblocked = first_of_each_rank(after)
    committed = [e["step"] for e in events if e["event"] == "StepCommitted" and e["time"] < kill["time"]]
    return {
        "node": kill["node"],
        "at_step": kill["step"],
        "phase": kill["phase"],
        "generation": generation,
        "detect_s": rounded(lost["time"] - kill["time"] if lost else None),
        "plan_s": rounded(plan["time"] - lost["time"] if plan and lost else None),
        "unblock_s": rounded(longest(unblocked, "WorkerUnblocked")),
        "groups_s": rounded(longest(mine, "GroupsRebuilt")),
        "restore_s": rounded(longest(mine, "StateRestored")),
        "ready_s": rounded(latest(mine, "WorkerResumed", kill["time"])),
        "first_step_s": rounded(latest(mine, "FirstStepDone", kill["time"])),
        "lost_steps": max(0, max(committed, default=0) - plan["restore_step"]) if plan else None,
        "covered": covered(mine),
    }


def plan_generation(plan: Event, after: list[Event]) -> int:
    """The generation that `plan` began: that of the first worker that entered one after it."""
    entered = (e for e in after if e["event"] == "GroupsRebuilt" and e["time"] >= plan["time"])
    return int(next((event["generation"] for event in entered), plan["generation"]))


def first_of_each_rank(events: list[Event]) -> list[Event]:
    """Return each rank's first event of every kind: a swap that is overtaken by another ends in that one."""
    firsts: dict[tuple[str, int], Event] = {}
    for event in events:
        if "rank" in event:
            firsts.setdefault((event["event"], event["rank"]), event)
    return list(firsts.values())


def longest(events: list[Event], kind: str) -> float | None:
    return max((event["duration_s"] for event in events if event["event"] == kind), default=None)


def latest(events: list[Event], kind: str, since: float) -> float | None:
    return max((event["time"] - since for event in events if event["event"] == kind), default=None)


def covered(events: list[Event]) -> bool | None:
    """Tell whether each rank that was taken over went to a process from before the loss; None if none was."""
    taken = [event["covered"] for event in events if event["event"] == "RankTakenOver"]
    return all(taken) if taken else None


def rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)


def kept(folder: Path, ranks: list[int], steps: int) -> dict[str, bool]:
    """Did the processes of `ranks` live from the first to the last step with the same groups and storages?

    True where no node is left of those the job began with: nothing was promised of them.
    """
    observed: dict[int, list[dict[str, Any]]] = {rank: [] for rank in ranks}
    for path in folder.glob("rank*.json"):
        line = json.loads(path.read_text())
        observed.setdefault(line["rank"], []).append(line)
    handles = storages = True
    for rank in ranks:
        lines = observed[rank]
        if len(lines) != 1 or (lines[0]["first"]["step"], lines[0]["last"]["step"]) != (1, steps):
            return {"survivor_pids_kept": False, "handles_kept": False, "storages_kept": False}
        first, last = lines[0]["first"], lines[0]["last"]
        handles &= bool(first["groups"]) and first["groups"] == last["groups"]
        storages &= all(first["storages"].values()) and first["storages"] == last["storages"]
    return {"survivor_pids_kept": True, "handles_kept": handles, "storages_kept": storages}


class Move(NamedTuple):
    """A node's ranks go to another node."""

    taker: int
    ranks: list[int]
    time: float


def moves(events: list[Event]) -> dict[int, Move]:
    """Find out who took over the ranks of each lost node."""
    node_of: list[int] = next((event["node_of"] for event in events if event["event"] == "WorldFormed"), [])
    found: dict[int, Move] = {}
    for plan in (event for event in events if event["event"] == "SwapPlanned"):
        takers = {int(lost): taker for lost, taker in plan["takers"].items() if int(lost) not in found}
        for lost, taker in takers.items():
            found[lost] = Move(taker, [rank for rank, owner in enumerate(node_of) if owner == lost], plan["time"])
        node_of = [takers.get(owner, owner) for owner in node_of]
    return found


def host(node: int | str) -> str:
    """Name a node as the hostfile does."""
    return f"node{node}"


def listed(things: Iterable[object]) -> str:
    return ", ".join(map(str, things))


def numbered(ranks: Sequence[int]) -> str:
    """Write `rank 0`, or `ranks 0, 1`."""
    return f"rank{'' if len(ranks) == 1 else 's'} {listed(ranks)}"


def swap_in_words(swap: dict[str, Any], move: Move | None) -> list[str]:
    """Put the figures of a swap into sentences; a figure that is not known is left out."""
    then = f"{host(move.taker)} took over its {numbered(move.ranks)}" if move else "nobody took over a rank of it"
    how = {True: ", which it had rehearsed", False: ", whose script it had to start first", None: ""}
    then += how[swap["covered"]] if move else ""
    told = {"detect_s": "noticed", "ready_s": "all ranks in training again", "first_step_s": "their first step done"}
    times = [f"{words} after {swap[name]:.2f} s" for name, words in told.items() if swap[name] is not None]
    lines = [f"was killed in step {swap['at_step']}, {WHEN[swap['phase']]}; {then}", listed(times)]
    if swap["lost_steps"] is not None:
        lines.append(f"committed steps that had to be done again: {swap['lost_steps'] or 'none'}")
    return [line for line in lines if line]


def draw_losses(
    path: Path,
    reference: list[tuple[int, float]],
    run: list[tuple[int, float]],
    kills: list[Event],
    events: list[Event],
) -> None:
    """Both runs' loss curves; one lies exactly on the other, or the difference shows."""
    plt = pyplot()
    figure, axes = plt.subplots(figsize=(9, 5.2), layout="constrained")
    axes.plot(*split(reference), color="#9aa5b1", linewidth=6, label="undisturbed run, without the plugin")
    axes.plot(*split(run), color="#c0392b", linewidth=1.3, label="protected run, with the plugin")
    moved = moves(events)
    for index, kill in enumerate(kills):
        axes.axvline(kill["step"], color="black", linestyle=":", linewidth=1)
        axes.annotate(
            in_short(kill, moved, "\n"),
            (kill["step"], 0.97 - 0.17 * (index % 4)),
            xycoords=("data", "axes fraction"),
            xytext=(-4 if kill["step"] > 0.7 * len(reference) else 4, 0),
            textcoords="offset points",
            fontsize=9,
            va="top",
            ha="right" if kill["step"] > 0.7 * len(reference) else "left",
        )
    lost = listed(dict.fromkeys(host(kill["node"]) for kill in kills)) or "no host"
    axes.set(xlabel="training step", ylabel="training loss (cross entropy, nats a token)")
    axes.set_title(f"Training loss, undisturbed and with {lost} killed", fontsize=12, fontweight="bold")
    axes.legend(loc="lower left", frameon=False)
    parts = next((expected[0] for expected, found in zip(reference, run, strict=False) if expected != found), None)
    if parts is not None:
        below = f"The losses of the two runs differ for the first time in step {parts}."
    elif len(run) < len(reference):
        below = f"The protected run ended after step {len(run)}; until then the losses are equal to the last bit."
    else:
        below = "The red curve lies on the grey one: the losses of all steps are equal to the last bit."
    figure.supxlabel(below, fontsize=10)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def in_short(kill: Event, moved: dict[int, Move], between: str = "; ") -> str:
    """Say `node3 killed in step 15; node4 takes over ranks 6, 7`."""
    move = moved.get(kill["node"])
    then = f"{between}{host(move.taker)} takes over {numbered(move.ranks)}" if move and move.ranks else ""
    return f"{host(kill['node'])} killed in step {kill['step']}{then}"


SPANS = {
    "WorkerUnblocked": ("stops its collectives", "#e67e22"),
    "GroupsRebuilt": ("waits for all, rebuilds groups", "#2980b9"),
    "SnapshotFetched": ("fetches the lost state", "#8e44ad"),
    "StateRestored": ("restores its state", "#27ae60"),
}
STARTING = ("starts the script", "#f5c38b")
FIRST_STEP = ("first step", "#bdc3c7")
MARKS = {"NodeLost": ("loss noticed", "x"), "WorkerResumed": ("in training again", "^"), "StepDone": ("step done", "|")}


def draw_timeline(path: Path, found: list[dict[str, Any]], kills: list[Event], events: list[Event], nodes: int) -> None:
    """One panel per swap: what each node did from just before the kill to everybody's first step."""
    plt = pyplot()
    count, moved = len(found), moves(events)
    figure, panels = plt.subplots(
        count, 1, figsize=(10, 1.8 + (0.5 * nodes + 1.1) * count), layout="constrained", squeeze=False
    )
    for panel, entry, kill in zip(panels[:, 0], found, sorted(kills, key=lambda kill: kill["time"]), strict=True):
        draw_swap(panel, entry, kill, moved.get(kill["node"]), events)
        names = {node: f"{host(node)}\n(spare)" for node in (move.taker for move in moved.values())}
        panel.set_yticks(range(nodes), [names.get(node, host(node)) for node in range(nodes)])
        panel.set_ylim(nodes - 0.4, -0.6)
        panel.set_title(in_short(kill, moved), fontsize=12, fontweight="bold")
        panel.set_ylabel("host")
    panels[-1, 0].set_xlabel("time since the kill (s)")
    bars = [*SPANS.values(), STARTING, FIRST_STEP]
    entries = [plt.Rectangle((0, 0), 1, 1, color=color, label=label) for label, color in bars]
    entries += [plt.Line2D([], [], marker=m, linestyle="", color="black", label=label) for label, m in MARKS.values()]
    figure.legend(handles=entries, loc="outside upper center", ncols=5, fontsize=8, frameon=False)
    trained = [f"{entry['ready_s']:.2f} s" for entry in found if entry["ready_s"] is not None]
    after = f"All ranks trained again {' and '.join(trained)} after the kill" if trained else "Training did not go on"
    did = "did until then" if trained else "still did"
    figure.supxlabel(f"{after}; the bars show what each host's ranks {did}.", fontsize=10)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def draw_swap(panel: Any, entry: dict[str, Any], kill: Event, move: Move | None, events: list[Event]) -> None:
    """Draw every node's bars and marks around one kill; an arrow leads to the taker."""
    end_s = entry["first_step_s"] or 5.0
    for event in events:
        at_s = event["time"] - kill["time"]
        if -0.15 * end_s <= at_s <= 1.1 * end_s:
            draw_event(panel, event, at_s)
    for node, start_s, span_s in first_steps(kill, events):
        panel.barh(node, span_s, left=start_s, height=0.34, color=FIRST_STEP[1], zorder=0)
    panel.axvline(0, color="black", linestyle=":", linewidth=1)
    panel.plot([0], [kill["node"]], marker="$\\times$", color="#c0392b", markersize=13)
    said = "killed"
    if move is not None:
        plan_s = move.time - kill["time"]
        said += f"; after {plan_s:.2f} s {host(move.taker)} takes over"
        rehearsed = [e["time"] for e in events if e["event"] == "Rehearsed" and e["node"] == move.taker]
        if ready := [at - kill["time"] for at in rehearsed if move.time < at < kill["time"] + end_s]:
            panel.barh(move.taker, max(ready) - plan_s, left=plan_s, height=0.6, color=STARTING[1], zorder=0)
        below_text = kill["node"] + (0.25 if move.taker > kill["node"] else -0.25)
        arrow = {"arrowstyle": "->", "color": "#c0392b", "shrinkA": 0, "shrinkB": 9}
        panel.annotate("", (plan_s, move.taker), xytext=(plan_s, below_text), arrowprops=arrow)
    panel.annotate(said, (0, kill["node"]), xytext=(10, 0), textcoords="offset points", color="#c0392b", va="center")
    panel.set_xlim(-0.15 * end_s, 1.1 * end_s)


def first_steps(kill: Event, events: list[Event]) -> Iterator[tuple[int, float, float]]:
    """(node, start, length) from a rank's return to training to the end of its first step."""
    resumed: dict[int, float] = {}
    for event in events:
        if event["event"] == "WorkerResumed":
            resumed[event["rank"]] = event["time"]
        elif event["event"] == "FirstStepDone" and event["time"] > kill["time"] and event["rank"] in resumed:
            start = resumed[event["rank"]]
            yield event["node"], start - kill["time"], event["time"] - start


def draw_event(panel: Any, event: Event, at_s: float) -> None:
    kind, node = event["event"], event["node"]
    if kind in SPANS:
        color = SPANS[kind][1]
        duration_s = max(event["duration_s"], 0.0)
        panel.barh(node, duration_s, left=at_s - duration_s, height=0.6, color=color, edgecolor=color)
    elif kind in MARKS:
        size = 16 if kind == "StepDone" else 5
        panel.plot([at_s], [node], marker=MARKS[kind][1], color="black", markersize=size, markeredgewidth=0.8)


def split(points: list[tuple[int, float]]) -> tuple[list[int], list[float]]:
    return [step for step, _ in points], [value for _, value in points]


def pyplot() -> Any:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot

    return matplotlib.pyplot
