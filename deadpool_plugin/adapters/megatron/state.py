"""A rank's training state in Megatron-core: fp32 masters and moments in one flat buffer, the model's buffers, plain
values of optimizer and modules.

Rules of this file: nothing is rebound after `TrainingState` is built; restoring copies into the live tensors.
Masters that the optimizer owns, and all moments, become views of one flat buffer once, before the first step:
training stays bitwise identical and a snapshot is one copy (facts: 19-68 us against 0.4-14 ms for torch.cat).
Masters that live in model memory (fp32 parameters) stay where they are and are listed beside it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from ...errors import Unsupported
from ...worker.adapter import Scalars
from ...worker.module_state import Buffers, Values, is_plain
from ..base_optimizer import MOMENTS, group_scalars, load_group_scalars, refuse_third_moment
from ..options import REMEDY, Option, refuse

SUPPORTED = ("Adam", "AdamW", "FusedAdam")
CACHES = ("cos_cached", "sin_cached")
"""Buffers of yarn_rotary_pos_embedding.py, made anew by the first forward that wants them longer or of another type."""
OF_MODULES = frozenset(
    {"current_microbatch", "max_seq_len_cached", "offset_cached", "dtype_cached", "packed_seq_cached"}
)
"""Attributes: what pipeline_parallel/schedules.py tells layers for CUDA graphs, and what CACHES were made for."""
ALIGNMENT = 16  # elements: 64 bytes of fp32, so that a view is aligned as a tensor of its own would be


class TrainingState:
    """State of one outermost Megatron optimizer (a ChainedOptimizer or a single one) and of the model it trains.

    Raises:
        Unsupported: from the constructor, naming the optimizer or parameter that cannot be protected.
    """

    def __init__(self, chunks: Sequence[Any], optimizer: Any) -> None:
        self._chunks = chunks
        self._parts = [part for part in parts_of(optimizer) if getattr(part, "optimizer", None) is not None]
        for part in self._parts:
            _check_supported(part)
        _check_no_frozen_parameters(chunks)
        for module in [module for chunk in chunks for module in chunk.modules()]:
            if hasattr(module, "_maintain_float32_expert_bias"):  # the first forward would rebind a buffer (router.py)
                module._maintain_float32_expert_bias()
        self.learned = Learned(_with_inner(optimizer))
        modules = [module for chunk in chunks for module in chunk.module.modules()]
        self.buffers, self.values = Buffers(modules, CACHES), Values(modules, OF_MODULES.__contains__)
        self.tensors = self._flatten() + self.buffers.tensors
        memory = [parameter for chunk in chunks for parameter in chunk.parameters()]
        memory += [b.grad_data for chunk in chunks for b in chunk.buffers + chunk.expert_parallel_buffers]
        self._memory = {tensor.untyped_storage().data_ptr() for tensor in memory}

    def owns(self, tensor: torch.Tensor) -> bool:
        """Return whether `tensor` lies in parameters, gradients or buffers."""
        return tensor.untyped_storage().data_ptr() in self._memory or self.buffers.hold(tensor)

    def _flatten(self) -> list[torch.Tensor]:
        model_memory = {p.untyped_storage().data_ptr() for chunk in self._chunks for p in chunk.parameters()}
        movable: list[tuple[Any, str | None]] = []
        fixed: list[torch.Tensor] = []
        for part in self._parts:
            for parameter, state in _parameters(part):
                if parameter.untyped_storage().data_ptr() in model_memory:
                    fixed.append(parameter.data)
                else:
                    movable.append((parameter, None))
                movable += [(state, name) for name in MOMENTS]
        return _move_into_one_buffer(movable) + merge_neighbours(fixed)

    def replicas(self) -> tuple[int, ...]:
        """Without a distributed optimizer data-parallel peers are full replicas, but for expert parameters and buffers
        (running means and the like, which each rank may have of its own)."""
        from megatron.core import parallel_state

        own = (torch.distributed.get_rank(),)
        if any(chunk.ddp_config.use_distributed_optimizer for chunk in self._chunks):
            return own
        if self.buffers.tensors or any(chunk.expert_parallel_buffers for chunk in self._chunks):
            return own
        group = parallel_state.get_data_parallel_group(with_context_parallel=True)
        return tuple(sorted(torch.distributed.get_process_group_ranks(group)))

    def scalars(self) -> Scalars:
        return {
            "steps": [[_step(state) for _, state in _parameters(part)] for part in self._parts],
            "groups": self.group_scalars(),
            "scalers": [_scaler_state(part) for part in self._parts],
            "learned": self.learned.changed(),
        }

    def group_scalars(self) -> list[list[Scalars]]:
        """Learning rates, betas and the like of every parameter group."""
        return [group_scalars(part.optimizer.param_groups) for part in self._parts]

    def load_group_scalars(self, saved_groups: list[list[Scalars]]) -> None:
        for part, groups in zip(self._parts, saved_groups, strict=True):
            load_group_scalars(part.optimizer.param_groups, groups)

    def load_scalars(self, scalars: Scalars) -> None:
        self.load_group_scalars(scalars["groups"])
        self.learned.load(scalars["learned"])
        for part, steps, scaler in zip(self._parts, scalars["steps"], scalars["scalers"], strict=True):
            for (_, state), step in zip(_parameters(part), steps, strict=True):
                if isinstance(state.get("step"), torch.Tensor):
                    state["step"].fill_(step)
                elif step is not None:
                    state["step"] = int(step)
            if scaler is not None:
                part.grad_scaler.load_state_dict(
                    {k: torch.tensor([v]) if k == "scale" else v for k, v in scaler.items()}
                )

    def refresh_parameters(self) -> None:
        """16-bit parameters from their fp32 masters (bitwise what the update itself leaves there)."""
        for part in self._parts:
            if hasattr(part, "_copy_main_params_to_model_params"):
                part._copy_main_params_to_model_params()


class Learned:
    """Plain values that optimizer objects found out in training and keep, whatever their names.

    From 0.19 on an optimizer asks all ranks, at its first update, which groups of gradient norms there are
    (`has_grad_norm_group`). A rank that lacks an answer its peers have would issue a collective that they do not.
    """

    def __init__(self, optimizers: Sequence[Any]) -> None:
        self._owners = [vars(optimizer) for optimizer in optimizers]
        self._first = [_plain_values(owner) for owner in self._owners]

    def changed(self) -> list[Scalars]:
        """Per optimizer, the values that are new or different since training began."""
        return [
            {name: value for name, value in _plain_values(owner).items() if name not in first or first[name] != value}
            for owner, first in zip(self._owners, self._first, strict=True)
        ]

    def load(self, saved: list[Scalars]) -> None:
        """Make them what `changed` returned, on every rank alike."""
        for owner, first, known, values in zip(self._owners, self._first, self.changed(), saved, strict=True):
            for name in known.keys() - values.keys() - first.keys():
                del owner[name]
            again = {name: first[name] for name in known.keys() & first.keys()} | values
            owner.update({name: _copied(value) for name, value in again.items()})


def _plain_values(owner: dict[str, Any]) -> Scalars:
    return {name: _copied(value) for name, value in owner.items() if is_plain(value)}


def _copied(value: Any) -> Any:
    return dict(value) if isinstance(value, dict) else value


def _with_inner(optimizer: Any) -> list[Any]:
    """An optimizer and, below it, all that are chained."""
    inner = getattr(optimizer, "chained_optimizers", ())
    return [optimizer, *(below for one in inner for below in _with_inner(one))]


def _parameters(part: Any) -> Iterator[tuple[torch.Tensor, dict[str, Any]]]:
    """Every main parameter of a sub-optimizer with its (complete) state, in a fixed order.

    What is missing is made as the optimizer itself would at its first step, but without memory: `_flatten` makes views
    of its buffer of it. torch's Adam counts steps in each state
    (torch/optim/adam.py `_init_group`); apex's and Transformer Engine's FusedAdam count in the group, and the latter
    cannot save a state that has anything else in it (fused_adam.py `state_dict`).
    """
    counts_in_group = type(part.optimizer).__module__.partition(".")[0] in ("apex", "transformer_engine")
    for group in part.optimizer.param_groups:
        for parameter in group["params"]:
            state = part.optimizer.state[parameter]
            if "exp_avg" not in state:
                if not counts_in_group:
                    state["step"] = torch.tensor(0.0, dtype=torch.float32)
                for name in MOMENTS:
                    state[name] = parameter.data.new_zeros(()).expand(parameter.shape)
            yield parameter, state


def _step(state: dict[str, Any]) -> float | None:
    return float(state["step"]) if "step" in state else None


def _move_into_one_buffer(movable: Sequence[tuple[Any, str | None]]) -> list[torch.Tensor]:
    """Make every `(tensor, None)` or `(state dict, key)` a view of one new fp32 buffer; return the buffer."""
    tensors = [owner.data if key is None else owner[key] for owner, key in movable]
    if not tensors:
        return []
    sizes = [-(-tensor.numel() // ALIGNMENT) * ALIGNMENT for tensor in tensors]
    flat = torch.zeros(sum(sizes), dtype=torch.float32, device=tensors[0].device)
    offset = 0
    for (owner, key), tensor, size in zip(movable, tensors, sizes, strict=True):
        view = flat[offset : offset + tensor.numel()].view(tensor.shape)
        view.copy_(tensor)
        if key is None:
            owner.data = view
        else:
            owner[key] = view
        offset += size
    return [flat]


def merge_neighbours(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The same memory as few tensors as possible: contiguous ones that touch become one (fewer copies a snapshot).

    They are in the order in which they lie there; Megatron's buffers begin with the last parameter.
    """
    storages: dict[int, int] = {}
    for tensor in tensors:
        storages.setdefault(tensor.untyped_storage().data_ptr(), len(storages))
    merged: list[torch.Tensor] = []
    for tensor in sorted(tensors, key=lambda t: (storages[t.untyped_storage().data_ptr()], t.storage_offset())):
        last = merged[-1] if merged else None
        if (
            last is not None
            and tensor.is_contiguous()
            and tensor.dtype == last.dtype
            and tensor.untyped_storage().data_ptr() == last.untyped_storage().data_ptr()
            and tensor.storage_offset() == last.storage_offset() + last.numel()
        ):
            merged[-1] = torch.as_strided(last, (last.numel() + tensor.numel(),), (1,), last.storage_offset())
        else:
            merged.append(tensor.flatten() if tensor.is_contiguous() else tensor)
    return merged


def parts_of(optimizer: Any) -> list[Any]:
    """List the wrappers of base optimizers, in order. A chain (of one or more, or of chains) itself wraps none."""
    chained = getattr(optimizer, "chained_optimizers", None)
    return [optimizer] if chained is None else [part for inner in chained for part in parts_of(inner)]


def check_base(part: Any) -> None:
    """Raises: Unsupported if one of `parts_of` is around one that is not Adam; one that has no parameters has none."""
    base = type(getattr(part, "optimizer", None))
    if base is not type(None) and base.__name__ not in SUPPORTED:
        raise Unsupported(
            f"the base optimizer is {base.__module__}.{base.__name__}",
            f"one of {', '.join(SUPPORTED)}",
            f"use one of them, {REMEDY}",
        )


def _check_supported(part: Any) -> None:
    refuse(part.config, [Option("use_precision_aware_optimizer", "keeps moments that are not fp32", "switch it off")])
    refuse_third_moment(part.optimizer.param_groups)
    for parameter in [parameter for group in part.optimizer.param_groups for parameter in group["params"]]:
        if parameter.dtype != torch.float32:
            raise Unsupported(
                f"a main parameter is {parameter.dtype}",
                "fp32 masters",
                f"let the optimizer make them (bf16 or fp16 in its configuration), {REMEDY}",
            )


def _check_no_frozen_parameters(chunks: Sequence[Any]) -> None:
    frozen = [n for chunk in chunks for n, p in chunk.module.named_parameters() if not p.requires_grad]
    if frozen:
        raise Unsupported(
            f"{len(frozen)} parameters are frozen (first: {frozen[0]}), which a replacement rank could not rebuild",
            "none",
            f"train all parameters, {REMEDY}",
        )


def _scaler_state(part: Any) -> Scalars | None:
    scaler = getattr(part, "grad_scaler", None)
    if scaler is None:
        return None
    return {k: float(v) if isinstance(v, torch.Tensor) else v for k, v in scaler.state_dict().items()}
