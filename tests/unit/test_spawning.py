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
