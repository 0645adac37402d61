"""worker/switches.py: kernels are chosen in a redo as they were in the call."""

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from deadpool_plugin.worker import switches


def test_a_redo_outside_a_context_computes_as_within_it():
    before = switches.capture()
    with sdpa_kernel(SDPBackend.MATH):
        within = switches.capture()
    assert switches.capture() == before
    try:
        switches.restore(within)
        assert switches.capture() == within != before
        assert torch.backends.cuda.math_sdp_enabled() and not torch.backends.cuda.flash_sdp_enabled()
    finally:
        switches.restore(before)
    assert switches.capture() == before


def test_precision_and_cudnn_are_among_them():
    before = switches.capture()
    torch.backends.cudnn.benchmark = not torch.backends.cudnn.benchmark
    torch.set_float32_matmul_precision("medium")
    assert switches.capture() != before
    switches.restore(before)
    assert switches.capture() == before and torch.get_float32_matmul_precision() == "highest"
