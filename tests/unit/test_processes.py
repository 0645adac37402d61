"""Starting and ending children: what they inherit, and who else may have waited for them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from deadpool_plugin.launch import processes


@pytest.mark.parametrize(("before", "kept"), [(signal.SIG_IGN, "1"), (signal.SIG_DFL, "0")])
def test_a_child_ignores_the_end_of_the_terminal_if_we_were_started_so(before, kept):
    code = (
        "import os, signal, sys\n"
        "from deadpool_plugin.launch.processes import spawn\n"
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
    monkeypatch.setattr(processes, "_children", lambda: next(rounds))
    processes.end_children()
    assert not os.path.exists(f"/proc/{living.pid}")
    living.wait()
