"""The content of a checkpoint on disk, whole, and whether two of them hold the same bits."""

from typing import Any

import torch


def content(folder):
    """Everything in one checkpoint, by file or key."""
    found = {path.name: torch.load(path, weights_only=False) for path in sorted(folder.glob("*.pt"))}
    if (folder / ".metadata").exists():
        found |= sharded_content(folder)
    return found


def sharded_content(folder):
    from torch.distributed.checkpoint import FileSystemReader
    from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
    from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

    state: dict[str, Any] = {}
    _load_state_dict(state, FileSystemReader(folder), planner=_EmptyStateDictLoadPlanner(), no_dist=True)
    return state


def equal(left, right):
    if isinstance(left, torch.Tensor):
        bits = [one.contiguous().flatten().view(torch.uint8) for one in (left, right)]
        return left.dtype == right.dtype and left.shape == right.shape and torch.equal(*bits)
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(equal(value, right[key]) for key, value in left.items())
    if isinstance(left, (list, tuple)):
        return len(left) == len(right) and all(map(equal, left, right))
    if hasattr(left, "tobytes"):
        return left.tobytes() == right.tobytes()
    if hasattr(left, "getvalue"):
        return left.getvalue() == right.getvalue()
    return left == right
