"""Changes to torch.distributed that make every group a Handle.

Rules of this file: one waist, `_new_process_group_helper`, through which every way of making a group goes; torch's own
tables keep the backend's real name, so `get_backend` needs no patch. Signatures are bound by name, not by position.
"""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

from ..errors import Unsupported, present
from .groups import Groups
from .handle import Handle

BACKEND = "deadpool"
BACKENDS = ("gloo", "nccl")
"""Those that `Network.build` knows."""


def install(groups: Groups) -> None:
    """From here on torch.distributed makes handles, whatever backend it is asked for; for the life of the process."""
    dist.Backend.register_backend(BACKEND, groups.create, extended_api=True, devices=["cpu", "cuda"])
    _wrap("init_process_group", functools.partial(_init_process_group, groups))
    _wrap("destroy_process_group", functools.partial(_destroy_process_group, groups))
    _wrap("_new_process_group_helper", _new_process_group_helper)
    _wrap("_new_group_with_tag", _new_group_with_tag)
    _wrap("batch_isend_irecv", _batch_isend_irecv)
    _wrap("_set_pg_timeout", _set_pg_timeout)
    if hasattr(c10d, "_maybe_attach_flight_recorder"):  # from torch 2.15 on
        _wrap("_maybe_attach_flight_recorder", _maybe_attach_flight_recorder)


def _wrap(name: str, replacement: Callable[..., Any]) -> None:
    """Put `replacement(original, arguments)` in the place of c10d's `name`, wherever torch exports it."""
    original = getattr(c10d, name)
    signature = inspect.signature(original)

    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        return replacement(original, bound.arguments)

    for module in (c10d, dist):
        if getattr(module, name, None) is original:
            setattr(module, name, wrapper)


def _init_process_group(groups: Groups, original: Callable[..., Any], arguments: dict[str, Any]) -> Any:
    """Rank and size are the layout's, the store is the generation's; what the caller says of them is ignored."""
    os.environ.pop("TORCH_DIST_INIT_BARRIER", None)
    if getattr(c10d, "_use_torchcomms_enabled", bool)():
        raise Unsupported(
            "torchcomms is enabled", "torch's own process groups", "unset TORCH_DISTRIBUTED_USE_TORCHCOMMS"
        )
    if arguments.get("enable_reconfigure"):
        raise Unsupported(
            "init_process_group(enable_reconfigure=True)",
            "groups whose members stay the same ranks for the whole job",
            "leave it out: a lost rank is replaced without it",
        )
    store = present(groups.bootstrap, "init_process_group before Groups.start or Groups.rehearse")
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    return original(**{**arguments, "init_method": None, "store": store, "rank": rank, "world_size": size})


def _destroy_process_group(groups: Groups, original: Callable[..., Any], arguments: dict[str, Any]) -> None:
    group = arguments["group"]
    everything = group is None or group is c10d.GroupMember.WORLD
    if everything:
        groups.runtime.before_destroy()
    going = [handle for handle in groups.handles if everything or handle is group]
    original(**arguments)
    groups.forget(going)


def _new_process_group_helper(original: Callable[..., Any], arguments: dict[str, Any]) -> Any:
    wanted = arguments["backend"]
    if wanted == BACKEND:
        return original(**arguments)
    config = c10d.BackendConfig(c10d.Backend(wanted))
    backends = {device: str(name) for device, name in config.get_device_backend_map().items()}
    for name in backends.values():
        if name not in BACKENDS:
            raise Unsupported(
                f"a process group of backend {name!r}",
                f"one of {', '.join(BACKENDS)}",
                "choose one of these, or run without the plugin",
            )
        if name == "nccl" and not dist.is_nccl_available():
            raise Unsupported(
                f"a process group of backend 'nccl', which torch {torch.__version__} does not have here",
                "gloo, or a torch that was built for CUDA",
                'name "gloo", or install that torch',
            )
    options = "backend_options" if "backend_options" in arguments else "pg_options"
    arguments[options] = (backends, arguments[options])  # which torch hands to `Groups.create`
    group, store = original(**{**arguments, "backend": BACKEND, "device_id": None})
    if isinstance(group, Handle):
        c10d._world.pg_map[group] = (c10d.Backend(wanted), store)
        c10d._world.pg_backend_config[group] = str(config)
    return group, store


def _new_group_with_tag(original: Callable[..., Any], arguments: dict[str, Any]) -> Any:
    """A group without a time-out of its own has the default group's, not torch's 30 minutes."""
    default = c10d._get_default_group()
    if arguments["timeout"] is None and isinstance(default, Handle):
        arguments["timeout"] = default.timeout
    return original(**arguments)


def _batch_isend_irecv(original: Callable[..., Any], arguments: dict[str, Any]) -> Any:
    """torch coalesces only `type(group) is ProcessGroup`; a handle issues the batch as one operation."""
    operations = arguments["p2p_op_list"]
    group = (operations[0].group if operations else None) or c10d._get_default_group()
    if not operations or not isinstance(group, Handle):
        return original(**arguments)
    c10d._check_p2p_op_list(operations)
    device = operations[0].tensor.device
    group._start_coalescing(device)
    try:
        for each in operations:
            peer = "group_dst" if each.op is c10d.isend else "group_src"
            each.op(each.tensor, group=group, tag=each.tag, **{peer: each.group_peer})
        work = group._end_coalescing(device)
    finally:
        group.drop_coalescing()
    return [] if work is None else [work]


def _set_pg_timeout(original: Callable[..., Any], arguments: dict[str, Any]) -> None:
    group = c10d._get_default_group() if arguments["group"] is None else arguments["group"]
    if isinstance(group, Handle):
        group.set_timeout(arguments["timeout"])
    else:
        original(**arguments)


def _maybe_attach_flight_recorder(original: Callable[..., Any], arguments: dict[str, Any]) -> None:
    # It asks a group's C++ side for a backend, and a handle has none there; gloo and NCCL behind it record themselves.
    if not isinstance(arguments["pg"], Handle):
        original(**arguments)
