"""State of a model's modules beside parameters: buffers, in the shard, and plain values, in every snapshot.

Rules of this file: the shard has tensors of our own, which from each cut on lie in the memory of the buffers as they
are then: nothing is copied. A buffer that is only changed in place stays where it is for ever. One that the forward
replaces (`self.mean = 0.9 * self.mean + ...`) is restored as a new tensor: the script may hold those there were.
Of values (a temperature, a count of calls) only what differs from those before the first forward is told, by module
number: a newcomer keeps what is its host's own. A module that has come to keep other objects (the tables of a rotary
embedding) is left alone for good: its values describe those, and a newcomer has none. What torch and the framework keep
on a module is theirs.
"""

from __future__ import annotations

import contextlib
import enum
import operator
from collections.abc import Callable, Collection, Iterable
from typing import Any

import torch

from ..errors import WHOLE_STEP, Unsupported
from .adapter import Scalars

PLAIN = (bool, int, float, str, type(None))
SIMPLE = frozenset(PLAIN)
"""Exactly these types, for a look that costs little; a value of a class below them takes `isinstance`."""
OF_TORCH = frozenset(vars(torch.nn.Module())) | {"_compiled_call_impl"}
_BUFFERS = operator.attrgetter("_buffers")
ByModule = dict[int, Scalars]  # values by the number of their module, and their name


class _Place:
    """One buffer: where modules keep it (several may share it), the tensor that stays there, ours in its memory."""

    def __init__(self, title: str, buffer: torch.Tensor) -> None:
        self.title, self.stays, self.ours = title, buffer, buffer.detach()
        self.owners: list[tuple[dict[str, torch.Tensor | None], str]] = []
        self.left: tuple[torch.Tensor, int] | None = None  # the buffer as a call left it, and the count of its writes

    def now(self) -> torch.Tensor | None:
        """Return None if it is gone, or its owners share it no more."""
        now, *others = (owner.get(name) for owner, name in self.owners)
        return now if all(other is now for other in others) else None

    def put(self, buffer: torch.Tensor) -> None:
        self.stays = buffer
        for owner, name in self.owners:
            owner[name] = buffer


class Buffers:
    """All buffers of `modules` that have a value now, but for those of a name in `caches` that are not persistent."""

    def __init__(self, modules: Iterable[torch.nn.Module], caches: Collection[str] = ()) -> None:
        places: dict[int, _Place] = {}
        self._modules, self._known = list(modules), set[tuple[int, str]]()
        for module in self._modules:
            for name, buffer in module._buffers.items():
                if buffer is not None and not (name in caches and name in module._non_persistent_buffers_set):
                    self._known.add((id(module), name))
                    title = f"the buffer {name!r} of {type(module).__name__}"
                    places.setdefault(id(buffer), _Place(title, buffer)).owners.append((module._buffers, name))
        self._places = list(places.values())
        self.tensors = [place.ours for place in self._places]  # for the shard: the same objects for ever
        self.left()

    def follow(self) -> None:
        """Let `tensors` be the buffers as they are now, at a cut. Raises: Unsupported if one has another form."""
        for place in self._places:
            now = place.now()
            if now is None or _form(now) != _form(place.ours):
                raise Unsupported(
                    f"{place.title} became {_said(now)} in training",
                    f"{_said(place.ours)}, as before the first step",
                    "give it the form it is to have before training",
                )
            if (now.data_ptr(), now.stride()) != (place.ours.data_ptr(), place.ours.stride()):
                place.ours.data = now.detach()
        for module in filter(_BUFFERS, self._modules):  # most have none
            for name, buffer in module._buffers.items():
                known = (id(module), name) in self._known or name in module._non_persistent_buffers_set
                if buffer is not None and not known:
                    raise Unsupported(
                        f"the buffer {name!r} of {type(module).__name__} had no value before the first forward",
                        "a value of its form from the beginning",
                        "give it one, or register it with persistent=False if it is only a cache",
                    )

    def left(self) -> None:
        """Note that a call has returned: what is written from here on is the script's (a mask it prunes by)."""
        for place in self._places:
            now = place.now()
            place.left = None if now is None or now.is_inference() else (now, now._version)

    def entry(self) -> dict[int, torch.Tensor]:
        """Copy what the script has written since, by the place's number, unless it went through `.data`."""
        found = {}
        for number, place in enumerate(self._places):
            now, (left, writes) = place.now(), place.left or (None, 0)
            if now is not None and not now.is_inference() and not (left is now and writes == now._version):
                found[number] = now.detach().clone()
        return found

    @torch.inference_mode(False)
    @torch.no_grad()
    def load_entry(self, entry: dict[int, torch.Tensor]) -> None:
        for number, value in entry.items():
            now = self._places[number].now()
            if now is not None and _form(now) == _form(value):
                now.copy_(value)
            else:
                self._places[number].put(value.clone())

    @torch.inference_mode(False)
    def put_back(self) -> None:
        """Let `tensors` lie in memory that the model uses and nobody else holds, before a restore."""
        for place in self._places:
            if place.now() is not place.stays:
                place.put(torch.empty_like(place.ours))
            place.ours.data = place.stays.detach()

    def hold(self, tensor: torch.Tensor) -> bool:
        """Return whether `tensor` lies in a buffer. Raises: Unsupported if a restore would put another in its place."""
        memory = tensor.untyped_storage().data_ptr()
        for place in self._places:
            now = place.now()
            if now is not None and now.untyped_storage().data_ptr() == memory:
                if now is not place.stays:
                    raise Unsupported(
                        f"the script communicates {place.title}, which the model's forward replaces by new tensors",
                        "a buffer that is changed in place (copy_, lerp_)",
                        f"change it so, communicate in the model's forward, or {WHOLE_STEP}",
                    )
                return True
        return False


def _form(tensor: torch.Tensor) -> tuple[torch.Size, torch.dtype, torch.device]:
    return tensor.shape, tensor.dtype, tensor.device


def _said(tensor: torch.Tensor | None) -> str:
    return "None" if tensor is None else f"{tensor.dtype} {list(tensor.shape)} on {tensor.device}"


class _Noted:
    """The values of one module, and what else it kept, before the first forward."""

    def __init__(self, module: torch.nn.Module, is_theirs: Callable[[str], bool]) -> None:
        self.attributes, self._buffers, self._is_theirs = vars(module), module._buffers, is_theirs
        self._held = self._own()  # so that nothing else can have the id of one
        self.first = {name: value for name, value in self._held.items() if _is_plain(value)}
        self._objects = self._others(self.first)
        self.is_left_alone = False
        self.look = operator.itemgetter("_modules", "_buffers", *self.first)
        self.looked, self.size = self.look(self.attributes), len(self.attributes)

    def _own(self) -> dict[str, Any]:
        names = [name for name in self.attributes if name not in OF_TORCH and not self._is_theirs(name)]
        return {name: self.attributes[name] for name in names}

    def _others(self, values: Scalars) -> tuple[int, dict[str, tuple[int, int]]]:
        """Identify all else that it keeps, and how much is in it."""
        others = {name: one for name, one in self._own().items() if name not in values}
        sized = {name: (id(one), len(one) if isinstance(one, (dict, list, set)) else 0) for name, one in others.items()}
        return sum(buffer is None for buffer in self._buffers.values()), sized

    def changed(self) -> Scalars:
        """Return its values that are not what they were, and those it had none of."""
        if self.is_left_alone:
            return {}
        values, found = Scalars(), Scalars()
        for name, value in self._own().items():
            # A number may become a tensor of one, as libraries let the longest sequence so far.
            is_number = name in self.first and isinstance(value, torch.Tensor) and value.numel() == 1
            if _is_plain(value) or is_number:
                values[name] = value
                first = self.first.get(name, self)
                if type(value) is not type(first) or value != first:
                    found[name] = value.detach().clone() if is_number else value
        if not found and self.first.keys() <= values.keys():
            self.size = len(self.attributes)  # what came is theirs
            return {}
        self.is_left_alone = self._others(values) != self._objects
        return {} if self.is_left_alone else found

    def load(self, changed: Scalars, values: Scalars) -> None:
        for name in changed.keys() - self.first.keys() - values.keys():
            del self.attributes[name]
        if not self.is_left_alone:
            self.attributes.update(self.first | values)


class Values:
    """Plain values of `modules`, numbered from here on. `is_theirs` knows the attributes of the framework's own."""

    def __init__(self, modules: Iterable[torch.nn.Module], is_theirs: Callable[[str], bool] = lambda _: False) -> None:
        self._noted = [_Noted(module, is_theirs) for module in modules]
        self._newest: ByModule = {}
        self._watch()

    def _watch(self) -> None:
        self._watched = [(number, one) for number, one in enumerate(self._noted) if not one.is_left_alone]
        self._attributes, self._looks = (
            [one.attributes for _, one in self._watched],
            [one.look for _, one in self._watched],
        )
        self._sizes, self._looked = [one.size for _, one in self._watched], [one.looked for _, one in self._watched]

    def changed(self) -> ByModule:
        """Return the same object as long as nothing changes: many calls keep it."""
        suspects = self._watched
        with contextlib.suppress(KeyError, RuntimeError, ValueError):  # a value is gone, or is an array now
            sizes, looked = [*map(len, self._attributes)], [*map(operator.call, self._looks, self._attributes)]
            if sizes == self._sizes and looked == self._looked:
                suspects = []
            else:
                now, first = zip(sizes, looked, strict=True), zip(self._sizes, self._looked, strict=True)
                suspects = [one for one, a, b in zip(self._watched, now, first, strict=True) if a != b]
        found = {number: values for number, one in suspects if (values := one.changed())}
        is_fewer = any(one.is_left_alone for _, one in suspects)
        if suspects and (is_fewer or [one.size for _, one in self._watched] != self._sizes):
            self._watch()
        if found != self._newest:
            self._newest = found
        return self._newest

    def load(self, values: ByModule) -> None:
        mine = self.changed()
        for number in mine.keys() | values.keys():
            self._noted[number].load(mine.get(number, {}), values.get(number, {}))


def is_plain(value: Any) -> bool:
    """Return whether `value` is a plain one, or a dictionary of nothing else."""
    if isinstance(value, dict):
        return all(_is_plain(one) for item in value.items() for one in item)
    return _is_plain(value)


def _is_plain(value: Any) -> bool:
    return isinstance(value, PLAIN) and not isinstance(value, enum.Enum)
