"""Pages say what is there: every folder is in the table; links lead somewhere; programs take the commands."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from deadpool_plugin import __version__
from deadpool_plugin.cli import main

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()
SCRIPTS = ROOT / "scripts"
READ_BY = {
    "demo.py": [SCRIPTS / "clusters" / "demo_jobs.py"],
    "demo.sh": [SCRIPTS / "clusters" / "demo_jobs.py"],
    "soak.py": [SCRIPTS / "clusters" / "demo_jobs.py"],
    "gpu_evidence.sh": [SCRIPTS / "gpu" / "evidence.py"],
    "mirror.py": [SCRIPTS / "gpu" / "checks.py"],
    "job.py": [SCRIPTS / "gpu" / "checks.py"],
}
"""Script -> where else its options are read."""


def test_the_table_of_folders_names_every_folder_of_python_files_and_no_other():
    page = (ROOT / "deadpool_plugin" / "README.md").read_text()
    named = re.findall(r"^\| `(\S+)/` \|", page, re.MULTILINE)
    files = [path for top in ("deadpool_plugin", "patches", "scripts") for path in (ROOT / top).rglob("*.py")]
    folders = {path.parent.relative_to(ROOT).as_posix() for path in files} | {"configs", "patches/megatron-lm", "tests"}
    assert sorted(named) == sorted(folders)


def pages():
    skipped = {".venv", ".venv-peers", ".git", ".cache"}
    return [path for path in sorted(ROOT.rglob("*.md")) if not skipped & set(path.relative_to(ROOT).parts)]


def anchors(page):
    """List what GitHub calls the headings of a page."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", pages(), ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(page):
    for target, anchor in re.findall(r"\]\(([^)#:]*)#?([^):]*)\)", page.read_text()):
        found = (page.parent / target).resolve() if target else page
        assert found.exists(), target
        assert not anchor or anchor in anchors(found), f"{target}#{anchor}"


def printed_commands(page):
    """The words of each command of ours on a page: in a code span, or a line of a block."""
    entry = r"(?:deadpool|python -m deadpool_plugin|(?:python |\./)scripts/[\w/]+\.(?:py|sh))"
    before = r"(?:(?:nohup|sudo|env|python|\w+=\S*) )*"
    span, line = rf"`{before}((?:{entry}|\w+\.py) [^`]+)`", rf"^[ +]*{before}({entry} .+)$"
    for found in re.findall(f"{span}|{line}", page.read_text().replace("\\\n", " "), re.MULTILINE):
        for command in "".join(found).split(" -- "):  # what netcluster.py is to run, too
            if re.match(rf"{entry}|\w+\.py", command):
                ours = command.removeprefix("python ").replace("-m deadpool_plugin ", "deadpool ")
                ours = ours.replace("HOST:PORT", "host:29500")  # a value that stands for itself would be refused
                yield re.split(r" [>&#] ", ours)[0].split()


def unknown_options(words):
    """Those that the program of a command does not take. Raises: argparse.ArgumentError for other mistakes."""
    options = {word.strip("[]").split("=")[0] for word in words if re.match(r"\[?--\w", word)}
    if words[0] != "deadpool":
        scripts = [path for path in SCRIPTS.rglob("*.*") if path.match(words[0].removeprefix("./"))]
        assert scripts, words[0]
        text = "".join(path.read_text() for path in [*scripts, *READ_BY.get(scripts[0].name, ())])
        return {option for option in options if f'"{option}"' not in text}
    if words[1] == "COMMAND":
        return set()
    if words[1] == "launch":
        return set()  # they are deepspeed's
    parser = vars(main.parser())["_subparsers"]._group_actions[0].choices[words[1]]
    parser.exit_on_error = False
    if words[2:] and not set("[]|") & set("".join(words)):
        parser.parse_args(words[2:])
    return options - set(parser._option_string_actions)


@pytest.mark.parametrize("page", pages(), ids=lambda page: page.relative_to(ROOT).as_posix())
def test_its_commands_are_ones_that_their_programs_take(page):
    wrong = [words for words in printed_commands(page) if page.name != "CHANGELOG.md" and unknown_options(words)]
    assert wrong == []


@pytest.mark.parametrize("page", pages(), ids=lambda page: page.relative_to(ROOT).as_posix())
def test_the_files_that_it_names_exist(page):
    """Also what a printed pytest shall run. The changelog names files of its time, and results those that were run."""
    if page.name == "CHANGELOG.md" or page.is_relative_to(ROOT / "scripts/results"):
        return
    folders = r"(?:deadpool_plugin|configs|patches|scripts|tests|\.ci)"
    named = re.findall(rf"(?<![\w/.])({folders}/[\w/.-]*\w)(?![*\w])", page.read_text())
    assert not [name for name in named if "DATE" not in name and not (ROOT / name).exists()]


def test_the_option_table_is_that_of_the_record():
    record = ROOT / "scripts/results/2026-11-21-megatron-lm-options.jsonl"
    newest = {line["meant"]: line["result"] for line in map(json.loads, record.read_text().splitlines())}
    page = record.with_suffix(".md").read_text()
    assert dict(re.findall(r"^\| (.+?) \| .*\| (held|not here).*\|$", page, re.MULTILINE)) == newest
    held = sum(result == "held" for result in newest.values())
    assert f"{held} of {len(newest)} options held; {len(newest) - held} do not run on a CPU." in page


def test_the_page_of_the_fault_matrices_is_that_of_their_records():
    made = subprocess.check_output([sys.executable, ROOT / "scripts/faults/table.py"], text=True)
    assert (ROOT / "scripts/results/2026-11-23-fault-matrices.md").read_text() == made


def test_the_picture_of_a_swap_is_that_of_its_events():
    record = ROOT / "scripts/results/2026-11-23-swap.jsonl"
    made = subprocess.check_output([sys.executable, ROOT / "scripts/draw_swap.py", record], text=True)
    assert record.with_suffix(".svg").read_text() == made


@pytest.mark.parametrize("forbidden", ["@@", "TODO", "FIXME"])
def test_nothing_unfinished_is_left_in_it(forbidden):
    assert forbidden not in README


def test_the_changelog_is_headed_by_the_version_and_says_nothing_twice():
    text = (ROOT / "CHANGELOG.md").read_text()
    versions = re.findall(r"^## (.+)$", text, re.MULTILINE)
    assert re.fullmatch(rf"\[{re.escape(__version__)}\] - (unreleased|\d{{4}}-\d\d-\d\d)", versions[0])
    assert all(re.fullmatch(r"\[\d[\w.]*\] - \d{4}-\d\d-\d\d", version) for version in versions[1:])
    lines = [line for line in text.splitlines() if line and not line.startswith("### ")]
    assert len(lines) == len(set(lines))


def test_the_two_commands_are_executable():
    listed = subprocess.run(["git", "ls-files", "-s", "scripts", ".ci"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("not a git checkout")
    modes = {line.split("\t")[1]: line.split()[0] for line in listed.stdout.splitlines()}
    for script in ("scripts/demo.sh", "scripts/test.sh", "scripts/setup_env.sh", "scripts/test_cuda.sh", ".ci/run"):
        assert modes[script] == "100755", script
