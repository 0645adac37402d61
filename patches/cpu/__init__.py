"""Runtime patches that let megatron-core train where there is no GPU.

megatron-core 0.16.1 assumes CUDA in a few dozen places: a literal `device="cuda"`, a string compare against
"torch.cuda.FloatTensor", the CUDA random number generators. Everything else of it runs on CPU tensors over gloo.
The patches answer those places with their CPU meaning and change no arithmetic.

Rules of these files: every patch is one short function whose docstring says which place of megatron-core needs it;
a patch may be applied before or after `import megatron.core`; applying twice is the same as once; where a GPU is
there nothing is applied at all.
"""

from __future__ import annotations

import torch

from patches.cpu import attention, compiler, device, experts, norms, rng, streams

_applied = False


def apply() -> None:
    """Patch torch and megatron-core for this process, once, if there is no GPU."""
    global _applied
    if _applied or torch.cuda.is_available():
        return
    for topic in (compiler, device, rng, streams, norms, attention, experts):
        topic.apply()
    _applied = True
