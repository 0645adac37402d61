"""Checks of one part of the evidence: each is run once, and its outcome kept as a JSON line as soon as it is known.

Rules of this file: standard library only. A check is a function that returns figures, or raises what does not hold.
"""

from __future__ import annotations

import argparse
import json
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from clusters.launched import read_json_lines

Figures = dict[str, Any]


class Checks:
    """Those of `part` that OUT/checks.jsonl does not hold yet (a check that failed is tried again)."""

    def __init__(self, part: str, out: Path) -> None:
        self.part, self.out, self._file = part, out, out / "checks.jsonl"
        out.mkdir(parents=True, exist_ok=True)
        known = [line for line in read_json_lines(self._file) if line["part"] == part]
        self._held = {line["check"] for line in known if line["ok"]}
        self.failed = 0

    def holds(self, name: str) -> bool:
        return name in self._held

    def run(self, name: str, check: Callable[[], Figures]) -> None:
        if self.holds(name):
            return
        began, line = time.monotonic(), {"part": self.part, "check": name, "ok": True, "problem": ""}
        try:
            line["figures"] = check()
        except Exception as error:
            traceback.print_exc()
            line |= {"ok": False, "problem": f"{type(error).__name__}: {error}", "figures": {}}
        self.keep(line | {"seconds": round(time.monotonic() - began, 1)})

    def keep(self, line: dict[str, Any]) -> None:
        self.failed += not line["ok"]
        with open(self._file, "a") as output:
            output.write(json.dumps(line) + "\n")
        print(f"{self.part}/{line['check']}: {'held' if line['ok'] else line['problem']} {line['figures']}", flush=True)


def parse_args(text: str) -> argparse.Namespace:
    """What all parts are told. `out` is another one for each `device`: what holds on one says nothing of the other."""
    parser = argparse.ArgumentParser(description=text.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: to try this script, in OUT/cpu")
    args = parser.parse_args()
    args.out = args.out / "cpu" if args.device == "cpu" else args.out
    return args
