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
from typing import Any, NoReturn, TypeVar

import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, PrefixStore, Store

from ..errors import InvariantViolated, Unsupported, present
from ..transport.flight_recorder import FlightRecorder
from .collective import BLOCKING, CompletedWork, HandleWork, outputs, tensors
from .generations import Generations
from .handle import Handle, Runtime
from .network import Network
from .pairing import is_inline, note
from .record import Recorder, Replay, user_frame
from .waits import in_helper

T = TypeVar("T")
_REST_S = 30.0


class Groups:
    """One per process. Call order: `patches.install`; start or rehearse; stop_recording or finish_rehearsal; then, per
    swap, interrupt (any thread) and rebuild. Without a worker it is its own runtime."""

    def __init__(self, recording_limit_bytes: int = 1 << 20, explain_timeout_s: float = 10.0) -> None:
        self.handles: list[Handle] = []
        self.runtime: Runtime = self
        """Whoever serves what the handles are asked; a worker puts itself here before the first group is made."""
        self.generations = Generations(explain_timeout_s, self._connection_broke)
        self.calls_area = memoryview(b"")
        """Where this rank's agent looks for what the rank issues, as soon as it has an arena."""
        self._recording_limit_bytes = recording_limit_bytes
        self._lock = threading.Lock()
        self._network: Network | None = None
        self._recorder: Recorder | None = None
        self._replay: Replay | None = None
        self._training = False
        self._books: FlightRecorder | None = None
        self._created: list[tuple[int, ...]] = []
        self.bootstrap: Store | None = None

    # ---- the runtime of a process without a worker

    def collective(self, handle: Handle, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> HandleWork:
        return self.issue(handle, name, args, kwargs)

    def before_destroy(self) -> None:
        """Nobody else's end is waited for."""

    def connection_broke(self, generation: int, peers: tuple[int, ...], reason: str) -> bool:
        return False

    def give_up(self, reason: str) -> NoReturn:
        sys.exit(reason)

    # ---- start-up

    @property
    def generation(self) -> int:
        return self.generations.current

    def start(self, generation: int, store: str) -> None:
        """Begin as a live rank (RANK, WORLD_SIZE): connect groups over `store` as they are created, and record what
        their operations return. Blocks: until the store answers. Raises: GenerationChanged."""
        self.generations.enter(generation)
        rank = int(os.environ["RANK"])
        self._network = self._attempt(lambda: Network(generation, store, rank, self.generations), generation)
        self.bootstrap = PrefixStore("torch", self._network.store)
        self._recorder = Recorder(self._recording_limit_bytes)

    def rehearse(self, recording: bytes) -> None:
        """Begin as a rank's rehearsal (RANK, WORLD_SIZE), alone: operations return what `recording` has."""
        self._replay, self.bootstrap = Replay(recording), HashStore()

    def stop_recording(self) -> bytes:
        """Return the recording of everything since `start`. From here on no groups can be made.

        Blocks: for operations not yet waited for.
        """
        recorder = present(self._recorder, "stop_recording without start")
        self._recorder, self._training = None, True
        return recorder.finish(self._created)

    def finish_rehearsal(self) -> None:
        """Raises: Divergence unless everything recorded was issued."""
        present(self._replay, "finish_rehearsal without rehearse").finish()

    def fact(self, question: str, ask: Callable[[], Any]) -> Any:
        """Run `ask`, which a rehearsal could not answer, for plain data: a rehearsal is told what the rank itself
        found. Raises: Divergence if that has not asked `question` in start-up."""
        if self._replay is not None:
            return self._replay.fact(question)
        with self.unrecorded():
            answer = ask()
        if self._recorder is not None:
            self._recorder.facts.append((question, answer))
        return answer

    @contextlib.contextmanager
    def unrecorded(self) -> Iterator[None]:
        """Leave collectives inside unrecorded: a rehearsal does not issue them."""
        recorder, self._recorder = self._recorder, None
        try:
            yield
        finally:
            self._recorder = recorder

    # ---- swap

    def interrupt(self, generation: int) -> None:
        """Unblock the main thread, because `generation` begins; operations raise GenerationChanged until `rebuild`.

        Thread: any, at any time, also during `rebuild`. Does nothing for a generation already known.
        Raises: DeadpoolError if NCCL's abort does not return; the process must then be killed.
        """
        with self._lock:
            if self.generations.announce(generation) and self._network is not None:
                self._network.unblock()

    def _connection_broke(self, generation: int, reason: str) -> bool:
        network = self._network if generation == self.generation else None
        peers = network.ranks_named(reason) if network is not None else ()
        return self.runtime.connection_broke(generation, peers, reason.strip().partition("\n")[0])

    def rebuild(self, generation: int, store: str) -> None:
        """Connect every handle again, over the store of `generation`; a rehearsing process becomes live by this.

        Blocks: until all ranks do the same, however long it takes them. Raises: GenerationChanged if a newer
        generation is announced.
        """
        self.interrupt(generation)
        self.generations.check(generation)
        deadline = time.monotonic() + _REST_S

        def stop() -> bool:
            return self.generations.announced > generation or time.monotonic() > deadline

        if self._network is not None and not self._network.quiesce(stop):
            self.generations.check(generation)
            self.runtime.give_up(f"operations in flight have not ended within {_REST_S:g} s and may still write")
        handles, rank, size = list(self.handles), int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])

        def build() -> tuple[Network, list[dist.ProcessGroup]]:
            network = Network(generation, store, rank, self.generations)
            network.gather(size)
            inners = []
            for handle in handles:
                self.generations.check(generation)  # else nobody waits for this thread any more
                inners.append(network.build(handle))
            return network, inners

        network, inners = self._attempt(build, generation)
        with self._lock:
            self.generations.enter(generation)
            retired = _retired(handles, aborted=True)
            for handle, inner in zip(handles, inners, strict=True):
                handle.inner, handle.abandoned = inner, False
                handle.drop_coalescing()
            self._network, self._replay, self._recorder, self._training = network, None, None, True
            self.begin_counting()
        table = dist.distributed_c10d._world.pg_map
        for handle in self.handles:  # torch hands out each group's store to whoever asks: a living one
            if handle in table:
                table[handle] = (table[handle][0], PrefixStore(f"torch/{handle.key}", network.store))
        _retire(retired)

    def _attempt(self, function: Callable[[], T], generation: int) -> T:
        """Run `function` in a helper thread, in which an announcement after `generation` leaves it behind."""
        try:
            return in_helper(function, self.generations, generation)
        except RuntimeError as error:
            self.generations.explain(error, generation)

    def begin_counting(self) -> None:
        """Count collectives from here on, as all members of a group do: its communicator is new on all of them."""
        counted = [handle for handle in self.handles if handle.size() > 1]
        described = [(handle.key, handle.rank(), handle.size()) for handle in counted]
        self._books = FlightRecorder(self.calls_area, self.generation, described)
        for handle, book in zip(counted, self._books.records, strict=True):
            handle.calls = book

    def cut(self, step: int) -> int:
        """Sum up this rank's collectives since the newest swap at the cut of `step`; 0 before the first swap."""
        return self._books.cut(step) if self._books is not None else 0

    # ---- operations

    def issue(self, handle: Handle, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> HandleWork:
        """Issue operation `name` on whatever is behind `handle` now; may be called again after a swap.

        Raises: GenerationChanged; in a rehearsal Divergence.
        """
        if self._replay is not None:
            written = outputs(name, args, kwargs)
            source = self._replay.answer(handle.index, handle.sequence, name, written)
            handle.sequence += 1
            return CompletedWork(written, source)
        self.generations.check()
        if handle.inner is None or self._network is None:
            raise InvariantViolated(f"{handle!r} is not connected")
        if handle.calls is not None and is_inline():
            note(handle.calls, name, args, kwargs)
        fabric = self._network.fabric(handle.only_backend or _backend_for(handle, name, args, kwargs))
        try:
            work = fabric.begin(handle, (name, args, kwargs))
        except RuntimeError as error:
            self.generations.explain(error)
        if self._recorder is not None:
            self._recorder.add(handle.index, handle.sequence, name, outputs(name, args, kwargs), work)
            handle.sequence += 1
        return work

    # ---- for patches

    def create(self, given: Any, request: tuple[dict[str, str], Any]) -> Handle:
        """Make a handle, connected or a stand-in. Blocks: when live, until its members do the same.

        Args: given: what torch tells the creator of a group; request: backends by device type, and options for them.
        Raises: Unsupported in training: whoever takes a rank over later has not made it.
        """
        ranks = tuple(given.global_ranks_in_group) or tuple(range(given.group_size))
        backends, options = request
        if self._training:
            raise Unsupported(
                f"a process group of ranks {list(ranks)} was made after training had begun, at {user_frame()}",
                "all groups of the script, made by every process in the same order before the first training call",
                "make it there",
            )
        occurrence = self._created.count(ranks)  # alike on all members, which an index over all groups is not
        key = f"{ranks[0]}+{len(ranks)}.{zlib.crc32(repr(ranks).encode()):08x}.{occurrence}"
        handle = Handle(
            self.runtime, index=len(self._created), key=key, rank=given.group_rank, ranks=ranks, backends=backends,
            timeout=given.timeout, options=options, name=str(given.group_id),
        )  # fmt: skip
        if self._replay is not None:
            self._replay.group(handle.index, ranks)
        else:
            self.generations.check()
            network = present(self._network, "a group was created before Groups.start")
            handle.inner = self._attempt(lambda: network.build(handle), self.generation)
        self._created.append(ranks)
        self.handles.append(handle)
        return handle

    def forget(self, handles: list[Handle]) -> None:
        """Let go of groups that torch has destroyed."""
        gone = {id(handle) for handle in handles}
        self.handles = [handle for handle in self.handles if id(handle) not in gone]
        retired = _retired(handles, aborted=False)
        for handle in handles:
            handle.inner = None
        _retire(retired)


def _backend_for(handle: Handle, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """The backend of an operation on a group that has several: that of the device of its tensors, or of its options."""
    if name in BLOCKING:
        return "gloo"
    given = tensors((args, kwargs))
    device = given[0].device if given else getattr(kwargs.get("opts", args[0] if args else None), "device", None)
    return handle.default_backend if device is None else handle.backends[device.type]


def _retired(handles: list[Handle], *, aborted: bool) -> list[tuple[Any, bool]]:
    """The groups behind `handles`, and whether each has to be kept for ever.

    A destructor of gloo's would join a thread that is stuck in the group. One of NCCL's would abort it under members
    that still read from this one, unless it has been aborted.
    """
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
