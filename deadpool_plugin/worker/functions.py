"""The functions of a framework that are calls, and what followers are told of them."""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Any


class CallKind(enum.Enum):
    """The meaning of a call to the protocol."""

    PLAIN = "plain"
    FORWARD = "forward"
    """Runs the model; the first one of these is where start-up ends and training begins."""
    UPDATE = "update"
    """The optimizer step: the shard changes inside it, and its return is the cut of a step."""
    STEP = "step"
    """A whole step in one call: it runs the model and updates it. Inside it the adapter hands the update itself to the
    handler, as a call of kind `UPDATE`."""
    FACT = "fact"
    """Asks what a spare would find otherwise (whether a file is there, parameters are alike), before the first forward
    or after it: a spare is told what the rank itself was, plain data. `name` is the question."""
    SAVE = "save"
    """Writes a checkpoint (`function` is a `saving.SaveCall`): waits for the commit, and followers skip it."""


RUNS_MODEL = frozenset({CallKind.FORWARD, CallKind.STEP})
MAKES_STEP = frozenset({CallKind.UPDATE, CallKind.STEP})


LossOf = Callable[[Any], float | None]


class Followed:
    """The `function` of a call, and what followers are told of it (plain data and tensors): its value, if a subclass
    does not say otherwise."""

    @staticmethod
    def of(function: Callable[..., Any]) -> Followed:
        return function if isinstance(function, Followed) else Bare(function)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Execute it."""
        raise NotImplementedError

    def check(self) -> None:
        """Raises: Unsupported if what it was given is not what it was, so that it cannot be executed again."""

    def told(self, value: Any) -> Any:
        """Collect all that the host will read of the call: for its record, its loss, the snapshot after it. After each
        execution; the device's tensors in it come to the host in the call's one wait."""
        return value

    def outcome(self, value: Any) -> Any:
        """Make the record of `value`, right after the call."""
        return value

    def failed(self, error: BaseException) -> Any:
        """Make the record of `error`, which it has raised, if the script may go on then; else None."""
        return None

    def skipped(self, outcome: Any) -> Any:
        """Return, in a follower, the value for the script, made from what was recorded; executes nothing."""
        return outcome

    def loss(self, value: Any, loss_of: LossOf, on_host: Callable[[Any], Any]) -> float | None:
        """The loss in `value`, if there is one, for people to look at.

        Args: loss_of: `Adapter.loss_of`; on_host: gives what was told, on the host.
        """
        return loss_of(on_host(value))


class Bare(Followed):
    """A function of the framework's as it is."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._function(*args, **kwargs)


CallHandler = Callable[[str, CallKind, Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]
"""`handler(name, kind, function, args, kwargs)`: what the runtime puts around every call."""
