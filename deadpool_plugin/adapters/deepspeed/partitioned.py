"""ZeRO 3: parameters are partitioned, and gathered while a module runs.

Rules of this file: after an interruption every rank has gathered nothing and remembers nothing of the order in which
modules use parameters, as before the first forward. It must not remember more than a newcomer: what is prefetched,
and which module gathers a parameter that another one owns, decides the order of collectives.
Source: DeepSpeed 0.19.8, runtime/zero/stage3.py, parameter_offload.py, partition_parameters.py. A survivor that still
knew the parameters which modules share (`_external_params`) would gather them earlier than the newcomer. One that
still had an earlier trace's answers to what is released when (a cache of the coordinator's class) kept parameters that
the newcomer gathered: it hung in the first evaluation after a swap.
"""

from __future__ import annotations

import types
from collections.abc import Sequence
from typing import Any

import torch

from .rest import Attributes, Rest

UNDER_WAY_OF_MODULES = ("_external_params", "ds_recompute_parameters", "ds_grads_remaining")


class Partitioned:
    """The parameters of one engine with ZeRO 3, and what DeepSpeed has noted on them and on their modules."""

    def __init__(self, optimizer: Any, modules: Sequence[Any], parameters: Sequence[Any]) -> None:
        from deepspeed.runtime.zero.parameter_offload import FWD_MODULE_STACK

        self._optimizer, self._modules, self._parameters = optimizer, modules, parameters
        self._of_modules = Attributes(modules, UNDER_WAY_OF_MODULES)
        self._rest = Rest([FWD_MODULE_STACK, *map(vars, parameters)])

    @property
    def masters(self) -> list[torch.Tensor]:
        return list(self._optimizer.fp32_partitioned_groups_flat)

    def clean(self) -> None:
        """Nothing is gathered or in use. Never communicates."""
        from deepspeed.runtime.zero.partition_parameters import free_param
        from deepspeed.runtime.zero.partitioned_param_coordinator import PartitionedParameterCoordinator

        _clear_caches(PartitionedParameterCoordinator)
        self._rest.restore()
        self._of_modules.restore()
        for module in self._modules:
            if "applied_pre_backward_ref_cnt" in vars(module):
                module.applied_pre_backward_ref_cnt = 0
            if hasattr(module._parameters, "_in_forward"):
                module._parameters._in_forward = False
        for parameter in self._parameters:
            parameter.ds_active_sub_modules.clear()
            free_param(parameter)

    def refresh(self) -> None:
        """This rank's partitions of the model's parameters from their masters."""
        for number in range(len(self._optimizer.fp16_groups)):
            self._optimizer._reassign_or_swap_out_partitioned_parameters(number)


def _clear_caches(owner: type) -> None:
    """Clear the caches of methods that remember their answers. DeepSpeed's decorators leave no trace but closures."""
    todo = list(vars(owner).values())
    while todo:
        method = todo.pop()
        if hasattr(method, "cache_clear"):
            method.cache_clear()
        elif isinstance(method, types.FunctionType):
            todo += [cell.cell_contents for cell in method.__closure__ or () if callable(cell.cell_contents)]
