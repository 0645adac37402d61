"""Recording a rank's start-up collectives, and replaying them to a process that rehearses the rank alone.

Beside them facts: what the script found out and a rehearsal would not (the world has changed, it has no state).

Rules of this file: no pickle; a recording is msgpack with raw tensor bytes. An operation is known by its group's
index and its number in that group, a fact by its question. Tensors above the limit are recorded without their values:
parameters, which the restore overwrites anyway. Indices and pickled objects are recorded all the same, up to
INDICES_BYTES_MAX in all; a rank that has more cannot be rehearsed.
"""

from __future__ import annotations

import itertools
import os
import sys
import traceback
from collections import defaultdict, deque
from typing import Any

import msgspec
import torch

from ..errors import Divergence
from .collective import Operation
from .fabric import HandleWork
from .handle import Handle

_OWN = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_LIBRARIES = _OWN, os.path.dirname(os.path.abspath(torch.__file__)) + os.sep
INDICES = frozenset({torch.int64, torch.bool})
"""Values that a rehearsal needs as it needs pickled objects: recorded beyond the limit, up to INDICES_BYTES_MAX."""
INDICES_BYTES_MAX = 64 << 20
ALIKE = "both must run the same script, arguments and versions"
OBJECTS = (
    "all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list", "send_object_list",
    "recv_object_list",
)  # fmt: skip
"""torch's functions that send pickled objects, as bytes. Other bytes may be parameters: DeepSpeed broadcasts views."""


class TensorRecord(msgspec.Struct, array_like=True):
    """One output. `data` is None if it was above the limit, or is not there yet."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes | None = None

    @staticmethod
    def of(tensor: torch.Tensor) -> TensorRecord:
        return TensorRecord(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))

    def write(self, target: torch.Tensor) -> None:
        """Copy the recorded value into `target`; nothing if the value was not recorded."""
        if self.data:
            source = torch.frombuffer(bytearray(self.data), dtype=getattr(torch, self.dtype))
            target.detach().copy_(source.view(self.shape))

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}"


class OperationRecord(msgspec.Struct, array_like=True):
    """One collective of one group; `where` is the user's line that issued it."""

    group: int
    sequence: int
    name: str
    where: str
    outputs: list[TensorRecord]
    source: int = -1

    def __str__(self) -> str:
        what = f"{self.name} {_listed(self.outputs)}"
        return f"{what}, recorded as operation {self.sequence} of group {self.group} at {self.where}"


class Recording(msgspec.Struct, array_like=True):
    """`groups`: the member ranks of each group, in creation order; `facts`: questions and answers, as asked."""

    groups: list[tuple[int, ...]] = []
    operations: list[OperationRecord] = []
    facts: list[tuple[str, Any]] = []


def contents(tensor: torch.Tensor) -> bytes:
    return tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()


def _listed(outputs: list[TensorRecord]) -> str:
    return "[" + ", ".join(map(str, outputs)) + "]"


def user_frame() -> str:
    """ "file:line in function" of the innermost frame that is neither torch's nor ours."""
    for frame, line in traceback.walk_stack(sys._getframe()):
        path = frame.f_code.co_filename
        if not path.startswith(_LIBRARIES) and not path.endswith(os.sep + "contextlib.py"):
            return f"{path}:{line} in {frame.f_code.co_name}"
    return "an unknown place"


def _is_needed(tensor: torch.Tensor) -> bool:
    """Return whether a process that rehearses needs what an operation, which is issued right now, gives here."""
    if tensor.dtype != torch.uint8:
        return tensor.dtype in INDICES
    codes = (frame.f_code for frame, _ in traceback.walk_stack(sys._getframe()))
    inner = itertools.takewhile(lambda code: code.co_filename.startswith(_LIBRARIES), codes)
    return any(code.co_name in OBJECTS for code in inner)


class Recorder:
    """Keeps what every operation returned, in the order of issue."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes, self._indices_bytes = limit_bytes, INDICES_BYTES_MAX
        self._recording = Recording()
        self._pending: dict[HandleWork, None] = {}
        self.facts = self._recording.facts

    def add(self, handle: Handle, operation: Operation, work: HandleWork) -> None:
        """Record an operation; its values are taken when its wait succeeds."""
        outputs = operation.outputs()
        forms = [TensorRecord.of(tensor) for tensor in outputs]
        record = OperationRecord(handle.index, handle.sequence, operation.name, user_frame(), forms)
        handle.sequence += 1
        self._recording.operations.append(record)
        needed = [_is_needed(tensor) for tensor in outputs]
        self._pending[work] = None

        def done() -> None:
            for tensor, form, is_needed in zip(outputs, forms, needed, strict=True):
                if tensor.nbytes <= self._limit_bytes:
                    form.data = contents(tensor)
                elif is_needed and tensor.nbytes <= self._indices_bytes:
                    self._indices_bytes -= tensor.nbytes
                    form.data = contents(tensor)
            record.source = work.source_rank()
            del self._pending[work]

        work.when_done(done)

    def finish(self, groups: list[tuple[int, ...]]) -> bytes:
        """The encoded recording; waits for operations nobody has waited for."""
        for work in list(self._pending):
            work.wait()
        self._recording.groups = groups
        return msgspec.msgpack.encode(self._recording)


class Replay:
    """Answers every operation from a recording. Its methods raise Divergence, which names the call, where it was made
    and what is recorded instead."""

    def __init__(self, recording: bytes) -> None:
        decoded = msgspec.msgpack.decode(recording, type=Recording)
        self._groups = decoded.groups
        self._operations = {(record.group, record.sequence): record for record in decoded.operations}
        self._facts: defaultdict[str, deque[Any]] = defaultdict(deque)
        for question, answer in decoded.facts:
            self._facts[question].append(answer)

    def group(self, index: int, ranks: tuple[int, ...]) -> None:
        """Check that group `index` was recorded with these members."""
        recorded = self._groups[index] if index < len(self._groups) else None
        if recorded != ranks:
            expected = "no such group" if recorded is None else f"ranks {list(recorded)}, as recorded"
            raise _diverged(f"made group {index} of ranks {list(ranks)} at {user_frame()}", expected)

    def answer(self, handle: Handle, operation: Operation) -> HandleWork:
        """Write the recorded results into the outputs."""
        name, at, outputs = operation.name, (handle.index, handle.sequence), operation.outputs()
        record = self._operations.get(at)
        shapes = _listed([TensorRecord.of(tensor) for tensor in outputs])
        if record is None or record.name != name or _listed(record.outputs) != shapes:
            found = f"issued {name} {shapes} as operation {at[1]} of group {at[0]} at {user_frame()}"
            raise _diverged(found, "none there, by the recording" if record is None else str(record))
        del self._operations[at]
        for tensor, recorded in zip(outputs, record.outputs, strict=True):
            if recorded.data is None and _is_needed(tensor):
                raise Divergence(
                    f"{name} at {user_frame()} gave [{recorded}], too large to be recorded",
                    f"indices and objects of {INDICES_BYTES_MAX >> 20} MiB in all at most, or recording_limit_mib each",
                    "raise recording_limit_mib, or let each rank make them from one seed",
                )
            recorded.write(tensor)
        handle.sequence += 1
        return HandleWork(operation, record.source)

    def fact(self, question: str) -> Any:
        """The answer, which the rank itself has found as often."""
        if not self._facts[question]:
            raise _diverged(f"asked {question} at {user_frame()}", "what the rank itself asked when it started")
        return self._facts[question].popleft()

    def finish(self) -> None:
        """Check that every recorded operation was issued."""
        for first in self._operations.values():
            missing = f"reached its first training call without {len(self._operations)} recorded operations"
            raise _diverged(missing, f"first {first}")


def _diverged(what: str, expected: str) -> Divergence:
    return Divergence(f"the rehearsal {what}", expected, ALIKE)
