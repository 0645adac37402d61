"""torch.distributed.checkpoint's `save` and `async_save` as calls.

Rules of this file: an asynchronous save runs in torch's own thread, whose collectives are issued directly and end with
the generation they began in. Asking the future that a script gets is a call too: a follower gets the rank's answers,
and a swap interrupts the waiting. The future of a save that a swap cancelled is done, has no result, and tells why
through `exception()`; `result()` does not raise: ranks may see different ends of one save, and must go on alike.
"""

from __future__ import annotations

import contextlib
import ctypes
import inspect
import os
import threading
import warnings
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError, wait
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint import _async_thread_executor as executor, state_dict_saver as saver
from torch.distributed.checkpoint.planner import SavePlanner
from torch.distributed.checkpoint.stateful import Stateful

from ..errors import CheckpointLost, GenerationChanged, Unsupported
from .patching import Function, replace
from .saving import Flight, FolderSave, SaveCall, Saves, own_flight

INTERRUPT_S = 0.05
"""Between two attempts to end a writing thread: torch turns the first one into a failed write and goes on."""
LOST_REMEDY = "before naming it the latest checkpoint, ask exception() of the future, which is this error then"


class WritingStopped(BaseException):
    """Interruption of a thread that writes a cancelled checkpoint."""


def install(saves: Saves) -> None:
    """Wrap both functions wherever they were imported. Once, when torch.distributed is initialised."""
    replace({one: saves.wrapped(one, kind) for one, kind in ((saver.save, Save), (saver.async_save, AsyncSave))})
    saves.on_cancel.append(_forget_plans)


def _forget_plans() -> None:
    # A new process has no plan of earlier saves, and whether ranks have one decides what they exchange.
    for name, value in vars(SavePlanner).items():
        if name.startswith("_cached_") and isinstance(value, dict):
            value.clear()


class Save(FolderSave):
    name = "torch.distributed.checkpoint.save"
    folder_argument = "checkpoint_id"

    def __init__(self, saves: Saves, function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = inspect.signature(function).bind(*args, **kwargs).arguments
        items = given["state_dict"].items()  # as they are now: they may have moved on when it is done again
        given["state_dict"] = {name: one.state_dict() if isinstance(one, Stateful) else one for name, one in items}
        super().__init__(saves, function, (), given)
        path = given.get("checkpoint_id") or getattr(given.get("storage_writer"), "path", None)
        self.path = "" if path is None else str(path)
        self.rank = dist.get_rank(given.get("process_group")) if dist.is_initialized() else 0

    def write(self) -> Any:
        self.begin_attempt()
        return super().write()


class AsyncSave(Save):
    name = "torch.distributed.checkpoint.async_save"

    def __init__(self, saves: Saves, *given: Any) -> None:
        super().__init__(saves, *given)
        kind = self.kwargs.get("async_checkpointer_type")
        if kind is not None and kind.name != "THREAD":
            raise Unsupported(
                f"async_save with async_checkpointer_type={kind.name}, whose processes have groups of their own",
                "AsyncCheckpointerType.THREAD",
                "leave the argument out",
            )
        if self.kwargs.get("async_stager") is not None:
            raise Unsupported("async_save with an async_stager", "torch's default staging", "leave the argument out")
        self.future = SaveFuture(saves)

    def __call__(self) -> SaveFuture:
        flight = ThreadFlight(self._saves, self, keep_files=self.begin_attempt())
        self._saves.flights.append(flight)
        flight.start()
        return self.future

    def skipped(self, outcome: Any) -> SaveFuture:
        self.future.calls_back = False  # nobody knows when callbacks ran in the rank itself
        self.future.lose("this process took the rank over after the save began")
        return self.future


class ThreadFlight(Flight):
    """A save in torch's thread."""

    ends_by_itself = True

    def __init__(self, saves: Saves, save: AsyncSave, *, keep_files: bool = False) -> None:
        super().__init__(saves, save.path, keep_files=keep_files)
        self._save, self.future = save, save.future
        self._generation, self._prefix = saves.groups.generation, f"__{save.rank}_"
        self._inner: Future[Any] | None = None
        self._thread = 0

    def start(self) -> None:
        """Let torch stage and start its thread, with this flight around what runs there."""
        self.future.ended = False
        original = executor.save_wrapper

        def save_wrapper(*args: Any, **kwargs: Any) -> Any:
            own_flight.set(self)
            self._thread = threading.get_ident()
            try:
                value = original(*args, **kwargs)
            finally:  # interrupted, too: what is left takes no time, and a lock that is interrupted stays locked
                self._thread = 0
            self.future.end(value)
            self.completed()
            return value

        executor.save_wrapper = save_wrapper
        try:
            self._inner = SaveCall.write(self._save)
        except Exception as error:
            self.future.end(None, error)
            self._saves.drop(self)
            raise
        finally:
            executor.save_wrapper = original
        self._inner.add_done_callback(self._stopped)

    def _stopped(self, inner: Future[Any]) -> None:
        error = inner.exception()
        is_interrupted = self.cancelled or isinstance(error, (GenerationChanged, WritingStopped))
        if error is not None and not is_interrupted:  # torch wraps what ended a cancelled one
            self.future.end(None, error)
            self._saves.drop(self)
        self.future.release()

    def check(self) -> None:
        if self.cancelled or self._generation != self._saves.groups.generation:
            raise GenerationChanged(self._generation + 1)
        try:  # with every rank's word the coordinator can complete the checkpoint, and this rank need not hear of it
            self.keep_files = self.keep_files or bool(self._written())
        except OSError:  # nobody can look: they may be there
            self.keep_files = True

    def settle(self) -> None:
        while self._inner is not None and not wait([self._inner], INTERRUPT_S).done:
            thread = ctypes.c_ulong(self._thread)  # which that thread itself sets to 0
            if thread and not ctypes.pythonapi.PyThreadState_SetAsyncExc(thread, ctypes.py_object(WritingStopped)):
                break  # the thread itself was hit, after its work and before it could say so
        self.future.lose(f"{self.path or 'its writing'} was cancelled by a swap")

    def remove_files(self) -> None:
        self.keep_files = self.keep_files or self._save.is_complete()
        self.files = self._written()
        super().remove_files()

    def _written(self) -> list[str]:
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):  # another rank may have removed the folder
            names = os.listdir(self.path)
            return [os.path.join(self.path, name) for name in names if name.startswith(self._prefix)]
        return []


class SaveFuture(Future[Any]):
    """The future that a script gets from `async_save`: the same object when the save is cancelled and done again.

    On the script's main thread `result`, `exception` and `done` are calls, and heed no time-out. Who waits in another
    way (`concurrent.futures.wait`, a callback) waits until the save has ended in whatever way, and asks then.
    """

    def __init__(self, saves: Saves) -> None:
        super().__init__()
        self._saves, self.calls_back, self.ended = saves, True, False
        self._value: Any = None
        self._failure: BaseException | None = None

    def end(self, value: Any, failure: BaseException | None = None) -> None:
        self._value, self._failure, self.ended = value, failure, True
        self._saves.link.wake()

    def lose(self, reason: str) -> None:
        if not self.ended:
            self.end(None, CheckpointLost(f"the checkpoint was not completed: {reason}", remedy=LOST_REMEDY))
        self.release()

    def release(self) -> None:
        """Let those go on that wait in another way."""
        with contextlib.suppress(InvalidStateError):
            self.set_result(None)

    # ---- for the script

    def add_done_callback(self, fn: Callable[[Future[Any]], object]) -> None:
        """Let `fn` run in a thread of its own, on which asking is no call."""
        if self.calls_back:
            super().add_done_callback(lambda future: threading.Thread(target=fn, args=(future,)).start())

    def done(self) -> bool:
        # Before the first forward the answer is None: nobody is told.
        return self._saves.wrapped(lambda: self.ended, Question)() is not False

    def result(self, timeout: float | None = None) -> Any:
        failure = self.exception()
        if isinstance(failure, CheckpointLost):
            warnings.warn(str(failure), RuntimeWarning, stacklevel=2)
        elif failure is not None:
            raise failure
        return self._value

    def exception(self, timeout: float | None = None) -> BaseException | None:
        def answer() -> str | None:
            self._saves.link.wait_until(lambda: self.ended)
            return None if self._failure is None else str(self._failure)

        text = self._saves.wrapped(answer, Question)()
        return None if text is None else self._failure or CheckpointLost(text)


class Question(SaveCall):
    """A script's question to a SaveFuture."""

    name, gated = "asking for a saved checkpoint", False
