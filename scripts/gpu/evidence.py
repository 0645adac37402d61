"""All that only an NVIDIA card can prove: runs the parts, each within its time, and makes one table of what they found.

    ./scripts/gpu_evidence.sh --out gpu-out            what is not known yet (a part may be cut off: go on later)
    ./scripts/gpu_evidence.sh --out gpu-out job        one part

Parts: `tests` (pytest -m gpu: every operation over NCCL, abort, rebuild), `mirror` (snapshots from the card: whole, how
fast, at what cost), `job` (a Megatron-core job that loses hosts, processes and CUDA contexts). OUT/evidence.json has
hardware, versions and every check with its figures, OUT/evidence.md the table.

Rules of this file: standard library only; a part is a process group of its own, and nothing of it outlives its time.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import platform
import signal
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])  # started by path

from clusters.launched import REPOSITORY, read_json_lines

from gpu.checks import Checks

LIMITS_S = {"tests": 150, "mirror": 90, "job": 290}
NEEDED = (
    "torch", "numpy", "megatron.core", "msgspec", "psutil", "pydantic", "yaml", "rich", "xxhash", "pytest",
    "hypothesis",
)  # fmt: skip
LIBRARIES = ("torch", "megatron-core", "deepspeed", "numpy")
FACTS = """
import json, torch
print(json.dumps({
    "available": torch.cuda.is_available(), "cuda": torch.version.cuda,
    "nccl": ".".join(map(str, torch.cuda.nccl.version())) if torch.cuda.is_available() else None,
}))
"""


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="gpu_evidence.sh", description=__doc__.splitlines()[0])
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"default: {' '.join(LIMITS_S)}")
    parser.add_argument("--out", type=Path, default=Path("gpu-out"))
    args = parser.parse_args()
    if unknown := set(args.parts) - set(LIMITS_S):
        parser.error(f"no such part: {' '.join(sorted(unknown))}; there are {' '.join(LIMITS_S)}")
    args.out = args.out.resolve()
    return args


def surroundings() -> dict[str, Any]:
    """Hardware and versions. Raises: SystemExit if something is missing, with what."""
    if missing := [name for name in NEEDED if not there(name)]:
        sys.exit(f"{sys.executable} lacks {', '.join(missing)}; expected what pyproject.toml names, and megatron-core")
    asked = subprocess.run([sys.executable, "-c", FACTS], capture_output=True, text=True, check=True)
    facts: dict[str, Any] = json.loads(asked.stdout)
    if not facts.pop("available"):
        sys.exit(f"torch {version('torch')} sees no NVIDIA card here (its CUDA: {facts['cuda']})")
    query = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    cards = subprocess.run(query, capture_output=True, text=True, check=True).stdout.strip().splitlines()
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=REPOSITORY, capture_output=True, text=True)
    facts |= {"cards": cards, "python": platform.python_version(), "kernel": platform.release()}
    facts |= {"versions": versions(), "cores": os.cpu_count(), "commit": commit.stdout.strip()}
    return facts


def there(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False


def versions() -> dict[str, str]:
    found = {}
    for name in LIBRARIES:
        with contextlib.suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def command(part: str, out: Path) -> list[str]:
    return [sys.executable, str(REPOSITORY / "scripts" / "gpu" / f"{part}.py"), "--out", str(out)]


def run(part: str, out: Path) -> None:
    """Its output goes to OUT/<part>.txt and to the terminal's last lines; it ends within its time."""
    print(f"{part}: at most {LIMITS_S[part]} s, output in {out / part}.txt", flush=True)
    with open(out / f"{part}.txt", "ab") as output:
        process = subprocess.Popen(
            command(part, out), cwd=REPOSITORY, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            process.wait(LIMITS_S[part])
        except subprocess.TimeoutExpired:
            say = f"the part was cut off after {LIMITS_S[part]} s; run it again: it goes on with what is missing"
            Checks(part, out).keep({"part": part, "check": "(whole)", "ok": False, "problem": say, "figures": {}})
        finally:
            end_session(process.pid)
            process.wait()


def end_session(leader: int) -> None:
    """Kill what is left of the part: what has a process group of its own dies with its parent."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(leader, signal.SIGKILL)


def newest(out: Path) -> list[dict[str, Any]]:
    lines = {(line["part"], line["check"]): line for line in read_json_lines(out / "checks.jsonl")}
    whole = {part for part in LIMITS_S if any(p == part and c != "(whole)" for p, c in lines)}
    return [line for (part, check), line in lines.items() if not (check == "(whole)" and part in whole)]


def table(facts: dict[str, Any], lines: list[dict[str, Any]]) -> str:
    text = [f"{'; '.join(facts['cards'])}; NCCL {facts['nccl']}; {facts['versions']}", ""]
    text += ["| part | check | result | figures |", "|---|---|---|---|"]
    for line in lines:
        figures = ", ".join(f"{name} {shown(value)}" for name, value in line["figures"].items())
        text.append(f"| {line['part']} | {line['check']} | {'held' if line['ok'] else line['problem']} | {figures} |")
    return "\n".join(text) + "\n"


def shown(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, list) and len(value) > 4:
        return f"{shown(min(value))} to {shown(max(value))}"
    return " to ".join(map(shown, value)) if isinstance(value, list) else str(value)


def main() -> int:
    args = parse_args()
    facts = surroundings()
    args.out.mkdir(parents=True, exist_ok=True)
    for part in args.parts or LIMITS_S:
        run(part, args.out)
    lines = newest(args.out)
    (args.out / "evidence.json").write_text(json.dumps({"machine": facts, "checks": lines}, indent=1))
    text = table(facts, lines)
    (args.out / "evidence.md").write_text(text)
    print(text)
    return int(not lines or not all(line["ok"] for line in lines))


if __name__ == "__main__":
    sys.exit(main())
