"""Starting and ending children: what they inherit, and who else may have waited for them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from deadpool_plugin.host import proc


@pytest.mark.parametrize(("before", "kept"), [(signal.SIG_IGN, "1"), (signal.SIG_DFL, "0")])
def test_a_child_ignores_the_end_of_the_terminal_if_we_were_started_so(before, kept):
    code = (
        "import os, signal, sys\n"
        "from deadpool_plugin.host.proc import spawn\n"
        "show = 'import signal; print(int(signal.getsignal(1) == signal.SIG_IGN), flush=True)'\n"
        "os.waitpid(spawn([sys.executable, '-c', show], os.environ, signal.SIGKILL), 0)"
    )
    restored = signal.signal(signal.SIGHUP, before)
    try:
        assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == kept
    finally:
        signal.signal(signal.SIGHUP, restored)


def test_a_child_that_somebody_else_has_waited_for_ends_nothing_but_itself(monkeypatch):
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    living = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
    rounds = iter([[gone.pid, living.pid], []])
    monkeypatch.setattr(proc, "children", lambda pid: next(rounds))
    proc.end_children(60.0)
    assert not os.path.exists(f"/proc/{living.pid}")
    living.wait()


def test_a_child_that_does_not_end_is_not_waited_for_for_ever(monkeypatch):
    stuck = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
    try:
        with monkeypatch.context() as patch:
            patch.setattr(proc, "children", lambda pid: [stuck.pid])
            patch.setattr(os, "kill", lambda pid, number: None)
            said = rf"process {stuck.pid} was killed and does not end \(state [RSD]\)"
            with pytest.raises(TimeoutError, match=said):
                proc.end_children(0.01)
    finally:
        stuck.kill()
        stuck.wait()


def test_a_program_that_is_none_of_ours_is_apart_and_ended_with_what_it_started(tmp_path):
    said, read_end = tmp_path / "said", os.pipe()
    show = f"yes | head -n 1; cat; ps -o sid= -p $$; sleep 1000 & echo $! > {said}.2; mv {said}.2 {said}; wait"
    pid = proc.spawn(["sh", "-c", show], os.environ, signal.SIGKILL, read_end[1], apart=True)
    os.close(read_end[1])
    with os.fdopen(read_end[0]) as output:
        assert [output.readline().strip() for _ in range(2)] == ["y", str(pid)], "no input, no broken pipe, a session"
        while not said.exists():
            assert proc.look(pid) is not None
        proc.kill_group(pid)
        assert output.read() == "", "nobody has it any more"
    assert os.waitpid(pid, 0)[1] == signal.SIGKILL
    proc.kill_group(pid)
