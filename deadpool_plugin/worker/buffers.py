"""A model's buffers in its shard, wherever they lie: a forward may put new tensors in their place.

Rules of this file: the shard has tensors of our own, which from each cut on lie in the memory of the buffers as they
are then: nothing is copied. A buffer that is only changed in place stays where it is for ever. One that the forward
replaces (`self.mean = 0.9 * self.mean + ...`) is restored as a new tensor: the script may hold those there were.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

import torch

from ..errors import WHOLE_STEP, Unsupported


class _Place:
    """One buffer: where modules keep it (several may share it), the tensor that stays there, ours in its memory."""

    def __init__(self, title: str, buffer: torch.Tensor) -> None:
        self.title, self.stays, self.ours = title, buffer, buffer.detach()
        self.owners: list[tuple[dict[str, torch.Tensor | None], str]] = []

    def now(self) -> torch.Tensor | None:
        """None if it is gone, or its owners share it no more."""
        if len(self.owners) == 1:
            owner, name = self.owners[0]
            return owner.get(name)
        first, *others = [owner.get(name) for owner, name in self.owners]
        return first if all(other is first for other in others) else None

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
                if buffer is None or (name in caches and name in module._non_persistent_buffers_set):
                    continue
                self._known.add((id(module), name))
                title = f"the buffer {name!r} of {type(module).__name__}"
                places.setdefault(id(buffer), _Place(title, buffer)).owners.append((module._buffers, name))
        self._places = list(places.values())
        self.tensors = [place.ours for place in self._places]
        """For the shard: the same objects for ever."""
        self._marks: list[tuple[torch.Tensor, int] | None] = []
        self.left()

    def follow(self) -> None:
        """At a cut: let `tensors` be the buffers as they are now. Raises: Unsupported if one has another form."""
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
        for module in self._modules:
            for name, buffer in module._buffers.items():
                known = (id(module), name) in self._known or name in module._non_persistent_buffers_set
                if buffer is None or known:
                    continue
                raise Unsupported(
                    f"the buffer {name!r} of {type(module).__name__} had no value before the first forward",
                    "a value of its form from the beginning",
                    "give it one, or register it with persistent=False if it is only a cache",
                )

    # ---- what the script writes between calls (a mask it prunes by, a temperature)

    def left(self) -> None:
        """A call has returned."""
        self._marks = [_mark(place.now()) for place in self._places]

    def entry(self) -> dict[int, torch.Tensor]:
        """Copies of what the script has written since, by the place's number, as far as torch counts it (not through
        `.data`)."""
        found = {}
        for number, (place, mark) in enumerate(zip(self._places, self._marks, strict=True)):
            now = place.now()
            if now is None or now.is_inference() or (mark and mark[0] is now and mark[1] == now._version):
                continue
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
        """Before a restore: let `tensors` lie in memory that the model uses and nobody else holds."""
        for place in self._places:
            if place.now() is not place.stays:
                place.put(torch.empty_like(place.ours))
            place.ours.data = place.stays.detach()

    def hold(self, tensor: torch.Tensor) -> bool:
        """Return whether `tensor` lies in a buffer. Raises: Unsupported if a restore would put another in its place."""
        memory = tensor.untyped_storage().data_ptr()
        for place in self._places:
            now = place.now()
            if now is None or now.untyped_storage().data_ptr() != memory:
                continue
            if now is not place.stays:
                raise Unsupported(
                    f"the script communicates {place.title}, which the model's forward replaces by new tensors",
                    "a buffer that is changed in place (copy_, lerp_)",
                    f"change it so, communicate in the model's forward, or {WHOLE_STEP}",
                )
            return True
        return False


def _mark(buffer: torch.Tensor | None) -> tuple[torch.Tensor, int] | None:
    """Make a mark that changes with the buffer and with each write; None if it is gone, or torch does not count."""
    return None if buffer is None or buffer.is_inference() else (buffer, buffer._version)


def _form(tensor: torch.Tensor) -> tuple[torch.Size, torch.dtype, torch.device]:
    return tensor.shape, tensor.dtype, tensor.device


def _said(tensor: torch.Tensor | None) -> str:
    return "None" if tensor is None else f"{tensor.dtype} {list(tensor.shape)} on {tensor.device}"
