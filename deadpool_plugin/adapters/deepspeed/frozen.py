"""Parameters that no update changes (the base of a LoRA): never copied, only compared with a newcomer's.

Rules of this file: every process of a rank makes or loads the same ones, which a digest tells; whoever changes them in
training is refused. With ZeRO 3 they are a part of the shard instead: a script may load them on one rank only then,
which a newcomer never sees, and each rank has its part of them only.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import xxhash

from ...errors import Divergence, Unsupported


class Frozen:
    """`parameters` as they are now. `digest`: of their values."""

    def __init__(self, parameters: Sequence[torch.Tensor]) -> None:
        self._parameters = parameters
        self._note()

    def _note(self) -> None:
        self.digest = _digest(self._parameters)
        self._forms = [_form(parameter) for parameter in self._parameters]

    def compare(self, digest: str) -> None:
        """Raises: Divergence if the rank itself has others."""
        if digest != self.digest:
            raise Divergence(
                f"this process made frozen parameters of digest {self.digest}",
                f"{digest}, as the rank itself has them: they are not mirrored",
                "load or make them alike on every rank: from the same file, or with the same seed",
            )

    def check_unchanged(self) -> None:
        """Raises: Unsupported. Sees all changes but those in place of `parameter.data`, which nothing counts."""
        for parameter, form in zip(self._parameters, self._forms, strict=True):
            if _form(parameter) != form:
                raise Unsupported(
                    f"a parameter of {list(parameter.shape)} that the optimizer does not update was changed",
                    "such parameters to stay as they are: they are not mirrored",
                    "make it a buffer of the model that its forward changes",
                )

    def loaded(self) -> None:
        """A checkpoint was. Raises: Unsupported if it had others."""
        before = self.digest
        self._note()
        if self.digest != before:
            raise Unsupported(
                "engine.load_checkpoint changed frozen parameters in mid-training",
                "a checkpoint of this job: they are not mirrored",
                "load it before the first forward",
            )


def _form(parameter: torch.Tensor) -> tuple[int, int]:
    return parameter._version, parameter.data_ptr()


@torch.no_grad()
def _digest(parameters: Sequence[torch.Tensor]) -> str:
    found = xxhash.xxh3_128()
    for parameter in parameters:
        found.update(f"{parameter.dtype} {list(parameter.shape)}".encode())
        found.update(parameter.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return found.hexdigest()
