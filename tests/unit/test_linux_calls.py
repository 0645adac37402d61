"""transport/linux.py under a Python that lacks the calls, as conda-forge's and uv's do (or did)."""

from __future__ import annotations

import errno
import fcntl
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from support.descriptors import none_left_open

import deadpool_plugin
from deadpool_plugin.errors import ConfigError
from deadpool_plugin.launch import checks
from deadpool_plugin.mirror.arena import SlotPair
from deadpool_plugin.transport import linux

ENDS_LATER = [sys.executable, "-c", "import time; time.sleep(600)"]


@pytest.fixture(params=["all there", "built without"])
def python(request, monkeypatch):
    if request.param == "built without":
        for module, name in (
            (os, "memfd_create"), (os, "MFD_CLOEXEC"), (os, "MFD_ALLOW_SEALING"), (os, "pidfd_open"),
            (signal, "pidfd_send_signal"), (fcntl, "F_ADD_SEALS"), (fcntl, "F_GET_SEALS"),
        ):  # fmt: skip
            monkeypatch.delattr(module, name, raising=False)


def test_a_process_is_watched_and_ended(python):
    with subprocess.Popen(ENDS_LATER) as process:
        pidfd = linux.pidfd_open(process.pid)
        assert not os.get_inheritable(pidfd) and not linux.await_end(pidfd, 0.0)
        linux.pidfd_send_signal(pidfd, signal.SIGKILL)
        assert linux.await_end(pidfd, 20.0)
        os.close(pidfd)
    assert process.returncode == -signal.SIGKILL


def test_a_process_that_has_gone_is_said_to_have(python):
    with subprocess.Popen(ENDS_LATER) as process:
        pidfd = linux.pidfd_open(process.pid)
        process.kill()
    with pytest.raises(ProcessLookupError):
        linux.pidfd_send_signal(pidfd, signal.SIGKILL)
    with pytest.raises(ProcessLookupError):
        linux.pidfd_open(process.pid)
    os.close(pidfd)


def test_a_tree_of_processes_is_ended(python):
    process = subprocess.Popen(ENDS_LATER)
    linux.kill_tree(process.pid)
    assert process.wait() == -signal.SIGKILL


def test_slots_are_made_sealed_and_attached(python):
    pair = SlotPair.create(3, 4096, 100)
    assert "deadpool-rank3" in os.readlink(f"/proc/self/fd/{pair.fd}") and not os.get_inheritable(pair.fd)
    with pytest.raises(PermissionError):
        os.ftruncate(pair.fd, 1)
    other = SlotPair.attach(os.dup(pair.fd), 3, 4096, 100)
    pair.payload(0)[:3] = b"abc"
    assert bytes(other.payload(0)[:3]) == b"abc"
    other.close()
    pair.close()


def test_a_machine_whose_numbers_are_not_known_has_no_such_call(monkeypatch):
    monkeypatch.delattr(os, "memfd_create", raising=False)
    monkeypatch.setattr(linux, "_MEMFD_CREATE", {})
    with pytest.raises(OSError, match=os.strerror(errno.ENOSYS)):
        linux.memfd_create("x", 0)


@pytest.mark.parametrize("name", ["pidfd_open", "memfd_create"])
def test_a_kernel_without_the_calls_is_refused_before_the_start(monkeypatch, name):
    def refused(*arguments: object) -> int:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(linux, name, refused)
    with pytest.raises(ConfigError, match=rf"{name} fails on .*Operation not permitted.*expected Linux 5\.3") as caught:
        checks.check_versions({"torch": "99.0"})
    assert caught.value.exit_code == 78


def test_a_start_leaves_no_descriptor_behind(python):
    with none_left_open():
        checks.check_versions({"torch": "99.0"})


def test_nobody_else_asks_python_for_them():
    asked = re.compile(r"\b(os\.(memfd_create|MFD_|pidfd_open)|signal\.pidfd_|fcntl\.F_(\w+_SEALS|SEAL_))")
    root = Path(deadpool_plugin.__file__).parent
    found = {path.name for path in root.rglob("*.py") if asked.search(path.read_text())}
    assert found == {"linux.py"}
