"""Megatron-LM's own training loop (megatron.training, pretrain_gpt.py), which is not in the megatron-core wheel.

Applied by the wrapper that runs such a script on a CPU, after `patches.cpu.apply()` and with the checkout on sys.path.
Source: tag core_v0.16.1.
"""

from __future__ import annotations

import sys
import types
from typing import Any

import torch


def apply() -> None:
    one_device()
    no_accelerator()
    kernels_that_need_triton()
    helpers_are_compiled()
    nothing_to_warm_up()
    names_of_transformer_engine()


class _Properties:
    major, minor, name, total_memory, multi_processor_count = 9, 0, "CPU", 1 << 34, 1


def one_device() -> None:
    """`initialize_megatron` asserts CUDA, sets its device and builds the parallel state only where there is one;
    arguments and logging ask for its capability and memory."""
    answers: dict[str, Any] = {
        "is_available": True,
        "device_count": 1,
        "is_current_stream_capturing": False,  # optimizers of torch 2.11 and older ask
        "_is_in_bad_fork": False,  # a torch built for CUDA may have looked for a device; a fork loses none
        "get_device_capability": (9, 0),
        "get_device_properties": _Properties(),
        "set_device": None,
        "memory_stats": {},
        "memory_allocated": 0,
        "max_memory_allocated": 0,
        "memory_reserved": 0,
        "max_memory_reserved": 0,
        "device_memory_used": 0,
        "reset_peak_memory_stats": None,
    }
    for name, answer in answers.items():
        setattr(torch.cuda, name, lambda *args, answer=answer, **kwargs: answer)


def no_accelerator() -> None:
    """A torch built for CUDA would ask its driver: data loaders pin batches, optimizers look for a captured graph."""
    torch.accelerator.is_available = lambda: False


def kernels_that_need_triton() -> None:
    """megatron/training/initialize.py imports batch-invariant kernels, which import triton."""
    module = types.ModuleType("megatron.core.transformer.custom_layers.batch_invariant_kernels")
    for name in ("enable_batch_invariant_mode", "disable_batch_invariant_mode"):
        setattr(module, name, lambda *args, **kwargs: None)
    module.is_batch_invariant_mode_enabled = lambda: False  # type: ignore[attr-defined]
    sys.modules.setdefault(module.__name__, module)


def helpers_are_compiled() -> None:
    """A checkout compiles datasets/helpers.cpp at start, by make: the wheel's compiled module stands in for it."""
    import importlib.machinery
    import importlib.metadata
    import importlib.util

    import megatron.core.datasets.utils as utils

    utils.compile_helpers = lambda: None
    name = "megatron.core.datasets.helpers_cpp"
    if name in sys.modules or importlib.util.find_spec(name) is not None:
        return
    files = importlib.metadata.files("megatron-core") or ()
    path = next(str(file.locate()) for file in files if "helpers_cpp" in file.name)
    loader = importlib.machinery.ExtensionFileLoader(name, path)
    spec = importlib.util.spec_from_file_location(name, path, loader=loader)
    assert spec is not None
    sys.modules[name] = importlib.util.module_from_spec(spec)
    loader.exec_module(sys.modules[name])


def nothing_to_warm_up() -> None:
    """Fused kernels are built, and jitted functions run once, on the device."""
    import megatron.training.initialize as initialize

    initialize._warmup_jit_function = lambda **kwargs: None
    try:
        import megatron.legacy.fused_kernels as fused_kernels
    except ImportError:  # gone in later tags
        return
    fused_kernels.load = lambda args: None


def names_of_transformer_engine() -> None:
    """pretrain_bert.py imports both of BERT's layer specs, whichever it is to use; one needs Transformer Engine."""
    import importlib.util

    import megatron.core.models.bert.bert_layer_specs as specs

    if importlib.util.find_spec("transformer_engine") is None:
        specs.bert_layer_with_transformer_engine_spec = None  # type: ignore[attr-defined]
