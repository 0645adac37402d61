"""Checks of one part of the evidence: what becomes of each is kept as a JSON line as soon as it is known.

A check has a line before it is begun ("not run"), one when it begins ("did not end") and one when it has ended; its
newest line counts. So whatever way a part ends, nothing that was planned passes for having held.

Rules of this file: standard library only. A check is a function that fills in figures, and raises what does not hold:
the figures it had by then are kept too. Lines say of which machine and commit they are; others' lines do not count.
"""

from __future__ import annotations

import argparse
import json
import time
import traceback
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from clusters.launched import read_json_lines

Figures = dict[str, Any]
Line = dict[str, Any]
Check = Callable[[Figures], object]
NOT_RUN, DID_NOT_END = "not run", "did not end"
NOT_HELD = 3
"""Exit code of a part of which some check did not hold: 1 is that of a Python that broke."""


def newest(out: Path, of: str) -> list[Line]:
    """The line of every check of every part on machine and commit `of`, in the order they were planned."""
    lines = [line for line in read_json_lines(out / "checks.jsonl") if line["of"] == of]
    return list({(line["part"], line["check"]): line for line in lines}.values())


class Checks:
    """Those of `part`, in OUT/checks.jsonl."""

    def __init__(self, part: str, out: Path, of: str = "") -> None:
        self.part, self.out, self.of, self.failed = part, out, of, 0
        out.mkdir(parents=True, exist_ok=True)

    def known(self) -> dict[str, Line]:
        return {line["check"]: line for line in newest(self.out, self.of) if line["part"] == self.part}

    def plan(self, names: Collection[str]) -> list[str]:
        """Those of `names` that have not held yet, in the order to run them in: what was never run before what failed,
        what did not end last, for it may take the rest of the time again."""
        known = self.known()
        for name in names:
            if name not in known:
                known[name] = self._keep(name, NOT_RUN)
        missing = [name for name in names if not known[name]["ok"]]
        return sorted(missing, key=lambda name: {NOT_RUN: 0, DID_NOT_END: 2}.get(known[name]["problem"], 1))

    @property
    def exit_code(self) -> int:
        return NOT_HELD if self.failed else 0

    def run(self, checks: dict[str, Check]) -> int:
        """All that have not held yet. Returns how many did not hold now."""
        failed = self.failed
        for name in self.plan(checks):
            self._run(name, checks[name])
        return self.failed - failed

    def _run(self, name: str, check: Check) -> None:
        began, figures, problem = time.monotonic(), Figures(), ""
        self.begin(name)
        try:
            check(figures)
        except Exception as error:
            traceback.print_exc()
            problem = f"{type(error).__name__}: {error}"
        self.end(name, problem, figures, time.monotonic() - began)

    def begin(self, name: str) -> None:
        self._keep(name, DID_NOT_END)

    def end(self, name: str, problem: str = "", figures: Figures | None = None, seconds: float = 0.0) -> None:
        """`problem` is empty if it held."""
        self.failed += bool(problem)
        line = self._keep(name, problem, figures or {}, seconds)
        print(f"{self.part}/{name}: {problem or 'held'} {line['figures']}", flush=True)

    def _keep(self, name: str, problem: str, figures: Figures | None = None, seconds: float = 0.0) -> Line:
        line: Line = {"of": self.of, "part": self.part, "check": name, "ok": not problem, "problem": problem}
        line |= {"figures": figures or {}, "seconds": round(seconds, 1)}
        with open(self.out / "checks.jsonl", "a") as output:
            output.write(json.dumps(line) + "\n")
        return line


def parse_args(text: str) -> argparse.Namespace:
    """Parse the arguments of all parts. `out` differs by `device`: what holds on one says nothing of the other."""
    parser = argparse.ArgumentParser(description=text.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--of", default="", help="the machine and commit, as gpu_evidence.sh names them")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: to try this script, in OUT/cpu")
    args = parser.parse_args()
    args.out = args.out.resolve() / "cpu" if args.device == "cpu" else args.out.resolve()
    return args
