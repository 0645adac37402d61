"""Call records survive the way into bytes and back, bit for bit, or are refused by name."""

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

from deadpool_plugin.errors import Unsupported
from deadpool_plugin.worker import codec

plain = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**60), 2**60) | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda inner: st.lists(inner) | st.lists(inner).map(tuple) | st.dictionaries(st.text() | st.integers(0, 9), inner),
    max_leaves=20,
)


@given(plain)
def test_plain_data_comes_back_equal_with_its_tuples(value):
    assert codec.decode(codec.encode(value)) == value


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.bool, torch.uint8])
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 3)])
def test_tensors_come_back_bit_for_bit(dtype, shape):
    tensor = torch.randn(shape).mul(100).to(dtype)
    back = codec.decode(codec.encode([{"loss": tensor}]))[0]["loss"]
    assert back.dtype == dtype and back.shape == tensor.shape and torch.equal(back, tensor)


class OnDevice(torch.Tensor):
    device = torch.device("cuda", 3)


def test_tensors_come_back_to_the_device_they_were_on(monkeypatch):
    """The device is the decoding process's own: its first and only one may have another number."""
    moved, loss = [], torch.tensor([1.5, 2.0]).as_subclass(OnDevice)
    data = codec.encode([{"loss": loss, "empty": loss[:0], "count": torch.ones(1)}])

    def to(tensor, device):
        moved.append(device)
        return tensor

    monkeypatch.setattr(torch.Tensor, "to", to)
    (back,) = codec.decode(data)
    assert moved == ["cuda", "cuda"] and back["loss"].tolist() == [1.5, 2.0] and back["count"].tolist() == [1.0]


def test_large_tensors_are_never_made_up():
    back = codec.decode(codec.encode([torch.ones(codec.TENSOR_LIMIT_BYTES)]))[0]
    assert isinstance(back, codec.TooLarge) and f"float32 [{codec.TENSOR_LIMIT_BYTES}]" in back.description
    assert codec.too_large({"logits": [torch.ones(codec.TENSOR_LIMIT_BYTES)]}) == back
    assert codec.too_large({"loss": (torch.ones(1), None)}) is None


def test_numbers_of_numpy_are_plain_and_large_integers_refused():
    largest = 2**63 - 1
    assert codec.decode(codec.encode([np.float64(0.5), largest])) == [0.5, largest]
    with pytest.raises(Unsupported, match="integers of at most 63 bits"):
        codec.encode(2**63)
    with pytest.raises(Unsupported, match="integers of at most 63 bits"):
        codec.encode((1, 2**64, 2))


def test_anything_else_is_refused_by_name():
    with pytest.raises(Unsupported, match="test_codec.*Thing"):

        class Thing:
            pass

        codec.encode([Thing()])
