"""The Python stack of a process that hangs, as its agent gets it: also from one that holds the interpreter lock."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from support import present

from deadpool_plugin.host.stacks import Stacks, frames_of

ENV = os.environ | {"PYTHONPATH": str(Path(__file__).resolve().parents[2])}
SCRIPT = """
import ctypes, os, sys, threading, time
from deadpool_plugin.host.stacks import write_stacks

def hang():
    if sys.argv[1] == "gil":
        ctypes.PyDLL(None).read(os.pipe()[0], ctypes.create_string_buffer(1), 1)
    os.read(os.pipe()[0], 1)

threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()
print(write_stacks(), flush=True)
hang()
"""


@pytest.fixture
def hanging(tmp_path):
    """Return what begins a process that hangs, and its stacks."""
    begun = []
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)

    def begin(how):
        process = subprocess.Popen([sys.executable, script, how], stdout=subprocess.PIPE, text=True, env=ENV)
        descriptor = int(present(process.stdout).readline())
        stacks = Stacks(os.open(f"/proc/{process.pid}/fd/{descriptor}", os.O_RDONLY), process.pid)
        begun.append((process, stacks))
        return process, stacks

    yield begin
    for process, stacks in begun:
        stacks.close()
        process.kill()
        process.wait()
        present(process.stdout).close()


def read_at_rest(stacks):
    """Read until the process, which may still be on its way there, is twice in the same line of `hang`."""
    last: tuple[str, ...] = ("",)
    frames: tuple[str, ...] = ()
    while frames != last or not frames[0].startswith("hang ("):
        last, frames = frames, frames_of(asyncio.run(stacks.read())) or ("",)
    return frames


@pytest.mark.parametrize("how", ["gil", "plain"])
def test_a_process_that_hangs_tells_where_twice(hanging, how):
    process, stacks = hanging(how)
    frames = read_at_rest(stacks)
    assert "script.py" in frames[0] and frames[-1].startswith("<module>") and process.poll() is None


def test_one_that_cannot_answer_is_described_by_its_state(hanging):
    process, stacks = hanging("plain")
    process.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
    assert asyncio.run(stacks.read()) == "no stack: its state is T"


def test_of_all_threads_the_last_is_the_main_one():
    text = (
        'Current thread 0x01 (most recent call first):\n  File "a.py", line 1 in b\n\n'
        'Thread 0x02 (most recent call first):\n  File "c.py", line 2 in d\n  File "e.py", line 3 in <module>\n'
    )
    assert frames_of(text) == ("d (c.py:2)", "<module> (e.py:3)")
