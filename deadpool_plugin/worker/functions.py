"""A call of the framework's: what it means, how it is executed, and what followers are told of it."""

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
    """Writes a checkpoint (the call is a `saving.SaveCall`): waits for the commit, and followers skip it."""


RUNS_MODEL = frozenset({CallKind.FORWARD, CallKind.STEP})
MAKES_STEP = frozenset({CallKind.UPDATE, CallKind.STEP})


class Call:
    """One call: `function` with what it is given. Followers are told its value, unless a subclass says otherwise."""

    name: str
    kind = CallKind.PLAIN
    function: Callable[..., Any]
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = {}

    def __init__(
        self,
        name: str,
        kind: CallKind,
        function: Callable[..., Any],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> None:
        self.name, self.kind, self.function, self.args, self.kwargs = name, kind, function, args, kwargs or {}

    def __call__(self) -> Any:
        """Execute it, as often as needed."""
        return self.function(*self.args, **self.kwargs)

    @property
    def is_read(self) -> bool:
        """Whether its effects are read, whatever its value: gradients, buffers by the script, state by a snapshot."""
        return self.kind in MAKES_STEP | RUNS_MODEL

    def check(self) -> None:
        """Raises: Unsupported if what it was given is not what it was, so that it cannot be executed again."""

    def told(self, value: Any) -> Any:
        """Collect all that the host will read of the call: for its record, its loss, the snapshot after it. After each
        execution; the device's tensors in it come to the host in the call's one wait."""
        return value

    def outcome(self, value: Any) -> Any:
        """Make the record of `value`, right after the call: plain data and tensors."""
        return value

    def failed(self, error: BaseException) -> Any:
        """Make the record of `error`, which it has raised, if the script may go on then; else None."""
        return None

    def skipped(self, outcome: Any) -> Any:
        """Return, in a follower, the value for the script, made from what was recorded; executes nothing."""
        return outcome

    def loss(self, value: Any, on_host: Callable[[Any], Any]) -> float | None:
        """Find the loss, for people to look at. `on_host` gives what was told, on the host."""
        return None


CallHandler = Callable[[Call], Any]
"""The runtime's function around every call; returns the value for the script."""
