"""Megatron-core as an `Adapter`: which functions are calls, and what a rank's state is.

Calls: `DistributedDataParallel.zero_grad_buffer` and `start_param_sync`, the optimizers' `zero_grad` and `step`, the
three forward-backward schedules, `OptimizerParamScheduler.step`, the reductions of losses that are tracked beside. A
script need not know: it finds the wrapped ones where it always found them.
Source: megatron-core 0.16.1; shared state as measured per sub-optimizer of ChainedOptimizer.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from ...errors import Unsupported, present
from ...worker import skipping
from ...worker.adapter import CallHandler, CallKind, Scalars
from ...worker.saving import Saves
from ..options import REMEDY
from . import bookkeeping, cleanup, facts, losses, refusals, saving, wrapping
from .state import TrainingState, check_base, parts_of

SCHEDULES = (
    "forward_backward_no_pipelining",
    "forward_backward_pipelining_without_interleaving",
    "forward_backward_pipelining_with_interleaving",
)


class MegatronAdapter:
    """See `Adapter` for when each method runs."""

    framework = "megatron.core.distributed"
    """Megatron-DeepSpeed has a `megatron.core` of its own, from before there was this in it."""

    def __init__(self) -> None:
        self._chunks: list[Any] = []
        self._optimizers: list[Any] = []
        self._schedulers: list[Any] = []
        self._modules: list[torch.nn.Module] = []
        self._timers: list[Any] = []
        self._state: TrainingState | None = None
        self._depth = 0
        """How many calls (for the first time or again), or step functions of the script's, run within each other."""

    def package(self) -> tuple[str, str]:
        import megatron.core  # a checkout's, if the script stands in one

        return "megatron-core", megatron.core.__version__

    # ---- calls

    def install(self, handler: CallHandler) -> None:
        try:
            from megatron.core.distributed import DistributedDataParallel
        except ImportError as error:
            raise Unsupported(
                f"megatron-core cannot be imported ({error})",
                "a script that trains with megatron-core",
                f"install megatron-core on every host, {REMEDY}",
            ) from error
        from megatron.core.optimizer import optimizer as optimizers
        from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
        from megatron.core.pipeline_parallel import schedules
        from megatron.core.rerun_state_machine import RerunDataIterator
        from megatron.core.timers import Timer

        _remember_instances(DistributedDataParallel, self._chunks)
        _remember_instances(OptimizerParamScheduler, self._schedulers)
        _remember_instances(optimizers.MegatronOptimizer, self._optimizers)
        _remember_instances(optimizers.ChainedOptimizer, self._optimizers)
        _remember_instances(Timer, self._timers)
        wrap = functools.partial(wrapping.wrap, handler=handler, within=self.inside_step)
        DistributedDataParallel.no_sync = cleanup.no_sync
        wrap(DistributedDataParallel, "zero_grad_buffer", CallKind.PLAIN)
        wrap(DistributedDataParallel, "start_param_sync", CallKind.PLAIN)
        for owner, name in losses.reductions():
            wrap(owner, name, CallKind.PLAIN, told=losses.Reduction)
        wrap(OptimizerParamScheduler, "step", CallKind.PLAIN)
        if hasattr(loop := sys.modules.get(bookkeeping.LOOP), bookkeeping.CONSUME):
            wrap(loop, bookkeeping.CONSUME, CallKind.PLAIN)
        for name in SCHEDULES:
            wrap(schedules, name, CallKind.FORWARD)
        for cls in _subclasses(optimizers.MegatronOptimizer):
            if "step" in vars(cls):
                wrap(cls, "step", CallKind.UPDATE)
            if "step_with_ready_grads" in vars(cls):
                wrapping.refuse_outside(cls, "step_with_ready_grads", self._is_outside, "call optimizer.step()")
            if "zero_grad" in vars(cls):
                wrap(cls, "zero_grad", CallKind.PLAIN)
            if "sharded_state_dict" in vars(cls):
                saving.wrap_sharded_state_dict(cls, handler)
        remedy = "set config.finalize_model_grads_func, which the schedule calls"
        wrapping.refuse_outside(DistributedDataParallel, "finish_grad_sync", self._is_outside, remedy)
        facts.install(handler)
        skipping.look_through(RerunDataIterator, "iterable", unless="replaying")
        skipping.draws_nothing(_reads_by_index)

    def install_saving(self, saves: Saves) -> None:
        saving.install(saves)

    # ---- state

    def is_used(self) -> bool:
        return bool(self._optimizers)

    def beforehand(self) -> Sequence[str]:
        return ()

    @contextlib.contextmanager
    def inside_step(self) -> Iterator[None]:
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1

    def _is_outside(self) -> bool:
        return self._state is not None and self._depth == 0

    def attach(self) -> None:
        refusals.check_training()
        for part in [part for optimizer in self._optimizers for part in parts_of(optimizer)]:
            check_base(part)
        nested = {id(inner) for outer in self._optimizers for inner in getattr(outer, "chained_optimizers", ())}
        outermost = [optimizer for optimizer in self._optimizers if id(optimizer) not in nested]
        if len(outermost) != 1:
            raise Unsupported(
                f"the script has {len(outermost)} Megatron optimizers",
                "exactly one",
                f"build one with get_megatron_optimizer before the first training call, {REMEDY}",
            )
        self._optimizers[:] = outermost
        refusals.check(self._chunks, outermost[0].config)
        self._modules = [module for chunk in self._chunks for module in chunk.modules()]
        self._state = TrainingState(self._chunks, outermost[0])

    @property
    def state(self) -> TrainingState:
        return present(self._state, "attach() comes first")

    def shard(self) -> Sequence[torch.Tensor]:
        return self.state.tensors

    def owns(self, tensor: torch.Tensor) -> bool:
        return self.state.owns(tensor)

    def changing(self) -> Sequence[torch.Tensor]:
        return self.state.buffers.tensors

    def replicas(self) -> tuple[int, ...]:
        return self.state.replicas()

    def scalars(self) -> Scalars:
        self.state.buffers.follow()
        return {
            "optimizer": self.state.scalars(),
            "schedulers": self._scheduler_states(),
            "values": self.state.values.changed(),
            "losses": losses.plain(losses.noted()),
            "books": bookkeeping.kept(),
        }

    def load(self, scalars: Scalars) -> None:
        self._load_schedulers(scalars["schedulers"])
        self.state.load_scalars(scalars["optimizer"])
        self.state.values.load(scalars["values"])
        losses.load(scalars["losses"])
        bookkeeping.load(scalars["books"])

    def visible(self) -> Scalars:
        return {
            "groups": self.state.group_scalars(),
            "schedulers": self._scheduler_states(),
            "values": self.state.values.changed(),
        }

    def show(self, visible: Scalars) -> None:
        self.state.load_group_scalars(visible["groups"])
        self._load_schedulers(visible["schedulers"])
        self.state.values.load(visible["values"])

    def _scheduler_states(self) -> list[Scalars]:
        return [_scheduler_state(scheduler) for scheduler in self._schedulers]

    def _load_schedulers(self, states: list[Scalars]) -> None:
        for scheduler, saved in zip(self._schedulers, states, strict=True):
            # load_state_dict is additive on a live scheduler (it steps by the saved count), so set it outright.
            vars(scheduler).update(saved)

    def entry_state(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[[], None]:
        training = [module.training for module in self._modules]
        configs = [(chunk.config, dict(vars(chunk.config))) for chunk in self._chunks]
        hooks = [(chunk, bool(chunk.remove_forward_pre_hook_handles)) for chunk in self._chunks]
        reducing = [getattr(chunk, "force_all_reduce", False) for chunk in self._chunks]  # from 0.16 on
        groups, schedulers = self.state.group_scalars(), self._scheduler_states()
        tracked, put_books_back = losses.noted(), bookkeeping.noted(self._timers)
        buffers, values = self.state.buffers.entry(), self.state.values.changed()
        learned = self.state.learned.changed()

        def restore() -> None:
            for module, flag in zip(self._modules, training, strict=True):
                module.training = flag
            for config, fields in configs:
                vars(config).update(fields)
            for chunk, enabled in hooks:
                cleanup.set_forward_hooks(chunk, enabled)
            for chunk, forced in zip(self._chunks, reducing, strict=True):
                chunk.force_all_reduce = forced
            self.state.load_group_scalars(groups)
            self._load_schedulers(schedulers)
            losses.put_back(tracked)
            put_books_back()
            self.state.values.load(values)
            self.state.learned.load(learned)
            self.state.buffers.load_entry(buffers)

        return restore

    def left(self) -> None:
        self.state.buffers.left()

    def clean(self) -> None:
        cleanup.reset_gradient_buckets(self._chunks)
        for chunk in self._chunks:
            chunk.zero_grad_buffer()
        for optimizer in self._optimizers:
            optimizer.zero_grad()
        self.state.buffers.put_back()

    def after_restore(self) -> None:
        self.state.refresh_parameters()
        for chunk in self._chunks:
            if chunk.ddp_config.use_distributed_optimizer:
                chunk.start_param_sync(force_sync=True)
        cleanup.reset_gradient_buckets(self._chunks)
        cleanup.forget_listings()

    def rng_states(self) -> dict[str, Any]:
        from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

        states = get_cuda_rng_tracker().get_states()  # generators with --te-rng-tracker
        return {name: one.get_state() if isinstance(one, torch.Generator) else one for name, one in states.items()}

    def set_rng_states(self, states: dict[str, Any]) -> None:
        from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

        tracker = get_cuda_rng_tracker()
        live, kept = tracker.get_states(), dict(states)
        for name, one in live.items():
            if isinstance(one, torch.Generator) and name in states:
                one.set_state(states[name])
                kept[name] = one
        tracker.set_states(kept)

    def loss_of(self, result: Any) -> float | None:
        """Mean over microbatches of the first reported number; Megatron reports `[sum, count]` pairs or means."""
        if not isinstance(result, list) or not result or not all(isinstance(one, dict) for one in result):
            return None
        key = next(iter(result[0]), None)
        values = [_mean(one.get(key)) for one in result]
        known = [value for value in values if value is not None]
        return sum(known) / len(known) if len(known) == len(values) else None

    def guessed(self) -> str:
        return ""


def _remember_instances(cls: type, instances: list[Any]) -> None:
    original = cls.__init__  # type: ignore[misc]

    @functools.wraps(original)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        if not any(known is self for known in instances):
            instances.append(self)

    cls.__init__ = init  # type: ignore[misc]


def _subclasses(cls: type) -> list[type]:
    """`cls` and everything below it that is imported by now."""
    found: list[type] = [cls]
    children: list[type] = cls.__subclasses__()
    for child in children:
        found += [sub for sub in _subclasses(child) if sub not in found]
    return found


def _mean(reported: Any) -> float | None:
    """Return the mean of a number, or of a sum and its count; None for anything else (logits, say)."""
    parts = reported if isinstance(reported, (tuple, list)) else [reported]
    if not all(isinstance(part, (bool, int, float, torch.Tensor)) for part in parts):
        return None
    if not 1 <= sum(part.numel() if isinstance(part, torch.Tensor) else 1 for part in parts) <= 2:
        return None
    total, *count = [float(number) for part in parts for number in torch.as_tensor(part).detach().flatten().tolist()]
    return total / count[0] if count and count[0] else total


def _scheduler_state(scheduler: Any) -> Scalars:
    """The plain numbers of a scheduler; its optimizer and call-backs are not state."""
    plain = (bool, int, float, str, type(None))
    return {name: value for name, value in vars(scheduler).items() if isinstance(value, plain)}


_READ_BY_INDEX = frozenset({
    "gpt_dataset.GPTDataset", "gpt_dataset.MockGPTDataset", "bert_dataset.BERTMaskedWordPieceDataset",
    "t5_dataset.T5MaskedWordPieceDataset", "multimodal_dataset.MockMultimodalDataset",
})  # fmt: skip
"""Data sets whose items depend on nothing but their index, if `_reads_by_index` agrees with their configuration.

Exactly these classes: a subclass may draw, also one of Megatron-LM's. They draw from generators seeded by the index.
Source: megatron/core/datasets of core_v0.14.0, 0.15.3, 0.16.1, 0.17.1, 0.18.2, 0.19.0 and main.
"""
_BLEND = "blended_dataset.BlendedDataset"
_LOW_LEVEL = ("indexed_dataset.IndexedDataset", "gpt_dataset.MockGPTLowLevelDataset")


def _reads_by_index(data_set: Any) -> bool:
    """Return whether a data set is one of megatron-core's whose items surely depend on their index alone."""
    name = _name_in_datasets(data_set)
    if name == _BLEND:
        return all(map(_reads_by_index, data_set.datasets))
    if name not in _READ_BY_INDEX or _name_in_datasets(data_set.dataset) not in _LOW_LEVEL:
        return False
    config = data_set.config
    if getattr(config, "masking_do_permutation", False):  # draws from numpy's global generator
        return False
    if hasattr(config, "preprocess_func") and config.preprocess_func is not type(config).preprocess_func:
        return False
    return not _keeps_masks(data_set)


def _name_in_datasets(data_set: Any) -> str:
    cls = type(data_set)
    return f"{cls.__module__}.{cls.__qualname__}".removeprefix("megatron.core.datasets.")


def _keeps_masks(data_set: Any) -> bool:
    """Return whether an item masks its padding in the mask of the items after it, as GPTDataset does before 0.15."""
    from megatron.core.package_info import MAJOR, MINOR

    if (MAJOR, MINOR) >= (0, 15) or not getattr(data_set, "masks_and_position_ids_are_cacheable", False):
        return False
    return bool(data_set._pad_token_id >= 0 or data_set.index_split.name == "valid")
