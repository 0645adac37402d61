"""The versions people install: each combination in an environment of its own, put through the same faults.

    python scripts/versions.py --rows newest --out OUT                     the newest Python, torch and frameworks
    python scripts/versions.py --rows all --megatron-lm CLONE --out OUT    all of them, and pretrain_gpt.py of each tag
    python scripts/versions.py --rows all --out OUT --table                what is known, as a page

A row is held if every check of it held; the table of rows is deadpool_plugin/versions.py. Environments are made once
and kept in `--envs`. Every check is one line of OUT/versions.jsonl as soon as it is known; a rerun goes on with what is
missing (`--again`: also with what did not hold). The demonstrations draw their faults from a seed, which is drawn,
printed and recorded; the other checks' faults are always the same. A line names our commit and, of a tag or main, that
of Megatron-LM (`checkout`): main is run again when it has moved. Without a clone of NVIDIA/Megatron-LM, or a Python of
that version, a row says skipped, which is not held; so does a check all of whose tests are skipped. Tests that a check
skipped are in its line, and in the last line printed, with their reasons. That last line is one JSON object, {"rows":
[{"name", "held", "detail"}], "exit_code"}; the exit code is 0 only if every row held or is refused by name.

Rules of this file: standard library only; checks run in the row's own interpreter, never in this one.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPOSITORY))

from clusters import launched  # noqa: E402
from clusters.launched import read_json_lines  # noqa: E402

from deadpool_plugin.versions import CHECKOUTS, NEWEST, ROWS, Row  # noqa: E402

REQUIREMENTS = REPOSITORY / "scripts" / "requirements-cpu.txt"
FOR_CHECKS_ONLY = ("mypy", "ruff", "pytest-xdist", "execnet")
FOR_PRETRAIN = ("six", "regex")
"""megatron.training's tokenizers import them."""
DEADLINE_S = 2400.0
LEAVE_S = 60.0
TAIL = 40
"""Lines of a check that did not hold, which are printed."""
EXIT_CONFIG = 78
"""As in deadpool_plugin/errors.py."""
MEGATRON_FAULTS = "tp2-pp2-dp2"
PRETRAIN = ("base", "tp2-pp2", "replicated", "overlap")
"""Options of pretrain_gpt.py, by their names in megatron_lm_options.py."""
SAVES = {"core_v0.14.0": "save-async", "core_v0.15.3": "save-async-gathered", "core_v0.16.1": "save-async"}
"""The same for saves, of tags that cannot choose who saves in the background. All others are told to do it themselves:
they would ask for NVRx, which no row has. 0.15.3 saves torch's AdamW only when gathered: its step is a tensor."""
ZERO_3_ONLY = ("0.18.9",)
"""DeepSpeed whose ZeRO 1 and 2 do not train over gloo, with the plugin or without: they gather into views."""
BUILDS_AT_IMPORT = ("0.15.3",)
"""megatron-core that builds an allocator for CUDA as it is imported, and does without where that fails. Without a card,
but with a compiler for one, it ends its import; so it finds no folder to build in."""
NOWHERE = {"TORCH_EXTENSIONS_DIR": os.devnull}
GUARDS = (
    "tests/unit/test_hook_points.py",
    "tests/unit/test_kept_answers.py",
    "tests/contract/test_comm_surface.py",
    "tests/contract/test_comm_pairing.py",
    "tests/adapters/test_megatron_state.py",
    "tests/adapters/test_megatron_saving.py",
    "tests/adapters/test_megatron_data.py",
    "tests/adapters/test_deepspeed_saving.py",
    "tests/worker/test_proof.py",
    "tests/worker/test_iterators.py",
    "tests/worker/test_file_view.py",
    "tests/worker/test_save_calls.py",
    "tests/dist/test_pairing.py",
    "tests/dist/test_checkpoint_folders.py",
)

Line = dict[str, Any]


@dataclass(frozen=True)
class Subject:
    """A row of the table of results: an environment, or pretrain_gpt.py of one tag in an environment."""

    name: str
    row: Row
    tag: str = ""


SUBJECTS = {
    subject.name: subject
    for subject in (
        *(Subject(row.name, row) for row in ROWS),
        *(Subject(f"pretrain_gpt.py-{one.tag}", one.row, one.tag) for one in CHECKOUTS),
    )
}


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", nargs="+", required=True, metavar="NAME", help=f"newest, all, {', '.join(SUBJECTS)}")
    parser.add_argument("--out", type=Path, required=True, help="folder for results and broken jobs")
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    parser.add_argument("--envs", type=Path, default=cache / "deadpool_plugin" / "envs", help="folder of environments")
    parser.add_argument("--megatron-lm", type=Path, metavar="CLONE", help="a git repository of NVIDIA/Megatron-LM")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6), help="of random faults")
    parser.add_argument("--again", action="store_true", help="repeat checks that did not hold")
    parser.add_argument("--table", action="store_true", help="print what is known as a page, and end")
    args = parser.parse_args()
    known = {"newest": [NEWEST.name], "all": list(SUBJECTS)}
    try:
        names = [name for word in args.rows for name in known.get(word) or [SUBJECTS[word].name]]
    except KeyError as unknown:
        parser.error(f"--rows {unknown}: expected newest, all, or some of {', '.join(SUBJECTS)}")
    args.subjects = [SUBJECTS[name] for name in dict.fromkeys(names)]
    args.out = args.out.resolve()
    return args


# Environments


class Unavailable(Exception):
    """Something this machine does not have; the message says what."""


def environment(row: Row, folder: Path, log: Path) -> Path:
    """The interpreter of the row's environment, made now unless it is there.

    Raises: Unavailable without a Python of that version; CalledProcessError if pip fails.
    """
    wanted = requirements(row)
    place = folder / f"{row.name}-{hashlib.sha256(chr(10).join(wanted).encode()).hexdigest()[:8]}"
    python, stamp = place / "bin" / "python", place / "complete"
    if stamp.exists():
        return python
    tell(f"{row.name}: making {place} (gigabytes, some minutes)")
    shutil.rmtree(place, ignore_errors=True)
    place.parent.mkdir(parents=True, exist_ok=True)
    listed = place.with_name(f"{place.name}.txt")  # a version ends like a suffix
    listed.write_text("".join(f"{line}\n" for line in wanted))
    # torch comes first: DeepSpeed's build imports it
    first = [line for line in wanted if line.startswith(("torch==", "numpy=="))]
    install = [str(python), "-m", "pip", "install", "--quiet", "--constraint", str(listed)]
    with open(log, "ab") as output:
        for command in (
            [interpreter(row.python), "-m", "venv", str(place)],
            [*install, "setuptools", "wheel", "ninja", *first],
            [*install, "--no-build-isolation", "--requirement", str(listed)],
        ):
            subprocess.run(command, stdout=output, stderr=output, check=True)
    stamp.touch()
    return python


def requirements(row: Row) -> list[str]:
    """The pins of requirements-cpu.txt with the row's own instead of theirs."""
    own = [f"{name}=={version}" for name, version in row.packages.items()] + list(row.pins)
    named = {line.split("==")[0] for line in own}
    pins = [line for line in REQUIREMENTS.read_text().split() if re.fullmatch(r"[\w-]+==[\w.]+", line)]
    kept = [line for line in pins if line.split("==")[0] not in named | set(FOR_CHECKS_ONLY)]
    return [*own, *kept, *FOR_PRETRAIN]


def interpreter(version: str) -> str:
    """A Python of this version on PATH, or beside it under pyenv."""
    root = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv")
    beside = sorted((root / "versions").glob(f"{version}.*/bin/python"))
    for candidate in (f"python{version}", *map(str, beside)):
        with contextlib.suppress(OSError, subprocess.CalledProcessError):
            subprocess.run([candidate, "-c", "import venv"], check=True, capture_output=True)
            return candidate
    raise Unavailable(f"no Python {version} on this machine")


def commit_of(tag: str, clone: Path | None) -> str:
    """The commit that `tag`, or a branch of that name, is in the clone (bare or not). Raises: Unavailable."""
    if clone is None:
        raise Unavailable("no clone of NVIDIA/Megatron-LM (--megatron-lm)")
    words = ["git", "-C", str(clone), "rev-parse", "--verify", "--quiet", f"{tag}^{{commit}}"]
    found = subprocess.run(words, capture_output=True, text=True)
    if found.returncode:
        raise Unavailable(f"{clone} has no {tag}")
    return found.stdout.strip()


def checkout(tag: str, commit: str, clone: Path, folder: Path) -> Path:
    """A tree of `commit`, taken out of the clone into `folder`."""
    place = folder / f"{tag}-{commit[:10]}"
    if not place.exists():
        unpacking = place.with_name(f"{place.name}.unpacking")
        shutil.rmtree(unpacking, ignore_errors=True)
        unpacking.mkdir(parents=True)
        with subprocess.Popen(["git", "-C", str(clone), "archive", commit], stdout=subprocess.PIPE) as archive:
            subprocess.run(["tar", "x", "-C", str(unpacking)], stdin=archive.stdout, check=True)
        unpacking.rename(place)
    return place


# Checks


def names(subject: Subject) -> tuple[str, ...]:
    """The checks of `subject`, in their order."""
    if subject.tag:
        return "pretrain_gpt", "saves"
    own = ("guards", "demo", f"demo-zero{zero(subject.row)[0]}", "faults", "faults-zero")
    return (*own, "faults-save") if subject.row == NEWEST else own


def zero(row: Row) -> tuple[str, str]:
    """ZeRO stages of the demonstration and of the slice of faults."""
    return ("3", "3") if row.deepspeed in ZERO_3_ONLY else ("2", "23")


def checks(subject: Subject, args: argparse.Namespace, out: Path, commit: str) -> dict[str, tuple[str, ...]]:
    """List what each check has Python run; it holds if the exit code is 0. `commit`: of the checkout of a tag."""
    if subject.tag:
        place = checkout(subject.tag, commit, args.megatron_lm, args.out / "checkouts")
        script = ("scripts/megatron_lm_options.py", "--checkout", str(place), "--again", "--only")
        options = dict(zip(names(subject), (PRETRAIN, (SAVES.get(subject.tag, "save-async-mcore"),)), strict=True))
        return {
            name: (*script, *chosen, "--out", str(out / f"{name}-{commit[:10]}")) for name, chosen in options.items()
        }
    demo = ("scripts/demo.py", "--seed", str(args.seed))
    faults = ("scripts/fault_matrix.py", "--heal", "--again", "--group")
    stage, stages = zero(subject.row)
    words: list[tuple[str, ...]] = [
        ("-m", "pytest", "-q", "-rfEs", "-p", "no:cacheprovider", *GUARDS),
        (*demo, "--out", str(out / "demo")),
        (*demo, "--framework", "deepspeed", "--zero", stage, "--out", str(out / f"demo-zero{stage}")),
        (*faults, "main", "--only", MEGATRON_FAULTS, "--out", str(out / "faults")),
        (
            *faults,
            "main",
            "--only",
            f"zero[{stages}]-bf16-adamw",
            "--framework",
            "deepspeed",
            "--out",
            str(out / "faults-zero"),
        ),
    ]
    if subject.row == NEWEST:
        words.append((*faults, "save", "--only", MEGATRON_FAULTS, "--out", str(out / "faults-save")))
    return dict(zip(names(subject), words, strict=True))


def run_check(row: Row, words: tuple[str, ...], python: Path, log: Path, clone: Path | None) -> tuple[str, str]:
    """The check's result and what there is to say of it, as `judge` has them."""
    environ = {**os.environ, "PATH": f"{python.parent}:{os.environ['PATH']}", "VIRTUAL_ENV": str(python.parent.parent)}
    environ |= {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "PYTHONWARNINGS": "ignore"}
    environ |= NOWHERE if row.megatron_core in BUILDS_AT_IMPORT else {}
    if clone is not None:
        environ["MEGATRON_LM_GIT"] = str(clone)  # tests of the guards look for hook points in its tags
    log.parent.mkdir(parents=True, exist_ok=True)
    with open(log, "wb") as output:
        process = subprocess.Popen(
            [str(python), *words],
            cwd=REPOSITORY,
            env=environ,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
        try:
            code = process.wait(timeout=DEADLINE_S)
        except subprocess.TimeoutExpired:
            code = -signal.SIGKILL
        finally:
            end(process)
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()] or [""]
    result, detail = judge(code, lines)
    if code:
        tell("\n".join(f"  {line[:300]}" for line in lines[-TAIL:]))
    return result, detail


def judge(code: int, lines: list[str]) -> tuple[str, str]:
    """(held, skipped, not here, refused or failed; the line that says most, then what was skipped, with reasons)"""
    skipped = "".join(f"; {line}" for line in lines if line.startswith("SKIPPED"))
    if code == 0:
        nothing = re.match(r"\d+ skipped\b(?!.*\bpassed\b)", lines[-1].strip("= "))
        return "skipped" if nothing else "held", lines[-1][:300] + skipped
    refused = [line for line in lines if "[deadpool]" in line and f"exit code {EXIT_CONFIG}" in line]
    problems = [line for line in lines if "FAILED" in line or "Error" in line]
    options = {found[1] for line in lines if (found := re.match(r"[\w-]+: (not here|refused|failed) \(", line))}
    what = "refused" if refused else options.pop() if len(options) == 1 else "failed"
    return what, (refused or problems or lines)[-1][:300] + f" (exit code {code}){skipped}"


def end(process: subprocess.Popen[bytes]) -> None:
    """A check ends the job that it started when it is told to end; what is left of it is killed."""
    process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(timeout=LEAVE_S)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def run(subject: Subject, args: argparse.Namespace, known: dict[str, Line]) -> None:
    """Run the checks of `subject` that are not known, and write each down."""
    out = args.out / subject.name
    out.mkdir(parents=True, exist_ok=True)
    commit = ""
    try:
        commit = commit_of(subject.tag, args.megatron_lm) if subject.tag else ""
        wanted = checks(subject, args, out, commit)
        python = environment(subject.row, args.envs, out / "install.txt")
    except (Unavailable, subprocess.CalledProcessError) as error:
        result = "skipped" if isinstance(error, Unavailable) else "failed"
        keep(args, subject, commit, "environment", result, str(error), 0.0)
        return
    for name, words in wanted.items():
        before = known.get(f"{subject.name}:{name}")
        same = before is not None and before.get("checkout", commit) == commit  # a branch moves
        if before and same and (before["result"] == "held" or not args.again):
            continue
        began = time.monotonic()
        result, detail = run_check(subject.row, words, python, out / f"{name}.txt", args.megatron_lm)
        keep(args, subject, commit, name, result, detail, time.monotonic() - began)


def keep(
    args: argparse.Namespace, subject: Subject, checkout: str, check: str, result: str, detail: str, seconds: float
) -> None:
    """Write the line of a check down. `checkout`: Megatron-LM's commit, "" without one; `commit` in it is ours."""
    line = {"row": subject.name, "check": check, "result": result, "detail": detail, "seconds": round(seconds)}
    line |= {"seed": args.seed, "commit": launched.commit_of(), "python": subject.row.python, **subject.row.packages}
    line |= {"checkout": checkout} if checkout else {}
    with open(args.out / "versions.jsonl", "a") as file:
        file.write(json.dumps(line) + "\n")
    tell(f"{subject.name}: {check} {result} ({seconds:.0f} s) {detail}")


# Results


def known_lines(path: Path) -> dict[str, Line]:
    """The newest line of each row and check."""
    return {f"{line['row']}:{line['check']}": line for line in read_json_lines(path)}


def results(subject: Subject, known: dict[str, Line]) -> dict[str, Line]:
    """The newest line of each check of `subject`, or of its environment if that could not be made."""
    lines = {name: known.get(f"{subject.name}:{name}", {"check": name, "result": "not run"}) for name in names(subject)}
    if any(line["result"] != "not run" for line in lines.values()):
        return lines
    return {"environment": known.get(f"{subject.name}:environment", {"result": "not run"})}


def outcome(subject: Subject, known: dict[str, Line]) -> Line:
    """The row's entry of the last line printed."""
    found = results(subject, known)
    broken = [f"{name} {line['result']}" + (f": {line['detail']}" if line.get("detail") else "")
              for name, line in found.items() if line["result"] != "held"]  # fmt: skip
    detail = "; ".join(broken) or ", ".join(map(what_held, found.values()))
    return {"name": subject.name, "held": not broken, "detail": detail}


def what_held(line: Line) -> str:
    """The check's name, with what of it was skipped."""
    _, found, skipped = line.get("detail", "").partition("; SKIPPED")
    return f"{line['check']} (SKIPPED{skipped})" if found else line["check"]


def is_refused(subject: Subject, known: dict[str, Line]) -> bool:
    """Return whether what did not hold was refused, each time, by name."""
    broken = {line["result"] for line in results(subject, known).values()} - {"held"}
    return broken == {"refused"} and bool(subject.row.refused)


def table(subjects: Iterable[Subject], known: dict[str, Line]) -> str:
    rows = ["| Python | torch | megatron-core | DeepSpeed | result |", "| --- | --- | --- | --- | --- |"]
    for subject in subjects:
        found, row = results(subject, known), subject.row
        if subject.tag:
            frameworks, held = f"`pretrain_gpt.py` of {subject.tag} | ", "held"
        else:
            frameworks = f"{row.megatron_core} | {row.deepspeed}"
            held = "held; ZeRO 1 and 2 do not train over gloo" if row.deepspeed in ZERO_3_ONLY else "held"
        broken = [f"{name} {line['result']}" for name, line in found.items() if line["result"] != "held"]
        result = held if not broken else "refused" if is_refused(subject, known) else "; ".join(broken)
        rows.append(f"| {row.python} | {row.torch} | {frameworks} | {result} |")
    return "\n".join(rows) + "\n"


PAGE = """# Versions that were run

`versions.py --rows all --table` prints this page. A row is an environment of its own. A row held if all its checks
held. A job held if it ended with the bits of an undisturbed run.

| check | what it runs |
| --- | --- |
| guards | tests of collectives that pair, of replacements' data, of saves, folders, hook points and kept answers |
| demo | `demo.py`: eight ranks (TP 2, PP 2, DP 2) on four nodes. One node is killed at a random place |
| demo-zero | the same with DeepSpeed; the number is the stage of ZeRO |
| faults | `fault_matrix.py`: a node and a process are lost at each of 12 places (TP 2, PP 2, DP 2) |
| faults-zero | the same with ZeRO 2 and 3 |
| faults-save | the same at 8 places of a save |
| pretrain_gpt | Megatron-LM's own script, unedited, loses a node and then a process. Sets of options: {pretrain} |
| saves | the same in asynchronous saves |

{table}
These do not run here without the plugin either:

- ZeRO 1 and 2 of DeepSpeed {zero_3_only} over gloo: they gather views, which may not be changed in place. Its rows use
  ZeRO 3.
- `--async-save` of core_v0.17.1 and later without `--async-strategy mcore`: it needs an nvidia-resiliency-ext that no
  row has.
- Saves of core_v0.15.3 with torch's AdamW without `--dist-ckpt-optim-fully-reshardable`: they take no step that is a
  tensor.

## Every check

The checks are in the order in which they were made. The newest of a row and check counts.

| row | check | result | seconds | seed | commit | what it said |
| --- | --- | --- | --- | --- | --- | --- |
{checks}
"""


def page(lines: list[Line]) -> str:
    """Describe what became of each row, and every check."""
    known = {f"{line['row']}:{line['check']}": line for line in lines}
    fields = ("row", "check", "result", "seconds", "seed", "commit")
    checks = [
        f"| {' | '.join(str(line[field]) for field in fields)} | {line['detail'][:160].replace('|', '/')} |"
        for line in lines
    ]
    return PAGE.format(
        table=table(SUBJECTS.values(), known),
        pretrain=", ".join(PRETRAIN),
        zero_3_only=", ".join(ZERO_3_ONLY),
        checks="\n".join(checks),
    )


def tell(text: str) -> None:
    print(text, flush=True)


def main() -> int:
    args = parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    args.out.mkdir(parents=True, exist_ok=True)
    results = args.out / "versions.jsonl"
    if args.table:
        print(page(list(read_json_lines(results))), end="")
        return 0
    tell(f"seed {args.seed}")
    for subject in args.subjects:
        run(subject, args, known_lines(results))
    known = known_lines(results)
    rows = [outcome(subject, known) for subject in args.subjects]
    refused = {subject.name for subject in args.subjects if is_refused(subject, known)}
    code = int(not all(row["held"] or row["name"] in refused for row in rows))
    print(json.dumps({"rows": rows, "exit_code": code}), flush=True)
    return code


if __name__ == "__main__":
    sys.exit(main())
