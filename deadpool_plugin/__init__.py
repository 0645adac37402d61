"""Megatron-LM and DeepSpeed training jobs that survive the permanent loss of nodes without being terminated.

The script stays as it is (`deadpool launch`, or `deepspeed --module deadpool_plugin.run`), or makes
`import deadpool_plugin; deadpool_plugin.activate()` its first statement.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import ParamSpec, TypeVar

Arguments = ParamSpec("Arguments")
Value = TypeVar("Value")

__version__ = "0.2.0"


def activate() -> None:
    """Protect this job if its command line names a configuration, by `--deadpool-config FILE` or in a DeepSpeed file
    with a deadpool section; otherwise do nothing.

    The first statement of a training script, before torch is imported: this process turns into the supervisor,
    which runs the same command line again as the worker, where `activate` returns at once.
    """
    from .launch.argv import activate

    activate()


def is_rehearsal() -> bool:
    """Return whether this process only rehearses a rank on a spare. A script that writes own files asks this first.

    Becomes False when the process takes over.
    """
    mute = sys.modules.get("deadpool_plugin.worker.mute")
    return bool(mute is not None and mute.Mute.active)


def step(function: Callable[Arguments, Value]) -> Callable[Arguments, Value]:
    """Decorate a script's own training iteration, for loops that cannot be redone call by call.

        @deadpool_plugin.step
        def train_step(batch):
            loss = criterion(engine(batch["tokens"]), batch["labels"])
            engine.backward(loss)
            for parameter in engine.module.parameters():
                parameter.grad.mul_(scale)
            engine.step()
            return loss.item()

    One call is one step: forward and backward of all accumulated micro-batches, and the update. A swap redoes it as a
    whole, from the state at its entry; a spare does not run it, but is told its value. So anything goes inside: edited
    gradients, losses computed with parameters or communication, several forwards and backwards. Evaluate and save
    outside, as without the decorator. Without the plugin the function is called as it is.

    What must hold:
        The function is deterministic, given its arguments, the model, the optimizer, random states and data. All that
        is trained is in the engine's model, or Megatron's; gradients do not outlive the call.
        What else it changes (counters, files, lists, tensors of the script's own) changes again when it is redone, and
        never on a spare: return such values, and keep count of them in the loop.
        Its data are its arguments, or come from loaders made `deadpool_plugin.data.resumable`; an iterator among the
        arguments is refused. Tensors up to 1 MiB are copied; all else must stay as it is until two snapshots
        later.
        It returns None, numbers, strings, or tensors of up to 1 MiB, in lists, tuples and dicts.

    Raises (from the call): deadpool_plugin.errors.Unsupported for no update in it, for other values, or such arguments.
    Thread: the script's main thread.
    """

    @functools.wraps(function)
    def whole(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Value:
        module = sys.modules.get("deadpool_plugin.worker.context")
        context = None if module is None else module.Context.installed
        if context is None:
            return function(*args, **kwargs)
        value: Value = context.step(function, args, kwargs)
        return value

    return whole
