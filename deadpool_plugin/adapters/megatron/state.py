"""A rank's training state in Megatron-core: masters and moments, buffers, plain values of optimizer and modules.

Rules of this file: nothing is rebound; restoring copies into the live tensors. Masters and moments stay where the
optimizer has them: `torch.save` writes whole storages, and views of one would make a script's checkpoints larger.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ...errors import Unsupported
from ...worker.adapter import Scalars
from ...worker.module_state import PLAIN, Buffers, Values, is_plain
from ..common import REMEDY, AdamState, Option, memory_of, refuse
from . import bookkeeping

SUPPORTED = ("Adam", "AdamW", "FusedAdam")
CACHES = ("cos_cached", "sin_cached")
"""Buffers of yarn_rotary_pos_embedding.py, made anew by the first forward that wants them longer or of another type."""
OF_MODULES = frozenset(
    {"current_microbatch", "max_seq_len_cached", "offset_cached", "dtype_cached", "packed_seq_cached"}
)
"""Attributes: what pipeline_parallel/schedules.py tells layers for CUDA graphs, and what CACHES were made for."""
PRECISION = Option("use_precision_aware_optimizer", "keeps moments that are not fp32", "switch it off")


class TrainingState:
    """State of the outermost Megatron optimizer, and of the model it trains. `timers` may grow.

    Raises: Unsupported, naming the optimizer or parameter that cannot be protected.
    """

    def __init__(self, chunks: Sequence[Any], optimizer: Any, schedulers: Sequence[Any], timers: Sequence[Any]) -> None:
        self._chunks, self._optimizer, self._schedulers, self._timers = chunks, optimizer, schedulers, timers
        self._parts = [part for part in parts_of(optimizer) if getattr(part, "optimizer", None) is not None]
        self._adams = list(map(_adam_of, self._parts))
        self._scalers = [part.grad_scaler for part in self._parts if getattr(part, "grad_scaler", None) is not None]
        frozen = [n for chunk in chunks for n, p in chunk.module.named_parameters() if not p.requires_grad]
        if frozen:
            raise Unsupported(
                f"{len(frozen)} parameters are frozen (first: {frozen[0]}), which a replacement rank could not rebuild",
                "none",
                f"train all parameters, {REMEDY}",
            )
        self._modules = [module for chunk in chunks for module in chunk.modules()]
        for module in self._modules:
            if hasattr(module, "_maintain_float32_expert_bias"):  # the first forward would rebind a buffer (router.py)
                module._maintain_float32_expert_bias()
        self._learned = Learned(chain_of(optimizer))
        modules = [module for chunk in chunks for module in chunk.module.modules()]
        self.buffers, self._values = Buffers(modules, CACHES), Values(modules, OF_MODULES.__contains__)
        self.changing: Sequence[torch.Tensor] = self.buffers.tensors
        held = [tensor for adam in self._adams for tensor in adam.tensors]
        self.shard: Sequence[torch.Tensor] = [*merge_neighbours(held), *self.changing]
        owned = [parameter for chunk in chunks for parameter in chunk.parameters()]
        owned += [b.grad_data for chunk in chunks for b in chunk.buffers + chunk.expert_parallel_buffers]
        self.derived: Sequence[torch.Tensor] = owned
        self._memory = set(map(memory_of, owned))

    def owns(self, tensor: torch.Tensor) -> bool:
        return memory_of(tensor) in self._memory or self.buffers.hold(tensor)

    def replicas(self) -> tuple[int, ...]:
        from megatron.core import parallel_state

        # Each rank may have buffers (running means and the like) and expert parameters of its own.
        own = any(chunk.ddp_config.use_distributed_optimizer for chunk in self._chunks) or self.changing
        if own or any(chunk.expert_parallel_buffers for chunk in self._chunks):
            return (torch.distributed.get_rank(),)
        group = parallel_state.get_data_parallel_group(with_context_parallel=True)
        return tuple(sorted(torch.distributed.get_process_group_ranks(group)))

    # ---- plain values

    def visible(self) -> Scalars:
        return {
            "groups": [adam.scalars() for adam in self._adams],
            "schedulers": [  # plain numbers; its optimizer and call-backs are not state
                {name: value for name, value in vars(scheduler).items() if isinstance(value, PLAIN)}
                for scheduler in self._schedulers
            ],
            "values": self._values.changed(),
        }

    def show(self, visible: Scalars) -> None:
        for adam, groups in zip(self._adams, visible["groups"], strict=True):
            adam.load_scalars(groups)
        for scheduler, saved in zip(self._schedulers, visible["schedulers"], strict=True):
            # load_state_dict is additive on a live scheduler (it steps by the saved count), so set it outright.
            vars(scheduler).update(saved)
        self._values.load(visible["values"])

    def scalars(self) -> Scalars:
        self.buffers.follow()
        return {
            "visible": self.visible(),
            "steps": [adam.steps() for adam in self._adams],
            "scalers": [
                {name: float(value) if isinstance(value, torch.Tensor) else value for name, value in state.items()}
                for state in (scaler.state_dict() for scaler in self._scalers)
            ],
            "learned": self._learned.changed(),
            "tracked": bookkeeping.plain(bookkeeping.noted()),
        }

    def load(self, scalars: Scalars) -> None:
        self.show(scalars["visible"])
        self._learned.load(scalars["learned"])
        for adam, steps in zip(self._adams, scalars["steps"], strict=True):
            adam.load_steps(steps)
        for scaler, state in zip(self._scalers, scalars["scalers"], strict=True):
            scaler.load_state_dict({k: torch.tensor([v]) if k == "scale" else v for k, v in state.items()})
        bookkeeping.put_back(scalars["tracked"])

    def entry_state(self) -> Callable[[], None]:
        training = [module.training for module in self._modules]
        configs = [(chunk.config, dict(vars(chunk.config))) for chunk in self._chunks]
        # Whether forwards wait for gathered parameters: scripts switch that off around evaluation and saving.
        hooked = [bool(chunk.remove_forward_pre_hook_handles) for chunk in self._chunks]
        reducing = [getattr(chunk, "force_all_reduce", False) for chunk in self._chunks]  # from 0.16 on
        visible, learned, buffers = self.visible(), self._learned.changed(), self.buffers.entry()
        tracked, running = bookkeeping.noted(), {timer for timer in self._timers if timer._started}

        def restore() -> None:
            for module, flag in zip(self._modules, training, strict=True):
                module.training = flag
            for config, fields in configs:
                vars(config).update(fields)
            for chunk, enabled, forced in zip(self._chunks, hooked, reducing, strict=True):
                if chunk.use_forward_hook and enabled != bool(chunk.remove_forward_pre_hook_handles):
                    chunk.enable_forward_pre_hook() if enabled else chunk.disable_forward_pre_hook(param_sync=False)
                chunk.force_all_reduce = forced
            self.show(visible)
            bookkeeping.put_back(tracked)
            for timer in self._timers:  # one that an interruption left running could not be started
                timer._started = timer in running
            self._learned.load(learned)
            self.buffers.load_entry(buffers)

        return restore

    def left(self) -> None:
        self.buffers.left()

    # ---- a swap

    def clean(self) -> None:
        bookkeeping.reset_gradient_buckets(self._chunks)
        for chunk in self._chunks:
            chunk.zero_grad_buffer()
        self._optimizer.zero_grad()
        self.buffers.put_back()

    def after_restore(self) -> None:
        for part in self._parts:  # bitwise what the update itself leaves there
            if hasattr(part, "_copy_main_params_to_model_params"):
                part._copy_main_params_to_model_params()
        for chunk in self._chunks:
            if chunk.ddp_config.use_distributed_optimizer:
                chunk.start_param_sync(force_sync=True)
        bookkeeping.reset_gradient_buckets(self._chunks)
        # At its first look for cached logits on remote storage a newcomer takes part in a broadcast (since core_v0.19).
        getattr(sys.modules.get("megatron.training.distillation.utils_logits"), "_STORAGE_GLOB_CACHE", {}).clear()


class Learned:
    """Plain values that optimizer objects found out in training and keep, whatever their names."""

    def __init__(self, optimizers: Sequence[Any]) -> None:
        # From 0.19 on an optimizer asks all ranks, at its first update, which groups of gradient norms there are
        # (`has_grad_norm_group`). A rank that lacks an answer its peers have would issue a collective that they do not.
        self._owners = [vars(optimizer) for optimizer in optimizers]
        self._first = [_plain_values(owner) for owner in self._owners]
        # The types of all attributes: while they are these, only those of `first` need be compared. Not so if another
        # one is a dictionary, whose content decides whether it is plain.
        self._types = [
            None if any(type(one) is dict and name not in first for name, one in owner.items()) else _types(owner)
            for owner, first in zip(self._owners, self._first, strict=True)
        ]

    def changed(self) -> list[Scalars]:
        """Return what is new or different since training began, per optimizer."""
        return [
            {}
            if _types(owner) == types and [*map(owner.get, first)] == [*first.values()]
            else {name: one for name, one in _plain_values(owner).items() if name not in first or first[name] != one}
            for owner, first, types in zip(self._owners, self._first, self._types, strict=True)
        ]

    def load(self, saved: list[Scalars]) -> None:
        for owner, first, known, values in zip(self._owners, self._first, self.changed(), saved, strict=True):
            for name in known.keys() - values.keys() - first.keys():
                del owner[name]
            again = {name: first[name] for name in known.keys() & first.keys()} | values
            owner.update({name: copy.copy(value) for name, value in again.items()})


def _types(owner: dict[str, Any]) -> list[type]:
    return [*map(type, owner.values())]


def _plain_values(owner: dict[str, Any]) -> Scalars:
    return {name: copy.copy(value) for name, value in owner.items() if is_plain(value)}


def merge_neighbours(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return the same memory as few tensors, in its order: contiguous ones that touch become one."""
    storages: dict[int, list[torch.Tensor]] = {}
    for tensor in tensors:
        storages.setdefault(memory_of(tensor), []).append(tensor)
    merged: list[torch.Tensor] = []
    for within in storages.values():
        end: object = None
        for tensor in sorted(within, key=torch.Tensor.storage_offset):
            is_whole = tensor.is_contiguous()
            if is_whole and (tensor.dtype, tensor.storage_offset()) == end:
                last = merged.pop()
                tensor = torch.as_strided(last, (last.numel() + tensor.numel(),), (1,), last.storage_offset())
            end = (tensor.dtype, tensor.storage_offset() + tensor.numel()) if is_whole else None
            merged.append(tensor.flatten() if is_whole else tensor)
    return merged


def chain_of(optimizer: Any) -> list[Any]:
    """List an optimizer and, below it, all that are chained."""
    inner = getattr(optimizer, "chained_optimizers", ())
    return [optimizer, *(below for one in inner for below in chain_of(one))]


def parts_of(optimizer: Any) -> list[Any]:
    """List the wrappers of base optimizers, in order. A chain (of one or more, or of chains) itself wraps none."""
    return [one for one in chain_of(optimizer) if not hasattr(one, "chained_optimizers")]


def check_base(part: Any) -> None:
    """Raises: Unsupported if one of `parts_of` is around another optimizer than Adam. An empty one has none."""
    base = type(getattr(part, "optimizer", None))
    if base is not type(None) and base.__name__ not in SUPPORTED:
        raise Unsupported(
            f"the base optimizer is {base.__module__}.{base.__name__}",
            f"one of {', '.join(SUPPORTED)}",
            f"use one of them, {REMEDY}",
        )


def _adam_of(part: Any) -> AdamState:
    refuse(part.config, [PRECISION])
    masters = [parameter for group in part.optimizer.param_groups for parameter in group["params"]]
    remedy = f"let the optimizer make them (bf16 or fp16 in its configuration), {REMEDY}"
    return AdamState(part.optimizer, masters, remedy)
