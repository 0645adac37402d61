"""Transfer of snapshots between nodes, as the agent uses it."""

from __future__ import annotations

from .peer import BulkPeer
from .server import BulkServer
from .wire import InAnotherGeneration, RefusedByPeer

__all__ = ["BulkPeer", "BulkServer", "InAnotherGeneration", "RefusedByPeer"]
