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


def hello_of_a_forked_process(monkeypatch, tmp_path, is_open, answer):
    """One that was forked by the real standby process with CUDA's device open or not, and with a driver that answers
    this to who would initialise it: order, command."""
    device = (tmp_path / "nvidia-uvm").open("w")
    name = f"deadpool/test/{os.getpid()}/{tmp_path}"
    listener = listen_unix(name)
    monkeypatch.setattr(standby, "_CUDA_DEVICE", device.name if is_open else "/dev/none")
    driver = {} if answer is None else {"libcuda.so.1": SimpleNamespace(cuInit=lambda flags: answer)}
    monkeypatch.setattr(ctypes, "CDLL", lambda name, **options: driver[name])
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


@pytest.mark.parametrize(
    ("is_open", "answer", "lost"),
    [(False, 3, False), (True, 3, True), (True, None, True), (True, 0, False), (True, 100, False)],
)
def test_a_process_that_inherits_an_initialised_cuda_is_executed_anew(monkeypatch, tmp_path, is_open, answer, lost):
    before = os.environ.get(standby.NVML_CHECK)
    order, command = hello_of_a_forked_process(monkeypatch, tmp_path, is_open, answer)
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
    monkeypatch.setattr(standby, "_CUDA_CONTROL", "/nowhere")
    cuda = SimpleNamespace(_is_in_bad_fork=lambda: True, device_count=lambda: devices)
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda))
    assert standby.cuda_is_lost() is lost
