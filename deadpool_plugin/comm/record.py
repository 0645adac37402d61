"""Recording a rank's start-up collectives, and replaying them to a process that rehearses the rank alone.

Beside them facts: what the script found out and a rehearsal would not (the world has changed, it has no state).

Rules of this file: no pickle; a recording is msgpack with raw tensor bytes. An operation is known by its group's
index and its number in that group, a fact by its question. Tensors above the limit are recorded without their values:
parameters, which the restore overwrites anyway. Indices and pickled objects are not parameters: they are recorded all
the same, up to INDICES_BYTES_MAX in all; a rank that has more cannot be rehearsed. What differs from the recording
raises Divergence and names the call.
"""

from __future__ import annotations

import math
import os
import sys
from collections import deque
from types import FrameType
from typing import Any

import msgspec
import torch

from ..errors import Divergence

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


class Recording(msgspec.Struct, array_like=True):
    """`groups` are the member ranks of every group this rank belongs to, in creation order; `facts` are questions and
    answers (plain data), in the order of asking."""

    groups: list[tuple[int, ...]] = []
    operations: list[OperationRecord] = []
    facts: list[tuple[str, Any]] = []


def encode_tensor(tensor: torch.Tensor, limit_bytes: int) -> TensorRecord:
    dtype, shape = _signature(tensor)
    if tensor.numel() * tensor.element_size() > limit_bytes:
        return TensorRecord(dtype, shape, None)
    flat = tensor.detach().contiguous().reshape(-1)
    return TensorRecord(dtype, shape, flat.view(torch.uint8).cpu().numpy().tobytes())


def write_tensor(record: TensorRecord, target: torch.Tensor) -> None:
    """Copy the recorded value into `target`; nothing if the value was not recorded."""
    if record.data is None or math.prod(record.shape) == 0:
        return
    source = torch.frombuffer(bytearray(record.data), dtype=torch.uint8).view(getattr(torch, record.dtype))
    target.detach().copy_(source.view(record.shape))


def user_frame() -> str:
    """ "file:line in function" of the innermost frame that is neither torch's nor ours."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        path = frame.f_code.co_filename
        if not path.startswith((_OWN, _TORCH)) and not path.endswith(os.sep + "contextlib.py"):
            return f"{path}:{frame.f_lineno} in {frame.f_code.co_name}"
        frame = frame.f_back
    return "an unknown place"


def _is_needed(tensor: torch.Tensor) -> bool:
    """Return whether a process that rehearses needs what an operation, which is issued right now, gives here."""
    return tensor.dtype in INDICES or (tensor.dtype == torch.uint8 and _carries_objects())


def _carries_objects() -> bool:
    """Return whether one of OBJECTS is what issues an operation right now."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith((_OWN, _TORCH)):
        if frame.f_code.co_name in OBJECTS:
            return True
        frame = frame.f_back
    return False


class Recorder:
    """Keeps what every operation returned, in the order of issue."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes, self._indices_bytes = limit_bytes, INDICES_BYTES_MAX
        self._operations: list[OperationRecord] = []
        self._facts: list[tuple[str, Any]] = []
        self._pending: dict[int, tuple[Any, OperationRecord]] = {}

    def add(self, group: int, sequence: int, name: str, outputs: list[torch.Tensor], work: Any) -> None:
        """Record an operation; its values are taken when its wait succeeds (a Work without `on_done` is done)."""
        record = OperationRecord(group, sequence, name, user_frame(), [_signature(tensor) for tensor in outputs])
        self._operations.append(record)
        needed = [_is_needed(tensor) for tensor in outputs]
        if not hasattr(work, "on_done"):
            self._fill(record, outputs, needed, work)
            return
        self._pending[id(record)] = (work, record)

        def done(finished: Any) -> None:
            self._fill(record, outputs, needed, finished)
            self._pending.pop(id(record), None)

        work.on_done = done

    def finish(self, groups: list[tuple[int, ...]]) -> bytes:
        """The encoded recording; waits for operations nobody has waited for."""
        for work, _ in list(self._pending.values()):
            work.wait()
        return msgspec.msgpack.encode(Recording(groups, self._operations, self._facts))

    def fact(self, question: str, answer: Any) -> None:
        self._facts.append((question, answer))

    def _fill(self, record: OperationRecord, outputs: list[torch.Tensor], needed: list[bool], work: Any) -> None:
        limits = map(self._limit_of, outputs, needed)
        record.outputs = [encode_tensor(tensor, limit) for tensor, limit in zip(outputs, limits, strict=True)]
        record.source = work.source_rank()

    def _limit_of(self, tensor: torch.Tensor, needed: bool) -> int:
        size = tensor.numel() * tensor.element_size()
        if not needed or not self._limit_bytes < size <= self._indices_bytes:
            return self._limit_bytes
        self._indices_bytes -= size
        return size


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
        if record is None or record.name != name or [tuple(shape) for shape in record.shapes] != shapes:
            raise Divergence(
                f"the rehearsal issued {name} {_readable(shapes)} as operation {sequence} of group {group} "
                f"at {user_frame()}",
                self._recorded(record),
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
                f"first {self._recorded(record)}",
                ALIKE,
            )

    @staticmethod
    def _recorded(record: OperationRecord | None) -> str:
        if record is None:
            return "none there, by the recording"
        return (
            f"{record.name} {_readable(record.shapes)}, recorded as operation {record.sequence} of group "
            f"{record.group} at {record.where}"
        )


def _signature(tensor: torch.Tensor) -> tuple[str, tuple[int, ...]]:
    return str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)


def _readable(shapes: list[tuple[str, tuple[int, ...]]]) -> str:
    return "[" + ", ".join(f"{dtype}{list(shape)}" for dtype, shape in shapes) + "]"
