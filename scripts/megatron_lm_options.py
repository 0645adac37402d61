"""Options of Megatron-LM's pretrain_gpt.py that survive losses bit for bit: one small job each, judged and kept.

    python scripts/megatron_lm_options.py --checkout MEGATRON_LM --out OUT               all that are not known yet
    python scripts/megatron_lm_options.py --checkout MEGATRON_LM --out OUT --only vpp fp16 --jobs 1
    python scripts/megatron_lm_options.py --out OUT --table                              what is known, as a table

Every job has 4 ranks on 4 nodes and a spare and loses a node, whose ranks the spare has rehearsed, and later one
process on a healthy host. An option is one line of OUT/options.jsonl as soon as it is known: `held` (all losses,
gradient norms, learning rates and final states of all ranks equal those of the job without the plugin, and no script
raised anything), `refused` (by the plugin, by name, before training), `not here` (the job does not run on a CPU without
the plugin either), or `failed`. A rerun goes on with those that are missing (`--again`: with all that have not held).
The last line printed counts the results of those asked for; the exit code is 0 only if all of them held.

Rules of this file: it only chooses and keeps; megatron_lm/jobs.py runs, faults/job.py judges.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import make_corpus
from clusters.launched import read_json_lines
from faults.job import Verdict
from faults.plan import Kill
from megatron_lm import base_job, jobs
from megatron_lm.options import OPTIONS, Option

STEPS, WORLD = 12, 4
KILLS = [Kill(0, 1, 4, "backward", hold=3), Kill(1, -1, 7, "optimizer", "rank", rank=2, hold=6)]
EXIT_CONFIG = 78
"""As in deadpool_plugin/errors.py."""
ERROR = re.compile(r"^(?:\w+\.)*\w*(?:Error|Exception)\b.*|^pretrain_gpt\.py: error: .*", re.MULTILINE)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--checkout", type=Path, help="of NVIDIA/Megatron-LM, core_v0.16.1")
    parser.add_argument("--out", type=Path, required=True, help="folder for results, references and broken jobs")
    parser.add_argument("--only", nargs="+", choices=OPTIONS, default=list(OPTIONS))
    parser.add_argument("--jobs", type=int, default=len(OPTIONS), help="at most so many now")
    parser.add_argument("--again", action="store_true", help="repeat what has not held")
    parser.add_argument("--table", action="store_true", help="print what is known, and end")
    args = parser.parse_args()
    if not args.table and not (args.checkout and (args.checkout / "pretrain_gpt.py").is_file()):
        parser.error(f"--checkout {args.checkout}: expected the folder of a Megatron-LM checkout")
    args.out = args.out.resolve()
    return args


def words_of(option: Option, corpus: str) -> list[str]:
    """The base job's arguments with the option's; what is left out goes with its values."""
    data = ["--data-path", corpus, "--data-cache-path", f"{corpus}.indices"]
    base = [*f"{base_job.MODEL} {base_job.TRAINING} {base_job.OPTIMIZER} --train-iters {STEPS}".split(), *data]
    kept: list[str] = []
    leaving_out = False
    for word in base:
        leaving_out = word in option.without or (leaving_out and not word.startswith("--"))
        if not leaving_out:
            kept.append(word)
    return [*kept, *option.words.replace("{corpus}", corpus).split()]


def tried(name: str, checkout: Path, out: Path, corpus: str) -> dict[str, Any]:
    """The option's line."""
    option = OPTIONS[name]
    training = jobs.Training(checkout, words_of(option, corpus), out / "references", WORLD)
    line: dict[str, Any] = {"option": name, "meant": option.meant, "words": option.words, "without": option.without}
    try:
        training.undisturbed()
    except RuntimeError:
        return {**line, "result": "not here", "detail": reason(out / "references")}
    verdict, _ = training.protected(out / "jobs" / name, KILLS, slots=1)
    return {**line, **judged(verdict), "seconds": verdict.seconds}


def judged(verdict: Verdict) -> dict[str, Any]:
    if verdict.holds and verdict.bit_exact:
        return {"result": "held", "ready_s": [one.ready_s for one in verdict.outcomes]}
    if set(verdict.exit_codes) == {EXIT_CONFIG}:
        return {"result": "refused", "detail": verdict.stopped}
    problems = [one.problem for one in verdict.outcomes if one.problem]
    return {"result": "failed", "detail": verdict.hang or verdict.difference or "; ".join(problems)}


def reason(references: Path) -> str:
    """The last words of the run that failed last."""
    newest = max(references.glob("*.running"), key=lambda path: path.stat().st_mtime_ns)
    found = [match for log in sorted(newest.glob("*.log")) for match in ERROR.findall(log.read_text(errors="replace"))]
    return found[0][:300] if found else f"see {newest.name}"


def table(lines: dict[str, dict[str, Any]]) -> str:
    rows = ["| option | added to the base job | result |", "| --- | --- | --- |"]
    for name, line in lines.items():
        changed = " ".join([line["words"], *(f"without {word}" for word in line["without"])]).strip()
        detail = line.get("detail", "") if line["result"] != "held" else ""
        shown = f"{line['result']}: {detail}" if detail else line["result"]
        rows.append(f"| {OPTIONS[name].meant} | {f'`{changed}`' if changed else ''} | {shown} |")
    return "\n".join(rows) + "\n"


def known(out: Path) -> dict[str, dict[str, Any]]:
    lines = {line["option"]: line for line in read_json_lines(out / "options.jsonl")}
    return {name: lines[name] for name in OPTIONS if name in lines}


def main() -> int:
    args = parse_args()
    done = known(args.out)
    if args.table:
        print(table(done), end="")
        return 0
    missing = [n for n in args.only if n not in done or (args.again and done[n]["result"] != "held")]
    corpus = args.out / "corpus"
    if missing:
        make_corpus.ensure(corpus)
    jobs.preload(args.checkout)
    for name in missing[: args.jobs]:
        began = time.monotonic()
        line = tried(name, args.checkout, args.out, str(corpus))
        with open(args.out / "options.jsonl", "a") as file:
            file.write(json.dumps(line) + "\n")
        print(f"{name}: {line['result']} ({time.monotonic() - began:.0f} s) {line.get('detail', '')}", flush=True)
    lines = known(args.out)
    results = Counter(lines[name]["result"] if name in lines else "not run" for name in args.only)
    print(", ".join(f"{number} {result}" for result, number in results.items()), flush=True)
    return int(set(results) != {"held"})


if __name__ == "__main__":
    sys.exit(main())
