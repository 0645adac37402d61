"""Process-wide switches of torch that decide how a call computes: a redo has those of the call, not of the moment.

Rules of this file: a switch that this torch does not have is left alone; nothing is set that is so already. Precision
is read and set the new way (`fp32_precision`), which tells what was set the old way, too; the old one raises where both
were used.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch


class _Switch(NamedTuple):
    read: Callable[[], Any]
    write: Callable[[Any], Any]


def _attribute(owner: Any, name: str) -> _Switch:
    return _Switch(lambda: getattr(owner, name), lambda value: setattr(owner, name, value))


def _all() -> list[_Switch]:
    cuda, cudnn = torch.backends.cuda, torch.backends.cudnn
    found = [
        _Switch(getattr(cuda, f"{kind}_sdp_enabled"), getattr(cuda, f"enable_{kind}_sdp"))
        for kind in ("flash", "mem_efficient", "math", "cudnn")
    ]
    if hasattr(torch._C, "_get_sdp_priority_order"):
        found.append(_Switch(torch._C._get_sdp_priority_order, torch._C._set_sdp_priority_order))
    found += [_attribute(cudnn, name) for name in ("enabled", "benchmark", "deterministic")]
    for name in ("allow_fp16_reduced_precision_reduction", "allow_bf16_reduced_precision_reduction"):
        found.append(_attribute(cuda.matmul, name))
    owners: list[Any] = [torch.backends, cuda.matmul, cudnn, getattr(torch.backends.mkldnn, "matmul", None)]
    owners += [getattr(cudnn, name, None) for name in ("conv", "rnn")]
    found += [_attribute(owner, "fp32_precision") for owner in owners]
    found.append(_Switch(torch.is_grad_enabled, torch.set_grad_enabled))
    enabled = torch.is_autocast_enabled, torch.set_autocast_enabled
    dtype = torch.get_autocast_dtype, torch.set_autocast_dtype
    for kind in ("cpu", "cuda"):
        found += [_Switch(partial(read, kind), partial(write, kind)) for read, write in (enabled, dtype)]
    return found


_SWITCHES = _all()


def capture() -> list[Any]:
    """For `restore`."""
    return [_read(switch) for switch in _SWITCHES]


def restore(values: list[Any]) -> None:
    for switch, value in zip(_SWITCHES, values, strict=True):
        if value is not None and value != _read(switch):
            switch.write(value)


def _read(switch: _Switch) -> Any:
    try:
        return switch.read()
    except (RuntimeError, AttributeError):
        return None
