"""A rank's training state in a DeepSpeed engine: tensors for the shard, plain values for the scalars.

Rules of this file: nothing is rebound; restoring copies into the live tensors (but for buffers that the forward
replaces). Masters are what the engine's basic optimizer updates: this rank's fp32 partitions with ZeRO and in
BF16_Optimizer, else the model's own parameters. Survivors must not remember more than a newcomer: what is prefetched,
and which module gathers a parameter that another one owns, decides the order of collectives.
Source: DeepSpeed 0.19.8, runtime/zero/stage3.py, parameter_offload.py, partition_parameters.py.
"""

from __future__ import annotations

import copy
import functools
import types
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from ...errors import WHOLE_STEP, Unsupported
from ...worker.adapter import Scalars
from ...worker.module_state import PLAIN, SIMPLE, Buffers, Values, is_plain
from ..common import REMEDY, memory_of
from .optimizer import Adam, Frozen, LastingGradients

COUNTERS = ("global_steps", "global_samples", "micro_steps", "skipped_steps", "_step_applied", "_global_grad_norm",
            "_unmanaged_backward_count")  # fmt: skip
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
"""ZeRO 3's on each module of a model, beside those that begin with `ds_`. The flops profiler's begin with `__`."""
OF_MODULES = ("_external_params", "ds_recompute_parameters", "ds_grads_remaining")
"""ZeRO 3's. A survivor that still knew `_external_params` (shared parameters) would gather them before the newcomer."""
OF_OPTIMIZER = ("overflow", "_global_grad_norm", "clip_grad", "custom_loss_scaler", "external_loss_scale")
GROUPS = ("bit16_groups", "bf16_groups", "fp16_groups")
"""Attributes with the parameters that an optimizer updates: of ZeRO 1 and 2, BF16_Optimizer, ZeRO 3 and FP16_*."""
CONTAINERS = (dict, list, set, deque)


class EngineState:
    """State of one engine. Raises: Unsupported, naming the optimizer or parameter that cannot be protected."""

    def __init__(self, engine: Any) -> None:
        self.engine, optimizer = engine, engine.optimizer
        self._modules, self._parameters = list(engine.module.modules()), list(engine.module.parameters())
        # A pipeline's module seeds its layers by an attribute (`seed_layers`).
        self._attributes = ((engine, COUNTERS), (engine.module, ("micro_offset",)), (optimizer, OF_OPTIMIZER))
        self._values = Values(self._modules, lambda name: name in ZERO3_ATTRIBUTES or name.startswith(("ds_", "__")))
        # Transformer Engine's layers (accelerate's `mixed_precision: fp8`) keep scales and histories past buffers.
        self._eight_bits: list[Any] = [module for module in self._modules if hasattr(module, "fp8_initialized")]
        self._trained: list[bool] = []
        self._is_partitioned = engine.zero_optimization_stage() == 3
        in_groups = [parameter for group in engine.basic_optimizer.param_groups for parameter in group["params"]]
        masters = list(optimizer.fp32_partitioned_groups_flat) if self._is_partitioned else in_groups
        self.adam = Adam(engine.basic_optimizer, masters, engine.lr_scheduler)
        check_schedule(engine.lr_scheduler)
        self.buffers = Buffers(self._modules)
        groups = next((getattr(optimizer, name) for name in GROUPS if hasattr(optimizer, name)), [in_groups])
        updated = {id(parameter) for group in groups for parameter in group}
        frozen = [parameter for parameter in self._parameters if id(parameter) not in updated]
        # With ZeRO 3 a script may load frozen parameters on one rank only.
        parts = [parameter.ds_tensor.data for parameter in frozen] if self._is_partitioned else []
        trained = [parameter for parameter in self._parameters if id(parameter) in updated]
        # With ZeRO 3 the parameters themselves are empty between two steps.
        self.derived: Sequence[torch.Tensor] = [getattr(one, "ds_tensor", one).data for one in trained]
        self.frozen = Frozen([] if self._is_partitioned else frozen)
        self.changing: Sequence[torch.Tensor] = self.buffers.tensors
        self.shard: Sequence[torch.Tensor] = [*self.adam.tensors, *parts, *self.changing]
        self._before = TransientState(optimizer)
        self._before.note_attributes([engine], OF_PIPELINE)
        if self._is_partitioned:
            from deepspeed.runtime.zero.parameter_offload import FWD_MODULE_STACK

            self._before.note(FWD_MODULE_STACK, *map(vars, self._parameters))
            self._before.note_attributes(self._modules, OF_MODULES)
        self._gradients = [(master, master.grad) for master in masters]
        self.lasting = LastingGradients(engine)

    def replicas(self) -> tuple[int, ...]:
        if self.engine.zero_optimization() or self.engine.bfloat16_enabled() or self.changing:
            return (dist.get_rank(),)
        return tuple(sorted(dist.get_process_group_ranks(self.engine.data_parallel_group)))

    def owns(self, tensor: torch.Tensor) -> bool:
        """Return whether `tensor` lies in parameters or buffers. Raises: Unsupported if it is a gradient."""
        memory, gradients = memory_of(tensor), (parameter.grad for parameter in self._parameters)
        if memory in (memory_of(gradient) for gradient in gradients if gradient is not None):
            raise Unsupported(
                "the script communicates gradients outside the engine's calls",
                "the engine to reduce them",
                f"leave gradients to engine.backward and engine.step, or {WHOLE_STEP}",
            )
        return memory in map(memory_of, self._parameters) or self.buffers.hold(tensor)

    def has_parameter(self, tensor: torch.Tensor) -> bool:
        return any(tensor is parameter for parameter in self._parameters)

    # ---- plain values

    def visible(self) -> Scalars:
        """Collect what a script sees of the engine's progress: counters, rates, schedule, scaler, values of modules."""
        return {
            "frozen": self.frozen.digest,
            "attributes": [_some(owner, names) for owner, names in self._attributes],
            "values": self._values.changed(),
            "groups": self.adam.scalars(),
            "objects": [plain_state(one) for one in self._objects()],
        }

    def show(self, visible: Scalars) -> None:
        self.frozen.compare(visible["frozen"])
        for (owner, _), values in zip(self._attributes, visible["attributes"], strict=True):
            vars(owner).update(values)
        self._values.load(visible["values"])
        self.adam.load_scalars(visible["groups"])
        for one, state in zip(self._objects(), visible["objects"], strict=True):
            load_plain_state(one, state)

    def _objects(self) -> list[Any]:
        return [self.engine.lr_scheduler, *(getattr(self.engine.optimizer, name, None) for name in SCALERS)]

    def scalars(self) -> Scalars:
        self.frozen.check_unchanged()
        for module in self._eight_bits:
            if module.fp8_initialized:
                raise Unsupported(
                    f"a {type(module).__name__} trains in fp8, whose scaling factors are not mirrored", "bf16", REMEDY
                )
        self.buffers.follow()
        without = self.lasting.without()
        return {"visible": self.visible(), "steps": self.adam.steps(), "without_gradients": without}

    def load(self, scalars: Scalars) -> None:
        self.show(scalars["visible"])
        self.lasting.load(scalars["without_gradients"])
        self.adam.load_steps(scalars["steps"])

    def entry_state(self) -> Callable[[], None]:
        trained = [parameter.requires_grad for parameter in self._parameters]
        if trained == self._trained:
            trained = self._trained  # the same object in all calls that are logged meanwhile
        self._trained = trained
        training = [module.training for module in self._modules]
        visible, flags, buffers = self.visible(), _some(self.engine, BETWEEN_CALLS), self.buffers.entry()

        def restore() -> None:
            self.show(visible)
            vars(self.engine).update(flags)
            for module, flag in zip(self._modules, training, strict=True):
                module.training = flag
            for parameter, requires_grad in zip(self._parameters, trained, strict=True):
                if parameter.requires_grad != requires_grad:
                    parameter.requires_grad_(requires_grad)
            self.buffers.load_entry(buffers)

        return restore

    def left(self) -> None:
        self.buffers.left()

    # ---- a swap

    def clean(self) -> None:
        """Leave the engine as between two steps. Lasting gradients keep values that the next step overwrites."""
        from deepspeed.runtime.activation_checkpointing import checkpointing

        self.adam.optimizer.param_groups = self.adam.groups  # ZeRO lends the optimizer one group at a time
        self._before.restore()
        if self._is_partitioned:
            self._clean_partitions()
        vars(self.engine).update({name: type(value)() for name, value in _some(self.engine, UNDER_WAY).items()})
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

    def _clean_partitions(self) -> None:
        from deepspeed.runtime.zero.partition_parameters import free_param
        from deepspeed.runtime.zero.partitioned_param_coordinator import PartitionedParameterCoordinator

        _clear_caches(PartitionedParameterCoordinator)
        for module in self._modules:
            if "applied_pre_backward_ref_cnt" in vars(module):
                module.applied_pre_backward_ref_cnt = 0
            if hasattr(module._parameters, "_in_forward"):
                module._parameters._in_forward = False
        for parameter in self._parameters:
            parameter.ds_active_sub_modules.clear()
            free_param(parameter)

    def after_restore(self) -> None:
        optimizer = self.engine.optimizer
        if self._is_partitioned:
            for number in range(len(optimizer.fp16_groups)):
                optimizer._reassign_or_swap_out_partitioned_parameters(number)
        elif hasattr(optimizer, "update_lp_params"):
            optimizer.update_lp_params()
        elif hasattr(optimizer, "fp16_groups"):
            # FP16_UnfusedOptimizer, which bf16 without ZeRO has too, or FP16_Optimizer, the same with a fused Adam.
            flat = getattr(optimizer, "fp32_groups_flat", None)
            for number, group in enumerate(optimizer.fp16_groups):
                sizes = [parameter.numel() for parameter in group]
                masters = optimizer.fp32_groups[number] if flat is None else flat[number].data.split(sizes)
                for parameter, master in zip(group, masters, strict=True):
                    parameter.data.copy_(master.data.view(parameter.shape))


# ---- what an interrupted call leaves


class TransientState:
    """The attributes and containers of `roots`, and of all objects of DeepSpeed's runtime below them.

    Noted when nothing is under way. Objects and containers stay the same; the values of tensors are not noted.
    """

    def __init__(self, *roots: Any) -> None:
        self._restores: list[Callable[[], None]] = []
        self._seen: set[int] = set()
        self.note(*roots)

    def note_attributes(self, owners: Sequence[Any], names: Sequence[str]) -> None:
        """Note the attributes `names` of each of `owners` that has them, with their content; no others."""
        for owner in owners:
            found = _some(owner, names)
            self._restores.append(functools.partial(vars(owner).update, found))
            self.note(*found.values())

    def restore(self) -> None:
        for restore in self._restores:
            restore()

    def note(self, *values: Any) -> None:
        for value in values:
            if id(value) in self._seen:
                continue
            if isinstance(value, CONTAINERS):
                held = value.copy()
                restore = functools.partial(_refill, value, held)
            elif _is_runtime_object(value):
                held = dict(vars(value))
                restore = functools.partial(_reset, value, held)
            else:
                continue
            self._seen.add(id(value))
            self._restores.append(restore)
            self.note(*(held.values() if isinstance(held, dict) else held))


def _refill(container: Any, items: Any) -> None:
    container.clear()
    container.extend(items) if isinstance(container, (list, deque)) else container.update(items)


def _reset(value: Any, attributes: dict[str, Any]) -> None:
    # An answer found out once, perhaps by a collective, and kept under a name that was not there: no newcomer has it.
    # A value that is not plain was allocated on the way, and every process makes it without the others.
    for name in [name for name, found in vars(value).items() if name not in attributes and is_plain(found)]:
        delattr(value, name)
    vars(value).update(attributes)


def _is_runtime_object(value: Any) -> bool:
    """Return whether `value` has state of DeepSpeed's: no model, configuration, class or function."""
    if isinstance(value, (torch.nn.Module, torch.Tensor, type)) or not hasattr(value, "__dict__"):
        return False
    module, dataclass = type(value).__module__, vars(type(value)).get("__dataclass_params__")
    is_frozen = dataclass is not None and dataclass.frozen
    return module.startswith("deepspeed.runtime.") and ".config" not in module and not is_frozen


def _clear_caches(owner: type) -> None:
    """Clear the caches of methods that remember their answers: of an earlier trace, to what is released when."""
    # A survivor that kept them kept parameters that the newcomer gathered, and hung in the first evaluation after that.
    todo = list(vars(owner).values())
    while todo:
        method = todo.pop()
        if hasattr(method, "cache_clear"):
            method.cache_clear()
        elif isinstance(method, types.FunctionType):  # DeepSpeed's decorators leave no trace but closures
            todo += [cell.cell_contents for cell in method.__closure__ or () if callable(cell.cell_contents)]


# ---- plain values of small objects with state: engines' counters, schedules, loss scalers


def _some(owner: Any, names: Sequence[str]) -> Scalars:
    return {name: vars(owner)[name] for name in names if name in vars(owner)}


def plain_state(owner: Any) -> list[Scalars]:
    """Copy the plain values of a schedule or scaler, and of all parts it consists of."""
    return [
        {
            name: value if type(value) in SIMPLE else copy.deepcopy(value)
            for name, value in vars(one).items()
            if type(value) in SIMPLE or _is_plain(value)
        }
        for one in _members(owner)
    ]


def load_plain_state(owner: Any, state: list[Scalars]) -> None:
    """Put back what `plain_state` gave, in place."""
    for one, values in zip(_members(owner), state, strict=True):
        for name, value in values.items():
            live = vars(one).get(name)
            if isinstance(live, dict):  # a Counter stays one
                live.clear()
                live.update(copy.deepcopy(value))
            else:
                setattr(one, name, copy.deepcopy(value) if isinstance(value, (dict, list, tuple)) else value)


def check_schedule(schedule: Any) -> None:
    """Raises: Unsupported, naming what a schedule saves in checkpoints and `plain_state` does not have."""
    for one in _members(schedule):
        saved = one.state_dict() if hasattr(one, "state_dict") else {}
        for name, value in vars(one).items():
            if saved.get(name) is not None and not _is_plain(value) and not _parts(value):
                raise Unsupported(
                    f"the schedule {type(one).__name__} has the state {name!r}, a {type(saved[name]).__name__}",
                    "plain data, and schedules of these",
                    "leave it out of its state_dict() if it never changes, or step a schedule of the script's own",
                )


def _members(owner: Any) -> list[Any]:
    """Return `owner`, if there is one, and all parts below it."""
    if owner is None:
        return []
    values = [value for value in vars(owner).values() if type(value) not in SIMPLE]  # at each call: few are left
    parts = [part for value in values for part in _parts(value)]
    return [owner, *(below for part in parts for below in _members(part))]


def _parts(value: Any) -> list[Any]:
    """Return the parts of a schedule that `value` is: other schedules, and functions that are objects with values."""
    parts = list(value) if isinstance(value, (list, tuple)) else [value]
    if type(parts[0] if parts else None) in SIMPLE:
        return []
    return parts if all(map(_is_part, parts)) else []


def _is_part(value: Any) -> bool:
    if isinstance(value, (torch.nn.Module, type)) or hasattr(value, "param_groups") or not hasattr(value, "__dict__"):
        return False
    return callable(value) or (hasattr(value, "step") and hasattr(value, "state_dict"))


def _is_plain(value: Any) -> bool:
    parts = [*value.keys(), *value.values()] if isinstance(value, dict) else value
    return all(map(_is_plain, parts)) if isinstance(parts, (list, tuple)) else isinstance(parts, PLAIN)
