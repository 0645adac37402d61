"""Megatron-core as an `Adapter`: functions that are calls, instances, data sets, and options refused by name.

A script finds the wrapped functions where it always found them. Source: megatron-core 0.16.1.
"""

from __future__ import annotations

import functools
import os
import sys
import threading
from collections.abc import Callable
from typing import Any

import torch

from ...errors import WHOLE_STEP, Unsupported
from ...worker import iterators
from ...worker.calls import Call, CallHandler, CallKind
from ...worker.saving import Saves
from ..common import REMEDY, FrameworkAdapter, Nesting, Option, after_init, before, in_place_of, refuse
from . import bookkeeping, saving
from .state import TrainingState, check_base, parts_of

SCHEDULES = ("no_pipelining", "pipelining_without_interleaving", "pipelining_with_interleaving")
TRACKER = "latest_checkpointed_iteration.txt"
HASHES = "check_param_hashes_across_dp_replicas"
"""Function behind `--check-weight-hash-across-dp-replicas-interval`."""


class MegatronAdapter(FrameworkAdapter):
    """See `Adapter` for when each method runs."""

    framework = "megatron.core.distributed"
    """Megatron-DeepSpeed has a `megatron.core` of its own, from before there was this in it."""
    trackers = ("megatron.core.tensor_parallel.random",)
    state: TrainingState

    def __init__(self) -> None:
        self.calls = Nesting()
        self._chunks: list[Any] = []
        self._optimizers: list[Any] = []
        self._schedulers: list[Any] = []
        self._timers: list[Any] = []

    def package(self) -> tuple[str, str]:
        import megatron.core  # a checkout's, if the script stands in one

        return "megatron-core", megatron.core.__version__

    def install(self, handler: CallHandler, saves: Saves) -> None:
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

        after_init(DistributedDataParallel, self._chunks.append)
        after_init(optimizers.MegatronOptimizer, self._optimizers.append)
        after_init(optimizers.ChainedOptimizer, self._optimizers.append)  # which need not call the one above
        after_init(OptimizerParamScheduler, self._schedulers.append)
        after_init(Timer, self._timers.append)
        wrap_call = functools.partial(wrap, handler, calls=self.calls)
        DistributedDataParallel.no_sync = bookkeeping.no_sync
        wrap_call(DistributedDataParallel, "zero_grad_buffer", CallKind.LIGHT)
        wrap_call(DistributedDataParallel, "start_param_sync", CallKind.PLAIN)
        for owner, name in bookkeeping.reductions():
            wrap_call(owner, name, CallKind.PLAIN, made=bookkeeping.Reduction)
        wrap_call(OptimizerParamScheduler, "step", CallKind.LIGHT)
        if hasattr(loop := sys.modules.get(bookkeeping.LOOP), bookkeeping.CONSUME):
            wrap_call(loop, bookkeeping.CONSUME, CallKind.PLAIN)
        for name in SCHEDULES:
            wrap_call(schedules, f"forward_backward_{name}", CallKind.FORWARD, made=ForwardBackward)
        for cls in _subclasses(optimizers.MegatronOptimizer):
            if "step" in vars(cls):
                wrap_call(cls, "step", CallKind.UPDATE)
            if "zero_grad" in vars(cls):
                wrap_call(cls, "zero_grad", CallKind.LIGHT)
            if "sharded_state_dict" in vars(cls):
                wrap_call(cls, "sharded_state_dict", CallKind.PLAIN, made=saving.ShardedState)
            if "step_with_ready_grads" in vars(cls):
                self.refuse_outside(cls, "step_with_ready_grads", "call optimizer.step()")
        remedy = "set config.finalize_model_grads_func, which the schedule calls"
        self.refuse_outside(DistributedDataParallel, "finish_grad_sync", remedy)
        install_facts(handler)
        saving.install(saves)
        iterators.WRAPPERS[RerunDataIterator] = ("iterable", "replaying")
        iterators.DRAWS_NOTHING.append(_reads_by_index)

    def is_used(self) -> bool:
        return bool(self._optimizers)

    def refuse_outside(self, owner: Any, name: str, remedy: str) -> None:
        """Refuse `owner.name` where it is called outside of every call: no redo would do it again."""

        def check(*_: Any, **__: Any) -> None:
            if self.calls.is_training and not self.calls.busy:
                raise Unsupported(
                    f"the script has called {owner.__name__}.{name} itself, which a swap would leave out of what is "
                    "redone",
                    "it within a training call",
                    f"{remedy}, or {WHOLE_STEP}",
                )

        before(owner, name, check)

    def attach(self) -> None:
        for part in [part for optimizer in self._optimizers for part in parts_of(optimizer)]:
            check_base(part)
        nested = {id(inner) for outer in self._optimizers for inner in getattr(outer, "chained_optimizers", ())}
        outermost = list({id(one): one for one in self._optimizers if id(one) not in nested}.values())
        if len(outermost) != 1:
            raise Unsupported(
                f"the script has {len(outermost)} Megatron optimizers",
                "exactly one",
                f"build one with get_megatron_optimizer before the first training call, {REMEDY}",
            )
        check(self._chunks, outermost[0].config)
        self.state = TrainingState(self._chunks, outermost[0], self._schedulers, self._timers)
        self.calls.is_training = True


class ForwardBackward(Call):
    """A schedule's whole forward and backward."""

    def loss(self, value: Any, on_host: Callable[[Any], Any]) -> float | None:
        """Average the first reported number over microbatches; Megatron reports `[sum, count]` pairs or means."""
        result = on_host(value)
        if not isinstance(result, list) or not result or not all(isinstance(one, dict) for one in result):
            return None
        key = next(iter(result[0]), None)
        means = [mean for one in result if (mean := _mean(one.get(key))) is not None]
        return sum(means) / len(means) if len(means) == len(result) else None


def wrap(
    handler: CallHandler, owner: Any, name: str, kind: CallKind, *, made: type[Call] = Call, calls: Nesting = Nesting()
) -> None:
    """Make `owner.name` a call, of the class `made`, inside `calls`."""
    run = calls.inside()(getattr(owner, name))
    in_place_of(owner, name)(lambda _, *args, **kwargs: handler(made(name, kind, run, args, kwargs)))


def install_facts(handler: CallHandler) -> None:
    """Let a later rehearsal of a rank find the facts that the rank itself found when the job began."""
    # With `--load X --save X` a job begins without a checkpoint and soon has one. A rehearsal that saw it would load
    # it, with collectives that the job never made. Nor has a rehearsal parameters whose hashes could be compared.
    # Source: megatron/training/checkpointing.py `_load_base_checkpoint`, `checkpoint_exists` (from 0.19 on they ask
    # `os.path` itself); megatron/core/utils.py `check_param_hashes_across_dp_replicas`.
    asking = Nesting()  # however many functions the question goes through

    def isfile(original: Callable[[Any], bool], path: Any) -> bool:
        on_main_thread = threading.current_thread() is threading.main_thread()
        if asking.busy or not on_main_thread or not str(path).endswith(TRACKER):
            return original(path)
        with asking.inside():
            return bool(handler(Call(f"isfile {path}", CallKind.FACT, original, (path,))))

    in_place_of(os.path, "isfile")(isfile)
    saving: Any = sys.modules.get("megatron.training.checkpointing")
    if hasattr(saving, "isfile"):  # which asks multi-storage-client where that is installed
        in_place_of(saving, "isfile")(isfile)
    for module in map(sys.modules.get, ("megatron.core.utils", "megatron.training.training")):
        if hasattr(module, HASHES):
            wrap(handler, module, HASHES, CallKind.FACT)


def _subclasses(cls: type) -> set[type]:
    """Return `cls` and everything below it that is imported by now."""
    return {cls}.union(*map(_subclasses, cls.__subclasses__()))


def _mean(reported: Any) -> float | None:
    """Return the mean of a number, or of a sum and its count; None for anything else (logits, say)."""
    numbers: list[float] = []
    for part in reported if isinstance(reported, (tuple, list)) else [reported]:
        if isinstance(part, torch.Tensor) and part.numel() <= 2:
            numbers += part.detach().flatten().tolist() if part.dim() else [part.item()]
        elif isinstance(part, (bool, int, float)):
            numbers.append(part)
        else:
            return None
    if not 1 <= len(numbers) <= 2:
        return None
    total, *count = map(float, numbers)
    return total / count[0] if count and count[0] else total


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
    from megatron.core.package_info import MAJOR, MINOR

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
    if (MAJOR, MINOR) >= (0, 15) or not getattr(data_set, "masks_and_position_ids_are_cacheable", False):
        return True
    # Before 0.15 an item of GPTDataset masks its padding in the mask of the items after it.
    return bool(data_set._pad_token_id < 0 and data_set.index_split.name != "valid")


def _name_in_datasets(data_set: Any) -> str:
    cls = type(data_set)
    return f"{cls.__module__}.{cls.__qualname__}".removeprefix("megatron.core.datasets.")


# ---- what a swap cannot restore is refused by name before training
#
# An option is here because it keeps state or communicators where `TrainingState` and the group handles do not reach, or
# works past the calls; a version of Megatron-core that lacks the option is fine.

FILLED = "keeps a queue of gradients to be computed, which an interruption leaves filled"
OFFLOADS = "counts what is offloaded, which an interruption leaves half-way"
CAPTURES = "captures communicators, which a swap replaces"
MODEL = (
    Option("fp8 fp4", "keeps scaling factors in the layers, which are not mirrored", "train in bf16"),
    Option("tp_comm_overlap", "communicates through buffers of its own, past the process groups", "switch it off"),
    Option("moe_enable_deepep", "communicates past the process groups", "use the alltoall or allgather dispatcher"),
    Option("enable_cuda_graph external_cuda_graph", CAPTURES, "switch it off"),
    Option("cuda_graph_impl", CAPTURES, "set it to none", (None, "none")),
    Option("moe_token_dispatcher_type", "communicates past the process groups", "use alltoall or allgather",
           (None, "alltoall", "allgather")),
    Option("delay_wgrad_compute defer_embedding_wgrad_compute", FILLED, "switch it off"),
    Option("overlap_dispatch_backward_with_experts_wgrad", FILLED, "switch it off"),
    Option("fine_grained_activation_offloading cpu_offloading", OFFLOADS, "switch it off, or recompute activations"),
    Option("qk_clip", "changes weights between the calls, which a redo leaves out", "switch it off"),
    Option("log_max_attention_logit", "reduces between the calls what a spare, which runs no forward, does not have",
           "switch it off"),
    Option("moe_enable_routing_replay", "routes by lists that the script sets between the calls"),
    Option("symmetric_ar_type", "communicates in symmetric memory, past the process groups"),
    Option("hybrid_context_parallel", "communicates while data is read, which a swap reads again from memory",
           "use context_parallel_size"),
    Option("moe_shared_expert_overlap", "keeps what the shared experts are at, which an interruption leaves half-way",
           "switch it off"),
    *(Option(f"{experts}gtp_weight_remat_size",
             "keeps communication under way in its parameters across an interruption",
             f"leave --{experts.replace('_', '-')}tensor-parallel-num-weight-shards out", (None, 1))
      for experts in ("", "expert_")),
)  # fmt: skip
ROUTERS = Option(
    "moe_router_force_load_balancing", "draws from a generator of its own, which is not mirrored, in this version",
    "leave it out, or use megatron-core 0.16 or later",
)  # fmt: skip
"""An option of the model, where routers have such a generator."""
GRADIENTS = (
    Option("use_megatron_fsdp use_custom_fsdp", "keeps parameters where a rollback does not reach",
           "use the distributed optimizer"),
    Option("nccl_ub", "registers memory with communicators, which a swap replaces", "switch it off"),
)  # fmt: skip
OPTIMIZER = (
    Option("overlap_param_gather_with_optimizer_step", "gathers parameters across the end of a step", "switch it off"),
    Option("optimizer_cpu_offload", "keeps the state in parts that are not mirrored", "switch it off"),
)
TRAINING = (
    Option("inprocess_restart", "starts the training function again, which the plugin keeps running"),
    Option("async_strategy", "saves by another library, whose writers a swap cannot end", "set it to mcore",
           (None, "mcore")),
    Option("log_straggler", "divides by the time of forwards, of which a spare runs none"),
    Option("use_sharp", "has switches sum in groups of the start only: later ones would sum otherwise"),
    Option("optimizer_cuda_graph", CAPTURES),
    Option("use_legacy_models", "counts micro-batches in the layers, which an interruption leaves too far on",
           "use megatron-core's models"),
    Option("perform_rl_step", "changes weights between the calls, which a redo leaves out"),
    Option("skip_train", "trains nothing that could be protected"),
    Option("save_dgrads_interval save_activations_interval save_tokens_per_expert_interval",
           "saves what is seen in forwards, of which a spare runs none"),
    Option("non_persistent_ckpt_type", "saves by another library, on each host of its own", "set it to global",
           (None, "global")),
)  # fmt: skip
"""Options among Megatron-LM's own arguments, where its training loop runs."""


def check(chunks: list[Any], optimizer_config: Any) -> None:
    """Raises: Unsupported, naming the option, why, and what to do instead."""
    args: Any = getattr(sys.modules.get("megatron.training.global_vars"), "_GLOBAL_ARGS", None)
    refuse(args, TRAINING)
    if getattr(args, "fim_data", False) and not args.num_workers:
        raise Unsupported(
            "fim_data=True with num_workers=0 draws random numbers of its own for every item: a process that passes "
            "over items would go on with others",
            "loader workers, whose items are all read",
            f"add --num-workers 1, {REMEDY}",
        )
    if not chunks:
        raise Unsupported(
            "an optimizer without a model in megatron.core.distributed.DistributedDataParallel",
            "all model chunks in DistributedDataParallel, not in FSDP or torch's own",
            f"wrap the model in it, {REMEDY}",
        )
    routing: Any = sys.modules.get("megatron.core.transformer.moe.moe_utils")
    has_generator = hasattr(getattr(routing, "RandomSTE", None), "generator")  # up to 0.15
    for chunk in chunks:
        refuse(chunk.config, (*MODEL, ROUTERS) if has_generator else MODEL)
        if (bias := getattr(chunk.config, "moe_router_force_biased", None) or 0.0) < 0:
            raise Unsupported(
                f"moe_router_force_biased = {bias} adds to routers what they drew in their first forward, which a "
                "replacement does not run",
                "None, or a number that is not negative: it is drawn in every forward",
                f"make it positive, {REMEDY}",
            )
        refuse(chunk.ddp_config, GRADIENTS)
    refuse(optimizer_config, OPTIMIZER)
