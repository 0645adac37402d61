"""The pages say what is there: every source file is in the file map; tables, links and commands lead somewhere."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from deadpool_plugin import __version__

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()


def source_files():
    folders = ("deadpool_plugin", "patches", "scripts", "configs")
    for path in sorted(path for folder in folders for path in (ROOT / folder).rglob("*")):
        if (
            path.suffix in (".py", ".sh", ".yaml", ".txt", ".sbatch")
            and path.name != "__init__.py"
            and path.parent.name != "results"
        ):
            yield path.relative_to(ROOT).as_posix()


def mapped_files():
    folder, found = "", set()
    block = (ROOT / "deadpool_plugin" / "README.md").read_text().split("## File map")[1].split("```")[1]
    for line in block.splitlines():
        if re.match(r"\S+/(\s|$)", line):
            folder = line.split()[0]
        elif line.startswith("    "):
            found.add(folder + line.split()[0])
    return found


def test_the_file_map_names_every_source_file_and_no_other():
    assert mapped_files() == set(source_files())


def pages():
    skipped = {".venv", ".venv-peers", ".git", ".cache"}
    return [path for path in sorted(ROOT.rglob("*.md")) if not skipped & set(path.relative_to(ROOT).parts)]


def anchors(page):
    """What GitHub calls the headings of a page."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", pages(), ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(page):
    for target, anchor in re.findall(r"\]\(([^)#:]*)#?([^):]*)\)", page.read_text()):
        found = (page.parent / target).resolve() if target else page
        assert found.exists(), target
        assert not anchor or anchor in anchors(found), f"{target}#{anchor}"


def test_every_script_it_names_exists():
    named = set(re.findall(r"scripts/[\w/]+\.(?:py|sh)", README))
    assert named and not [name for name in named if not (ROOT / name).exists()]


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
    for script in ("scripts/demo.sh", "scripts/test.sh", "scripts/setup_env.sh", ".ci/run"):
        assert modes[script] == "100755", script
