"""The real Python classes of apex's and Transformer Engine's FusedAdam, over stand-ins for what is compiled.

Rules of this file: of both packages only the files that make up FusedAdam are loaded, from a checkout; everything else
they import is an empty stand-in, and the compiled Adam is a few lines of torch with the same arguments.
"""

import importlib
import sys
from types import ModuleType


def adam(chunk_size, overflow, lists, lr, beta1, beta2, eps, step, decoupled, bias_correction, decay):
    """As csrc/multi_tensor_adam.cu: parameters and moments in place."""
    for grad, param, mean, square in zip(*lists, strict=True):
        grad = grad.float() if decoupled else grad.float() + decay * param
        mean.mul_(beta1).add_(grad, alpha=1 - beta1)
        square.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        first, second = (1 - beta1**step, 1 - beta2**step) if bias_correction else (1, 1)
        update = (mean / first) / ((square / second).sqrt() + eps)
        param.sub_(lr * (update + (decay * param if decoupled else 0)))


class Enumeration(type):
    """A class of which nothing is an instance; its public names are strings."""

    def __getattr__(cls, name):
        if name.startswith("_"):
            raise AttributeError(name)
        return name


class Stub(ModuleType):
    """Has every name: `adam` for the one that is called, a class for the others."""

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return adam if name == "multi_tensor_adam" else Enumeration(name, (), {})


def packages(names, root):
    """Packages whose files are found and whose own __init__ is not run."""
    made = {}
    for name in names:
        made[name] = ModuleType(name)
        made[name].__path__ = [str(root.joinpath(*name.split(".")))]
    return made


def load(root, stubs, empty, name):
    """Import module `name` from `root` with everything else standing in; nothing of it stays in sys.modules."""
    before = dict(sys.modules)
    sys.modules.update({stub: Stub(stub) for stub in stubs} | packages(empty, root))
    try:
        return importlib.import_module(name)
    finally:
        added = {key: module for key, module in sys.modules.items() if before.get(key) is not module}
        for key in added:
            if key.partition(".")[0] in ("apex", "amp_C", "transformer_engine", "transformer_engine_torch"):
                del sys.modules[key]


def apex(root):
    module = load(root, ["amp_C"], ["apex", "apex.optimizers"], "apex.optimizers.fused_adam")
    return module.FusedAdam


def transformer_engine(root):
    pytorch = "transformer_engine.pytorch"
    stubs = ["transformer_engine_torch", f"{pytorch}.tensor.float8_tensor", f"{pytorch}.quantized_tensor"]
    empty = ["transformer_engine", pytorch, f"{pytorch}.optimizers", f"{pytorch}.tensor"]
    module = load(root, [*stubs, f"{pytorch}.constants"], empty, f"{pytorch}.optimizers.fused_adam")
    return module.FusedAdam
