"""Recording a rank's start-up collectives, and replaying them to a process that rehearses the rank alone.

Beside them facts: what the script found out and a rehearsal would not (the world has changed, it has no state).

Rules of this file: no pickle; a recording is msgpack with raw tensor bytes. An operation is known by its group's
index and its number in that group, a fact by its question. Tensors above the limit are recorded without their values:
parameters, which the restore overwrites anyway. Indices and pickled objects are not parameters: they are recorded all
the same, up to INDICES_BYTES_MAX in all; a rank that has more cannot be rehearsed. What differs from the recording
raises Divergence and names the call.
"""

from __future__ import annotations

import itertools
import math
import os
import sys
from collections import deque
from collections.abc import Iterator
from types import FrameType
from typing import Any

import msgspec
import torch

from ..errors import Divergence
from .collective import HandleWork

_OWN = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_TORCH = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep
INDICES = frozenset({torch.int64, torch.bool})
"""Values that a rehearsal needs as it needs pickled objects: recorded beyond the limit, up to INDICES_BYTES_MAX."""
INDICES_BYTES_MAX = 64 << 20
ALIKE = "both must run the same script, arguments and versions"
OBJECTS = frozenset(
    {
        "all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list", "send_object_list",
        "recv_object_list",
    }
)  # fmt: skip
"""torch's functions that send pickled objects, as bytes. Other bytes may be parameters: DeepSpeed broadcasts views."""


class TensorRecord(msgspec.Struct, frozen=True, array_like=True):
    """One output. `data` is None if it was above the limit."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes | None


class OperationRecord(msgspec.Struct, array_like=True):
    """One collective of one group; `where` is the user's line that issued it."""

    group: int
    sequence: int
    name: str
    where: str
    shapes: list[tuple[str, tuple[int, ...]]]
    outputs: list[TensorRecord] = []
    source: int = -1

    def __str__(self) -> str:
        what = f"{self.name} {_readable(self.shapes)}"
        return f"{what}, recorded as operation {self.sequence} of group {self.group} at {self.where}"


class Recording(msgspec.Struct, array_like=True):
    """`groups` are the member ranks of every group this rank belongs to, in creation order; `facts` are questions and
    answers (plain data), in the order of asking."""

    groups: list[tuple[int, ...]] = []
    operations: list[OperationRecord] = []
    facts: list[tuple[str, Any]] = []


def encode_tensor(tensor: torch.Tensor, limit_bytes: int) -> TensorRecord:
    if tensor.numel() * tensor.element_size() > limit_bytes:
        return TensorRecord(*_signature(tensor), None)
    flat = tensor.detach().contiguous().reshape(-1)
    return TensorRecord(*_signature(tensor), flat.view(torch.uint8).cpu().numpy().tobytes())


def write_tensor(record: TensorRecord, target: torch.Tensor) -> None:
    """Copy the recorded value into `target`; nothing if the value was not recorded."""
    if record.data is None or math.prod(record.shape) == 0:
        return
    source = torch.frombuffer(bytearray(record.data), dtype=torch.uint8).view(getattr(torch, record.dtype))
    target.detach().copy_(source.view(record.shape))


def user_frame() -> str:
    """ "file:line in function" of the innermost frame that is neither torch's nor ours."""
    for frame in _frames():
        path = frame.f_code.co_filename
        if not path.startswith((_OWN, _TORCH)) and not path.endswith(os.sep + "contextlib.py"):
            return f"{path}:{frame.f_lineno} in {frame.f_code.co_name}"
    return "an unknown place"


def _frames() -> Iterator[FrameType]:
    """The frames of this thread, from the innermost one outwards."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back


def _is_needed(tensor: torch.Tensor) -> bool:
    """Return whether a process that rehearses needs what an operation, which is issued right now, gives here."""
    if tensor.dtype != torch.uint8:
        return tensor.dtype in INDICES
    inner = itertools.takewhile(lambda frame: frame.f_code.co_filename.startswith((_OWN, _TORCH)), _frames())
    return any(frame.f_code.co_name in OBJECTS for frame in inner)


class Recorder:
    """Keeps what every operation returned, in the order of issue."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes, self._indices_bytes = limit_bytes, INDICES_BYTES_MAX
        self._operations: list[OperationRecord] = []
        self._pending: dict[int, HandleWork] = {}
        self.facts: list[tuple[str, Any]] = []

    def add(self, group: int, sequence: int, name: str, outputs: list[torch.Tensor], work: HandleWork) -> None:
        """Record an operation; its values are taken when its wait succeeds."""
        record = OperationRecord(group, sequence, name, user_frame(), [_signature(tensor) for tensor in outputs])
        self._operations.append(record)
        needed = [_is_needed(tensor) for tensor in outputs]
        self._pending[id(record)] = work

        def done() -> None:
            for tensor, is_needed in zip(outputs, needed, strict=True):
                size, limit = tensor.numel() * tensor.element_size(), self._limit_bytes
                if is_needed and limit < size <= self._indices_bytes:
                    self._indices_bytes -= size
                    limit = size
                record.outputs.append(encode_tensor(tensor, limit))
            record.source = work.source_rank()
            del self._pending[id(record)]

        work.when_done(done)

    def finish(self, groups: list[tuple[int, ...]]) -> bytes:
        """The encoded recording; waits for operations nobody has waited for."""
        for work in list(self._pending.values()):
            work.wait()
        return msgspec.msgpack.encode(Recording(groups, self._operations, self.facts))


class Replay:
    """Answers every operation from a recording."""

    def __init__(self, recording: bytes) -> None:
        decoded = msgspec.msgpack.decode(recording, type=Recording)
        self._groups = decoded.groups
        self._operations = {(record.group, record.sequence): record for record in decoded.operations}
        self._facts: dict[str, deque[Any]] = {}
        for question, answer in decoded.facts:
            self._facts.setdefault(question, deque()).append(answer)

    def group(self, index: int, ranks: tuple[int, ...]) -> None:
        """Raises: Divergence unless group `index` was recorded with these members."""
        recorded = self._groups[index] if index < len(self._groups) else None
        if recorded != ranks:
            raise Divergence(
                f"the rehearsal made group {index} of ranks {list(ranks)} at {user_frame()}",
                "no such group" if recorded is None else f"ranks {list(recorded)}, as recorded",
                ALIKE,
            )

    def answer(self, group: int, sequence: int, name: str, outputs: list[torch.Tensor]) -> int:
        """Write the recorded results into `outputs`; returns the recorded sender (-1 if none).

        Raises:
            Divergence: names the call, where it was made and what is recorded instead.
        """
        record = self._operations.get((group, sequence))
        shapes = [_signature(tensor) for tensor in outputs]
        if record is None or record.name != name or record.shapes != shapes:
            raise Divergence(
                f"the rehearsal issued {name} {_readable(shapes)} as operation {sequence} of group {group} "
                f"at {user_frame()}",
                "none there, by the recording" if record is None else str(record),
                ALIKE,
            )
        del self._operations[(group, sequence)]
        for tensor, recorded in zip(outputs, record.outputs, strict=True):
            if recorded.data is None and _is_needed(tensor):
                raise Divergence(
                    f"{name} at {user_frame()} gave {_readable([_signature(tensor)])}, too large to be recorded",
                    f"indices and objects of {INDICES_BYTES_MAX >> 20} MiB in all at most, or recording_limit_mib each",
                    "raise recording_limit_mib, or let each rank make them from one seed",
                )
            write_tensor(recorded, tensor)
        return record.source

    def fact(self, question: str) -> Any:
        """Raises: Divergence if the rank has not asked it as often."""
        answers = self._facts.get(question)
        if not answers:
            raise Divergence(
                f"the rehearsal asked {question} at {user_frame()}",
                "what the rank itself asked when it started",
                ALIKE,
            )
        return answers.popleft()

    def finish(self) -> None:
        """Raises: Divergence if recorded operations were never issued."""
        for record in self._operations.values():
            raise Divergence(
                f"the rehearsal reached its first training call without {len(self._operations)} recorded operations",
                f"first {record}",
                ALIKE,
            )


def _signature(tensor: torch.Tensor) -> tuple[str, tuple[int, ...]]:
    return str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)


def _readable(shapes: list[tuple[str, tuple[int, ...]]]) -> str:
    return "[" + ", ".join(f"{dtype}{list(shape)}" for dtype, shape in shapes) + "]"
