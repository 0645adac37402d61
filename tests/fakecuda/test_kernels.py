"""Arithmetic on the stand-in for CUDA: equal to the CPU's, in the stream's order, and counted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from fakecuda import control
from fakecuda.control import report
from support.zygote import in_zygote

pytestmark = control.only_here
functional = torch.nn.functional


def trained(device: str, **options: Any) -> torch.Tensor:
    """Parameters of a small model after three steps of AdamW."""
    torch.manual_seed(0)
    layers = [torch.nn.Linear(8, 8), torch.nn.LayerNorm(8), torch.nn.GELU(), torch.nn.Linear(8, 4)]
    model = torch.nn.Sequential(*layers).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, **options)
    data, wanted = matrix().to(device), torch.arange(8, device=device) % 4
    for _ in range(3):
        optimizer.zero_grad()
        functional.cross_entropy(model(data), wanted).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return torch.nn.utils.parameters_to_vector(model.parameters()).detach()


def attention(x: torch.Tensor) -> torch.Tensor:
    return functional.scaled_dot_product_attention(x, x, x, is_causal=True)


def matrix() -> torch.Tensor:
    return torch.arange(64.0).reshape(8, 8).sin()


def written(device: str, index: Any, value: Any) -> torch.Tensor:
    m = matrix().to(device)
    m[index(m)] = value
    return m


OPERATIONS: dict[str, Callable[[str], torch.Tensor]] = {
    "adamw": trained,
    "adamw fused": lambda device: trained(device, fused=True),
    "adamw foreach": lambda device: trained(device, foreach=True),
    "attention": lambda device: attention(matrix().to(device)[None, None]),
    "baddbmm": lambda device: torch.baddbmm(*[matrix().to(device).expand(2, 8, 8)] * 3),
    "bf16 mm": lambda device: matrix().to(device).bfloat16() @ matrix().to(device).bfloat16().t(),
    "cat": lambda device: torch.cat([matrix().to(device), matrix().to(device)[:2]]),
    "complex": lambda device: torch.view_as_real(torch.complex(*[matrix().to(device)] * 2).conj() * 2),
    "cpu scalar": lambda device: matrix().to(device) * torch.tensor(2.0),
    "embedding": lambda device: functional.embedding(torch.arange(5, device=device), matrix().to(device)),
    "into a slice": lambda device: torch.zeros(8, 16, device=device)[:, ::2].copy_(matrix().to(device)),
    "layout": lambda device: matrix().to(device).t().contiguous().to(torch.float16),
    "masked write": lambda device: written(device, lambda m: m > 0, 7.0),
    "indexed write": lambda device: written(device, lambda m: (torch.tensor([0, 2]), 1), 7.0),
    "max": lambda device: torch.cat([part.float() for part in matrix().to(device).max(-1)]),
    "norms": lambda device: torch.stack(list(torch._foreach_norm([matrix().to(device)] * 2))),
    "out": lambda device: torch.mm(matrix().to(device), matrix().to(device), out=torch.empty(0, device=device)),
    "select": lambda device: matrix().to(device).masked_select(matrix().to(device) > 0),
    "softmax": lambda device: matrix().to(device).softmax(-1),
    "sort": lambda device: matrix().to(device).sort(0)[0],
    "sum": lambda device: matrix().to(device).sum(0, dtype=torch.float64),
    "tril": lambda device: torch.tril(torch.ones(4, 4, device=device)),
}  # fmt: skip


@pytest.mark.parametrize("deterministic", [False, True])
@in_zygote
def test_results_are_the_cpus(deterministic: bool) -> None:
    """With deterministic algorithms, torch fills memory that it gives out with NaN."""
    torch.use_deterministic_algorithms(deterministic, warn_only=True)
    wrong = {name: problem for name, operation in OPERATIONS.items() if (problem := difference(operation))}
    assert wrong == {}


def difference(operation: Callable[[str], torch.Tensor]) -> str:
    """Describe how the device's result differs from the CPU's; empty if it does not."""
    expected, found = (operation(device) for device in ("cpu", "cuda"))
    assert found.is_cuda
    forms = [(one.dtype, one.size(), one.stride()) for one in (expected, found)]
    if forms[0] != forms[1]:
        return f"{forms[1]}, expected {forms[0]}"
    return "" if torch.equal(found.cpu(), expected) else f"{found.cpu()}, expected {expected}"


@in_zygote
def test_random_numbers_follow_the_generator_of_the_device():
    host = torch.get_rng_state()
    torch.cuda.init()
    torch.cuda.manual_seed(7)
    generator = torch.cuda.default_generators[0]
    state = generator.get_state()

    def draw() -> list[torch.Tensor]:
        x = torch.ones(100, device="cuda")
        drawn = [torch.rand(100, device="cuda"), torch.randn(100, device="cuda"), functional.dropout(x, 0.5)]
        return [*drawn, torch.randperm(100, device="cuda"), torch.bernoulli(x / 2), torch.multinomial(x, 5)]

    first, offset = draw(), generator.get_offset()
    second = draw()
    generator.set_state(state)
    again = draw()
    assert offset > 0 and offset % 4 == 0 and generator.get_offset() == offset
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert torch.equal(torch.get_rng_state(), host), "the CPU's generator is not the device's"
    dropped = functional.dropout(torch.ones(1000, device="cuda"), 0.25)
    assert set(dropped.unique().tolist()) == {0.0, torch.tensor(1 / 0.75).item()}


@in_zygote
def test_what_a_step_does_is_counted():
    x, stream = torch.zeros(8, device="cuda"), torch.cuda.Stream()
    pinned = torch.zeros(8).pin_memory()
    x.add_(1.0).mul_(2.0)
    torch.cuda.synchronize()
    before = report()
    x.add_(1.0)  # one launch
    y = x * 2  # another; its memory is cached
    y.item() if y.numel() == 1 else y[0].item()  # one copy that is waited for
    event = torch.cuda.current_stream().record_event()
    stream.wait_event(event)
    with torch.cuda.stream(stream):
        pinned.copy_(y, non_blocking=True)
    stream.synchronize()
    after = report()
    grown = {name: after[name] - value for name, value in before.items() if isinstance(value, int)}
    assert {name: value for name, value in grown.items() if value and not name.startswith("host_")} == {
        "launches": 2, "copies": 2, "events_recorded": 1, "events_awaited": 1, "stream_waits": 2,
    }  # fmt: skip
    counted = {one["stream"]: one for one in after["streams"]}
    assert counted[stream.cuda_stream]["copies"] == 1 and counted[0]["copies"] == before["copies"] + 1


@in_zygote
def test_the_host_waits_only_for_results_whose_form_depends_on_data():
    x = torch.arange(8.0, device="cuda")
    for result in (x * 2, x.sum(), x.softmax(0), x.sort()[0], functional.layer_norm(x, (8,))):
        assert result.is_cuda
    assert report()["form_waits"] == 0
    assert torch.nonzero(x > 3).flatten().tolist() == [4, 5, 6, 7] and report()["form_waits"] == 1


@in_zygote
def test_a_wrong_call_is_raised_and_a_wrong_index_kills_the_context():
    x = torch.zeros(8, device="cuda")
    with pytest.raises(RuntimeError, match="size of tensor"):
        x.add_(torch.zeros(3, device="cuda"))
    assert x.sum().item() == 0.0
    with pytest.raises(torch.AcceleratorError, match="device-side assert"):  # here, or as soon as it is launched
        x[torch.tensor([9], device="cuda")] = 1.0
        torch.cuda.synchronize()


@in_zygote
def test_an_assertion_on_the_device_kills_the_context():
    torch._assert_async(torch.ones((), device="cuda"))
    torch.cuda.synchronize()
    false = torch.zeros((), device="cuda")
    with pytest.raises(torch.AcceleratorError, match="device-side assert"):  # here, or as soon as it is launched
        torch._assert_async(false)
        torch.cuda.synchronize()
