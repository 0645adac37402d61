"""All that needs an NVIDIA card: runs the parts, each within its time, and makes one table of what they found.

    ./scripts/gpu_evidence.sh --out gpu-out                    what is not known yet (a part cut off goes on later)
    ./scripts/gpu_evidence.sh --out gpu-out --seconds 520 job  one part, with more time

Parts: `tests` (pytest -m gpu: every operation over NCCL, abort, rebuild), `mirror` (snapshots from the card: whole, how
fast, at what cost), `job` (jobs of four ranks that lose hosts, processes and CUDA contexts). OUT/evidence.json has
hardware, versions and every check with its figures, OUT/evidence.md the table; both are written after every part.

Rules of this file: standard library only; a part is a process group of its own, and nothing of it outlives its time.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import importlib.util
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path[:1] = [str(Path(__file__).resolve().parents[number]) for number in (1, 2)]  # started by path

from clusters import card, processes
from clusters.launched import REPOSITORY

from gpu.checks import NOT_HELD, Checks, Line, newest

LIMITS_S = {"tests": 145, "mirror": 90, "job": 285}
WHOLE = "(whole)"
"""The check that a part got to its end."""
NEEDED = (
    "torch", "numpy", "megatron.core.datasets.helpers_cpp", "deepspeed", "hjson", "einops", "msgpack", "tqdm",
    "msgspec._core", "psutil", "pydantic", "pydantic_core._pydantic_core", "yaml", "rich", "xxhash",
    "zstandard.backend_c", "packaging", "pytest", "hypothesis", "deadpool_plugin.config",
)  # fmt: skip
"""Modules that must import. Of a compiled package its compiled part: a wheel for another Python lacks it."""
LIBRARIES = ("torch", "megatron-core", "deepspeed", "numpy")
FACTS = """
import json, torch
print(json.dumps({
    "available": torch.cuda.is_available(), "cuda": torch.version.cuda,
    "nccl": ".".join(map(str, torch.cuda.nccl.version())) if torch.cuda.is_available() else None,
    "reconfigure": hasattr(torch.distributed.distributed_c10d, "_reconfigure"),
}))
"""


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="gpu_evidence.sh", description=__doc__.splitlines()[0])
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"default: {' '.join(LIMITS_S)}")
    parser.add_argument("--out", type=Path, default=Path("gpu-out"))
    parser.add_argument("--commit", default="", help="what is tried here, where git cannot say it")
    limits = ", ".join(f"{part} {limit_s}" for part, limit_s in LIMITS_S.items())
    parser.add_argument("--seconds", type=float, help=f"of the one part that is named; default: {limits}")
    args = parser.parse_args()
    if unknown := set(args.parts) - set(LIMITS_S):
        parser.error(f"no such part: {' '.join(sorted(unknown))}; there are {' '.join(LIMITS_S)}")
    if args.seconds and len(args.parts) != 1:
        parser.error("--seconds is the time of one part: name it")
    args.parts, args.out = args.parts or list(LIMITS_S), args.out.resolve()
    return args


def surroundings(commit: str) -> dict[str, Any]:
    """Hardware and versions. Raises: SystemExit if something is missing, with what."""
    if missing := [name for name in NEEDED if not there(name)]:
        expected = "what pyproject.toml names, megatron-core and DeepSpeed"
        sys.exit(f"{sys.executable} lacks {', '.join(missing)}; expected {expected}")
    if not commit:
        sys.exit("git does not say which commit this is; expected --commit ID")
    if shutil.which("nvidia-smi") is None:
        sys.exit("no nvidia-smi on PATH; expected one: it says which card this is, and how much of it is in use")
    asked = subprocess.run([sys.executable, "-c", FACTS], stdout=subprocess.PIPE, text=True, check=True)
    facts: dict[str, Any] = json.loads(asked.stdout)
    if not facts.pop("available"):
        sys.exit(f"torch {version('torch')} sees no NVIDIA card here (its CUDA: {facts['cuda']})")
    query = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    cards = subprocess.run(query, capture_output=True, text=True, check=True).stdout.strip().splitlines()
    facts |= {
        "cards": cards,
        "stand_in": any(card.STAND_IN in name for name in cards),
        "python": platform.python_version(),
        "kernel": platform.release(),
    }
    facts |= {"versions": versions(), "cores": os.cpu_count(), "commit": commit}
    return facts | {"reconfigure": said_of_reconfigure(facts["reconfigure"], facts["versions"]["torch"])}


def there(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ImportError:
        return False


def commit_here() -> str:
    """Describe the commit of this checkout; empty where git cannot say."""
    words = ["git", "describe", "--always", "--dirty", "--exclude=*"]
    try:
        return subprocess.run(words, cwd=REPOSITORY, capture_output=True, text=True).stdout.strip()
    except FileNotFoundError:
        return ""


def said_of_reconfigure(exists: bool, torch: str) -> str:
    """Describe torch's own way to give a group other members; the plugin's would have to be measured beside it."""
    return f"torch {torch} has it; not tried" if exists else f"not tried: torch {torch} has none (2.15 brings it)"


def versions() -> dict[str, str]:
    found = {}
    for name in LIBRARIES:
        with contextlib.suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def name_of(facts: dict[str, Any]) -> str:
    """Name this machine and commit, for the lines that are about them."""
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:12]


def command(part: str, out: Path, of: str) -> list[str]:
    return [sys.executable, str(REPOSITORY / "scripts" / "gpu" / f"{part}.py"), "--out", str(out), "--of", of]


def run(part: str, out: Path, of: str, limit_s: float) -> None:
    """Its output goes to OUT/<part>.txt; it ends within its time, and how it ended is kept as a check, too."""
    print(f"{part}: at most {limit_s:g} s, output in {out / part}.txt", flush=True)
    checks = Checks(part, out, of)
    checks.begin(WHOLE)
    with open(out / f"{part}.txt", "ab") as output:
        process = subprocess.Popen(
            command(part, out, of), cwd=REPOSITORY, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            process.wait(limit_s)
        except subprocess.TimeoutExpired:
            checks.end(WHOLE, f"cut off after {limit_s:g} s; run it again: it goes on with what is missing")
        else:
            code = process.returncode
            checks.end(WHOLE, "" if code in (0, NOT_HELD) else f"ended with {code}, see {part}.txt")
        finally:
            end_session(process.pid)
            process.wait()


def end_session(leader: int) -> None:
    """Kill what is left of the part; it adopts what loses its parent below it."""
    for pid in processes.descendants({leader}, processes.table()):
        processes.send(pid, signal.SIGKILL)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(leader, signal.SIGKILL)


def table(facts: dict[str, Any], lines: list[Line]) -> str:
    text = [f"{'; '.join(facts['cards'])}; NCCL {facts['nccl']}; {facts['versions']}; commit {facts['commit']}"]
    if facts["stand_in"]:
        text += [
            "",
            "**On a stand-in, without a card**: order, leaks and lifetimes are tried, speed and hardware are not.",
        ]
    text += ["", f"torch's own _reconfigure: {facts['reconfigure']}", ""]
    text += ["| part | check | result | figures |", "|---|---|---|---|"]
    for line in lines:
        figures = ", ".join(f"{name} {shown(value)}" for name, value in line["figures"].items())
        result = "held" if line["ok"] else line["problem"].partition("\n")[0]
        text.append(f"| {line['part']} | {line['check']} | {cell(result)} | {cell(figures)} |")
    return "\n".join(text) + "\n"


def cell(text: str) -> str:
    return text.replace("\n", " ").replace("|", "\\|")


def shown(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, list) and len(value) > 4:
        return f"{shown(min(value))} to {shown(max(value))}"
    return f"[{', '.join(map(shown, value))}]" if isinstance(value, list) else str(value)


def write(out: Path, facts: dict[str, Any], lines: list[Line]) -> str:
    """Both files. Returns the table."""
    text = table(facts, lines)
    (out / "evidence.json").write_text(json.dumps({"machine": facts, "checks": lines}, indent=1))
    (out / "evidence.md").write_text(text)
    return text


def main() -> int:
    args = parse_args()
    facts = surroundings(args.commit or commit_here())
    of = name_of(facts)
    for part in args.parts:
        Checks(part, args.out, of).plan([WHOLE])
    for part in args.parts:
        run(part, args.out, of, args.seconds or LIMITS_S[part])
        text = write(args.out, facts, newest(args.out, of))
    print(text)
    return int(not all(line["ok"] for line in newest(args.out, of)))


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the part under way is ended, too
    sys.exit(main())
