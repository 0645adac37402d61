"""An engine's ways of saving and loading as calls: a save begins when its step is committed, and is redone as a whole.

Rules of this file: all files of a checkpoint are one save, told when the last of them is there. `latest` names it only
when every rank has written its part. Each file is replaced as a whole: a redo never breaks a complete checkpoint.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ...errors import Unsupported
from ...worker.calls import Call, CallKind
from ...worker.saving import SaveCall, Saves, write_beside
from ..common import Function, in_place_of
from .calls import EngineCall, EngineCalls


def install(saves: Saves, calls: EngineCalls, engine_class: Any) -> None:
    """Wrap what saves and loads. Once, before the engine is built."""
    for kind, *names in (
        (CheckpointSave, "save_checkpoint"),
        (WeightsSave, "save_16bit_model", "save_fp16_model"),
        (Gathering, "_zero3_consolidated_16bit_state_dict", "_consolidated_16bit_state_dict"),  # accelerate calls them
    ):
        make = functools.partial(kind, calls)
        for name in names:
            setattr(engine_class, name, saves.wrapped(getattr(engine_class, name), make, lambda: calls.busy))
    install_loading(calls, engine_class)


class EngineSave(SaveCall):
    """A method of the engine that gathers weights, or saves them to `path`."""

    whole = False

    def __init__(
        self, calls: EngineCalls, saves: Saves, original: Function, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        self.name = f"engine.{original.__name__}"
        super().__init__(saves, original, args, kwargs)
        self._calls, self._engine = calls, args[0]

    def __call__(self) -> Any:
        with self._calls.inside(), _saving_beside():
            return super().__call__()


class WeightsSave(EngineSave):
    """The model's weights alone, by the ranks that have them."""

    def write(self) -> Any:
        name = self.kwargs.get("save_filename")
        self.path = os.path.join(str(self.kwargs["save_dir"]), "pytorch_model.bin" if name is None else str(name))
        return super().write()


class CheckpointSave(EngineSave):
    """One checkpoint of an engine: all ranks save it, to one folder (unless to their hosts' own) under one tag."""

    whole = True

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        tag = self.kwargs.get("tag")
        self._tag = f"global_step{self._engine.global_steps}" if tag is None else str(tag)

    def write(self) -> Any:
        folders, arguments, folder = self._saves.folders, self.kwargs, str(self.kwargs["save_dir"])
        if not self._engine.use_node_local_storage() and (agreed := folders.one_folder(folder)) != folder:
            arguments["save_dir"] = folder = agreed
        arguments["tag"] = self._tag = folders.one_tag(folder, self._tag)
        # DeepSpeed's rank 0 names the newest checkpoint when its own part is written, whatever the others have.
        value = self.function(**{**arguments, "save_latest": False})  # it ends with a barrier
        if arguments.get("save_latest", True):
            if dist.get_rank() == 0:
                write_beside(Path(folder, "latest"), lambda file: file.write_text(self._tag))
            dist.barrier()
        self.path = os.path.join(folder, self._tag)
        return value


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


class Gathering(EngineSave):
    """The whole model's weights on rank 0 (some under several names), None elsewhere. A follower gets zeros."""

    gated = False

    def outcome(self, value: Any) -> Any:
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


def install_loading(calls: EngineCalls, engine_class: type) -> None:
    """Wrap `load_checkpoint`. A later rehearsal of the rank is told the newest checkpoint that the rank found."""

    @in_place_of(engine_class, "load_checkpoint")
    def load_checkpoint(
        original: Function, engine: Any, load_dir: Any, tag: Any = None, *args: Any, **kwargs: Any
    ) -> Any:
        load = functools.partial(original, engine, load_dir)
        if calls.busy or calls.is_training:
            return calls.make(Load, "engine.load_checkpoint", load, tag, *args, **kwargs)
        newest = Path(load_dir) / ("latest_universal" if engine.load_universal_checkpoint() else "latest")

        def tag_there() -> str | None:
            return newest.read_text().strip() if newest.is_file() else None

        if tag is None:
            tag = calls.handler(Call(f"the tag in {newest}", CallKind.FACT, tag_there))
        if tag is None and newest.is_file():
            return None, None  # there was none when the job began
        return load(tag, *args, **kwargs)


class Load(EngineCall):
    """A checkpoint loaded in mid-training. Its value is a path and what the script had saved beside the state."""

    def __call__(self) -> Any:
        state = self._calls.state
        if state.adam.is_in_cpp:
            raise Unsupported(
                f"engine.load_checkpoint was called during training with {type(state.adam.optimizer).__name__} on the "
                "CPU, whose products of the betas a swap could not bring back then",
                "it before the first forward",
                "use torch's AdamW, or load in a job of its own",
            )
        with self._calls.inside():
            value = self.function()
            state.adam.take_back()
            state.frozen.check_loaded()
        return value

    def outcome(self, value: Any) -> Any:
        return [value, self._calls.state.visible()]

    def skipped(self, outcome: Any) -> Any:
        value, visible = outcome
        self._calls.state.show(visible)
        return tuple(value)
