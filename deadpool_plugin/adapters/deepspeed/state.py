"""A rank's training state in a DeepSpeed engine: tensors for the shard, plain values for the scalars.

Rules of this file: nothing is rebound after `EngineState` is built; restoring copies into the live tensors (but for
buffers that the forward itself replaces). Masters are what the engine's basic optimizer updates: this rank's fp32
partitions with ZeRO and in BF16_Optimizer, the model's own parameters without ZeRO in fp32.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from ...errors import WHOLE_STEP, Unsupported
from ...worker.adapter import Scalars
from ...worker.module_state import Buffers, Values
from ..base_optimizer import group_scalars, load_group_scalars
from . import adam
from .frozen import Frozen
from .gradients import LastingGradients, lasts
from .partitioned import Partitioned
from .plain import check_schedule, load_plain_state, plain_state, some
from .refusals import check_eight_bits
from .rest import Attributes, Rest

COUNTERS = ("global_steps", "global_samples", "micro_steps", "skipped_steps", "_step_applied", "_global_grad_norm",
            "_unmanaged_backward_count")  # fmt: skip
OF_PIPELINE_MODULE = ("micro_offset",)
"""Attribute of a pipeline's module: its layers are seeded by it (`seed_layers`)."""
BETWEEN_CALLS = ("_is_gradient_accumulation_boundary", "inside_no_sync_ctxt", "_manual_backward_expected",
                 "data_iterator")  # fmt: skip
"""Flags of the engine that a script sets between calls."""
UNDER_WAY = ("_running_engine_backward", "_running_engine_backward_count", "_running_engine_step")
OF_PIPELINE = ("num_pipe_buffers", "pipe_buffers", "pipe_recv_buf", "grad_layer", "_grad_layer_buf", "meta_buffer",
               "first_output_send", "first_gradient_send", "pipe_partition_input_meta_cache",
               "pipe_partition_output_meta_cache", "pipe_partition_grad_meta_cache",
               "grad_partition_grad_layer_meta_cache", "fwd_outputs", "outputs", "eval_return_logits", "_compute_loss",
               "_force_grad_boundary", "total_loss", "total_additional_losses", "agg_additional_losses")  # fmt: skip
"""Activations on their way, and what neighbours have been told of their shapes: a newcomer knows nothing of it."""
SCALERS = ("loss_scaler", "loss_scale_config")
"""Attributes of ZeRO's optimizer, and of the one for fp16 without ZeRO."""
ZERO3_ATTRIBUTES = frozenset({"_external_params", "all_parameters", "_original_parameters",
                              "applied_pre_backward_ref_cnt", "pre_bwd_fn", "post_bwd_fn"})  # fmt: skip
"""ZeRO 3's on each module of a model, beside what `_is_deepspeeds` knows."""
OF_OPTIMIZER = ("overflow", "_global_grad_norm", "clip_grad", "custom_loss_scaler", "external_loss_scale")


def updated_parameters(optimizer: Any, groups: Sequence[dict[str, Any]]) -> list[torch.Tensor]:
    """Those of the model's parameters that the optimizer updates, wherever it keeps their masters."""
    for name in ("bit16_groups", "bf16_groups", "fp16_groups"):  # ZeRO 1 and 2; BF16_Optimizer; ZeRO 3 and FP16_*
        if hasattr(optimizer, name):
            return [parameter for group in getattr(optimizer, name) for parameter in group]
    return _parameters_of(groups)


def _is_deepspeeds(attribute: str) -> bool:
    return attribute in ZERO3_ATTRIBUTES or attribute.startswith(("ds_", "__"))  # ZeRO 3's, the flops profiler's


def _parameters_of(groups: Sequence[dict[str, Any]]) -> list[torch.Tensor]:
    return [parameter for group in groups for parameter in group["params"]]


class EngineState:
    """State of one engine, from its first forward on.

    Raises:
        Unsupported: from the constructor, naming the optimizer or parameter that cannot be protected.
    """

    def __init__(self, engine: Any) -> None:
        self.engine, self.basic_optimizer = engine, engine.basic_optimizer
        self._groups = self.basic_optimizer.param_groups
        self._modules = list(engine.module.modules())
        self._values = Values(self._modules, _is_deepspeeds)
        self._eight_bits = [module for module in self._modules if hasattr(module, "fp8_initialized")]
        self._parameters = list(engine.module.parameters())
        self._trained: list[bool] = []
        self._partitioned = None
        if engine.zero_optimization_stage() == 3:
            self._partitioned = Partitioned(engine.optimizer, self._modules, self._parameters)
        self.masters = self._partitioned.masters if self._partitioned else _parameters_of(self._groups)
        adam.check(self.basic_optimizer, self.masters, engine.lr_scheduler)
        check_schedule(engine.lr_scheduler)
        adam.complete(self.basic_optimizer, self.masters)
        self._steps_before = int(max(adam.steps(self.basic_optimizer, self.masters)))
        self._parameter_ids = {id(parameter) for parameter in self._parameters}
        self._moments = adam.moments(self.basic_optimizer, self.masters)
        self.buffers = Buffers(self._modules)
        frozen = self._not_updated()
        parts = [parameter.ds_tensor.data for parameter in frozen] if self._partitioned else []
        self.frozen = Frozen([] if self._partitioned else frozen)
        self.tensors = [*(master.data for master in self.masters), *self._moments, *parts, *self.buffers.tensors]
        self._rest = Rest(engine.optimizer)
        self._pipeline = Attributes([engine], OF_PIPELINE)
        self._gradients = [(master, master.grad) for master in self.masters]
        self._lasting = LastingGradients(engine.optimizer, engine.module) if lasts(engine) else None

    def _not_updated(self) -> list[Any]:
        updated = {id(parameter) for parameter in updated_parameters(self.engine.optimizer, self._groups)}
        return [parameter for parameter in self._parameters if id(parameter) not in updated]

    def replicas(self) -> tuple[int, ...]:
        """Without ZeRO data-parallel peers are full replicas, but for buffers (running means and the like)."""
        if self.engine.zero_optimization() or self.engine.bfloat16_enabled() or self.buffers.tensors:
            return (dist.get_rank(),)
        return tuple(sorted(dist.get_process_group_ranks(self.engine.data_parallel_group)))

    def owns(self, tensor: torch.Tensor) -> bool:
        """Return whether `tensor` lies in parameters or buffers. Raises: Unsupported if it is a gradient."""
        memory = tensor.untyped_storage().data_ptr()
        gradients = [parameter.grad for parameter in self._parameters if parameter.grad is not None]
        if any(memory == gradient.untyped_storage().data_ptr() for gradient in gradients):
            raise Unsupported(
                "the script communicates gradients outside the engine's calls",
                "the engine to reduce them",
                f"leave gradients to engine.backward and engine.step, or {WHOLE_STEP}",
            )
        own = any(memory == parameter.untyped_storage().data_ptr() for parameter in self._parameters)
        return own or self.buffers.hold(tensor)

    # ---- plain values

    def visible(self) -> Scalars:
        """Collect what a script sees of the engine's progress: counters, rates, schedule, scaler, values of modules."""
        optimizer = self.engine.optimizer
        return {
            "frozen": self.frozen.digest,
            "counters": some(self.engine, COUNTERS),
            "module": some(self.engine.module, OF_PIPELINE_MODULE),
            "values": self._values.changed(),
            "optimizer": some(optimizer, OF_OPTIMIZER),
            "groups": group_scalars(self._groups),
            "scheduler": plain_state(self.engine.lr_scheduler),
            "scalers": [plain_state(getattr(optimizer, name, None)) for name in SCALERS],
        }

    def show(self, visible: Scalars) -> None:
        self.frozen.compare(visible["frozen"])
        optimizer = self.engine.optimizer
        vars(self.engine).update(visible["counters"])
        self._values.load(visible["values"])
        vars(self.engine.module).update(visible["module"])
        vars(optimizer).update(visible["optimizer"])
        load_group_scalars(self._groups, visible["groups"])
        load_plain_state(self.engine.lr_scheduler, visible["scheduler"])
        for name, state in zip(SCALERS, visible["scalers"], strict=True):
            load_plain_state(getattr(optimizer, name, None), state)

    def scalars(self) -> Scalars:
        self.frozen.check_unchanged()
        check_eight_bits(self._eight_bits)
        self.buffers.follow()
        steps = adam.steps(self.basic_optimizer, self.masters)
        without = self._lasting.without() if self._lasting else []
        return {"visible": self.visible(), "steps": steps, "without_gradients": without}

    def load(self, scalars: Scalars) -> None:
        self.show(scalars["visible"])
        if self._lasting:
            self._lasting.load(scalars["without_gradients"])
        adam.load_steps(self.basic_optimizer, self.masters, scalars["steps"], self._steps_before)

    def entry(self) -> Scalars:
        """Collect what a call may read beside the shard."""
        flags = [module.training for module in self._modules]
        trained = [parameter.requires_grad for parameter in self._parameters]
        if trained != self._trained:
            self._trained = trained  # the same object in all calls that are logged meanwhile
        return {
            "visible": self.visible(),
            "training": flags,
            "requires_grad": self._trained,
            "flags": some(self.engine, BETWEEN_CALLS),
            "buffers": self.buffers.entry(),
        }

    def load_entry(self, entry: Scalars) -> None:
        self.show(entry["visible"])
        vars(self.engine).update(entry["flags"])
        for module, flag in zip(self._modules, entry["training"], strict=True):
            module.training = flag
        for parameter, trained in zip(self._parameters, entry["requires_grad"], strict=True):
            if parameter.requires_grad != trained:
                parameter.requires_grad_(trained)
        self.buffers.load_entry(entry["buffers"])

    def check_gradients(self) -> None:
        """Before an update. Raises: Unsupported if it would use gradients of an earlier step."""
        if self._lasting:
            self._lasting.check()

    # ---- a swap

    def clean(self) -> None:
        """Leave the engine as between two steps: no gradients, nothing under way. Never communicates.

        Those that `LastingGradients` minds keep their memory's values, which the next step writes over.
        """
        from deepspeed.runtime.activation_checkpointing import checkpointing

        self.basic_optimizer.param_groups = self._groups  # ZeRO lends the optimizer one group at a time
        self._rest.restore()
        self._pipeline.restore()
        if self._partitioned:
            self._partitioned.clean()
        vars(self.engine).update({name: type(value)() for name, value in some(self.engine, UNDER_WAY).items()})
        for parameter in self._parameters:
            parameter.grad = None
            if hasattr(parameter, "grad_accum"):
                parameter.grad_accum = None
        for master, gradient in self._gradients:
            master.grad = gradient
            if gradient is not None:
                gradient.zero_()
        checkpointing.reset()
        if hasattr(self.engine, "flops_profiler"):
            self.engine.flops_profiler.end_profile()
        if hasattr(self.engine.optimizer, "clear_hp_grads"):  # BF16_Optimizer, which adds to buffers it keeps
            self.engine.optimizer.clear_hp_grads()
        for timers in (self.engine.timers, checkpointing.timers):
            for timer in getattr(timers, "timers", {}).values():
                timer.started_ = False
        self.engine.tput_timer.started = False
        self.buffers.put_back()

    def refresh_parameters(self) -> None:
        """The model's parameters from their masters, on all data-parallel ranks. Blocks: communicates."""
        optimizer = self.engine.optimizer
        if self._partitioned:
            self._partitioned.refresh()
        elif hasattr(optimizer, "update_lp_params"):
            optimizer.update_lp_params()
        elif hasattr(optimizer, "fp32_groups"):  # FP16_UnfusedOptimizer, which bf16 without ZeRO has too
            for group, masters in zip(optimizer.fp16_groups, optimizer.fp32_groups, strict=True):
                for parameter, master in zip(group, masters, strict=True):
                    parameter.data.copy_(master.data)
        elif hasattr(optimizer, "fp32_groups_flat"):  # FP16_Optimizer, the same with a fused Adam
            for group, flat in zip(optimizer.fp16_groups, optimizer.fp32_groups_flat, strict=True):
                for parameter, part in zip(group, flat.data.split([p.numel() for p in group]), strict=True):
                    parameter.data.copy_(part.view(parameter.shape))

    def take_back(self) -> None:
        """Something has put other groups and tensors into the optimizer: their values into ours, and ours back."""
        for mine, theirs in zip(self._groups, self.basic_optimizer.param_groups, strict=True):
            if mine is not theirs:
                mine.update(theirs)
        self.basic_optimizer.param_groups = self._groups
        adam.replace_moments(self.basic_optimizer, self.masters, self._moments)

    def has_parameter(self, tensor: torch.Tensor) -> bool:
        return id(tensor) in self._parameter_ids
