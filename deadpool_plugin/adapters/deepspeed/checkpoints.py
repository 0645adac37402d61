"""An engine's ways of saving and loading as calls: a save begins when its step is committed, and is redone as a whole.

Rules of this file: all files of a checkpoint are one save, told when the last of them is there; what DeepSpeed writes
through `torch.save` on the way is no save of its own. `latest` names a checkpoint only when every rank has written its
part, and each file is replaced as a whole, so that a save done again never breaks one that is complete.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ...errors import Unsupported
from ...worker.copies import structure
from ...worker.functions import Call, CallKind
from ...worker.saving import SaveCall, Saves, write_beside
from ..common import Function, in_place_of
from .calls import EngineCall, EngineCalls


def install(saves: Saves, calls: EngineCalls, engine_class: Any) -> None:
    """Wrap what saves and loads. Once, before the engine is built."""

    def wrap(kind: type[EngineSave], *names: str) -> None:
        for name in names:
            if hasattr(engine_class, name):
                make = functools.partial(kind, calls)
                setattr(engine_class, name, saves.wrapped(getattr(engine_class, name), make, lambda: calls.busy))

    wrap(CheckpointSave, "save_checkpoint")
    wrap(WeightsSave, "save_16bit_model", "save_fp16_model")
    wrap(Gathering, "_zero3_consolidated_16bit_state_dict", "_consolidated_16bit_state_dict")  # accelerate calls them
    install_loading(calls, engine_class)


class EngineSave(SaveCall):
    """A method of the engine that gathers weights, or saves."""

    def __init__(
        self, calls: EngineCalls, saves: Saves, original: Function, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        self._calls, self._saves, self._original, self._engine = calls, saves, original, args[0]
        self._arguments = structure(dict(inspect.signature(original).bind(*args, **kwargs).arguments))
        self.name = f"engine.{original.__name__}"

    def __call__(self) -> Any:
        with self._calls.inside():
            return self._original(**self._arguments)

    def outcome(self, value: Any) -> Any:
        return value

    def skipped(self, outcome: Any) -> Any:
        return outcome


class WeightsSave(EngineSave):
    """The model's weights alone, by the ranks that have them."""

    whole = False
    named_by = "save_filename"
    """The parameter that names what is saved within `save_dir`."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        name = self._arguments.get(self.named_by)
        self._within = self._name_if_none() if name is None else str(name)

    def _name_if_none(self) -> str:
        return "pytorch_model.bin"

    def __call__(self) -> Any:
        began = time.monotonic()
        with self._calls.inside(), _saving_beside():
            value = self._write()
        path = os.path.join(str(self._arguments["save_dir"]), self._within)
        self._saves.written(path, began, whole=self.whole)
        return value

    def _write(self) -> Any:
        return self._original(**self._arguments)


class CheckpointSave(WeightsSave):
    """One checkpoint of an engine: all ranks save it, to one folder under one name (its tag).

    Checkpoints on each host's own storage have the name alone in common.
    """

    whole = True
    named_by = "tag"

    def _name_if_none(self) -> str:
        return f"global_step{self._engine.global_steps}"

    def _write(self) -> Any:
        folders = self._saves.folders
        if not self._engine.use_node_local_storage():
            given = self._arguments["save_dir"]
            if (agreed := folders.one_folder(str(given))) != str(given):
                self._arguments["save_dir"] = agreed
        folder = str(self._arguments["save_dir"])
        if (tag := folders.one_tag(folder, self._within)) != self._within:
            self._arguments["tag"] = self._within = tag
        # DeepSpeed's rank 0 names the newest checkpoint when its own part is written, whatever the others have.
        value = self._original(**{**self._arguments, "save_latest": False})  # it ends with a barrier
        if self._arguments.get("save_latest", True):
            if dist.get_rank() == 0:
                write_beside(Path(folder, "latest"), lambda file: file.write_text(self._within))
            dist.barrier()
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
    """The whole model's weights on rank 0: a dict of tensors, some of them under several names; None elsewhere.

    They are gathered again in a redo. A follower gets zeros: it saves nothing.
    """

    gated = False

    def outcome(self, value: Any) -> Any:
        """Record the names, dtype and shape of each weight."""
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
        if calls.busy:
            return original(engine, load_dir, tag, *args, **kwargs)
        if calls.is_training:
            load = functools.partial(original, engine, load_dir, tag, *args, **kwargs)
            return calls.handler(Load(calls, "engine.load_checkpoint", load))
        newest = Path(load_dir) / ("latest_universal" if engine.load_universal_checkpoint() else "latest")

        def tag_there() -> str | None:
            return newest.read_text().strip() if newest.is_file() else None

        if tag is None:
            tag = calls.handler(Call(f"the tag in {newest}", CallKind.FACT, tag_there))
        if tag is None and newest.is_file():
            return None, None  # there was none when the job began
        return original(engine, load_dir, tag, *args, **kwargs)


class Load(EngineCall):
    """A checkpoint loaded in mid-training. Its value is a path and what the script had saved beside the engine's state.

    DeepSpeed reads into the tensors of the shard; tensors that it has put in their place give their values and leave.
    """

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
