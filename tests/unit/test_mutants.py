"""The bugs of scripts/faults/mutants.py and of draw_bugs.py can be put into the package as it is now."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))

import draw_bugs
from faults.mutants import MUTANTS

PACKAGE = Path(__file__).resolve().parents[2] / "deadpool_plugin"


@pytest.mark.parametrize("mutant", MUTANTS, ids=[mutant.name for mutant in MUTANTS])
def test_the_place_is_there_once_and_the_program_is_one_still(mutant):
    text = (PACKAGE / mutant.file).read_text(encoding="utf-8")
    assert text.count(mutant.old) == 1 and mutant.new != mutant.old
    ast.parse(text.replace(mutant.old, mutant.new))


def test_every_bug_has_a_name_of_its_own():
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)


def test_drawn_bugs_change_one_line_each():
    bugs = draw_bugs.drawn(21, 50)
    assert len(set(bugs)) == 50
    assert {Path(bug.file).parts[1] for bug in bugs} == set(draw_bugs.FOLDERS)
    for bug in bugs:
        lines = (PACKAGE.parent / bug.file).read_text(encoding="utf-8").splitlines()
        assert lines[bug.line - 1] == bug.before
        was = ast.dump(ast.parse("\n".join(lines)))
        lines[bug.line - 1] = bug.after
        assert ast.dump(ast.parse("\n".join(lines))) != was, bug
