"""`python -m deadpool_plugin.launch.standby COMMAND...`: a slot's standby process, which forks the slot's workers.

Rules of this file: nothing of the user's runs here, and no thread may exist while it forks, but for NVML's, which forks
do without. Of the processes that run the slot's rank one lives at a time: an order ends the one before, with everything
that one has left behind (orphans are reparented to us). Stand-ins live beside it, and keep their orphans themselves.
What cannot be ended is the node's end. A forked process that could not use its GPU executes this module again, with its
order in the environment. What the agent is told is how a process ended; what that means is decided elsewhere.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import os
import select
import signal
import sys
import threading
import time
import traceback
import warnings
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NoReturn

import msgspec

from ..config import load
from ..core import local
from ..host import proc
from ..host.output import say
from ..host.proc import be_the_first_to_go, end_children, reaped
from ..transport.framing import ConnectionClosed
from ..transport.linux import PR_SET_CHILD_SUBREAPER, die_with_parent, kill_tree, prctl
from ..transport.unix import LocalConnection
from ..worker.patching import before_fork
from .worker import become

DEFAULT_PRELOAD = ("torch", "torch.distributed")
ENDING_S = 60.0  # longer than a large process takes to give back what it has, on a device and in memory
_ORDER = "DEADPOOL_ORDER"
Run = Callable[[local.RunRank], object]
"""The work of a forked process."""
NVML_CHECK = "PYTORCH_NVML_BASED_CUDA_CHECK"
"""Set, it lets `torch.cuda.is_available()`, which many modules ask as they are imported, leave CUDA alone."""
_NICE = 10
_WARM_S = 60.0  # that a process which is to stand in waits for imports at most
_LOOK_S = 0.05


class Prewarm:
    """Imports what a rank has imported, and does work that it names, so that later forks start warm and share memory.

    The importing thread stands behind everything else, as a rank may run on this host. A module that initialises CUDA
    as it is imported takes it from every process forked afterwards: those begin anew. Thread: the main one, which calls
    `pause` before it forks and `resume` after.
    """

    def __init__(self) -> None:
        self._names: deque[str] | None = None
        self._pausing = threading.Event()
        self._thread: threading.Thread | None = None

    def begin(self, names: Iterable[str]) -> None:
        """Import these. Only the first call counts: later ones name little more."""
        if self._names is None:
            self._names = deque(names)
            self.resume()

    def pause(self) -> None:
        """Stop importing; no thread is left. Blocks: for the one module that is being imported."""
        if self._thread is not None:
            self._pausing.set()
            with contextlib.suppress(OSError):  # only a privileged process may hurry it up
                os.setpriority(os.PRIO_PROCESS, self._thread.native_id or 0, 0)
            self._thread.join()
            self._thread = None

    @property
    def is_under_way(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def resume(self) -> None:
        """Go on, in the process that has forked."""
        if self._names:
            self._pausing.clear()
            self._thread = threading.Thread(target=self._run, args=(self._names,), name="deadpool-prewarm")
            self._thread.start()

    def _run(self, names: deque[str]) -> None:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
        while names and not self._pausing.is_set():
            name, *call = names.popleft().split(":", 2)
            # An import that fails here (off the main thread, say) costs a later process its import, no more.
            with contextlib.suppress(Exception):
                module = importlib.import_module(name)
                if call:
                    function, argument = call
                    getattr(module, function)(argument)
        before_fork.note()


class Standby:
    """Serves orders until the agent says it is over. `ending_s`: how long what was killed may take to end."""

    def __init__(
        self, connection: LocalConnection, local_rank: int, run: Run, modules: Sequence[str], ending_s: float = ENDING_S
    ) -> None:
        self._connection, self._local_rank, self._run, self._modules = connection, local_rank, run, modules
        self._ending_s, self._pid = ending_s, os.getpid()
        self._children: dict[int, int] = {}  # their orders, by pid
        self._waiting: dict[int, tuple[local.RunRank, float]] = {}  # orders to stand in, and until when they may wait
        self._running = 0  # the order whose process runs the slot's rank, or is to; 0: all stand in
        self._prewarm = Prewarm()
        self.cuda_is_taken = False  # this process had initialised CUDA when it forked last

    def serve(self) -> NoReturn:
        prctl(PR_SET_CHILD_SUBREAPER, 1)  # orphans of our descendants become ours
        be_the_first_to_go()
        signal.signal(signal.SIGTERM, self._told_to_end)
        self._signals = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)  # it becomes readable whenever a child ends
        signal.set_wakeup_fd(self._signals[1], warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        self._connection.send(local.StandbyHello(self._local_rank))
        for name in self._modules:
            try:
                importlib.import_module(name)
            except Exception as error:  # the script's to fail on
                say(f"could not preload {name}: {error}", to=sys.stderr)
        before_fork.note()  # once, not at every fork: a page written here is copied for each process forked before
        while True:
            wait_s = _LOOK_S if self._waiting else None
            readable, _, _ = select.select([self._connection.fileno(), self._signals[0]], [], [], wait_s)
            # Modules imported before a fork are memory that processes share; nobody waits for those that stand in.
            first, until = next(iter(self._waiting.values()), (None, 0.0))
            if first is not None and (not self._prewarm.is_under_way or time.monotonic() > until):
                del self._waiting[first.order]
                self._fork(first)
            if self._signals[0] in readable:
                os.read(self._signals[0], 1 << 12)
                for pid, exit_code in reaped():
                    if (order := self._children.pop(pid, 0)) != 0:
                        if order == self._running:
                            self._running = 0
                        if not self._running:  # else what it has left behind cannot be told from the other's daemons
                            self._end()
                        self._connection.send(local.WorkerExited(order, exit_code))
            if self._connection.fileno() in readable:
                self._hear()

    def _told_to_end(self, number: int, frame: object) -> None:
        """The launcher tells everybody on its host. A script that handles that itself needs us until it has ended."""
        if os.getpid() != self._pid or not any(proc.catches(pid, number) for pid in self._children):
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    def _hear(self) -> None:
        try:
            message, _ = self._connection.recv()
        except ConnectionClosed:
            os._exit(0)
        match message:
            case local.End(exit_code):
                self._end(*self._children.values())
                os._exit(exit_code)
            case local.EndProcess(order):
                self._waiting.pop(order, None)
                for pid in [pid for pid, its in self._children.items() if its == order]:
                    del self._children[pid]
                    with self._giving_up(), contextlib.suppress(ChildProcessError):
                        kill_tree(pid, self._ending_s)
                        os.waitpid(pid, 0)
            case local.Imports(modules):
                with contextlib.suppress(zlib.error):  # what is imported beforehand is a matter of speed
                    self._prewarm.begin(zlib.decompress(modules).decode().split("\n"))
            case local.RunsRank(order):
                self._end(self._running)
                self._running = order
                if (waiting := self._waiting.pop(order, None)) is not None:
                    self._fork(waiting[0])
            case local.RunRank(order=order, stands_in=True):
                self._waiting[order] = message, time.monotonic() + _WARM_S
            case local.RunRank(order=order):
                self._end(self._running)
                self._running = order
                self._fork(message)

    def _end(self, *orders: int) -> None:
        """End these processes, and all that processes have left behind. Blocks: until their memory is given back."""
        for pid in [pid for pid, order in self._children.items() if order in orders]:
            del self._children[pid]
            os.kill(pid, signal.SIGKILL)  # at once; it takes a while to look for the others
        with self._giving_up():
            end_children(self._ending_s, spared=self._children)

    @contextlib.contextmanager
    def _giving_up(self) -> Iterator[None]:
        try:
            yield
        except TimeoutError as error:
            # One that a driver or file system does not let go would hold the slot: leave the node.
            self._connection.send(local.CannotEnd(str(error)))
            os._exit(1)

    def _fork(self, order: local.RunRank) -> None:
        self._prewarm.pause()
        me, self.cuda_is_taken = os.getpid(), has_initialised_cuda()
        sys.stdout.flush()
        sys.stderr.flush()
        with warnings.catch_warnings(action="ignore", category=DeprecationWarning):  # of NVML's thread
            child = os.fork()
        if child == 0:  # which never returns into the loop above
            try:
                die_with_parent(signal.SIGKILL, me)
                signal.set_wakeup_fd(-1)
                for number in (signal.SIGCHLD, signal.SIGTERM):
                    signal.signal(number, signal.SIG_DFL)
                for fd in (*self._signals, self._connection.fileno()):
                    os.close(fd)
                self._run(order)
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(1)
        self._children[child] = order.order
        self._prewarm.resume()


def has_initialised_cuda() -> bool:
    """Return whether this process has initialised CUDA, which no fork of it can use then."""
    try:
        driver = ctypes.CDLL("libcuda.so.1", os.RTLD_NOLOAD)  # whoever has initialised it has loaded this
    except OSError:
        return False
    # An open /dev/nvidia-uvm would tell nothing: NVML opens it, too (driver 580).
    return bool(driver.cuDeviceGetCount(ctypes.byref(ctypes.c_int())) == 0)


def torch_has_lost_devices() -> bool:
    """Return, in a forked process, whether torch refuses to use the devices here, those of AMD too."""
    torch = sys.modules.get("torch")
    # A torch built for CUDA refuses on a host without a device too, where there is nothing to lose.
    return torch is not None and torch.cuda._is_in_bad_fork() and torch.cuda.device_count() > 0


def main(script: list[str]) -> NoReturn:
    """Entry point, also for a process that was forked instead of executed (the environment says the rest)."""
    die_with_parent()
    os.environ.setdefault(NVML_CHECK, "1")
    config, local_rank = load(os.environ["DEADPOOL_CONFIG"]), int(os.environ["LOCAL_RANK"])
    if _ORDER in os.environ:
        become(config, local_rank, script, msgspec.json.decode(os.environ.pop(_ORDER), type=local.RunRank))

    def run(order: local.RunRank) -> None:
        if standby.cuda_is_taken or torch_has_lost_devices():
            # do it without anything that was imported before the fork
            say("the import of a module initialised CUDA: this process imports everything again", to=sys.stderr)
            os.environ[_ORDER] = msgspec.json.encode(order).decode()
            os.execv(sys.executable, [sys.executable, "-u", "-m", "deadpool_plugin.launch.standby", *script])
        become(config, local_rank, script, order)

    connection = LocalConnection.to(os.environ["DEADPOOL_SOCKET"])
    modules = config.preload if config.preload is not None else DEFAULT_PRELOAD
    standby = Standby(connection, local_rank, run, modules, max(config.phase_timeout_s, ENDING_S))
    standby.serve()


if __name__ == "__main__":
    main(sys.argv[1:])
