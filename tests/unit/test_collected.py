"""Every folder of tests is run by the test command: pytest leaves some names out by itself (`dist`, `build`)."""

from fnmatch import fnmatch
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]


def test_no_folder_of_tests_has_a_name_that_pytest_leaves_out(pytestconfig):
    folders = {path.parent.name for path in TESTS.rglob("test_*.py")}
    assert {"dist", "unit"} <= folders
    assert not [name for name in folders for pattern in pytestconfig.getini("norecursedirs") if fnmatch(name, pattern)]
    assert pytestconfig.getini("testpaths") == ["tests"]
