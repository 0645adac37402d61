"""Imports of a standby process before it forks, and what becomes of a forked process that these have spoilt."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from support import expect

from deadpool_plugin.core import local
from deadpool_plugin.host.proc import spawn
from deadpool_plugin.launch import standby
from deadpool_plugin.launch.standby import Prewarm
from deadpool_plugin.transport.unix import LocalConnection, listen_unix


def hello_of_a_forked_process(monkeypatch, tmp_path, answer):
    """Fork a process by the real standby process, for a driver that answers this to who counts devices, or for none
    that is loaded. Return its order, and its command."""
    name = f"deadpool/test/{os.getpid()}/{tmp_path}"
    listener = listen_unix(name)

    def loaded(name, mode):
        if answer is None:
            raise OSError(name)
        return SimpleNamespace(cuDeviceGetCount=lambda count: answer)

    monkeypatch.setattr(standby, "ctypes", SimpleNamespace(CDLL=loaded, byref=ctypes.byref, c_int=ctypes.c_int))
    monkeypatch.setenv("DEADPOOL_CONFIG", "")
    monkeypatch.setenv("DEADPOOL_SOCKET", name)
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setattr(standby, "DEFAULT_PRELOAD", ())
    pid = spawn(lambda: standby.main(["script.py"]), dict(os.environ), signal.SIGKILL)
    try:
        agent = LocalConnection(listener.accept()[0])
        assert isinstance(agent.recv()[0], local.StandbyHello)
        agent.send(local.RunRank(rank=0, env={}, order=5))
        worker = LocalConnection(listener.accept()[0])
        hello = expect(local.WorkerHello, worker.recv()[0])
        command = Path(f"/proc/{hello.pid}/cmdline").read_text().split("\0")
        return hello.order, command[-2:]
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


NOT_INITIALISED = 3


@pytest.mark.parametrize(("answer", "lost"), [(None, False), (NOT_INITIALISED, False), (0, True)])
def test_a_process_that_inherits_an_initialised_cuda_is_executed_anew(monkeypatch, tmp_path, answer, lost):
    before = os.environ.get(standby.NVML_CHECK)
    order, command = hello_of_a_forked_process(monkeypatch, tmp_path, answer)
    assert order == 5
    assert (command == ["script.py", ""]) is lost
    assert os.environ.get(standby.NVML_CHECK) == before, "the standby process's own"


def test_what_can_be_done_beforehand_is_done_after_the_imports_and_may_fail(monkeypatch):
    done: list[object] = []
    monkeypatch.setattr(standby, "learned", done.append, raising=False)
    prewarm = Prewarm()
    prewarm.begin(
        ["no_module_of_that_name", *(f"{standby.__name__}:{name}:a=/b:c" for name in ("is_not_there", "learned"))]
    )
    prewarm.pause()
    while prewarm._names:  # it was paused before it got there
        prewarm.resume()
        prewarm.pause()
    prewarm.begin([f"{standby.__name__}:learned:again"])  # another process's, which has imported the same
    assert done == ["a=/b:c"] and not prewarm.is_under_way


@pytest.mark.parametrize(("devices", "lost"), [(0, False), (1, True)])
def test_a_torch_for_cuda_loses_nothing_in_a_fork_on_a_host_without_a_device(monkeypatch, devices, lost):
    cuda = SimpleNamespace(_is_in_bad_fork=lambda: True, device_count=lambda: devices)
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda))
    assert standby.torch_has_lost_devices() is lost
