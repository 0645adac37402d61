"""DeepSpeed as an `Adapter`: its engines, and what of them a swap cannot restore, refused by name.

Source: DeepSpeed 0.19.8.
"""

from __future__ import annotations

import functools
import gc
import weakref
from collections.abc import Callable
from typing import Any

import torch

from ...errors import Unsupported
from ...worker.calls import CallHandler
from ...worker.saving import Saves
from ..common import REMEDY, FrameworkAdapter, Function, Option, after_init, before, in_place_of, refuse
from . import checkpoints, extensions, zero3
from .calls import EngineCalls
from .optimizer import check_kind
from .outputs import Guess
from .state import EngineState

ONE_ENGINE = (
    "call deepspeed.initialize once: a teacher or a reference model, which is not trained, needs no engine (call it "
    f"under torch.no_grad()); models that are trained together can be parts of one; {REMEDY}"
)


class DeepSpeedAdapter(FrameworkAdapter):
    """See `Adapter` for when each method runs."""

    framework = "deepspeed"
    trackers = (
        "deepspeed.runtime.activation_checkpointing.checkpointing",
        "megatron.core.tensor_parallel.random",  # Megatron-DeepSpeed's own
        "megatron.mpu.random",  # that of older ones, and of GPT-NeoX
    )
    calls: EngineCalls
    """From `install` on."""
    state: EngineState
    beforehand = staticmethod(extensions.beforehand)

    def __init__(self) -> None:
        self._engines = weakref.WeakSet[Any]()

    def package(self) -> tuple[str, str]:
        import deepspeed

        return "deepspeed", deepspeed.__version__

    def install(self, handler: CallHandler, saves: Saves) -> None:
        from deepspeed.runtime.engine import DeepSpeedEngine
        from deepspeed.runtime.pipe.engine import PipelineEngine

        self.calls = calls = EngineCalls(handler)
        calls.install(DeepSpeedEngine, PipelineEngine)
        checkpoints.install(saves, calls, DeepSpeedEngine)
        zero3.install(calls)
        refuse_methods(DeepSpeedEngine, lambda: calls.is_training)
        after_init(DeepSpeedEngine, self._engine_made)

    def _engine_made(self, engine: Any) -> None:
        if self.calls.is_training:
            raise Unsupported("the script makes another DeepSpeed engine during training", "exactly one", ONE_ENGINE)
        self._engines.add(engine)
        zero3.watch_model(self.calls, engine)

    def is_used(self) -> bool:
        return bool(self._engines)

    def attach(self) -> None:
        gc.collect()  # engines that the script has let go of are full of cycles
        engines = list(self._engines)
        if len(engines) != 1:
            raise Unsupported(f"the script has {len(engines)} DeepSpeed engines", "exactly one", ONE_ENGINE)
        check(engines[0])
        zero3.watch_model(self.calls, engines[0])
        self.state = self.calls.state = EngineState(engines[0])
        self.calls.is_training = True

    def guessed(self) -> str:
        return Guess.first_taken


# ---- what a swap cannot restore is refused by name before training
#
# An option is here because it keeps state where `EngineState` does not reach, or communicates past the process groups
# or outside the calls; a version of DeepSpeed that lacks the option is fine.

COMPRESSION = ("weight_quantization", "activation_quantization", "sparse_pruning", "row_pruning", "head_pruning",
               "channel_pruning")  # fmt: skip
"""Schedules of DeepSpeed up to 0.19.5; the first may have a quantizer of the engine's. `layer_reduction` is none."""
SCHEDULE = "keeps a schedule that is not mirrored"
CURRICULUM = "keeps a curriculum that is not mirrored"
UNTESTED = "is not tested"
OPTIONS = (
    Option("has_moe_layers", "has parameters with owners of their own", "train a dense model",
           called="a mixture of experts"),
    Option("zero_hpz_partition_size", "keeps a second copy of the parameters", harmless=(None, 0, 1),
           called="zero_hpz_partition_size (ZeRO++)"),
    Option("zero_quantized_weights", "gathers parameters that are not the masters'",
           called="zero_quantized_weights (ZeRO++)"),
    Option("zero_quantized_nontrainable_weights", "keeps parameters in another form"),
    Option("zero_quantized_gradients", "reduces in groups that are not tested",
           called="zero_quantized_gradients (ZeRO++)"),
    Option("_config.zero_config.mics_shard_size", "shards within groups of its own", harmless=(None, -1, 0),
           called="mics_shard_size (MiCS)"),
    Option("_config.zero_config.offload_optimizer.device", "keeps state where a restore does not reach",
           "offload to the CPU", (None, "none", "cpu"), called="offload_optimizer.device"),
    Option("zero_partial_offload", "keeps a second optimizer that is not mirrored", "leave it at 1", (None, 1),
           called="offload_optimizer.ratio (Twin-Flow)"),
    Option("super_offload", "updates in a process of its own"),
    Option("_config.zero_config.offload_param.device", "keeps parameters where a restore does not reach",
           harmless=(None, "none"), called="offload_param"),
    Option("zenflow", "updates parameters beside the step"),
    Option("sequence_parallel_size", UNTESTED, harmless=(None, 0, 1), called="sequence parallelism (Ulysses)"),
    Option("autotp_size", UNTESTED, harmless=(None, 0, 1), called="tensor parallelism of DeepSpeed's own (AutoTP)"),
    Option("is_deepcompile_enabled", "communicates inside compiled code", called="compile.deepcompile"),
    Option("curriculum_learning_enabled", CURRICULUM, called="data_efficiency: curriculum_learning"),
    Option("curriculum_enabled_legacy", CURRICULUM, called="curriculum_learning (of DeepSpeed 0.18)"),
    Option("random_ltd_enabled", SCHEDULE, called="data_efficiency: random_ltd"),
    Option("data_sampling_config.dynamic_batching.enabled", UNTESTED, called="data_efficiency: dynamic_batching"),
    Option("pld_enabled", SCHEDULE, called="progressive_layer_drop"),
    Option("sparse_gradients_enabled", UNTESTED, called="sparse_gradients"),
    Option("amp_enabled", "keeps loss scales and masters of its own", "use bf16 or DeepSpeed's fp16",
           called="amp (apex)"),
    Option("eigenvalue_enabled", "changes how weights are quantized, by what is not mirrored", called="eigenvalue"),
    *(Option(f"_config.compression_config.{technique}.shared_parameters.enabled", SCHEDULE,
             called=f"compression_training: {technique}") for technique in COMPRESSION),
    Option("graph_harvesting", "captures the first norm of gradients in a CUDA graph, by reductions of its own",
           called="graph_harvesting (of DeepSpeed 0.18)"),
    Option("autotuning_enabled", "ends the job by itself", called="autotuning"),
    Option("torch_autocast_z0_gradscaler optimizer.torch_autocast_gradscaler",
           "keeps a GradScaler that is not mirrored", "use bfloat16, or DeepSpeed's fp16",
           called="torch_autocast in float16"),
    Option("_config.monitor_config.comet.enabled", "opens another run in every rehearsal",
           "use TensorBoard, W&B or CSV files", called="Comet's monitor"),
    Option("checkpoint_engine.is_decoupled", "writes behind the script's back", "use the default one",
           called="a decoupled checkpoint engine"),
)  # fmt: skip
METHODS = {
    "coalesce_grad_reduction": "let every backward reduce its gradients",
    "set_train_batch_size": "keep the batch size",
    "set_train_micro_batch_size": "keep the batch size",
    "offload_states": "leave the states where they are",
}
"""Methods that are refused in training, each with what to do instead."""


def check(engine: Any) -> None:
    """Raises: Unsupported, naming the engine, option or layer, why, and what to do instead."""
    kind = type(engine).__name__
    if kind not in ("DeepSpeedEngine", "PipelineEngine"):
        raise Unsupported(f"the engine is a {kind}", "a DeepSpeedEngine or a PipelineEngine", REMEDY)
    refuse(engine, OPTIONS)
    # cuDNN draws the masks from a state of its own, which every restore of torch's generator begins anew
    # (ATen/native/cudnn/RNN.cpp, get_dropout_state).
    for module in engine.module.modules():
        draws = isinstance(module, torch.nn.RNNBase) and module.dropout > 0 and module.num_layers > 1
        if draws and any(parameter.is_cuda for parameter in module.parameters()):
            raise Unsupported(
                f"a {type(module).__name__} with dropout draws from a generator of cuDNN's, which is not mirrored",
                "dropout between layers by torch.nn.Dropout",
                f"make layers of one, {REMEDY}",
            )


def refuse_methods(engine_class: Any, is_training: Callable[[], bool]) -> None:
    """Refuse optimizers, and once `is_training` what would change an engine's state between calls."""

    def check_method(name: str, engine: Any, *args: Any, **kwargs: Any) -> None:
        if not is_training():
            return
        # Megatron-DeepSpeed tells the engine its batch size before every step.
        if name != "set_train_batch_size" or engine.train_batch_size() not in (*args, *kwargs.values()):
            raise Unsupported(f"engine.{name} was called during training", remedy=f"{METHODS[name]}, {REMEDY}")

    for name in filter(functools.partial(hasattr, engine_class), METHODS):
        before(engine_class, name, functools.partial(check_method, name))

    @in_place_of(engine_class, "_do_optimizer_sanity_check")
    def check_optimizer(original: Function, engine: Any, optimizer: torch.optim.Optimizer) -> Any:
        try:
            return original(engine, optimizer)
        except AssertionError:  # it asks for `zero_allow_untested_optimizer`, which does not help here
            check_kind(optimizer)
            raise
