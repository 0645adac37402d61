"""The fault matrix for people: a markdown table and a few numbers.

Rules of this file: says what the result lines say, nothing else.
"""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

Line = dict[str, Any]
KINDS = ("node", "rank")


def keep(path: Path, line: dict[str, Any]) -> None:
    """Append a result, and say it."""
    with open(path, "a") as file:
        file.write(json.dumps(line) + "\n")
    state = "ok" if line["ok"] else f"refused: {line['refused']}" if line["refused"] else f"FAILED: {line['problem']}"
    print(f"{line['cell']:45s} {state} ({line['ready_s']} s)", flush=True)


def table(lines: list[Line]) -> str:
    """Rows layouts, columns places; a cell has a word for a lost node and one for a lost rank."""
    by_cell = {(line["layout"], line["column"], line["kind"]): line for line in lines}
    layouts = list(dict.fromkeys(line["layout"] for line in lines))
    columns = list(dict.fromkeys(line["column"] for line in lines if line["kind"] in KINDS))
    notes: list[str] = []
    rows = [["layout", *columns], ["---"] * (len(columns) + 1)]
    for layout in layouts:
        words = [" / ".join(word(by_cell.get((layout, column, kind)), notes) for kind in KINDS) for column in columns]
        rows.append([layout, *words])
    text = "".join(f"| {' | '.join(row)} |\n" for row in rows)
    others = [line for line in lines if line["kind"] not in KINDS]
    text += "".join(f"\n- {line['cell']}: {word(line, notes)}" for line in others)
    remarks = "".join(f"\n[{number}] {note}\n" for number, note in enumerate(notes, 1))
    return f"Each cell: a node killed / a rank killed.\n\n{text}\n{remarks}\n{summary(lines)}\n"


def word(line: Line | None, notes: list[str]) -> str:
    if line is None:
        return "."
    if line["ok"]:
        return "ok"
    note = line["refused"] or line["problem"]
    if note not in notes:
        notes.append(note)
    return f"{'refused' if line['refused'] else 'FAILED'} [{notes.index(note) + 1}]"


def summary(lines: list[Line]) -> str:
    fired = [line for line in lines if line["fired"]]
    held = [line for line in lines if line["ok"]]
    times = [line["ready_s"] for line in held if line["ready_s"] is not None]
    text = f"{len(lines)} cells, {len(fired)} faults fired, {len(held)} held, "
    text += f"{sum(bool(line['refused']) for line in lines)} refused, {sum(line['hang'] for line in lines)} hangs, "
    text += f"{sum(line['bit_exact'] is False for line in lines)} with wrong bits"
    if times:
        text += f"; from the fault to everybody's return: median {statistics.median(times):.2f} s"
        text += f" ({min(times):.2f} .. {max(times):.2f})"
    lost = [line["cell"] for line in lines if line["lost_steps"]]
    return text + (f"; committed steps lost in {lost}" if lost else "; no committed step lost")
