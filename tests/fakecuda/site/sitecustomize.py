"""Gives torch's CUDA key the kernels of the stand-in, in every Python process: while torch is imported.

Two moments count. Before torch puts meta kernels written in Python over its own (each takes ten times as long, and
the first one imports 900 modules), kernels.so takes hold of torch's own. At the end of the import, when torch has no
kernels left to register, kernels.so registers its.

Rules of this file: nothing is imported unless torch is.
"""

from __future__ import annotations

import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    import ctypes

META = "torch._meta_registrations"


class _Moments:
    """Sees which module is about to be imported; finds none itself."""

    def find_spec(self, name: str, *_: object) -> None:
        if name == META:
            _library().fakecuda_remember_forms()


def install() -> None:
    """Called by torch at the end of its import (entry point `torch.backends` in fakecuda.dist-info)."""
    _library().fakecuda_install()


def _library() -> ctypes.CDLL:
    import ctypes
    from pathlib import Path

    return ctypes.CDLL(str(Path(__file__).with_name("kernels.so")))


sys.meta_path.insert(0, _Moments())
