"""All that needs a card, run on the stand-ins for CUDA and NCCL: the whole of ./scripts/test_cuda.sh.

    python tests/fakecuda/run.py [--out DIR] [PART ...]

Every part's output is in DIR/PART.txt. The last line is "N passed, N failed, N skipped"; each skip and each failure is
named above it. The exit code is 0 if nothing failed.

Rules of this file: standard library only; it runs in any Python, the parts in the environment's.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

import build

REPOSITORY = Path(__file__).resolve().parents[2]
SLOW_BUS = {"FAKECUDA_SLOW_BUS": "2000000"}
"""Nanoseconds per MiB: so slow that an update which does not wait for a copy overtakes it, on any machine."""
LEAVE_S = 60.0
SAID = 30
"""Lines of a part that failed, which are printed."""


@dataclass(frozen=True)
class Part:
    """A command of its own. `results`: the file of its outcomes below DIR, by pytest, gpu_evidence.sh or
    fault_matrix.py."""

    words: tuple[str, ...]
    results: str
    limit_s: float
    environ: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class Result:
    part: str
    name: str
    problem: str = ""
    is_skip: bool = False


def tests(*words: str, limit_s: float) -> Part:
    # pytest leaves no cache, for the environment's is not that of other runs
    command = ("{python}", "-m", "pytest", "-p", "no:cacheprovider", "-ra", "--junitxml={out}/{part}.xml", *words)
    return Part(command, "{part}.xml", limit_s)


def evidence(part: str, limit_s: float, **environ: str) -> Part:
    words = ("./scripts/gpu_evidence.sh", "--out", "{out}/{part}", "--seconds", str(limit_s), part)
    return Part(words, "{part}/evidence.json", limit_s + 60, tuple(environ.items()))


def jobs(*words: str, results: str = "cells.jsonl", limit_s: float) -> Part:
    """Two cards in each emulated host, which all hosts share."""
    command = ("{python}", "scripts/fault_matrix.py", "--out", "{out}/{part}", "--device", "cuda", *words)
    return Part(command, f"{{part}}/{results}", limit_s, (("FAKECUDA_DEVICES", "2"),))


ON_STAND_INS_ONLY = ("tests/contract/test_comm_tax.py", "tests/worker/test_live_calls.py")
"""Files with tests that prove nothing on a card; a unit test compares."""
PARTS = {
    "stand-in": tests("tests/fakecuda", *ON_STAND_INS_ONLY, limit_s=400),
    "evidence-tests": evidence("tests", 240),
    "evidence-mirror": evidence("mirror", 120, **SLOW_BUS),
    "evidence-job": evidence("job", 600),
    "jobs-megatron": jobs("--group", "main", "--kinds", "node", "rank", "--heal", limit_s=900),
    "jobs-deepspeed": jobs(
        "--framework", "deepspeed", "--group", "main", "--kinds", "node", "rank", "--heal", limit_s=900
    ),
    "jobs-swaps": jobs("--many", "20", results="many.jsonl", limit_s=300),
}


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="test_cuda.sh", description=__doc__.splitlines()[0])
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"default: {' '.join(PARTS)}")
    parser.add_argument("--out", type=Path, default=REPOSITORY / ".cache" / "cuda", help="emptied first")
    args = parser.parse_args()
    if unknown := set(args.parts) - set(PARTS):
        parser.error(f"no such part: {' '.join(sorted(unknown))}; there are {' '.join(PARTS)}")
    return args


def run(name: str, part: Part, out: Path, environ: dict[str, str]) -> list[Result]:
    """Run the part within its time. Returns: what became of each of its checks, and the part itself if it broke."""
    known = {"out": str(out), "part": name, "python": environ["PYTHON"]}
    log, began = out / f"{name}.txt", time.monotonic()
    print(f"[test_cuda] {name}: at most {part.limit_s:g} s, output in {log}", flush=True)
    with open(log, "wb") as output:
        process = subprocess.Popen(
            [word.format(**known) for word in part.words],
            cwd=REPOSITORY,
            env=os.environ | environ | dict(part.environ),
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        code: int | None = None
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = process.wait(part.limit_s)
        end(process)
    file = out / part.results.format(**known)
    read = {".xml": of_pytest, ".json": of_evidence, ".jsonl": of_matrix}[file.suffix]
    results = list(read(name, file)) if file.exists() else []
    if code is None:
        results.append(Result(name, "(whole)", f"was cut off after {part.limit_s:g} s"))
    elif all(result.is_skip for result in results) or (code and not any(result.problem for result in results)):
        results.append(Result(name, "(whole)", f"ended with {code}, see {log}"))  # it broke, or nothing ran
    held = sum(not result.problem for result in results)
    print(f"[test_cuda] {name}: {held} of {len(results)} held ({time.monotonic() - began:.0f} s)", flush=True)
    if any(result.problem and not result.is_skip for result in results):
        print("\n".join(log.read_text(errors="replace").splitlines()[-SAID:]), flush=True)
    return results


def end(process: subprocess.Popen[bytes]) -> None:
    """A part ends what it has started when it is told to end; what is left after that is killed."""
    if process.poll() is None:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(LEAVE_S)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def of_pytest(part: str, file: Path) -> Iterator[Result]:
    for case in ElementTree.parse(file).iter("testcase"):
        name = f"{case.get('classname', '').replace('.', '/')}::{case.get('name')}"
        bad = next((one for kind in ("failure", "error", "skipped") if (one := case.find(kind)) is not None), None)
        if bad is None:
            yield Result(part, name)
        else:
            yield Result(part, name, (bad.get("message") or bad.tag).partition("\n")[0], bad.tag == "skipped")


def of_evidence(part: str, file: Path) -> Iterator[Result]:
    found = json.loads(file.read_text())
    if not found["machine"]["stand_in"]:
        yield Result(part, "(whole)", "its evidence passes for a card's")
    for line in found["checks"]:
        if f"evidence-{line['part']}" == part:
            problem = line["problem"].partition("\n")[0]
            yield Result(part, line["check"], problem, problem.startswith("Skipped: "))


def of_matrix(part: str, file: Path) -> Iterator[Result]:
    for line in map(json.loads, file.read_text().splitlines()):
        yield Result(part, line["cell"], "" if line["ok"] else line["refused"] or line["problem"] or "did not hold")


def main() -> int:
    args = parse_args()
    try:
        _, environ = build.prepared()
    except build.Missing as error:
        sys.exit(f"test_cuda: {error}")
    shutil.rmtree(args.out, ignore_errors=True)
    args.out.mkdir(parents=True)
    out, results, began = args.out.resolve(), list[Result](), time.monotonic()
    for name in args.parts or PARTS:
        results += run(name, PARTS[name], out, environ)
    skipped = [result for result in results if result.is_skip]
    failed = [result for result in results if result.problem and not result.is_skip]
    for what, those in (("SKIPPED", skipped), ("FAILED", failed)):
        for result in those:
            print(f"{what} {result.part}: {result.name}: {result.problem}")
    print(f"[test_cuda] {time.monotonic() - began:.0f} s in all")
    print(f"{len(results) - len(skipped) - len(failed)} passed, {len(failed)} failed, {len(skipped)} skipped")
    return int(bool(failed))


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the part under way is ended, too
    sys.exit(main())
