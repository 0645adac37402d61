"""worker/output.py: what a rehearsal prints where nothing can be written, and that it is heard of all the same."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from deadpool_plugin.worker.output import Mute

REHEARSES = """
import os, resource, sys
from pathlib import Path
from deadpool_plugin.launch.script import run_script
from deadpool_plugin.worker.output import Mute
heard = os.dup(1)
resource.setrlimit(resource.RLIMIT_FSIZE, (64, 64))
mute = Mute(Path(sys.argv[1]))
code = run_script(sys.argv[2:], None, lambda reason: os.write(heard, reason.encode() + b"\\n"))
mute.lift()
print("heard again", file=sys.__stdout__)
print("heard again", flush=True)
os._exit(code)
"""
PRINTS = """
import subprocess, sys
for _ in range(100):
    print("a line of the script")
    print("another one", file=sys.stderr, flush=True)
sys.stdout.buffer.write(b"bytes")
subprocess.run(["echo", "of a child"])
"""
TEES = PRINTS + """
sys.stderr = open("tee", "w", buffering=1)
"""
FAILS = "raise RuntimeError('of the script')"


@pytest.mark.parametrize("script", [PRINTS, TEES], ids=["streams", "a_stream_of_its_own"])
@pytest.mark.parametrize("log", ["rehearsals/rank", "file/rank"], ids=["full", "not_to_be_made"])
def test_a_rehearsal_fails_for_no_disk_and_its_own_reason_is_heard(tmp_path, script, log):
    (tmp_path / "file").touch()
    (tmp_path / "s.py").write_text(script + FAILS)
    ran = subprocess.run(
        [sys.executable, "-B", "-u", "-c", REHEARSES, str(tmp_path / log), "s.py"], cwd=tmp_path, capture_output=True,
        text=True, check=False, env={"PYTHONPATH": str(Path(__file__).parents[2])},
    )  # fmt: skip
    assert ran.returncode == 1, ran.stderr
    assert ran.stdout.splitlines() == ["RuntimeError: of the script", "heard again", "heard again"]
    assert log.startswith("file") or (tmp_path / log).stat().st_size == 64


def test_the_scripts_own_stream_stays_where_it_is(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "stdout", before := sys.stdout)
    mute = Mute(tmp_path / "out")
    own = sys.stderr = open(tmp_path / "own", "w")  # noqa: SIM115
    try:
        print("private")
    finally:
        mute.lift()
    assert sys.stdout is before and sys.stderr is own and (tmp_path / "out").read_text() == "private\n"
    sys.stderr = mute._streams[1]
    own.close()
