"""The transient state of an engine: remains of an interrupted call, put back as they were before the first forward.

Survivors are afterwards as a newcomer is, whatever the version keeps. They must not remember more than a newcomer: what
is prefetched, and which module gathers a parameter that another one owns, decides the order of collectives.
Source: DeepSpeed 0.19.8, runtime/zero/stage3.py, parameter_offload.py, partition_parameters.py.
"""

from __future__ import annotations

import functools
import types
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from ...worker.module_state import is_plain

CONTAINERS = (dict, list, set, deque)
OF_MODULES = ("_external_params", "ds_recompute_parameters", "ds_grads_remaining")
"""ZeRO 3's. A survivor that still knew `_external_params` (shared parameters) would gather them before the newcomer."""


class TransientState:
    """The plain attributes and containers of `root`, and of all objects of DeepSpeed's runtime below it.

    Noted when nothing is under way. Objects and containers stay the same. Tensors are noted by reference: their values
    are `EngineState`'s (of gradients that outlive a step nobody's: `LastingGradients`).
    """

    def __init__(self, root: Any) -> None:
        self._restores: list[Callable[[], None]] = []
        self._seen: set[int] = set()
        self._note(root)

    def restore(self) -> None:
        for restore in self._restores:
            restore()

    def _note(self, value: Any) -> None:
        if id(value) in self._seen:
            return
        below: Iterable[Any]
        if isinstance(value, CONTAINERS):
            items = value.copy()
            below = items.values() if isinstance(items, dict) else items
            self._restores.append(functools.partial(_refill, value, items))
        elif _is_runtime_object(value):
            attributes = dict(vars(value))
            below = attributes.values()
            self._restores.append(functools.partial(_reset, value, attributes))
        else:
            return
        self._seen.add(id(value))
        for one in below:
            self._note(one)


def _refill(container: Any, items: Any) -> None:
    container.clear()
    container.extend(items) if isinstance(container, (list, deque)) else container.update(items)


def _reset(value: Any, attributes: dict[str, Any]) -> None:
    # An answer found out once, perhaps by a collective, and kept under a name that was not there: no newcomer has it.
    # What is not plain was allocated on the way, and every process makes it without the others.
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


class Attributes:
    """The attributes `names` of each of `owners` that has them, with their content; no others."""

    def __init__(self, owners: Sequence[Any], names: Sequence[str]) -> None:
        self._noted = [(owner, {name: vars(owner)[name] for name in names if name in vars(owner)}) for owner in owners]
        self._contents = TransientState([noted for _, noted in self._noted])

    def restore(self) -> None:
        self._contents.restore()
        for owner, noted in self._noted:
            vars(owner).update(noted)


class Partitioned:
    """The parameters of an engine with ZeRO 3: partitioned, and gathered while a module runs."""

    def __init__(self, modules: Sequence[Any], parameters: Sequence[Any]) -> None:
        from deepspeed.runtime.zero.parameter_offload import FWD_MODULE_STACK

        self._modules, self._parameters = modules, parameters
        self._of_modules = Attributes(modules, OF_MODULES)
        self._of_parameters = TransientState([FWD_MODULE_STACK, *map(vars, parameters)])

    def clean(self) -> None:
        """Leave nothing gathered or in use. Never communicates."""
        from deepspeed.runtime.zero.partition_parameters import free_param
        from deepspeed.runtime.zero.partitioned_param_coordinator import PartitionedParameterCoordinator

        _clear_caches(PartitionedParameterCoordinator)
        self._of_parameters.restore()
        self._of_modules.restore()
        for module in self._modules:
            if "applied_pre_backward_ref_cnt" in vars(module):
                module.applied_pre_backward_ref_cnt = 0
            if hasattr(module._parameters, "_in_forward"):
                module._parameters._in_forward = False
        for parameter in self._parameters:
            parameter.ds_active_sub_modules.clear()
            free_param(parameter)


def _clear_caches(owner: type) -> None:
    """Clear the caches of methods that remember their answers: of an earlier trace, to what is released when.

    A survivor that kept them kept parameters that the newcomer gathered, and hung in the first evaluation after a swap.
    """
    todo = list(vars(owner).values())
    while todo:
        method = todo.pop()
        if hasattr(method, "cache_clear"):
            method.cache_clear()
        elif isinstance(method, types.FunctionType):  # DeepSpeed's decorators leave no trace but closures
            todo += [cell.cell_contents for cell in method.__closure__ or () if callable(cell.cell_contents)]
