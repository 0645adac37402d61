"""Switches of torch: kernels are chosen in a redo as they were in the call."""

import pytest
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
    before, precision = switches.capture(), torch.backends.cuda.matmul.fp32_precision
    assert None not in before
    try:
        torch.backends.cudnn.benchmark = not torch.backends.cudnn.benchmark
        torch.backends.cuda.matmul.fp32_precision = "tf32"
        within = switches.capture()
        assert None not in within and within != before
        switches.restore(before)
        assert switches.capture() == before and torch.backends.cuda.matmul.fp32_precision == precision
        switches.restore(within)
        assert torch.backends.cuda.matmul.fp32_precision == "tf32"
    finally:
        switches.restore(before)


def test_so_is_precision_that_is_set_the_old_way():
    before = switches.capture()
    try:
        torch.set_float32_matmul_precision("high")
        assert switches.capture() != before
    finally:
        switches.restore(before)
    assert switches.capture() == before


def test_so_are_deterministic_algorithms():
    before = switches.capture()
    torch.use_deterministic_algorithms(True, warn_only=True)
    within = switches.capture()
    switches.restore(before)
    assert switches.capture() == before != within and not torch.are_deterministic_algorithms_enabled()
    try:
        switches.restore(within)
        assert torch.is_deterministic_algorithms_warn_only_enabled()
    finally:
        switches.restore(before)


@pytest.mark.parametrize("number", range(len(switches._ATTRIBUTES)))
def test_each_attribute_is_read_where_it_is_set(number):
    owner, name, _ = switches._ATTRIBUTES[number]
    before = switches.capture()
    was = getattr(owner, name)
    try:
        setattr(owner, name, not was if isinstance(was, bool) else "ieee" if was != "ieee" else "tf32")
        is_other = [now != then for now, then in zip(switches.capture(), before, strict=True)]
        within = switches.capture()
        switches.restore(before)
        assert any(is_other) and switches.capture() == before and getattr(owner, name) == was
        switches.restore(within)
        assert getattr(owner, name) != was
    finally:
        switches.restore(before)
