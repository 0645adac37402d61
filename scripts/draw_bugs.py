"""Do the tests find bugs? One-line bugs drawn by a seed, and which of them a test command catches.

    python scripts/draw_bugs.py --seed 21 --bugs 10 --out bugs.jsonl -- ./scripts/test.sh -x
    python scripts/draw_bugs.py --seed 23 --bugs 60 --folders agent mirror -- .venv/bin/python scripts/simulate.py \\
        --seeds 0:5000 --until-broken

As many bugs from each of the folders of deadpool_plugin/ (FOLDERS). Each bug changes one line, in a copy of the tree
(the files of git, and .venv). There the command runs. A bug is caught if the command fails. One line of JSON for each
bug is written when its command has ended; the same words go on where they were ended. Without a command the bugs are
printed.

A bug may change nothing that matters: compare commands on the same bugs, and read those that none of them caught.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import copy
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("agent", "worker", "comm", "mirror", "adapters")
OTHER = {
    ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In, ast.And: ast.Or, ast.Or: ast.And,
    ast.Add: ast.Sub, ast.Sub: ast.Add,
}  # fmt: skip


@dataclass(frozen=True)
class Bug:
    """One line of one file, as it is and as it shall be."""

    file: str
    line: int
    kind: str
    before: str
    after: str


def drawn(seed: int, count: int, folders: Sequence[str] = FOLDERS, root: Path = ROOT) -> list[Bug]:
    """Draw as many bugs of each folder (one more of the first if `count` is no multiple), in the order of `folders`."""
    found = []
    for place, folder in enumerate(folders):
        files = sorted((root / "deadpool_plugin" / folder).rglob("*.py"))
        possible = [bug for file in files for bug in bugs_of(file.relative_to(root).as_posix(), file.read_text())]
        share = count // len(folders) + (place < count % len(folders))
        found += random.Random(f"{seed} {folder}").sample(possible, share)
    return found


def bugs_of(file: str, text: str) -> Iterator[Bug]:
    """Every bug that one line of the file can have."""
    lines, tree = text.splitlines(), ast.parse(text)
    # Python 3.11 does not know where in an f-string its parts are.
    inside = {part for whole in ast.walk(tree) if isinstance(whole, ast.JoinedStr) for part in ast.walk(whole)}
    for node in ast.walk(tree):
        place: Any = node
        if node in inside or getattr(node, "lineno", 0) != getattr(node, "end_lineno", -1):
            continue
        for kind, changed in changes(node):
            line, new = lines[place.lineno - 1].encode(), ast.unparse(changed)
            if isinstance(node, ast.expr) and not isinstance(node, ast.Constant):
                new = f"({new})"  # it may be a part of an expression that binds tighter
            after = line[: place.col_offset] + new.encode() + line[place.end_col_offset :]
            yield Bug(file, place.lineno, kind, line.decode(), after.decode())


def changes(node: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    """(kind, the node that takes its place)"""
    new: Any = copy.deepcopy(node)
    if isinstance(node, ast.Compare) and type(node.ops[0]) in OTHER:
        new.ops[0] = OTHER[type(node.ops[0])]()
        yield "another comparison", new
    elif isinstance(node, (ast.BoolOp, ast.BinOp)) and type(node.op) in OTHER:
        new.op = OTHER[type(node.op)]()
        yield "another operator", new
    elif isinstance(node, ast.Constant) and type(node.value) is int:
        new.value += 1
        yield "off by one", new
    elif isinstance(node, ast.Constant) and type(node.value) is bool:
        new.value = not node.value
        yield "the other truth value", new
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield "negation dropped", node.operand
    elif isinstance(node, ast.IfExp):
        new.body, new.orelse = node.orelse, node.body
        yield "branches swapped", new
    elif isinstance(node, ast.Call) and len(node.args) > 1 and not isinstance(node.args[1], ast.Starred):
        new.args[:2] = node.args[1], node.args[0]
        yield "arguments swapped", new
    elif isinstance(node, ast.AugAssign) or (
        isinstance(node, ast.Expr) and isinstance(node.value, (ast.Call, ast.Await))
    ):
        yield "statement dropped", ast.Pass()
    elif isinstance(node, ast.Return) and node.value is not None:
        yield "nothing returned", ast.Return()


# -- one bug after the other -------------------------------------------------------------------------------------------


def tree_with(bug: Bug, folder: Path) -> Path:
    """A copy of the tree with the bug in it; the environment is a link."""
    tree = folder / "tree"
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True).stdout
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).exists():
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, tree / name)
    (tree / ".venv").symlink_to((ROOT / ".venv").resolve())
    lines = (tree / bug.file).read_text().splitlines()
    assert lines[bug.line - 1] == bug.before, bug
    lines[bug.line - 1] = bug.after
    (tree / bug.file).write_text("\n".join([*lines, ""]))
    # Its layout shall not give it away: a command may check the format first.
    subprocess.run([ROOT / ".venv/bin/ruff", "format", "--quiet", bug.file], cwd=tree, check=True)
    return tree


def tried(bug: Bug, command: list[str], limit_s: float) -> dict[str, Any]:
    """Run the command on the bug and return what it said. One that does not end in time has caught it, by a hang."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder, open(Path(folder, "output"), "w+") as output:
        tree = tree_with(bug, Path(folder))
        process = subprocess.Popen(
            command, cwd=tree, stdout=output, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, start_new_session=True
        )
        try:
            code: int | None = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            end_all_of(tree, process)
        output.seek(0)
        said = output.read()
    failed, ill_typed = r"^(?:FAILED|ERROR) (\S+)", r"^(\S+\.py:\d+: error: .*)"
    by = re.findall(failed, said, re.MULTILINE) or re.findall(ill_typed, said, re.MULTILINE)
    if code is None:
        by = [f"no end within {limit_s:g} s"]
    return {"caught": code != 0, "by": by[:1] or said.splitlines()[-1:], "seconds": round(time.monotonic() - began)}


def end_all_of(tree: Path, process: subprocess.Popen[bytes]) -> None:
    """Kill what runs in the tree: tests put processes into sessions of their own, and a bug may have left some."""
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            inside = os.readlink(path.with_name("cwd")).startswith(str(tree)) or str(tree).encode() in path.read_bytes()
            if inside:
                os.kill(int(path.parent.name), signal.SIGKILL)
    process.wait()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--bugs", type=int, default=10)
    parser.add_argument("--folders", nargs="+", default=FOLDERS, metavar="NAME")
    parser.add_argument("--only", type=int, nargs="+", metavar="N", help="these of the bugs, counted from 0")
    parser.add_argument("--out", type=Path, default=Path("bugs.jsonl"))
    parser.add_argument("--limit-s", type=float, default=3600.0, help="longest time of one command")
    parser.add_argument("command", nargs="*", help="after --: what shall catch them, run in a copy of the tree")
    args = parser.parse_args()
    records = [json.loads(line) for line in args.out.read_text().splitlines()] if args.out.exists() else []
    bugs = dict(enumerate(drawn(args.seed, args.bugs, args.folders)))
    for number in args.only or bugs:
        bug = bugs[number]
        if not args.command:
            print(f"{number} {bug.file}:{bug.line} {bug.kind}\n    {bug.before.strip()}\n    {bug.after.strip()}")
            continue
        what = {"seed": args.seed, "bug": number, "command": args.command, **asdict(bug)}
        record = next((one for one in records if what.items() <= one.items()), None)
        if record is None:
            record = what | tried(bug, args.command, args.limit_s)
            with open(args.out, "a") as file:
                file.write(json.dumps(record) + "\n")
        result = f"caught by {record['by']}" if record["caught"] else "not caught"
        print(f"{number} {bug.file}:{bug.line} {result}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
