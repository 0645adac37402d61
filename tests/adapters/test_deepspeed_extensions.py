"""DeepSpeed's C++: the lock around a build ends with the process that holds it; a slot's processes load it once."""

import errno
import fcntl
import hashlib
import os
import signal
import socket
import sys
import sysconfig
import threading
from pathlib import Path

import pytest
from support.zygote import in_zygote
from torch.utils import file_baton

from deadpool_plugin.adapters.deepspeed import extensions
from deadpool_plugin.config import Config
from deadpool_plugin.launch import worker
from deadpool_plugin.transport.unix import LocalConnection


@pytest.fixture
def baton(tmp_path, monkeypatch):
    for name in ("try_acquire", "release"):
        monkeypatch.setattr(file_baton.FileBaton, name, getattr(file_baton.FileBaton, name))  # put back afterwards
    extensions.install()
    return lambda: file_baton.FileBaton(str(tmp_path / "lock"))


def test_a_build_is_told_before_it_begins(baton, tmp_path, capfd):
    one = baton()
    assert one.try_acquire()
    assert capfd.readouterr().err.startswith(f"[deadpool] building C++: {tmp_path.name} (minutes at")
    one.release()


def test_what_was_built_before_is_told_to_be_loaded(baton, tmp_path, capfd):
    (tmp_path / f"{tmp_path.name}.so").touch()
    one = baton()
    assert one.try_acquire()
    assert capfd.readouterr().err.startswith(f"[deadpool] loading C++: {tmp_path.name}, built before (seconds")
    one.release()


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


def acquiring(one):
    """A thread that acquires `one`."""
    thread = threading.Thread(target=one.try_acquire, daemon=True)
    thread.start()
    return thread


def test_who_waits_for_a_killed_builder_builds(baton):
    pid, one = held_by_another_process(baton), baton()
    waiting = acquiring(one)
    waiting.join(0.05)
    assert waiting.is_alive()
    kill(pid)
    waiting.join(20)
    assert not waiting.is_alive() and one.locked is not None
    one.release()
    assert not os.path.exists(one.lock_file_path)


KEPT: list[socket.socket] = []


@in_zygote
def test_what_is_built_before_torch_distributed_is_initialised_waits_for_no_killed_builder(tmp_path):
    """DeepSpeed's first build is such a one. `try_acquire` of torch says no, and its `wait` has no end."""
    ours, agents = socket.socketpair()
    KEPT.append(agents)  # where its agent has gone a worker ends, maybe before it has said how this test went
    worker._context(LocalConnection(ours), Config(), 1)
    (tmp_path / "lock").touch()
    assert file_baton.FileBaton(str(tmp_path / "lock")).try_acquire()


def test_a_file_left_by_a_process_without_us_means_nothing(baton):
    one, other = baton(), baton()
    open(one.lock_file_path, "w").close()
    assert one.try_acquire()
    waiting = acquiring(other)
    one.release()
    waiting.join(20)
    assert not waiting.is_alive() and other.locked is not None
    other.release()


def test_where_files_cannot_be_locked_torchs_own_way_stays(baton, monkeypatch):
    def flock(descriptor, operation):
        raise OSError(errno.ENOLCK, "no locks available")

    monkeypatch.setattr(fcntl, "flock", flock)
    one = baton()
    assert one.try_acquire() and not baton_is_free(one)
    one.release()
    assert baton_is_free(one)


def baton_is_free(one):
    return not os.path.exists(one.lock_file_path)


def test_what_a_process_has_loaded_its_standby_process_loads_by_the_same_name(monkeypatch):
    pytest.importorskip("deepspeed")
    from deepspeed.ops.op_builder.builder import OpBuilder

    libraries = Path(sysconfig.get_config_var("DESTSHARED")).glob("*.so")  # any that nobody has imported
    path = next(path for path in sorted(libraries) if path.name.partition(".")[0] not in {*sys.modules})
    monkeypatch.setattr(OpBuilder, "_loaded_ops", {"json": sys.modules["json"]})
    digest = hashlib.sha256(path.read_bytes()).hexdigest()[:16]
    extensions.load(f"an_op=another={path}")
    assert "an_op" not in OpBuilder._loaded_ops, "it is another file here"
    extensions.load(f"an_op={digest}={path}")
    first = OpBuilder._loaded_ops["an_op"]
    (lesson,) = extensions.beforehand()
    module, function, argument = lesson.split(":", 2)
    assert (module, function, argument) == (extensions.__name__, "load", f"an_op={digest}={path}")
    monkeypatch.setattr(OpBuilder, "_loaded_ops", {})
    extensions.load(argument)
    again = OpBuilder._loaded_ops["an_op"]
    assert again.__file__ == first.__file__ == str(path)
    extensions.load(argument)
    assert OpBuilder._loaded_ops["an_op"] is again
    monkeypatch.setattr(again, "__file__", "/removed.so")
    assert extensions.beforehand() == []
