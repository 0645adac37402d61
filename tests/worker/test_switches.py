"""Switches of torch: kernels are chosen in a redo as they were in the call."""

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from deadpool_plugin.worker import rng


def test_a_redo_outside_a_context_computes_as_within_it():
    before = rng.capture_switches()
    with sdpa_kernel(SDPBackend.MATH):
        within = rng.capture_switches()
    assert rng.capture_switches() == before
    try:
        rng.restore_switches(within)
        assert rng.capture_switches() == within != before
        assert torch.backends.cuda.math_sdp_enabled() and not torch.backends.cuda.flash_sdp_enabled()
    finally:
        rng.restore_switches(before)
    assert rng.capture_switches() == before


def test_precision_and_cudnn_are_among_them():
    before, precision = rng.capture_switches(), torch.backends.cuda.matmul.fp32_precision
    assert None not in before
    try:
        torch.backends.cudnn.benchmark = not torch.backends.cudnn.benchmark
        torch.backends.cuda.matmul.fp32_precision = "tf32"
        within = rng.capture_switches()
        assert None not in within and within != before
        rng.restore_switches(before)
        assert rng.capture_switches() == before and torch.backends.cuda.matmul.fp32_precision == precision
        rng.restore_switches(within)
        assert torch.backends.cuda.matmul.fp32_precision == "tf32"
    finally:
        rng.restore_switches(before)


def test_so_is_precision_that_is_set_the_old_way():
    before = rng.capture_switches()
    try:
        torch.set_float32_matmul_precision("high")
        assert rng.capture_switches() != before
    finally:
        rng.restore_switches(before)
    assert rng.capture_switches() == before


def test_so_are_deterministic_algorithms():
    before = rng.capture_switches()
    torch.use_deterministic_algorithms(True, warn_only=True)
    within = rng.capture_switches()
    rng.restore_switches(before)
    assert rng.capture_switches() == before != within and not torch.are_deterministic_algorithms_enabled()
    try:
        rng.restore_switches(within)
        assert torch.is_deterministic_algorithms_warn_only_enabled()
    finally:
        rng.restore_switches(before)
