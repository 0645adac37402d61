"""The demonstration says how far it is and what failed: its setup (with a stand-in for Python), lines, pictures."""

import os
import pty
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
STAND_IN = """#!/usr/bin/env bash
case $* in
    --version) echo Python 3.11.0 ;;
    "-m venv "*) mkdir -p "$3/bin" && cp "$0" "$3/bin/python" ;;
    *" pip "*)
        echo "Collecting torch"
        [[ $* != *"$FAILS"* ]] || { echo "ERROR: no such wheel"; exit 7; }
        until [[ -z $SEEN || -e $SEEN ]]; do read -r -t 0.1 <> <(:) || true; done ;;
esac
"""


@pytest.fixture
def setup(tmp_path):
    """Runs the setup in an empty repository, where Python is a stand-in; `stderr` gets its progress."""
    (tmp_path / "scripts").mkdir()
    for name in ("setup_env.sh", "requirements-cpu.txt"):
        shutil.copy(ROOT / "scripts" / name, tmp_path / "scripts")
    stand_in = tmp_path / "python"
    stand_in.write_text(STAND_IN)
    stand_in.chmod(0o755)

    def start(stderr, fails="nothing", seen=""):
        environ = os.environ | {"PYTHON": str(stand_in), "FAILS": fails, "SEEN": str(seen)}
        return subprocess.Popen([tmp_path / "scripts" / "setup_env.sh"], env=environ, stderr=stderr)

    return start


def test_setup_prints_plain_lines_into_a_file_and_nothing_the_second_time(setup, tmp_path):
    with (tmp_path / "first.txt").open("wb") as log:
        assert setup(log).wait() == 0
    said = (tmp_path / "first.txt").read_bytes()
    assert b"\r" not in said and b"\x1b" not in said
    assert said.endswith(b"setup: done\n") and b"2/2 everything else: done after" in said
    with (tmp_path / "second.txt").open("wb") as log:
        assert setup(log).wait() == 0
    assert (tmp_path / "second.txt").read_bytes() == b""


def test_setup_names_the_part_that_failed_and_its_log_and_begins_anew_the_next_time(setup, tmp_path):
    with (tmp_path / "said.txt").open("wb") as log:
        assert setup(log, fails="requirements-cpu.txt").wait() == 1
    said = (tmp_path / "said.txt").read_text()
    assert "ERROR: no such wheel" in said
    assert (
        f"FAILED: 2/2 everything else: pip ended with exit code 7; all it said is in {tmp_path}/.venv/setup.log" in said
    )
    with (tmp_path / "again.txt").open("wb") as log:
        assert setup(log).wait() == 0


def test_setup_on_a_terminal_says_in_one_changing_line_what_pip_does(setup, tmp_path):
    """The stand-in for pip ends only when that line has been seen."""
    ours, theirs = pty.openpty()
    process = setup(theirs, seen=tmp_path / "seen")
    os.close(theirs)
    said = b""
    while b"MB; Collecting torch" not in said:
        said += os.read(ours, 4096)
    (tmp_path / "seen").touch()
    try:
        while more := os.read(ours, 4096):
            said += more
    except OSError:  # the terminal's other end is closed
        pass
    os.close(ours)
    assert process.wait() == 0
    assert said.count(b"\r\x1b[K") >= 2 and said.endswith(b"setup: done\r\n")
