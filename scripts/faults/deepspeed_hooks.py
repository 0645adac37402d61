"""Places in a DeepSpeed job where a fault can strike; hooked from outside, as inject.py hooks megatron-core.

Rules of this file: the script and the plugin are not touched; `deepspeed.initialize` is wrapped before the script
calls it. Steps are the engine's: some of its optimizers make one with zeros when they are built.

What the phases mean (step s is the s-th update):
  startup    (step 0) the engine has been built, nothing has been trained
  forward    inside the model's forward of the last micro-batch of step s
  backward   half-way down the model in the backward of that micro-batch
  before     the engine is about to look at the gradients of step s
  optimizer  the basic optimizer has updated (a group of) this rank's part to s, the engine's step has not returned
  mirror     the engine's step has just returned from update s: its snapshot is on its way
  evaluate   inside the model's forward of every second batch of an evaluation after step s
  write      a checkpoint of step s: the first file is written, not the others
  between    in the script's loop, when it asks for the batch after update s (a pipeline: after `train_batch`)
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from faults import hooks

if TYPE_CHECKING:
    from faults.inject import Injector


def install(injector: Injector) -> None:
    import deepspeed

    original = deepspeed.initialize

    @functools.wraps(original)
    def initialize(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        hook_engine(injector, result[0])
        return result

    deepspeed.initialize = initialize
    hooks.hook_worker(injector)


def hook_engine(injector: Injector, engine: Any) -> None:
    from torch.optim.optimizer import register_optimizer_step_post_hook
    from torch.utils.data.dataloader import _BaseDataLoaderIter

    injector.completed = lambda: int(engine.global_steps)
    injector.reached("startup", 0)
    injector.reached("rehearsal", 0)
    blocks = blocks_of(engine.module)
    blocks[len(blocks) // 2].register_forward_hook(functools.partial(forward_done, injector, Microbatches(engine)))

    def updated(optimizer: Any, args: Any, kwargs: Any) -> None:
        if optimizer is engine.basic_optimizer:
            injector.reached("optimizer", injector.completed() + 1)

    register_optimizer_step_post_hook(updated)
    hooks.around(engine, "_take_model_step", lambda *_: injector.reached("before", injector.completed() + 1))
    hooks.around(engine, "_save_zero_checkpoint", lambda *_: injector.reached("write", injector.completed()))
    if hasattr(engine, "train_batch"):
        hook_return(injector, engine, "train_batch", lambda: between(injector))
    else:
        hook_return(injector, engine, "step", lambda: None)
        hooks.around(_BaseDataLoaderIter, "__next__", lambda *_: between(injector))


def blocks_of(model: Any) -> list[Any]:
    """The model's blocks; of a model that has none, the layers that are trained."""
    modules = list(model.modules())
    blocks = [module for module in modules if type(module).__name__.endswith("Block")]
    trained = [one for one in modules if any(each.requires_grad for each in one.parameters(recurse=False))]
    return blocks or trained


def hook_return(injector: Injector, engine: Any, name: str, then: Callable[[], None]) -> None:
    function = getattr(engine, name)

    @functools.wraps(function)
    def then_mirror(*args: Any, **kwargs: Any) -> Any:
        before = engine.global_steps
        result = function(*args, **kwargs)
        if engine.global_steps > before:
            observe(injector, engine)
            injector.reached("mirror", injector.completed())
            then()
        return result

    setattr(engine, name, then_mirror)


def observe(injector: Injector, engine: Any) -> None:
    if injector.observer:
        partitions = [getattr(parameter, "ds_tensor", parameter) for parameter in engine.module.parameters()]
        state = [value for one in engine.basic_optimizer.state.values() for value in one.values()]
        moments = [value for value in state if getattr(value, "ndim", 0)]
        storages = {"parameters": partitions, "optimizer": [*engine.basic_optimizer.state, *moments]}
        injector.observer.observe(engine.global_steps, [engine, engine.optimizer], storages)


class Microbatches:
    """Counts the forwards of one block: in training since the newest update, in evaluations all of them."""

    def __init__(self, engine: Any) -> None:
        self._engine, self._step, self._count = engine, -1, 0
        self.evaluated = 0

    def count(self) -> bool:
        """One more; whether it is the last before the update."""
        self._count = self._count + 1 if self._step == self._engine.global_steps else 1
        self._step = self._engine.global_steps
        return bool(self._count % self._engine.gradient_accumulation_steps() == 0)


def forward_done(injector: Injector, microbatches: Microbatches, module: Any, inputs: Any, output: Any) -> None:
    if not module.training:
        microbatches.evaluated += 1
        if microbatches.evaluated % 2 == 0:
            injector.reached("evaluate", injector.completed())
    elif microbatches.count():
        step = injector.completed() + 1
        injector.reached("forward", step)
        output = output[0] if isinstance(output, tuple) else output
        if output.requires_grad:
            output.register_hook(lambda gradient: injector.reached("backward", step))


def between(injector: Injector) -> None:
    """Also a follower passes here: it asks for batches as the rank itself did, and is at no place of a fault."""
    injector.reached("between", injector.completed())
    injector.hold(injector.completed())
