"""Run test functions in forks of one preloaded process that has no threads, whatever the pytest process has.

Rules of this file: the zygote imports torch and test modules but never uses them; it forks one process per test, which
may fork ranks in turn (support.forked). Arguments and failures travel as pickles over pipes of our own, and so does
what a test has put into its argument `figures`, if it has one.
"""

from __future__ import annotations

import atexit
import functools
import importlib.util
import inspect
import os
import pickle
import select
import signal
import struct
import subprocess
import sys
import traceback
from collections.abc import Callable
from typing import Any

from deadpool_plugin.host.proc import end_children
from deadpool_plugin.transport.linux import PR_SET_CHILD_SUBREAPER, prctl

TESTS = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
DEADLINE_S = 900.0
"""A last resort; a test's own deadline (support.forked.Fleet, support.scripted_agent) comes first and says more."""
ENDING_S = 60.0
"""The longest that what a test leaves behind may take to end."""


def in_zygote(function: Callable[..., None]) -> Callable[..., None]:
    """Decorator of a test: its body runs in a fork of the zygote."""

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> None:
        path, bound = inspect.getfile(function), inspect.signature(function).bind(*args, **kwargs)
        failure, figures = _zygote().run(path, function.__qualname__, dict(bound.arguments))
        bound.arguments.get("figures", {}).update(figures)
        if failure is not None:
            raise AssertionError(failure)

    return wrapper


class _Zygote:
    def __init__(self) -> None:
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join([TESTS, *sys.path]),
            "PYTORCH_NVML_BASED_CUDA_CHECK": "1",  # asking for a GPU must not initialise CUDA before a fork
        }
        self.process = subprocess.Popen(
            [sys.executable, "-m", "support.zygote"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment
        )
        atexit.register(self.close)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()

    def run(self, path: str, name: str, arguments: dict[str, Any]) -> tuple[str | None, dict[str, Any]]:
        """The failure's text, or None; the test's figures."""
        assert self.process.stdin is not None and self.process.stdout is not None
        _write(self.process.stdin.fileno(), (path, name, arguments))
        ready, _, _ = select.select([self.process.stdout], [], [], DEADLINE_S)
        if not ready:
            self.close()
            _zygote.cache_clear()
            return f"{name} did not end within {DEADLINE_S} s", {}
        failure, figures = _read(self.process.stdout.fileno())
        return failure, figures


@functools.lru_cache(maxsize=1)
def _zygote() -> _Zygote:
    return _Zygote()


def _write(descriptor: int, value: Any) -> None:
    data = pickle.dumps(value)
    data = struct.pack("!I", len(data)) + data
    while data:
        data = data[os.write(descriptor, data) :]


def _read(descriptor: int) -> Any:
    (size,) = struct.unpack("!I", _exactly(descriptor, 4))
    return pickle.loads(_exactly(descriptor, size))


def _exactly(descriptor: int, size: int) -> bytes:
    data = b""
    while len(data) < size:
        part = os.read(descriptor, size - len(data))
        if not part:
            raise EOFError
        data += part
    return data


@functools.cache
def _module(path: str) -> Any:
    name = os.path.splitext(os.path.basename(path))[0]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _serve(requests: int, answers: int) -> None:
    while True:
        try:
            path, name, arguments = _read(requests)
        except EOFError:
            return
        read, write = os.pipe()
        _module(path)
        if os.fork() == 0:
            prctl(PR_SET_CHILD_SUBREAPER, 1)  # what ranks leave behind, those that are killed too, is its to end
            answer = _run(path, name, arguments)
            end_children(ENDING_S)
            _write(write, answer)
            os._exit(0)
        os.close(write)
        try:
            answer = _read(read)
        except EOFError:
            answer = f"the process that ran {name} died", {}
        os.close(read)
        os.wait()
        _write(answers, answer)


def _run(path: str, name: str, arguments: dict[str, Any]) -> tuple[str | None, dict[str, Any]]:
    failure = None
    try:
        inspect.unwrap(getattr(_module(path), name))(**arguments)
    except BaseException:
        failure = traceback.format_exc()
    return failure, arguments.get("figures", {})


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    import torch.distributed  # noqa: F401 - preloaded for the forks

    answers = os.dup(1)
    os.dup2(2, 1)
    _serve(0, answers)
