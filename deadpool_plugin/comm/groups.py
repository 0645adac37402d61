"""The process-wide registry of handles: live, recording, rehearsing, interrupted, rebuilt.

Rules of this file: operations come from whatever thread torch issues them in (asynchronous saves and autograd have
their own), `interrupt` from any, everything else is the main thread's. `interrupt` and the moment a rebuilt network
becomes the current one share a lock, so a late interruption cannot cut the new generation's connections. An inner
group with a stuck operation is kept for ever; the others are dropped in a thread of their own, because a destructor
that hangs must not hang anybody else. Whatever waits for peers inside of a library, and cannot be cut, runs in a thread
that an announcement leaves behind.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any, NoReturn

import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, PrefixStore, Store

from ..errors import GenerationChanged, InvariantViolated, Unsupported, present
from ..transport.flight_recorder import FlightRecorder
from .collective import BATCH, BLOCKING, CompletedWork, Operation, outputs, tensors
from .fence import Fence
from .handle import Handle
from .network import Network
from .pairing import is_inline, note
from .patches import Patches
from .record import Recorder, Replay, user_frame
from .waits import ABANDON_S, Abandoned, BatchWork, SwapWork, in_helper

Dispatch = Callable[[Handle, str, tuple[Any, ...], dict[str, Any]], Any]

_UNFINISHED_MAX = 512
_REST_S = 30.0
_LEAVE_S = 0.3
"""For threads in the middle of issuing an operation over NCCL, before it is aborted under them."""


def _issue(handle: Handle, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return handle.issue(name, args, kwargs)


class Groups:
    """One per process. Call order: install; start or rehearse; stop_recording or finish_rehearsal; then, per swap,
    interrupt (any thread) and rebuild.

    `dispatch(handle, name, args, kwargs)` is called for every operation and returns its Work; by default it issues.
    `on_destroy` is called before torch's groups are destroyed, while they still work; `give_up` ends this process,
    which is then replaced.
    """

    def __init__(self, recording_limit_bytes: int = 1 << 20, explain_timeout_s: float = 10.0) -> None:
        self.handles: list[Handle] = []
        self.dispatch: Dispatch = _issue
        self.on_destroy: Callable[[], None] = lambda: None
        self.give_up: Callable[[str], NoReturn] = sys.exit
        self._recording_limit_bytes = recording_limit_bytes
        self._fence = Fence(explain_timeout_s)
        self._fence.on_broken = self._connection_broke
        self.on_broken: Callable[[int, tuple[int, ...], str], bool] = lambda generation, peers, reason: False
        """Told of a connection that broke: its generation, to which ranks it may have led, and what torch said."""
        self._lock = threading.Lock()
        self._network: Network | None = None
        self._recorder: Recorder | None = None
        self._replay: Replay | None = None
        self._training = False
        self._books: FlightRecorder | None = None
        self.calls_area = memoryview(b"")
        """Where this rank's agent looks for what the rank issues, as soon as it has an arena."""
        self._created: list[tuple[int, ...]] = []
        self._unfinished: set[SwapWork] = set()
        self._issuing: set[int] = set()
        """Threads that may be in a communication library just now."""
        self._bootstrap: Store | None = None

    # ---- life

    @property
    def generation(self) -> int:
        return self._fence.current

    def install(self) -> None:
        """From here on torch.distributed makes handles, whatever backend it is asked for."""
        Patches(self).install()

    def start(self, generation: int, store: str) -> None:
        """This process is a live rank (RANK, WORLD_SIZE): groups are connected over `store` as they are created, and
        what their operations return is recorded. Blocks: until the store answers. Raises: GenerationChanged."""
        self._fence.enter(generation)
        self._network = self._attempt(lambda: Network(generation, store, _own_rank()), generation)
        self._bootstrap = PrefixStore("torch", self._network.store)
        self._recorder = Recorder(self._recording_limit_bytes)

    def rehearse(self, recording: bytes) -> None:
        """This process rehearses a rank (RANK, WORLD_SIZE) alone: operations return what `recording` has."""
        self._replay, self._bootstrap = Replay(recording), HashStore()

    def stop_recording(self) -> bytes:
        """The recording of everything since `start`; recording ends, and with it the time when groups can be made.

        Blocks: for operations not yet waited for.
        """
        recorder = present(self._recorder, "stop_recording without start")
        self._recorder, self._training = None, True
        return recorder.finish(self._created)

    def fact(self, question: str, ask: Callable[[], Any]) -> Any:
        """Run `ask`, which a rehearsal could not answer, for plain data: a rehearsal is told what the rank itself
        found. Raises: Divergence if that has not asked `question` in start-up."""
        if self._replay is not None:
            return self._replay.fact(question)
        with self.unrecorded():
            answer = ask()
        if self._recorder is not None:
            self._recorder.fact(question, answer)
        return answer

    @contextlib.contextmanager
    def unrecorded(self) -> Iterator[None]:
        """Leave collectives inside unrecorded: a rehearsal does not issue them."""
        recorder, self._recorder = self._recorder, None
        try:
            yield
        finally:
            self._recorder = recorder

    def finish_rehearsal(self) -> None:
        """Raises: Divergence unless everything recorded was issued."""
        present(self._replay, "finish_rehearsal without rehearse").finish()

    # ---- swap

    def interrupt(self, generation: int) -> None:
        """`generation` begins: unblock the main thread; operations raise GenerationChanged until it is rebuilt.

        Thread: any, at any time, also during `rebuild`. Does nothing for a generation already known.
        Raises: DeadpoolError if NCCL's abort does not return; the process must then be killed.
        """
        with self._lock:
            if self._fence.announce(generation) and self._network is not None:
                if self._network.has_nccl:
                    self._let_issuers_leave()
                self._network.unblock()

    def _let_issuers_leave(self) -> None:
        """Nobody comes in any more; one that is caught in there is aborted all the same. Blocks: _LEAVE_S at most."""
        deadline = time.monotonic() + _LEAVE_S
        while self._issuing and time.monotonic() < deadline:
            time.sleep(0.001)

    def _connection_broke(self, generation: int, reason: str) -> bool:
        network = self._network
        known = network is not None and generation == self._fence.current
        peers = network.ranks_named(reason) if network is not None and known else ()
        return self.on_broken(generation, peers, reason.strip().partition("\n")[0])

    def rebuild(self, generation: int, store: str) -> None:
        """Connect every handle again, over the store of `generation`; a rehearsing process becomes live by this.

        Blocks: until all ranks do the same, however long it takes them. Raises: GenerationChanged if a newer
        generation is announced.
        """
        self.interrupt(generation)
        if self._fence.announced > generation:
            raise GenerationChanged(self._fence.announced)
        self._settle(generation)
        rank, handles = _own_rank(), list(self.handles)
        size = int(os.environ["WORLD_SIZE"])

        def build() -> tuple[Network, list[dist.ProcessGroup]]:
            network = Network(generation, store, rank)
            network.gather(size)
            inners = []
            for handle in handles:
                if self._fence.announced > generation:  # nobody waits for this thread any more
                    raise GenerationChanged(self._fence.announced)
                inners.append(network.build(handle))
            return network, inners

        network, inners = self._attempt(build, generation)
        with self._lock:
            self._fence.enter(generation)
            retired = _retired(handles, aborted=True)
            for handle, inner in zip(handles, inners, strict=True):
                handle.inner, handle.abandoned = inner, False
                handle.drop_coalescing()
            self._network, self._replay, self._recorder, self._training = network, None, None, True
            self._issuing = set()  # whoever is left behind in there is waited for no more
            self._note_calls(generation, handles)
        self._refresh_stores(network.store)
        _retire(retired)

    def _note_calls(self, generation: int, handles: list[Handle]) -> None:
        """All members of a group begin to count in it here: its communicator is new on all of them."""
        counted = [handle for handle in handles if handle.size() > 1]
        described = [(handle.key, handle.rank(), handle.size()) for handle in counted]
        self._books = FlightRecorder(self.calls_area, generation, described)
        for handle, book in zip(counted, self._books.records, strict=True):
            handle.calls = book

    def cut(self, step: int) -> int:
        """`step` is complete: what this rank's collectives since the newest swap come to; 0 before the first one."""
        return self._books.cut(step) if self._books is not None else 0

    def _attempt(self, function: Callable[[], Any], generation: int) -> Any:
        """`function` in a helper thread; left behind there when a generation after `generation` is announced."""
        try:
            return in_helper(function, lambda: self._fence.announced > generation)
        except Abandoned:
            raise GenerationChanged(self._fence.announced) from None
        except RuntimeError as error:
            self._fence.explain(error, after=generation)

    def _settle(self, generation: int) -> None:
        """Raises: GenerationChanged if one newer than `generation` is announced."""
        began = time.monotonic()
        for work in list(self._unfinished):
            work.settle(began + ABANDON_S)
        self._unfinished.clear()

        def stop() -> bool:
            return self._fence.announced > generation or time.monotonic() > began + _REST_S

        if self._network is not None and not self._network.await_rest(stop):
            if self._fence.announced > generation:
                raise GenerationChanged(self._fence.announced)
            self.give_up(f"operations in flight have not ended within {_REST_S:g} s and may still write")

    def _refresh_stores(self, store: Store) -> None:
        """Give torch a living store for each group, for those who ask it for one."""
        table = dist.distributed_c10d._world.pg_map
        for handle in self.handles:
            if handle in table:
                table[handle] = (table[handle][0], PrefixStore(f"torch/{handle.key}", store))

    # ---- operations

    def issue(self, handle: Handle, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """`Handle.issue`."""
        if self._replay is not None:
            written = outputs(name, args, kwargs)
            sequence, handle.sequence = handle.sequence, handle.sequence + 1
            return CompletedWork(written, self._replay.answer(handle.index, sequence, name, written))
        self._fence.check()
        if handle.calls is not None and is_inline():
            note(handle.calls, name, args, kwargs)
        try:
            work = self._issue_live(handle, name, args, kwargs)
        except RuntimeError as error:
            self._fence.explain(error)
        if self._recorder is not None:
            sequence, handle.sequence = handle.sequence, handle.sequence + 1
            self._recorder.add(handle.index, sequence, name, outputs(name, args, kwargs), work)
        return work

    def _issue_live(self, handle: Handle, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        inner, network = handle.inner, self._network
        if inner is None or network is None:
            raise InvariantViolated(f"{handle!r} is not connected")
        if name in BLOCKING:
            return self._issue_blocking(handle, lambda: getattr(inner, name)(*args, **kwargs))
        backend, operation = _backend_for(handle, args, kwargs), (name, args, kwargs)
        if name == BATCH and backend == "gloo":
            works = [self._issue_live(handle, *part) for part in args[0]]
            return BatchWork(works, outputs(*operation))
        thread = threading.get_ident()
        self._issuing.add(thread)
        try:
            self._fence.check()  # after the line before: who passes here is waited for
            generation, fabric = self._fence.current, network.fabric(backend)
            work = fabric.begin(inner, operation, self._aside)
            if work is None:  # it was synchronous; an abort ends it without an error, a barrier though nobody came
                self._fence.check_since(generation)
            return self._wrap(work, handle, operation, fabric.wait_style(name))
        finally:
            self._issuing.discard(thread)

    def _aside(self, function: Callable[[], Any]) -> Any:
        """Run `function`, which waits for peers inside of a library, in a thread that an announcement leaves there."""
        generation = self._fence.current

        def inside() -> Any:
            thread = threading.get_ident()
            self._issuing.add(thread)
            try:
                return function()
            finally:
                self._issuing.discard(thread)

        try:
            return in_helper(inside, lambda: self._fence.announced > generation)
        except Abandoned:
            raise GenerationChanged(self._fence.announced) from None

    def _issue_blocking(self, handle: Handle, function: Callable[[], Any]) -> CompletedWork:
        try:
            in_helper(function, lambda: self._fence.announced > self._fence.current, ABANDON_S)
        except Abandoned:
            handle.abandoned = True
            raise GenerationChanged(self._fence.announced) from None
        return CompletedWork()

    def _wrap(self, inner: Any, handle: Handle, operation: Operation, style: str) -> SwapWork | CompletedWork:
        if inner is None:  # NCCL's synchronous operations: whatever comes on the stream comes after them
            return CompletedWork(outputs(*operation))
        if len(self._unfinished) > _UNFINISHED_MAX:
            for work in [work for work in list(self._unfinished) if work.at_rest()]:
                self._unfinished.discard(work)
        return SwapWork(inner, handle, self._fence, operation, style=style, registry=self._unfinished)

    # ---- for patches

    def bootstrap(self) -> Store:
        return present(self._bootstrap, "init_process_group before Groups.start or Groups.rehearse")

    def create(
        self, rank: int, ranks: tuple[int, ...], backends: dict[str, str], timeout: timedelta, options: Any, name: str
    ) -> Handle:
        """A new handle, connected or a stand-in. Blocks: when live, until its members do the same.

        Raises: Unsupported in training: whoever takes a rank over later has not made it.
        """
        if self._training:
            raise Unsupported(
                f"a process group of ranks {list(ranks)} was made after training had begun, at {user_frame()}",
                "all groups of the script, made by every process in the same order before the first training call",
                "make it there",
            )
        occurrence = self._created.count(ranks)  # alike on all members, which an index over all groups is not
        key = f"{ranks[0]}+{len(ranks)}.{zlib.crc32(repr(ranks).encode()):08x}.{occurrence}"
        handle = Handle(
            self, index=len(self._created), key=key, rank=rank, ranks=ranks, backends=backends, timeout=timeout,
            options=options, name=name,
        )  # fmt: skip
        if self._replay is not None:
            self._replay.group(handle.index, ranks)
        else:
            self._fence.check()
            network = present(self._network, "a group was created before Groups.start")
            handle.inner = self._attempt(lambda: network.build(handle), self._fence.current)
        self._created.append(ranks)
        self.handles.append(handle)
        return handle

    def forget(self, handles: list[Handle]) -> None:
        """torch destroyed these groups."""
        gone = {id(handle) for handle in handles}
        self.handles = [handle for handle in self.handles if id(handle) not in gone]
        retired = _retired(handles, aborted=False)
        for handle in handles:
            handle.inner = None
        _retire(retired)


def _backend_for(handle: Handle, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    if handle.only_backend is not None:
        return handle.only_backend
    options = kwargs.get("opts", args[0] if args else None)
    given = tensors((args, kwargs))
    device = given[0].device if given else getattr(options, "device", None)
    return handle.default_backend if device is None else handle.backends[device.type]


def _retired(handles: list[Handle], *, aborted: bool) -> list[tuple[dist.ProcessGroup, bool]]:
    """The groups behind `handles`, and whether each has to be kept for ever: a destructor would join a thread that is
    stuck in it (gloo), or abort it under members that still read from this one (NCCL, unless that has been done)."""
    return [
        (handle.inner, handle.abandoned or (not aborted and "nccl" in handle.backends.values()))
        for handle in handles
        if handle.inner is not None
    ]


def _retire(inners: list[tuple[Any, bool]]) -> None:
    """Let go of replaced inner groups; those to be kept for ever are never destroyed, not even at exit."""
    for inner in [inner for inner, keep in inners if keep]:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(inner))
    droppable = [inner for inner, keep in inners if not keep]
    inners.clear()
    if droppable:
        threading.Thread(target=droppable.clear, name="deadpool-retire", daemon=True).start()


def _own_rank() -> int:
    return int(os.environ["RANK"])
