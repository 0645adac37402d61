"""Links that have ended, made again: the larger node dials, the smaller one asks it to.

Rules of this file: who is asked again and again is given up after the job's patience, as silent; where nobody listens
any more, or somebody else does, or no link is wanted, at once. A node that was given up as silent gets no link again,
but is asked for a connection until it is dropped, and that it gives none is said. Thread: the event loop's only.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Mapping

from ..core.types import NodeId
from ..errors import TransportError
from .framing import ConnectionClosed
from .links import NotWanted
from .reliable_channel import Line
from .sockets import Address, connected

_AGAIN_S = 0.01
_AGAIN_MAX_S = 0.2
"""An attempt that fails waits twice as long as the one before: many nodes ask one that is ending."""
_UNASKED_S = 0.1
"""A node that has lost a link which the other end dials waits so long to be dialled before it asks."""
YOUNG_S = 1.0
"""A link that was made no longer ago is not the one that the other end has lost: it has not seen this one yet."""
_ASKS = 2
"""Within its patience a node that is silent is asked so often."""
_log = logging.getLogger(__name__)


class Renewals:
    """The links of node `node` that are being made again.

    Args:
        addresses: where nodes listen; the mesh's own, which changes.
        dial: begins a link to a node, which a smaller one takes and a larger one answers by dialling itself.
        is_wanted: whether there is to be a link to a node any more.
        lose: there will be no link to a node: why, and whether that is only its silence.
        still_silent: a node that was lost for its silence does not answer still: why it was lost.
        patience_s: for how long a node may answer nothing.
    """

    def __init__(
        self,
        node: NodeId,
        addresses: Mapping[NodeId, Address],
        dial: Callable[[NodeId], Awaitable[None]],
        is_wanted: Callable[[NodeId], bool],
        lose: Callable[[NodeId, str, bool], None],
        still_silent: Callable[[NodeId, str], None],
        patience_s: float,
    ) -> None:
        self._node, self._addresses, self._dial = node, addresses, dial
        self._is_wanted, self._lose, self.patience_s = is_wanted, lose, patience_s
        self._still_silent = still_silent
        self._tasks: dict[NodeId, asyncio.Task[None]] = {}
        self._asking: dict[NodeId, asyncio.Task[None]] = {}
        """After those that are lost for their silence."""

    @property
    def nodes(self) -> frozenset[NodeId]:
        return frozenset(self._tasks)

    def begin(self, peer: NodeId, line: Line, reason: str, after_s: float = 0.0) -> None:
        """Makes the link of `line` again, unless that is under way. `reason`: why it has ended."""
        if peer not in self._tasks:
            work = self._renew(peer, line, reason, after_s)
            self._tasks[peer] = asyncio.get_running_loop().create_task(work)

    def asked(self, peer: NodeId, line: Line | None) -> None:
        """`peer`, which is smaller, asks to be dialled: it has no link, even if we still have one."""
        reason = "the other end has lost the link"
        if line is not None and line.link is not None and line.age_s >= YOUNG_S:
            line.carry(None, reason)
        if line is not None and line.link is None:
            self.begin(peer, line, reason)

    def stop(self, peer: NodeId) -> None:
        for tasks in (self._tasks, self._asking):
            if (task := tasks.pop(peer, None)) is not None:
                task.cancel()

    async def close(self) -> None:
        tasks = [*self._tasks.values(), *self._asking.values()]
        for peer in self.nodes | self._asking.keys():
            self.stop(peer)
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _renew(self, peer: NodeId, line: Line, reason: str, after_s: float) -> None:
        """Nothing is awaited between the last look at the link and the end of this."""
        loop = asyncio.get_running_loop()
        why, silent, deadline = "no answer", True, loop.time() + self.patience_s
        again_s = _AGAIN_S
        try:
            await asyncio.sleep(after_s)
            while line.link is None and self._is_wanted(peer) and loop.time() < deadline:
                await self._try(peer, line, deadline - loop.time(), again_s)
                again_s = min(2 * again_s, _AGAIN_MAX_S)
        except ConnectionRefusedError:
            why, silent = "nobody listens there", False
        except NotWanted:
            why = "it wants none"
        except TransportError as error:  # somebody else is there
            why, silent = str(error), False
        self._tasks.pop(peer, None)
        if line.link is not None:
            _log.warning("the link to node %d had ended (%s) and was made again", peer, reason)
        elif self._is_wanted(peer):
            self._lose(peer, f"{reason}; no new link: {why}", silent)
            if silent:
                self.ask_still(peer, f"{reason}; no new link: {why}")

    def ask_still(self, peer: NodeId, reason: str) -> None:
        """Ask `peer`, which was lost for its silence (`reason`), for a connection until it is dropped."""
        self._asking[peer] = asyncio.get_running_loop().create_task(self._ask_still(peer, reason))

    async def _ask_still(self, peer: NodeId, reason: str) -> None:
        """Says whenever `peer` gives no connection. One that refuses answers, too."""
        loop, every_s = asyncio.get_running_loop(), self.patience_s / _ASKS
        while True:
            began = loop.time()
            try:
                async with asyncio.timeout(every_s):
                    (await connected(self._addresses[peer])).close()
            except ConnectionRefusedError:
                pass
            except OSError:
                self._still_silent(peer, reason)
            await asyncio.sleep(max(0.0, began + every_s - loop.time()))

    async def _try(self, peer: NodeId, line: Line, within_s: float, again_s: float) -> None:
        """One attempt, and a pause of `again_s` after one that fails.

        Raises: ConnectionRefusedError if nobody listens there; TransportError if it is in vain.
        """
        try:
            async with asyncio.timeout(within_s):
                await self._ask(peer, line)
        except ConnectionRefusedError:
            raise
        except (ConnectionClosed, OSError) as error:  # who is being ended may still listen
            _log.info("node %d does not answer now: %r", peer, error)
            await asyncio.sleep(again_s)

    async def _ask(self, peer: NodeId, line: Line) -> None:
        (await connected(self._addresses[peer])).close()  # that nobody listens is known before it is this link's turn
        if peer < self._node:
            await self._dial(peer)
        elif not await _is_set_within(line.up, _UNASKED_S):
            await self._dial(peer)
            await _is_set_within(line.up, YOUNG_S)


async def _is_set_within(event: asyncio.Event, limit_s: float) -> bool:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(limit_s):
            await event.wait()
    return event.is_set()
