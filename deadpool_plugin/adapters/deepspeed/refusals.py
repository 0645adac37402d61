"""What of DeepSpeed a swap cannot bring back, refused by name before training.

Rules of this file: an option is here because it keeps state where `EngineState` does not reach, or communicates past
the process groups or outside the calls; a version of DeepSpeed that lacks the option is fine.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ...errors import Unsupported

REMEDY = "or run this job without deadpool_plugin"


@dataclass(frozen=True)
class Option:
    """`path` of an engine (attributes, methods without arguments, keys), refused unless it has one of `harmless`."""

    path: str
    name: str
    reason: str
    remedy: str
    harmless: tuple[Any, ...] = (None, False, 0, "none")


COMPRESSION = ("weight_quantization", "activation_quantization", "sparse_pruning", "row_pruning", "head_pruning",
               "channel_pruning")  # fmt: skip
"""Of DeepSpeed up to 0.19.5, where the first may have a quantizer of the engine's; `layer_reduction` is no schedule."""

OPTIONS = (
    Option("has_moe_layers", "a mixture of experts", "has parameters with owners of their own", "train a dense model"),
    Option("zero_hpz_partition_size", "zero_hpz_partition_size (ZeRO++)", "keeps a second copy of the parameters",
           "leave it out", (None, 0, 1)),
    Option("zero_quantized_weights", "zero_quantized_weights (ZeRO++)", "gathers parameters that are not the masters'",
           "leave it out"),
    Option("zero_quantized_nontrainable_weights", "zero_quantized_nontrainable_weights",
           "keeps parameters in another form", "leave it out"),
    Option("zero_quantized_gradients", "zero_quantized_gradients (ZeRO++)", "reduces in groups that are not tested",
           "leave it out"),
    Option("_config.zero_config.mics_shard_size", "mics_shard_size (MiCS)", "shards within groups of its own",
           "leave it out", (None, -1, 0)),
    Option("_config.zero_config.offload_optimizer.device", "offload_optimizer.device", "keeps state where a restore "
           "does not reach", "offload to the CPU", (None, "none", "cpu")),
    Option("zero_partial_offload", "offload_optimizer.ratio (Twin-Flow)", "keeps a second optimizer that is not "
           "mirrored", "leave it at 1", (None, 1)),
    Option("super_offload", "super_offload", "updates in a process of its own", "leave it out"),
    Option("_config.zero_config.offload_param.device", "offload_param", "keeps parameters where a restore does not "
           "reach", "leave it out"),
    Option("zenflow", "zenflow", "updates parameters beside the step", "leave it out"),
    Option("sequence_parallel_size", "sequence parallelism (Ulysses)", "is not tested", "leave it out", (None, 0, 1)),
    Option("autotp_size", "tensor parallelism of DeepSpeed's own (AutoTP)", "is not tested", "leave it out",
           (None, 0, 1)),
    Option("is_deepcompile_enabled", "compile.deepcompile", "communicates inside compiled code", "leave it out"),
    Option("curriculum_learning_enabled", "data_efficiency: curriculum_learning", "keeps a curriculum that is not "
           "mirrored", "leave it out"),
    Option("curriculum_enabled_legacy", "curriculum_learning (of DeepSpeed 0.18)", "keeps a curriculum that is not "
           "mirrored", "leave it out"),
    Option("random_ltd_enabled", "data_efficiency: random_ltd", "keeps a schedule that is not mirrored",
           "leave it out"),
    Option("data_sampling_config.dynamic_batching.enabled", "data_efficiency: dynamic_batching", "is not tested",
           "leave it out"),
    Option("pld_enabled", "progressive_layer_drop", "keeps a schedule that is not mirrored", "leave it out"),
    Option("sparse_gradients_enabled", "sparse_gradients", "is not tested", "leave it out"),
    Option("amp_enabled", "amp (apex)", "keeps loss scales and masters of its own", "use bf16 or DeepSpeed's fp16"),
    Option("eigenvalue_enabled", "eigenvalue", "changes how weights are quantized, by what is not mirrored",
           "leave it out"),
    *(Option(f"_config.compression_config.{technique}.shared_parameters.enabled", f"compression_training: {technique}",
             "keeps a schedule that is not mirrored", "leave it out") for technique in COMPRESSION),
    Option("autotuning_enabled", "autotuning", "ends the job by itself", "leave it out"),
    Option("torch_autocast_z0_gradscaler", "torch_autocast in float16", "keeps a GradScaler that is not mirrored",
           "use bfloat16, or DeepSpeed's fp16"),
    Option("optimizer.torch_autocast_gradscaler", "torch_autocast in float16", "keeps a GradScaler that is not "
           "mirrored", "use bfloat16, or DeepSpeed's fp16"),
    Option("monitor.enabled", "a monitor (TensorBoard, W&B, Comet)", "opens another run in every rehearsal",
           "log from the script"),
    Option("checkpoint_engine.is_decoupled", "a decoupled checkpoint engine", "writes behind the script's back",
           "use the default one"),
)  # fmt: skip


def check(engine: Any) -> None:
    """Raises: Unsupported, naming the option, why, and what to do instead."""
    kind = type(engine).__name__
    if kind not in ("DeepSpeedEngine", "PipelineEngine"):
        raise Unsupported(f"the engine is a {kind}", "a DeepSpeedEngine or a PipelineEngine", REMEDY)
    for option in OPTIONS:
        value = _look_up(engine, option.path)
        if value not in option.harmless:
            harmless = " or ".join(map(repr, option.harmless))
            raise Unsupported(
                f"{option.name} = {value!r} {option.reason}", f"it to be {harmless}", f"{option.remedy}, {REMEDY}"
            )


def check_recurrent(model: Any) -> None:
    """cuDNN draws the masks from a state of its own, which every restore of torch's generator begins anew
    (ATen/native/cudnn/RNN.cpp, get_dropout_state). Raises: Unsupported for layers with dropout on a GPU."""
    import torch

    for module in model.modules():
        draws = isinstance(module, torch.nn.RNNBase) and module.dropout > 0 and module.num_layers > 1
        if draws and any(parameter.is_cuda for parameter in module.parameters()):
            raise Unsupported(
                f"a {type(module).__name__} with dropout draws from a generator of cuDNN's, which is not mirrored",
                "dropout between layers by torch.nn.Dropout",
                f"make layers of one, {REMEDY}",
            )


def _look_up(owner: Any, path: str) -> Any:
    for name in path.split("."):
        owner = owner.get(name) if isinstance(owner, dict) else getattr(owner, name, None)
        if callable(owner):
            owner = owner()
    return owner


def install(engine_class: type, is_training: Callable[[], bool]) -> None:
    """Refuse what would change an engine's state between calls, once `is_training`."""
    for name, remedy, is_harmless in (
        ("coalesce_grad_reduction", "let every backward reduce its gradients", _never),
        ("set_train_batch_size", "keep the batch size", _has_that_batch_size),
        ("set_train_micro_batch_size", "keep the batch size", _never),
        ("offload_states", "leave the states where they are", _never),
    ):
        if hasattr(engine_class, name):
            _refuse(engine_class, name, is_training, remedy, is_harmless)
    _refuse_hooks(is_training)


def _never(engine: Any, *args: Any, **kwargs: Any) -> bool:
    return False


def _has_that_batch_size(engine: Any, train_batch_size: int) -> bool:
    """Megatron-DeepSpeed tells the engine its batch size before every step."""
    return bool(train_batch_size == engine.train_batch_size())


def _refuse(
    engine_class: type, name: str, is_training: Callable[[], bool], remedy: str, is_harmless: Callable[..., bool]
) -> None:
    """`is_harmless` gets what the method gets."""
    original = getattr(engine_class, name)

    @functools.wraps(original)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        if is_training() and not is_harmless(self, *args, **kwargs):
            raise Unsupported(f"engine.{name} was called during training", remedy=f"{remedy}, {REMEDY}")
        return original(self, *args, **kwargs)

    setattr(engine_class, name, method)


def _refuse_hooks(is_training: Callable[[], bool]) -> None:
    """Whoever takes ZeRO 3's hooks off the model for a while (`unwrap_model_for_generation` of DeepSpeed and trl) asks
    for them first. A swap meanwhile would run the model without them, one after that believe in those that are gone."""
    from deepspeed.runtime.zero.parameter_offload import DeepSpeedZeRoOffload

    owner: Any = DeepSpeedZeRoOffload
    remove, ending = owner._remove_module_hooks, []

    @functools.wraps(remove)
    def remove_at_the_end(offload: Any) -> None:
        ending.append(True)  # engine.destroy()
        remove(offload)

    def get(name: str, offload: Any) -> Any:
        if is_training() and not ending:
            raise Unsupported(
                "ZeRO 3's hooks were to be taken off the engine's model during training (unwrap_model_for_generation)",
                "them to stay",
                f"generate with the model as it is (generate(..., synced_gpus=True)), {REMEDY}",
            )
        return vars(offload)[name]

    def put(name: str, offload: Any, hooks: Any) -> None:
        vars(offload)[name] = hooks

    owner._remove_module_hooks = remove_at_the_end
    for name in ("forward_hooks", "backward_hooks"):
        setattr(owner, name, property(functools.partial(get, name), functools.partial(put, name)))
