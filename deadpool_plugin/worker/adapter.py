"""The seam between the plugin and a training framework.

An adapter names the framework functions that are *calls* (recorded, and redone after a swap) and knows which tensors
and plain values make up a rank's state. It communicates with nobody and decides nothing: the worker runtime calls it,
always on the worker's main thread. May import: torch, the framework, `errors`; not the agent, not the protocol.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch

from . import rng
from .calls import CallHandler
from .saving import Saves

Scalars = dict[str, Any]  # plain data only: None, bool, int, float, str, bytes, and lists, tuples and dicts of them


class State(Protocol):
    """A rank's state, as the worker runtime needs it."""

    shard: Sequence[torch.Tensor]
    """Live tensors of this rank's shard, in an order that is equal on every replacement of the rank; no copies."""
    derived: Sequence[torch.Tensor]
    """Tensors that `after_restore` makes of the shard, and gradients, all of which start-up need not have read."""
    changing: Sequence[torch.Tensor]  # those of `shard` that change outside of updates (buffers): copied at the cut

    def owns(self, tensor: torch.Tensor) -> bool:
        """Return whether `tensor` lies in the framework's parameter or gradient memory, which a restore covers."""

    def replicas(self) -> tuple[int, ...]:
        """Ranks whose shard is bit for bit the same as ours, ourselves included."""

    def scalars(self) -> Scalars:
        """Everything else a rollback needs beside RNG and data position: schedules, scaler, step counters."""

    def visible(self) -> Scalars:
        """Select the part of `scalars()` that a script can see, for processes that follow it."""

    def show(self, visible: Scalars) -> None:
        """Let the script see, in a follower, what it would have seen."""

    def entry_state(self) -> Callable[[], None]:
        """Capture what a call may read and an interrupted call may leave changed; the result puts it back."""

    def left(self) -> None:
        """A call has returned: what changes until the next one begins is the script's doing."""

    def clean(self) -> None:
        """Forget handles and flags after an interrupted call, and zero the gradients. Never communicates."""

    def load(self, scalars: Scalars) -> None:
        """The tensors of `shard` hold the restored values: put back the scalars, in place, rebinding nothing."""

    def after_restore(self) -> None:
        """Make what derives from the shard true again (16-bit parameters).

        Blocks: it communicates in the groups of the new generation; every rank calls it.
        """


class Adapter(Protocol):
    """The framework, as the worker runtime needs it. Order: install, attach, then the rest as often as needed."""

    framework: str  # the module whose presence says that a script uses this framework
    state: State
    """The rank's state. From `attach` on."""

    def package(self) -> tuple[str, str]:
        """The name and version of the package that was imported. After `install`."""

    def install(self, handler: CallHandler, saves: Saves) -> None:
        """Make the framework's calls go through `handler`, and its own ways of saving through `saves`. Once."""

    def is_used(self) -> bool:
        """Return whether the script has built something by now that this framework trains."""

    def beforehand(self) -> Sequence[str]:
        """Name work for the standby process (`launch.standby`): `module:function:argument` each. After `attach`."""
        return ()

    def inside_step(self) -> AbstractContextManager[None]:
        """A script's own step function runs: what it asks of the framework is no call, but for the update."""

    def attach(self) -> None:
        """At the first call: find model and optimizer, and list their state. Raises: Unsupported, with the reason."""

    def rng_states(self) -> dict[str, Any]:
        """Random states kept by the framework itself, by name (tensors or plain data)."""

    def set_rng_states(self, states: dict[str, Any]) -> None: ...

    def guessed(self) -> str:
        """Return, in a follower, where the script first took a number that followers are not told; "" if it did not."""
        return ""


def capture_rng(adapter: Adapter, like: dict[str, Any] | None = None) -> dict[str, Any]:
    """Copy every random state. Returns: `like` itself if it is the same, as the log keeps one (30 KB) of each call."""
    # The framework's tensors are never written in place, and go by reference.
    states = {**rng.capture_host(), "framework": adapter.rng_states()}
    return like if like and rng.equal(states, like) else states


def restore_rng(adapter: Adapter, states: dict[str, Any]) -> None:
    """Put back all that `capture_rng` has copied, or the part of it that `rng.drawn` selected."""
    rng.restore_host(states)
    if "framework" in states:
        adapter.set_rng_states(states["framework"])
