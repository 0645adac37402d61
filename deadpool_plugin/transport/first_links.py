"""The control links that a node makes while the job starts, when all nodes make theirs at once.

Rules of this file: each node dials those with a smaller id, one a little after the other, and again until it is linked.
A node that dies or stands still meanwhile is lost as any later one is. If more than half of all nodes are missing, the
network is at fault: nobody is lost then, and the deadline names those that are missing.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Mapping
from typing import Protocol

from ..core.types import NodeId
from ..errors import TransportError
from .framing import ConnectionClosed
from .sockets import Address, why_unreachable
from .tasks import loop_time

_RETRY_S, _RETRY_MAX_S = 0.1, 1.0  # the first pause after an attempt that fails, and the longest
_LOOK_S = 1.0  # the shortest pause between two looks at a node
LOOKS = 4
"""Looks at nodes that are missing, at the least, within a patience; nodes begin to look within one such part."""
LOOKS_MAX = 64
"""Nodes that one node asks for a connection at a time, or in a second: more than a rack has as a rule."""
TURN_S = 0.002
"""A node dials so much later than the one before it: whom all dial at once answers none in time."""
_log = logging.getLogger(__name__)


class Links(Protocol):
    """The links of this node, as the start needs them. `changed`: set whenever a link is made or has ended."""

    changed: asyncio.Event

    @property
    def linked(self) -> frozenset[NodeId]: ...

    @property
    def gone(self) -> frozenset[NodeId]: ...

    def is_linked(self, node: NodeId) -> bool: ...

    async def dial(self, node: NodeId) -> None: ...

    def lose(self, peer: NodeId, reason: str, silent: bool) -> None: ...


class FirstLinks:
    """Makes the links of node `me` of a job, which has those of `table`, to those that are `wanted`.

    A node that answers nothing for `silent_after_s` is lost. Thread: the event loop's only.
    """

    def __init__(
        self,
        links: Links,
        me: NodeId,
        table: Mapping[NodeId, Address],
        wanted: Collection[NodeId],
        silent_after_s: float,
    ) -> None:
        self._links, self._me, self._table, self._others = links, me, table, {*wanted} - {me}
        self._silent_after_s = silent_after_s
        # Rarely among many, but done with it before others, which wait no longer, miss this node for its silence.
        self._every_s = min(max(_LOOK_S, len(table) / LOOKS_MAX), silent_after_s / LOOKS)

    async def made(self, timeout_s: float) -> None:
        """Waits until all are linked, or gone. Raises: TransportError naming those that are missing; PeerRefused."""
        links, missing = self._links, self._missing
        older = sorted((node for node in self._others if node < self._me), reverse=True)
        turn = sum(node < self._me for node in self._table)
        work = [asyncio.create_task(self._dial(node, turn * TURN_S)) for node in older]
        work.append(asyncio.create_task(self._lose_those_gone()))
        for one in work:
            one.add_done_callback(lambda _: links.changed.set())
        try:
            async with asyncio.timeout(timeout_s):
                while missing():
                    links.changed.clear()
                    await links.changed.wait()
                    for one in work:
                        if one.done():
                            one.result()
        except TimeoutError as error:
            names = ", ".join(f"{node} at {self._table[node]}" for node in sorted(missing()))
            raise TransportError(
                f"node {self._me} has no control link to node {names} after {timeout_s:g} s",
                remedy="check that these nodes run and that no firewall blocks the ports (port_range)",
            ) from error
        finally:
            for one in work:
                one.cancel()
            await asyncio.gather(*work, return_exceptions=True)

    def _missing(self) -> set[NodeId]:
        return self._others - self._links.linked - self._links.gone

    async def _dial(self, node: NodeId, after_s: float) -> None:
        again_s = _RETRY_S
        await asyncio.sleep(after_s)
        while node not in self._links.gone:
            try:
                return await self._links.dial(node)
            except (ConnectionClosed, OSError) as error:
                _log.info("node %d at %s does not answer yet: %s", node, self._table[node], error)
            await asyncio.sleep(again_s)
            again_s = min(2 * again_s, _RETRY_MAX_S)

    async def _lose_those_gone(self) -> None:
        looked_at = set[NodeId]()
        async with asyncio.TaskGroup() as looks:
            while True:
                await asyncio.sleep(self._every_s)
                for node in self._missing() - looked_at:  # few: who could link up has by now
                    looked_at.add(node)
                    looks.create_task(self._lose_if_gone(node))

    async def _lose_if_gone(self, node: NodeId) -> None:
        links, every_s, patience_s = self._links, self._every_s, self._silent_after_s
        unlinked_s = failing_s = 0.0
        await asyncio.sleep(every_s * ((node + self._me) % LOOKS_MAX / LOOKS_MAX))  # not all nodes at a time
        while node not in links.gone:
            began = loop_time()
            await asyncio.sleep(every_s)
            why, silent = "", False
            if not links.is_linked(node):
                why, silent = await why_unreachable(self._table[node], patience_s)
            took_s = loop_time() - began
            stood_still = took_s > patience_s + every_s + _LOOK_S
            if links.is_linked(node) or stood_still:  # linked for now: it may end again
                unlinked_s = failing_s = 0.0
                continue
            unlinked_s += took_s
            failing_s = failing_s + took_s if why else 0.0
            if not why and unlinked_s >= 2 * patience_s:
                why, silent = "it accepts connections and does not answer", True
            elif silent and failing_s < patience_s:
                continue
            if why and node not in links.gone and 2 * (len(links.linked | links.gone) + 1) > len(self._others):
                hint = "if it lives, check that no firewall blocks the ports (port_range)"
                links.lose(node, f"no control link to it since the hosts met: {why}; {hint}", silent)
