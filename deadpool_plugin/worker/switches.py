"""Process-wide switches of torch that decide how a call computes: a redo has those of the call, not of the moment.

Rules of this file: a switch that this torch does not have, or does not tell (old and new ways to set TF32 do not mix),
is left alone; nothing is set that is so already.
"""

from __future__ import annotations

from collections.abc import Callable
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
    found += [_attribute(cudnn, name) for name in ("enabled", "benchmark", "deterministic", "allow_tf32")]
    found.append(_attribute(cuda.matmul, "allow_tf32"))
    found.append(_Switch(torch.get_float32_matmul_precision, torch.set_float32_matmul_precision))
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
    except RuntimeError:
        return None
