"""Output of this node's processes: the file for what is read from each pipe, and what a rank has printed already.

Rules of this file: the files may be on a file system that hangs with a lost host. Nobody waits for it longer than
READ_S; what a pipe holds goes to a file that opens later.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import TypeVar

from ..core.types import Rank, Step
from ..host.output import READ_S, LogFile, Printed, printed_since, rank_file
from ..transport.tasks import Tasks
from ..transport.unix import close_descriptors
from .node import LocalNode, Process, Slot

T = TypeVar("T")


class Outputs:
    """The files of one node's pipes."""

    def __init__(self, node: LocalNode) -> None:
        self._node, self._folder, self._opening = node, node.config.output_dir, Tasks()

    def assign(self, slot: Slot, file: LogFile | None = None, late: bool = False) -> None:
        """Have the slot's output go to the rank that it runs; of a slot that stands by, to a file of its own."""
        if slot.pipe is None:
            return
        if slot.rank >= 0:
            slot.pipe.assign(rank_file(self._folder, slot.rank, self._node.id), True, file, late)
        else:
            name = f"spare{slot.local_rank}.node{self._node.id}.log"
            slot.pipe.assign(self._folder / name, forward=False)

    def assign_rehearsal(self, process: Process | None, descriptors: list[int]) -> None:
        """Have the output of a rehearsal go to a file of its own; until it is open, it stays in the pipe."""
        if process is None or process.ended:  # these are the last words of one that is known to be dead
            return close_descriptors(descriptors)
        pipe = self._node.host.pipe(descriptors[0])
        path = self._folder / "rehearsals" / f"rank{process.rank:04d}.{process.pid}.txt"

        async def begin() -> None:
            file = await self._in_time(lambda: self._node.host.output.open(path))
            pipe.assign(path, False, file, late=file is None)

        self._opening.start(begin())

    async def of_rank(self, rank: Rank, step: Step) -> tuple[LogFile | None, Printed | None]:
        """Open a rank's file, and find what it has printed since `step`; None, each, if that took too long."""
        path, job = rank_file(self._folder, rank, self._node.id), self._node.credentials.job
        file, printed = await asyncio.gather(
            self._in_time(lambda: self._node.host.output.open(path)),
            self._in_time(lambda: printed_since(self._folder, job, rank, step)),
        )
        return file, printed

    async def drain(self, timeout_s: float) -> None:
        """Write the last words of the workers, which are still in their pipes."""
        pipes = {slot.local_rank: slot.pipe for slot in self._node.slots if slot.pipe is not None}
        if self._node.world is None:  # no slot ever had a rank
            for local_rank, pipe in pipes.items():
                pipe.assign(self._folder / f"standby{local_rank}.node{self._node.id}.log", forward=True)
        if pipes:
            await asyncio.wait([asyncio.create_task(pipe.ended.wait()) for pipe in pipes.values()], timeout=timeout_s)
        for pipe in pipes.values():
            pipe.close()

    async def _in_time(self, look: Callable[[], T]) -> T | None:
        with contextlib.suppress(OSError):
            async with asyncio.timeout(READ_S):
                return await self._node.host.at_files(look)
        return None
