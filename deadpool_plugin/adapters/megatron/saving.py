"""Megatron-core's dist_checkpointing.save and AsyncCallsQueue as calls, and what its optimizers gather to be saved.

Rules of this file: the AsyncRequest a script holds stays the same object in a redo; what it stands for is exchanged.
Writers, forked from the training process, die with it. A swap kills them before anything is removed or written again.
A rank removes what it wrote until it begins to finish the checkpoint, which needs every rank's word to be completed.
Source: megatron-core 0.16.1, strategies/async_utils.py, strategies/filesystem_async.py.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import queue as queues
import signal
import time
from collections.abc import Callable
from typing import Any

from ...errors import Unsupported
from ...transport import linux
from ...worker.calls import Call
from ...worker.copies import structure
from ...worker.patching import around, replace
from ...worker.saving import Flight, FolderSave, SaveCall, Saves
from ..common import Function

WRITERS = ("write_preloaded_data", "write_preloaded_data_multiproc", "write_preloaded_data_multithread")
"""Names of the functions that run in a writer's process; the third replaced the second in 0.17."""
LOOK_EVERY_S = 0.1  # as upstream


def install(saves: Saves) -> None:
    """Wrap what saves. Once, when torch.distributed is initialised."""
    from megatron.core.dist_checkpointing import serialization
    from megatron.core.dist_checkpointing.strategies import async_utils, filesystem_async
    from megatron.core.optimizer import distrib_optimizer, optimizer

    replace({serialization.save: saves.wrapped(serialization.save, DistCheckpointSave)})
    queue = async_utils.AsyncCallsQueue
    _wrap(saves, queue, "schedule_async_request", Schedule)
    _wrap(saves, queue, "maybe_finalize_async_calls", Finalize)
    _wrap(saves, queue, "close", QueueCall)  # it finalizes all calls first, by the function above
    for owner in (optimizer.ChainedOptimizer, distrib_optimizer.DistributedOptimizer):
        _wrap(saves, owner, "save_parameter_state", SaveCall)
    writer = filesystem_async.FileSystemWriterAsync
    for name in [name for name in WRITERS if hasattr(writer, name)]:
        setattr(writer, name, staticmethod(around(getattr(writer, name), _end_with_trainer)))
    saves.on_cancel.append(_drain_results)


def _wrap(saves: Saves, owner: type, name: str, kind: type[SaveCall]) -> None:
    setattr(owner, name, saves.wrapped(getattr(owner, name), kind))


class ShardedState(Call):
    """An optimizer's `sharded_state_dict`, some kinds of which gather the whole state. A follower gets an empty one."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.args, self.kwargs = structure((self.args, self.kwargs))  # as they are now: the script adds to them

    def __call__(self) -> Any:
        args, kwargs = structure((self.args, self.kwargs))
        return self.function(*args, **kwargs)

    def outcome(self, value: Any) -> None:
        return None

    def skipped(self, outcome: None) -> dict[str, Any]:
        return {}


def _end_with_trainer(original: Function, *args: Any, **kwargs: Any) -> Any:
    parent, trainer = os.getppid(), multiprocessing.parent_process()
    if trainer is not None:  # left behind, it would hold the dead rank's connections and files
        if not trainer.is_alive():  # an orphan has another parent
            os.kill(os.getpid(), signal.SIGKILL)
        linux.die_with_parent(signal.SIGKILL, parent)
    return original(*args, **kwargs)


def _drain_results() -> None:
    """Drop the results of cancelled writers: the next save would take them for its own."""
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    results = filesystem_async._results_queue
    with contextlib.suppress(queues.Empty):
        while results is not None:
            results.get_nowait()


def _forget_plans(strategy: Any, generation: int) -> None:
    """Forget cached plans: a new process has none, and whether ranks have one decides what they exchange."""
    if isinstance(strategy, tuple) or strategy is None:
        return
    if getattr(strategy, "deadpool_generation", 0) != generation:
        strategy.deadpool_generation = generation
        for name, nothing in vars(strategy).items():
            if name.startswith("cached_") and nothing is not None:
                setattr(strategy, name, None)
            elif name.startswith("validated_"):
                setattr(strategy, name, False)
    _forget_plans(getattr(strategy, "base_strategy", None), generation)


class DistCheckpointSave(FolderSave):
    """`dist_checkpointing.save`; asynchronous, it gives out a request whose finalize functions know their flight."""

    name = "megatron.core.dist_checkpointing.save"
    folder_argument = "checkpoint_dir"

    def __init__(self, saves: Saves, original: Function, args: tuple[Any, ...], kwargs: dict[str, Any]):
        super().__init__(saves, original, args, kwargs)
        self.path, self.rank = str(self.kwargs["checkpoint_dir"]), int(os.environ["RANK"])
        self._request, self._functions = None, FinalizeFunctions()

    def __call__(self) -> Any:
        from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest

        began = time.monotonic()
        _forget_plans(self.kwargs.get("sharded_strategy"), self._saves.groups.generation)
        is_redone, overwrites = self._overwrites is not None, self.begin_attempt()
        if is_redone:
            os.makedirs(self.path, exist_ok=True)  # the script made it, and a cancelled flight removed it
        made = self.write()
        if made is None:
            self._saves.written(self.path, began)
            return None
        if not isinstance(made, AsyncRequest):  # it goes into another library's queue, where nobody could cancel it
            raise Unsupported(
                f"an asynchronous save is carried out by {type(made).__module__.partition('.')[0]}",
                "Megatron-core's own way, whose writers a swap can end",
                "save with async_strategy='mcore' (--async-strategy mcore), or synchronously",
            )
        flight = RequestFlight(self._saves, self.path, made, keep_files=overwrites)
        self._saves.flights.append(flight)
        functions = self._functions
        functions[: functions.own] = [flight.begin, *made.finalize_fns]
        functions.own, functions.flight = 1 + len(made.finalize_fns), flight
        self._request = self._request or made._replace(finalize_fns=functions)
        return self._request

    def skipped(self, outcome: Any) -> Any:
        if not self.kwargs.get("async_sharded_save"):
            return None
        from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest

        flight = RequestFlight(self._saves, "", AsyncRequest(None, (), []), keep_files=True)
        flight.cancelled = True
        self._functions.flight = flight
        return flight.made._replace(finalize_fns=self._functions)


class FinalizeFunctions(list[Callable[[], None]]):
    """A request's finalize functions (the one mutable thing in it): the first `own` are the save's, then the user's."""

    own = 0
    flight: RequestFlight | None = None


class RequestFlight(Flight):
    """One AsyncRequest and, once scheduled, its place in a queue."""

    def __init__(self, saves: Saves, path: str, made: Any, *, keep_files: bool) -> None:
        # The files that this rank's writer will write, and the one that the coordinator has written already.
        buckets = made.async_fn_args[1] if len(made.async_fn_args) > 1 else []
        common = [os.path.join(path, "common.pt")] if os.environ.get("RANK") == "0" else []
        super().__init__(saves, path, [*(str(bucket[0]) for bucket in buckets), *common], keep_files=keep_files)
        self.made = made
        self.queue: Any = None
        self.active: Any = None
        self._stopping = False

    def begin(self) -> None:
        """Keep the files from the first finalize function on: the checkpoint may become complete."""
        self.keep_files = self.keep_files or not self.cancelled

    def stop(self) -> None:
        super().stop()
        process = getattr(self.active.async_caller, "process", None) if self.active is not None else None
        if process is not None and not self._stopping:
            self._stopping = True
            linux.kill_tree(process.pid)

    def settle(self) -> None:
        if self.active is None:
            return
        caller = self.active.async_caller
        if caller.process is not None:
            caller.process.join()
            if hasattr(caller, "_persistent_process"):  # kept by its class from 0.17 on
                caller.close(abort=True)
            caller.process = None
        for owner, name in ((self.queue, "persistent_caller"), (type(self.queue), "_persistent_caller")):
            if getattr(owner, name, None) is caller:
                setattr(owner, name, None)  # its pipes may hold half a message
        if self.active in self.queue.async_calls:
            self.queue.async_calls.remove(self.active)


class QueueCall(SaveCall):
    gated = False


class Schedule(QueueCall):
    """`schedule_async_request`, of a request that a swap may have cancelled since it was made."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self._queue, self._request = self.kwargs.values()
        self._index = self._queue.call_idx

    def __call__(self) -> int:
        queue, request = self._queue, self._request
        if getattr(queue, "persistent", False):
            # Its one writer would take the request only once all before it are written, and upstream waits for that
            # where a swap, which kills the writer, could not interrupt it (`preload_q.join`).
            queue.maybe_finalize_async_calls(blocking=True)
        flight = getattr(request.finalize_fns, "flight", None)
        if flight is None:  # made by somebody else's code
            flight = RequestFlight(self._saves, "", request, keep_files=True)
            self._saves.flights.append(flight)
        queue.call_idx = self._index
        if flight.cancelled:  # on all ranks
            queue.call_idx += 1
            return int(queue.call_idx)
        index = self.function(queue, flight.made._replace(finalize_fns=request.finalize_fns))
        flight.queue, flight.active = queue, queue.async_calls[-1]
        return int(index)

    def skipped(self, outcome: Any) -> int:
        self._queue.call_idx = outcome
        return int(outcome)


class Finalize(QueueCall):
    """`maybe_finalize_async_calls`, which looks again and again where it is told to block."""

    def __call__(self) -> list[int]:
        if not self.kwargs.get("blocking"):
            return self._look(self.kwargs)
        # A look is a collective, which a swap can interrupt. Upstream waits for a persistent writer's end without one
        # (`is_current_async_call_done`), though the swap has killed it. Queues of all ranks are equally long, so all
        # look equally often, and together whatever `no_dist` says.
        queue = self.kwargs["self"]
        finalized = self._look({"self": queue})
        while queue.async_calls:
            time.sleep(LOOK_EVERY_S)
            finalized += self._look({"self": queue})
        return finalized

    def _look(self, arguments: dict[str, Any]) -> list[int]:
        flights = list(self._saves.flights)
        waiting = [one for one in flights if isinstance(one, RequestFlight) and one.queue is arguments["self"]]
        finalized: list[int] = self.function(**arguments)
        for flight in waiting:
            if flight.active.idx in finalized:
                flight.completed()
        return finalized
