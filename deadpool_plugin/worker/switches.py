"""Switches of torch that decide how a call computes: a redo has those of the call, not of the moment.

Rules of this file: all of them are read at every call, so that functions below torch's Python ones read them, where
this version has such functions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

_Switch = tuple[Callable[[], Any], Callable[[Any], Any]]

_CUDA, _CUDNN, _DEVICES = torch.backends.cuda, torch.backends.cudnn, ("cpu", "cuda")
_ATTRIBUTES: list[tuple[Any, str, str]] = [  # owner, name, and what reads it
    *((_CUDNN, name, f"_get_cudnn_{name}") for name in ("enabled", "benchmark", "deterministic")),
    *(
        (_CUDA.matmul, name, f"_get_cublas_{name}")
        for name in ("allow_fp16_reduced_precision_reduction", "allow_bf16_reduced_precision_reduction")
    ),
    # Precision is read and set the new way, which tells of the old way, too; the old one raises where both were used.
    (torch.backends, "fp32_precision", "_get_fp32_precision_getter generic all"),
    (_CUDA.matmul, "fp32_precision", "_get_fp32_precision_getter cuda matmul"),
    (_CUDNN, "fp32_precision", "_get_fp32_precision_getter cuda all"),
    (getattr(torch.backends.mkldnn, "matmul", None), "fp32_precision", "_get_fp32_precision_getter mkldnn matmul"),
    *(
        (getattr(_CUDNN, kind, None), "fp32_precision", f"_get_fp32_precision_getter cuda {kind}")
        for kind in ("conv", "rnn")
    ),
]


def _known() -> Iterator[_Switch]:
    """Find the switches that this torch has."""
    for kind in ("flash", "mem_efficient", "math", "cudnn"):
        yield (
            _below(f"_get_{kind}_sdp_enabled", getattr(_CUDA, f"{kind}_sdp_enabled")),
            getattr(_CUDA, f"enable_{kind}_sdp"),
        )
    for owner, name, path in _ATTRIBUTES:
        if hasattr(owner, name):
            yield _below(path, partial(getattr, owner, name)), partial(setattr, owner, name)
    yield torch.is_grad_enabled, torch.set_grad_enabled
    yield torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode
    for kind in _DEVICES:
        yield partial(torch.is_autocast_enabled, kind), partial(torch.set_autocast_enabled, kind)
        yield partial(torch.get_autocast_dtype, kind), partial(torch.set_autocast_dtype, kind)
    if hasattr(torch._C, "_get_sdp_priority_order"):
        yield torch._C._get_sdp_priority_order, torch._C._set_sdp_priority_order


def _below(path: str, public: Callable[[], Any]) -> Callable[[], Any]:
    """Return torch's function and its arguments that `path` names, or `public` if that does not tell the same."""
    name, *words = path.split()
    function = getattr(torch._C, name, None)
    if function is None:
        return public
    function = partial(function, *words) if words else function
    told = function()
    return function if (told[0] if isinstance(told, tuple) else told) == public() else public


_SWITCHES = list(_known())
_READERS = [read for read, _ in _SWITCHES]


def capture() -> list[Any]:
    """Read every switch, for `restore`."""
    return [read() for read in _READERS]


def restore(values: list[Any]) -> None:
    for (read, write), value in zip(_SWITCHES, values, strict=True):
        if value != read():
            write(value)
