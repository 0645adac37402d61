"""An engine's ways of saving as calls: begun when their step is committed, done again as a whole.

Rules of this file: all files of a checkpoint are one save, told when the last of them is there; what DeepSpeed writes
through `torch.save` on the way is no save of its own. `latest` names a checkpoint only when every rank has written its
part, and each file is replaced as a whole, so that a save done again never breaks one that is complete.
Weights that ZeRO 3 gathers for the script to save are gathered again in a redo, and a follower gets zeros: it saves
nothing.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ...worker.copies import structure
from ...worker.saving import SaveCall, Saves, write_beside
from .calls import Calls


def install(saves: Saves, calls: Calls, engine_class: type) -> None:
    """Wrap what saves. Once, before the engine is built."""
    _wrap(
        saves, calls, engine_class, "save_checkpoint", "tag", lambda engine: f"global_step{engine.global_steps}", Save
    )
    for name in ("save_16bit_model", "save_fp16_model"):
        if hasattr(engine_class, name):
            _wrap(saves, calls, engine_class, name, "save_filename", lambda engine: "pytorch_model.bin", WeightsSave)
    for name in ("_zero3_consolidated_16bit_state_dict", "_consolidated_16bit_state_dict"):  # accelerate asks for them
        if hasattr(engine_class, name):
            _wrap_gathering(saves, calls, engine_class, name)


def _wrap(
    saves: Saves,
    calls: Calls,
    owner: Any,
    name: str,
    last: str,
    otherwise: Callable[[Any], str],
    kind: type[WeightsSave],
) -> None:
    """`last`: the parameter that names what is saved within `save_dir`; `otherwise`: its name without one."""
    original = getattr(owner, name)
    signature = inspect.signature(original)

    def save(args: tuple[Any, ...], kwargs: dict[str, Any]) -> SaveCall:
        arguments = structure(dict(signature.bind(*args, **kwargs).arguments))
        given = arguments.get(last)
        within = otherwise(args[0]) if given is None else str(given)
        return kind(saves, calls, original, arguments, name, within)

    setattr(owner, name, saves.wrapped(original, save, lambda: calls.busy))


class WeightsSave(SaveCall):
    """The model's weights alone, by the ranks that have them. `within`: their name in `save_dir`."""

    whole = False

    def __init__(
        self,
        saves: Saves,
        calls: Calls,
        function: Callable[..., Any],
        arguments: dict[str, Any],
        name: str,
        within: str,
    ) -> None:
        self._saves, self._calls, self._function, self._arguments = saves, calls, function, arguments
        self.name, self._within = f"engine.{name}", within

    def __call__(self) -> Any:
        began = time.monotonic()
        with self._calls.inside(), _saving_beside():
            self._agree()
            value = self._write()
        path = os.path.join(str(self._arguments["save_dir"]), self._within)
        self._saves.written(path, began, whole=self.whole)
        return value

    def _agree(self) -> None:
        """Not every rank need come here: what it saves where is its own affair."""

    def _write(self) -> Any:
        return self._function(**self._arguments)

    def outcome(self, value: Any) -> Any:
        return value

    def skipped(self, outcome: Any) -> Any:
        return outcome


class Save(WeightsSave):
    """One checkpoint of an engine: all ranks save it, to one folder under one name (its tag).

    One that goes to each host's own storage has the name alone in common."""

    whole = True

    def _agree(self) -> None:
        _, engine = next(iter(self._arguments.items()))
        if not engine.use_node_local_storage():
            given = self._arguments["save_dir"]
            if (agreed := self._saves.folders.one_folder(str(given))) != str(given):
                self._arguments["save_dir"] = agreed
        tag = self._saves.folders.one_tag(str(self._arguments["save_dir"]), self._within)
        if tag != self._within:
            self._arguments["tag"] = self._within = tag

    def _write(self) -> Any:
        """DeepSpeed's rank 0 names the newest checkpoint when its own part is written, whatever the others have."""
        value = self._function(**{**self._arguments, "save_latest": False})  # it ends with a barrier
        if self._arguments.get("save_latest", True):
            if dist.get_rank() == 0:
                latest = Path(str(self._arguments["save_dir"]), "latest")
                write_beside(latest, lambda file: file.write_text(self._within))
            dist.barrier()
        return value


def _wrap_gathering(saves: Saves, calls: Calls, owner: Any, name: str) -> None:
    original = getattr(owner, name)

    def gather(args: tuple[Any, ...], kwargs: dict[str, Any]) -> SaveCall:
        return Gathering(calls, functools.partial(original, *args, **kwargs), name)

    setattr(owner, name, saves.wrapped(original, gather, lambda: calls.busy))


class Gathering(SaveCall):
    """The whole model's weights on rank 0: a dict of tensors, some of them under several names; None elsewhere."""

    gated = False

    def __init__(self, calls: Calls, function: Callable[[], Any], name: str) -> None:
        self._calls, self._function = calls, function
        self.name = f"engine.{name}"

    def __call__(self) -> Any:
        with self._calls.inside():
            return self._function()

    def outcome(self, value: Any) -> Any:
        """Per weight: its names, dtype and shape."""
        if value is None:
            return None
        weights: dict[int, list[Any]] = {}
        for name, tensor in value.items():
            dtype = str(tensor.dtype).removeprefix("torch.")
            weights.setdefault(id(tensor), [[], dtype, list(tensor.shape)])[0].append(name)
        return list(weights.values())

    def skipped(self, outcome: Any) -> Any:
        if outcome is None:
            return None
        zeros = [(names, torch.zeros(shape, dtype=getattr(torch, dtype))) for names, dtype, shape in outcome]
        return {name: tensor for names, tensor in zeros for name in names}


@contextlib.contextmanager
def _saving_beside() -> Iterator[None]:
    wrapped = torch.save
    plain = inspect.unwrap(wrapped)

    @functools.wraps(plain)
    def save(obj: Any, f: Any, *args: Any, **kwargs: Any) -> None:
        if isinstance(f, (str, os.PathLike)):
            write_beside(Path(os.fspath(f)), lambda file: plain(obj, file, *args, **kwargs))
        else:
            plain(obj, f, *args, **kwargs)

    torch.save = save
    try:
        yield
    finally:
        torch.save = wrapped
