"""Other people's training scripts, unedited, under the plugin: each loses a node nobody rehearsed, then a process.

    python scripts/strangers.py --out OUT --megatron-lm PATH --deepspeed-examples PATH --transformers PATH \\
        --accelerate PATH --trl PATH [--only cifar sft] [--seed 7] [--again]
    python scripts/strangers.py --out OUT --table                               what is known, as a page of tables

Each PATH is a folder that has the script in it or below it. A job has 4 ranks on 4 emulated nodes and a spare, on CPUs.
Phases, steps and victims are drawn at random from `--seed`, the row's name and the number of its attempt. Every attempt
is one line of OUT/strangers.jsonl with its seed, its faults, the versions and our commit, whatever came of it: `held`
(losses, gradient norms, learning rates and the final states of all ranks equal those of the script without the plugin),
`refused` (by the plugin, by name, before training), `not here` (the script does not run on a CPU without the plugin
either), `failed`, `skipped` (no checkout, or no package), or `not run` (something kept this runner itself from the
attempt: a thread before a fork, a machine that is too slow; nothing has held, and nothing is said of the plugin).
`stand_ins` names all that a script found instead of what it asked for. A rerun goes on with the rows that have not
held; `--again` repeats all. The last line that is printed is one JSON object; the exit code is 0 only if every row that
was asked for held or was refused by name.

Rules of this file: it chooses, draws and keeps; foreign/rows.py says what the scripts are, foreign/stage.py what they
find around them, faults/job.py judges. Each row runs in a process of its own: rows import what others must not.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import importlib.metadata
import json
import os
import random
import re
import shutil
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import make_corpus
from clusters import forked_node
from clusters.launched import commit_of, read_json_lines
from clusters.references import reference
from faults.job import Job, Verdict
from faults.plan import Kill
from foreign import material
from foreign.rows import PROJECTS, ROWS, Row
from megatron_lm import jobs

WORLD = 4
FOREIGN = Path(material.__file__).parent
EXIT_CONFIG = 78
"""As in deadpool_plugin/errors.py."""
VERSIONS = ("torch", "megatron-core", "deepspeed", "transformers", "accelerate", "datasets", "trl", "peft")
FINE = ("held", "refused")
NOT_RUN = "not run"
PAGE = """# Other people's scripts that were run

`strangers.py --table` prints this page. Each script is unedited. It has 4 ranks on 4 emulated nodes and a spare, on
CPUs. It loses a node that nobody rehearsed, then a process.

- held: losses, gradient norms, learning rates and the final states of all ranks equal those without the plugin
- not here: the script does not run on a CPU without the plugin either
- stand-ins, where they were recorded: what the script found instead of its downloads

| script | must hold | attempts that held | the newest attempt |
| --- | --- | --- | --- |
{rows}

## Every attempt

The attempts are in the order in which they were made. The first {before} are older than two parts of the record: the
`commit`, and lines for attempts that the runner itself prevented (`not run`).

| row | seed | faults | commit | outcome |
| --- | --- | --- | --- | --- |
{attempts}
"""
WAIT_S = 240.0
"""Limit of a wait. Four ranks of others' scripts and their rehearsals start up on as few CPUs as there are."""
UNDISTURBED_S = 600
CELL = 300
"""Characters of a cell of the page."""


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder for results, references and broken jobs")
    for project in PROJECTS:
        parser.add_argument(f"--{project}", type=Path, help="folder with its scripts")
    parser.add_argument("--only", nargs="+", choices=ROWS, default=list(ROWS), metavar="ROW", help=" ".join(ROWS))
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--again", action="store_true", help="also what has held")
    parser.add_argument("--table", action="store_true", help="print what is known, as a page, and end")
    args = parser.parse_args()
    args.out = args.out.resolve()
    return args


def missing(row: Row, args: argparse.Namespace) -> str:
    """Name what is missing for the row; "" if all is there."""
    folder = getattr(args, row.project.replace("-", "_"))
    if folder is None:
        return f"no checkout: give --{row.project}"
    if row.script_in(folder) is None:
        return f"--{row.project} {folder}: there is no {row.script} in it or below it"
    lacks = [name for name in row.packages if not installed(name)]
    if lacks:
        return f"not installed: {', '.join(lacks)} (scripts/requirements-strangers.txt)"
    return row.unfit()


def present(script: Path | None) -> Path:
    assert script is not None, "asked after `missing`"
    return script


def installed(name: str) -> str:
    """The version; "" if it is not."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""


def draw(row: Row, seed: str) -> list[Kill]:
    """A node that no spare rehearses (the only one rehearses the first), and later one process."""
    random_ = random.Random(seed)
    first = random_.randint(row.begins + 2, row.steps - 5)
    second = random_.randint(first + 2, row.steps - 1)
    node, rank = random_.randint(1, WORLD - 1), random_.randrange(WORLD)
    phases = [random_.choice(row.phases) for _ in range(2)]
    return [
        Kill(0, node, first, phases[0], hold=first - 1),
        Kill(1, -1, second, phases[1], "rank", rank=rank, hold=second - 1),
    ]


def play(row: Row, folder: Path, out: Path, kills: list[Kill]) -> dict[str, Any]:
    """The row's outcome. In a process of its own."""
    at = out / f"material-{installed('transformers').partition('.')[0] or 'plain'}"
    in_a_child(lambda: made(row, at))  # it starts threads
    os.environ.update(material.environment(at) | row.environment(at))
    script = present(row.script_in(folder))
    resumed = out / "jobs" / f"{row.name}.resumed"
    command = [word.replace("{resumed}", str(resumed)) for word in command_of(row, script, at)]
    sys.path[:0] = [str(script.parent), str(folder)]
    if row.framework == "megatron":
        make_corpus.ensure(out / "corpus")
        jobs.preload(script.parent)
    else:
        forked_node.preload((*row.preload, *forked_node.OURS))
    cache = out / "references" / digest(script, *sorted(FOREIGN.glob("*.py")))
    undisturbed = functools.partial(reference, cache, world=WORLD, slots=1, deadline_s=UNDISTURBED_S)
    checkpoint = None
    try:
        if row.resumes:
            earlier = undisturbed(command_of(ROWS[row.resumes], script, at), script=ROWS[row.resumes].wrapper)
            checkpoint = earlier / "out" / f"checkpoint-{row.begins}"
        lay(checkpoint, resumed)
        expected = undisturbed(command, script=row.wrapper)
    except RuntimeError as problem:
        return undisturbed_failed(str(problem))
    lay(checkpoint, resumed)
    run = out / "jobs" / row.name
    words = [word.replace("{folder}", str(run)) for word in command]
    job = Job(run, words, WORLD, 1, 1, kills, script=row.wrapper, framework=row.framework, wait_s=WAIT_S)
    verdict = job.run(expected)
    return {**judged(verdict), "stand_ins": stand_ins(row, run), "seconds": verdict.seconds}


def command_of(row: Row, script: Path, at: Path) -> list[str]:
    return [*([] if row.local_rank else ["--no_local_rank"]), str(script), *row.words(at)]


def lay(checkpoint: Path | None, folder: Path) -> None:
    """Make `folder` hold the checkpoint, if there is one, and nothing else."""
    shutil.rmtree(folder, ignore_errors=True)
    if checkpoint:
        shutil.copytree(checkpoint, folder / checkpoint.name)


def undisturbed_failed(problem: str) -> dict[str, Any]:
    """Report a run without the plugin that failed. Raises: RuntimeError if it was only too slow."""
    if "ended with -9" in problem:
        raise RuntimeError(problem)
    raised = re.compile(r"[\w.]*(Error|Exception)\b.*")
    lines = [line for log in logs(Path(problem.rpartition("see ")[2])) for line in log.read_text().splitlines()]
    return {"result": "not here", "detail": next(filter(raised.fullmatch, lines), problem)}


def stand_ins(row: Row, run: Path) -> list[str]:
    """List the stand-ins that the ranks of a job say they found."""
    lines = {line for log in logs(run) for line in log.read_text(errors="replace").splitlines()}
    said = {line.removeprefix(material.STAND_IN) for line in lines if line.startswith(material.STAND_IN)}
    return sorted(said | set(row.models))


def logs(folder: Path) -> list[Path]:
    return sorted(folder.rglob("rank*.log"))


def digest(*files: Path) -> str:
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:16]


def made(row: Row, at: Path) -> None:
    material.make(at)
    if row.framework == "megatron":
        material.make_masked(at)


def in_a_child(act: Callable[[], None]) -> None:
    """Let `act` run, and end, in a process of its own."""
    pid = os.fork()
    if pid == 0:
        try:
            act()
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(0)
    os.waitpid(pid, 0)


def judged(verdict: Verdict) -> dict[str, Any]:
    if verdict.holds and verdict.bit_exact:
        figures = {"ready_s": [one.ready_s for one in verdict.outcomes]}
        return {"result": "held", **figures, "lost_steps": [one.lost_steps for one in verdict.outcomes]}
    if set(verdict.exit_codes) == {EXIT_CONFIG}:
        return {"result": "refused", "detail": verdict.stopped}
    problems = [one.problem for one in verdict.outcomes if one.problem]
    detail = [verdict.stopped, verdict.hang, verdict.difference, *problems, *(verdict.left and ["processes left"])]
    return {"result": "failed", "detail": "; ".join(dict.fromkeys(filter(None, detail)))}


def attempt(row: Row, args: argparse.Namespace, number: int) -> dict[str, Any]:
    """The row's next line."""
    line: dict[str, Any] = {"row": row.name, "must_hold": row.must_hold, "commit": commit_of()}
    if reason := missing(row, args):
        return {**line, "result": "skipped", "detail": reason}
    folder = getattr(args, row.project.replace("-", "_")).resolve()
    script, seed = present(row.script_in(folder)), f"{args.seed} {row.name} {number}"
    kills = draw(row, seed)
    drawn = [{"kind": k.kind, "node": k.node, "rank": k.rank, "step": k.step, "phase": k.phase} for k in kills]
    line |= {"seed": seed, "faults": drawn, "script": digest(script)}
    line |= {"versions": {name: installed(name) for name in VERSIONS if installed(name)}}
    answer = args.out / f"{row.name}.answer.json"
    answer.unlink(missing_ok=True)
    in_a_child(lambda: _write(answer, played(row, folder, args.out, kills)))
    found = json.loads(answer.read_text()) if answer.exists() else not_run("the row's process ended")
    answer.unlink(missing_ok=True)
    places = {str(args.out): "OUT", str(folder): row.project.upper(), sys.prefix: "VENV"}
    for place, name in places.items():
        found = json.loads(json.dumps(found).replace(place, name))
    return {**line, **found}


def not_run(reason: str) -> dict[str, Any]:
    return {"result": NOT_RUN, "detail": f"{reason}: the row says nothing about the plugin"}


def _write(path: Path, found: dict[str, Any]) -> None:
    path.write_text(json.dumps(found))


def played(row: Row, folder: Path, out: Path, kills: list[Kill]) -> dict[str, Any]:
    try:
        return play(row, folder, out, kills)
    except Exception as problem:
        traceback.print_exc()
        return not_run(f"the row could not be run: {problem!r}")


def newest(out: Path) -> dict[str, dict[str, Any]]:
    lines = {line["row"]: line for line in read_json_lines(out / "strangers.jsonl")}
    return {name: lines[name] for name in ROWS if name in lines}


def said(line: dict[str, Any]) -> str:
    """Describe a line beside its result."""
    found = ", ".join(line.get("stand_ins", []))
    return "; ".join(filter(None, (line.get("detail"), found and f"stand-ins: {found}")))


def page(lines: list[dict[str, Any]]) -> str:
    """Write the page: the result of each row, and every attempt."""
    attempts = [line for line in lines if "seed" in line]
    rows: list[str] = []
    for row in ROWS.values():
        own = [line for line in lines if line["row"] == row.name]
        tried = [line["result"] for line in own if "seed" in line and line["result"] != NOT_RUN]
        held = f"{tried.count('held')} of {len(tried)}"
        outcome = outcome_of(own[-1]) if own else NOT_RUN
        rows.append(f"| {row.meant} | {'yes' if row.must_hold else ''} | {held} | {outcome} |")
    every = [f"| {one['row']} | {one['seed']} | {drawn(one)} | {one.get('commit', '')} | {outcome_of(one)} |"
             for one in attempts]  # fmt: skip
    before = sum("commit" not in one for one in attempts)
    return PAGE.format(rows="\n".join(rows), before=before or "No", attempts="\n".join(every))


def outcome_of(line: dict[str, Any]) -> str:
    return "; ".join(filter(None, (line["result"], said(line)[:CELL]))).replace("|", "/")


def drawn(line: dict[str, Any]) -> str:
    victims = [f"node {one['node']}" if one["kind"] == "node" else f"rank {one['rank']}" for one in line["faults"]]
    return ", ".join(
        f"{who}: {one['phase']} of {one['step']}" for who, one in zip(victims, line["faults"], strict=True)
    )


def main() -> int:
    args = parse_args()
    if args.table:
        print(page(list(read_json_lines(args.out / "strangers.jsonl"))), end="")
        return 0
    args.out.mkdir(parents=True, exist_ok=True)
    for name in args.only:
        if newest(args.out).get(name, {}).get("result") in FINE and not args.again:
            continue
        number = sum(line["row"] == name and "seed" in line for line in read_json_lines(args.out / "strangers.jsonl"))
        began = time.monotonic()
        line = attempt(ROWS[name], args, number)
        with open(args.out / "strangers.jsonl", "a") as file:
            file.write(json.dumps(line) + "\n")
        print(f"{name}: {line['result']} ({time.monotonic() - began:.0f} s) {line.get('detail', '')}", flush=True)
    known = newest(args.out)
    rows = [
        {"name": name, "held": known[name]["result"] == "held", "detail": said(known[name])}
        | {"result": known[name]["result"]}
        for name in args.only
    ]
    exit_code = int(any(row["result"] not in FINE for row in rows))
    print(json.dumps({"rows": rows, "exit_code": exit_code}))
    return exit_code


if __name__ == "__main__":
    sys.exit(main())
