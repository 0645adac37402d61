"""The bugs of scripts/faults/mutants.py can be put into the protocol as it is now."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))

from faults.mutants import MUTANTS

PACKAGE = Path(__file__).resolve().parents[2] / "deadpool_plugin"


@pytest.mark.parametrize("mutant", MUTANTS, ids=[mutant.name for mutant in MUTANTS])
def test_the_place_is_there_once_and_the_program_is_one_still(mutant):
    text = (PACKAGE / mutant.file).read_text(encoding="utf-8")
    assert text.count(mutant.old) == 1 and mutant.new != mutant.old
    ast.parse(text.replace(mutant.old, mutant.new))


def test_every_bug_has_a_name_of_its_own():
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)
