"""Places inside the plugin where a fault can strike; hooked from outside, as inject.py hooks megatron-core.

Rules of this file: the plugin is not touched and need not be in use; nothing here decides when, only where.

In a worker:
  update     step s is updated, its snapshot not yet asked for
  staging    half of the tensors of step s are copied to the arena
  unwinding  the worker's call has been interrupted by a loss, its device has not come to rest yet
  on:EVENT   the worker reports an event of the plugin (WorkerUnblocked, GroupsRebuilt, StateRestored, ...)
In an agent:
  push       a snapshot of step s is under way to the buddy: announced, its bytes not sent yet
  on:EVENT   the agent reports an event (SwapPlanned, Unprotected, Mirrored, ...)
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from faults.inject import Injector


def _nothing(*args: Any, **kwargs: Any) -> None:
    """No hook on this side."""


def around(owner: Any, name: str, before: Callable[..., Any] = _nothing, after: Callable[..., Any] = _nothing) -> None:
    """Call `before` and `after` with the same arguments each time `owner.name` is called."""
    original = getattr(owner, name)

    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        before(*args, **kwargs)
        result = original(*args, **kwargs)
        after(*args, **kwargs)
        return result

    setattr(owner, name, wrapper)


def hook_worker(injector: Injector) -> None:
    if "deadpool_plugin.worker.link" not in sys.modules:  # a run without the plugin
        return
    from deadpool_plugin.worker import live
    from deadpool_plugin.worker.link import AgentLink
    from deadpool_plugin.worker.staging import Stager

    around(Stager, "stage", lambda self, step, *_: injector.reached("update", step))
    around(Stager, "_copy", lambda self, step, before: watch_copy(injector, self, step))
    around(live, "_let_device_rest", lambda: in_swap(injector, "unwinding"))
    around(AgentLink, "event", lambda self, kind, **_: in_swap(injector, f"on:{kind}"))


def in_swap(injector: Injector, phase: str) -> None:
    """Also in a process that takes a rank over right now and has only rehearsed it so far."""
    injector.strike_if_due(phase, 0, int(os.environ["RANK"]), os.getpid())


def watch_copy(injector: Injector, stager: Any, step: int) -> None:
    if any(kill.phase == "staging" for kill in injector.plan.kills):
        stager._views = [views if isinstance(views, Halfway) else Halfway(views) for views in stager._views]
        for views in stager._views:
            views.at_half = lambda: injector.reached("staging", step)


class Halfway(list):  # type: ignore[type-arg]
    """A list that calls `at_half` when half of it has been walked over."""

    def __init__(self, items: Any) -> None:
        super().__init__(items)
        self.at_half: Callable[[], None] = lambda: None

    def __iter__(self) -> Iterator[Any]:
        for index in range(len(self)):
            if index == len(self) // 2:
                self.at_half()
            yield self[index]


def hook_agent(injector: Injector) -> None:
    """Install in an agent's process, before it begins."""
    from deadpool_plugin.agent.reports import Reports
    from deadpool_plugin.mirror.transfers import BulkTransfers

    around(BulkTransfers, "_records", lambda self, job, last: push_under_way(injector, job))
    around(
        Reports, "emit",
        lambda self, event: injector.strike_if_due(f"on:{type(event).__name__}", 0, -1, os.getpid()),
    )  # fmt: skip


def push_under_way(injector: Injector, job: Any) -> None:
    plan = injector.plan
    if any(kill.phase == "push" and kill.rank == job.rank for kill in plan.kills):
        injector.strike_if_due("push", job.step, job.rank, plan.pid_of(job.rank))
