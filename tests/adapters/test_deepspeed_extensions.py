"""The lock around a build of DeepSpeed's C++ ends with the process that holds it."""

import os
import signal
import threading

import pytest
from torch.utils import file_baton

from deadpool_plugin.adapters.deepspeed import extensions


@pytest.fixture
def baton(tmp_path, monkeypatch):
    for name in ("try_acquire", "wait", "release"):
        monkeypatch.setattr(file_baton.FileBaton, name, getattr(file_baton.FileBaton, name))  # put back afterwards
    extensions.install()
    return lambda: file_baton.FileBaton(str(tmp_path / "lock"))


def held_by_another_process(baton):
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.write(write, b"y" if baton().try_acquire() else b"n")
        signal.pause()
        os._exit(0)
    assert os.read(read, 1) == b"y"
    return pid


def kill(pid):
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


def test_a_killed_builder_leaves_no_lock(baton):
    pid = held_by_another_process(baton)
    assert not baton().try_acquire()
    kill(pid)
    next_one = baton()
    assert next_one.try_acquire()
    next_one.release()
    assert not os.path.exists(next_one.lock_file_path)


def test_who_waits_for_a_killed_builder_goes_on(baton):
    pid = held_by_another_process(baton)
    waiting = threading.Thread(target=lambda: baton().wait(), daemon=True)
    waiting.start()
    kill(pid)
    waiting.join(20)
    assert not waiting.is_alive()


def test_a_file_left_by_a_process_without_us_means_nothing(baton):
    one = baton()
    open(one.lock_file_path, "w").close()
    assert one.try_acquire()
    assert not baton().try_acquire()
    one.release()
    assert baton().try_acquire()
