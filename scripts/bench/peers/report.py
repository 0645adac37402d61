"""From single measurements to the JSON summary and the markdown table. Rules of this file: standard library only."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from typing import Any

Line = dict[str, Any]

COMMON = ("ready_s", "first_step_s", "survivors_s", "lost_steps", "skipped_steps")
PHASES = ("detect_s", "plan_s", "unblock_s", "groups_s", "fetch_s", "restore_s", "step_s")
TITLES = {
    "process": "process killed",
    "node": "node killed",
    "silent": "node silent",
    "first": "first node killed",
    "equal": "all of these: values as undisturbed",
}
NOTES = """
NVRx `defaults` is measured over gloo, which its own Abort does not end (it knows NCCL): survivors blocked among
themselves wait for its hard time-out. `tuned` lends it an Abort that does; compare with that one. torchft's figures are
those of a data-parallel model: compare with `deadpool dp4`. Relaunches begin without a scheduler's delay."""


def spread(values: Iterable[float]) -> dict[str, float]:
    """Median, quartiles (inclusive), least and greatest, number."""
    known = sorted(values)
    quartiles = statistics.quantiles(known, n=4, method="inclusive") if len(known) > 1 else [known[0]] * 3
    names = ("n", "min", "q1", "median", "q3", "max")
    return dict(zip(names, (len(known), known[0], *(round(q, 4) for q in quartiles), known[-1]), strict=True))


def summary(measurements: list[Line]) -> list[Line]:
    """One entry per system and fault: spreads of every figure, and how many never recovered or never started."""
    entries = []
    for system, fault in dict.fromkeys((line["system"], line["fault"]) for line in measurements):
        mine = [line for line in measurements if (line["system"], line["fault"]) == (system, fault)]
        struck = [line for line in mine if line["outcome"] != "not started"]
        good = [line["figures"] for line in struck if line["outcome"] == "recovered"]
        figures = {}
        for name in (*COMMON, *PHASES):
            values = [one[name] for one in good if one.get(name) is not None]
            if values:
                figures[name] = spread(values)
        entries.append(
            {
                "system": system,
                "fault": fault,
                "struck": len(struck),
                "recovered": len(good),
                "covered": sum(bool(one.get("covered")) for one in good),
                "not_started": len(mine) - len(struck),
                "ends": sorted({line["outcome"] for line in struck} - {"recovered"}),
                "figures": figures,
            }
        )
    return entries


def table(entries: list[Line]) -> str:
    """Two markdown tables: all systems by fault, and the plugin's phases."""
    lines = [
        "| fault | system | recovered | kill to all in training (s) | kill to first whole step (s) "
        "| completed steps done again |",
        "|---|---|---|---|---|---|",
    ]
    order = {fault: place for place, fault in enumerate(TITLES)}
    entries = sorted(entries, key=lambda entry: order[entry["fault"]])
    for entry in entries:
        cells = [TITLES[entry["fault"]], entry["system"], f"{entry['recovered']} of {entry['struck']}"]
        cells[-1] += f", {entry['covered']} covered" if entry["covered"] else ""
        cells += [_cell(entry, "ready_s"), _first_step(entry), _lost_steps(entry)]
        lines.append("| " + " | ".join(cells) + " |")
    lines += ["", "| plugin's phases, ms | system | " + " | ".join(name[:-2] for name in PHASES) + " |"]
    lines.append("|---|---|" + "---|" * len(PHASES))
    for entry in entries:
        if "plan_s" in entry["figures"]:
            cells = [_cell(entry, name, 0, 1000) for name in PHASES]
            lines.append(f"| {TITLES[entry['fault']]} | {entry['system']} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n" + (NOTES if any("NVRx" in entry["system"] for entry in entries) else "")


def _cell(entry: Line, name: str, digits: int = 2, factor: float = 1.0) -> str:
    found = entry["figures"].get(name)
    if found is None:
        return "; ".join(entry["ends"]) or "-"
    median, least, most = (f"{found[key] * factor:.{digits}f}" for key in ("median", "min", "max"))
    return median if least == most else f"**{median}** ({least} .. {most})"


def _first_step(entry: Line) -> str:
    """torchft's survivors go on with fewer replicas first."""
    cell = _cell(entry, "first_step_s")
    if "survivors_s" in entry["figures"]:
        cell += f"; survivors alone {_cell(entry, 'survivors_s')}"
    return cell


def _lost_steps(entry: Line) -> str:
    """torchft does not repeat the interrupted step: its samples are skipped."""
    cell = _cell(entry, "lost_steps", 0)
    if "skipped_steps" in entry["figures"]:
        cell += f"; skipped {_cell(entry, 'skipped_steps', 0)}"
    return cell
