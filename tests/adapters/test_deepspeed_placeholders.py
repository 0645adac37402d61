"""Large outputs in a follower: shapes without values, which a recorded collective can fill; never made-up numbers."""

import pytest
import torch

from deadpool_plugin.adapters.deepspeed import outputs
from deadpool_plugin.adapters.deepspeed.cut import Graph, collect, cut
from deadpool_plugin.adapters.deepspeed.outputs import Guess, Placeholder
from deadpool_plugin.errors import Divergence
from deadpool_plugin.worker import codec

CPU = torch.device("cpu")


def logits():
    return Placeholder(torch.empty(4, 3, 7, device="meta"), CPU)


def test_a_large_output_is_told_by_its_shape_and_a_small_one_by_its_values():
    large = torch.zeros(codec.TENSOR_LIMIT_BYTES // 4 + 1)
    record = codec.decode(codec.encode(outputs.encode({"loss": torch.ones(1), "logits": large})))
    value = outputs.decode(record, CPU)
    assert torch.equal(value["loss"], torch.ones(1)) and not outputs.differentiable(value)
    assert value["logits"].shape == large.shape and value["logits"].dtype == large.dtype
    with pytest.raises(Divergence, match="large output of the engine's model"):
        value["logits"].sum().item()


def test_what_is_computed_from_shapes_has_a_shape():
    guessed = logits()[:, :-1].detach().argmax(-1).to(torch.int32)
    assert guessed.shape == (4, 2) and guessed.dtype == torch.int32 and guessed.device == CPU
    assert (logits() * torch.ones(7) + 1).shape == (4, 3, 7)
    assert torch.cat([logits(), torch.ones(1, 3, 7)]).shape == (5, 3, 7)
    changed = logits()
    assert changed.add_(1) is changed and torch.empty_like(changed).shape == (4, 3, 7)
    with torch.inference_mode():
        assert logits().mean().shape == ()


@pytest.mark.parametrize(
    "use",
    [
        lambda value: bool(value.sum() > 0),
        lambda value: value.tolist(),
        lambda value: value.numpy(),
        lambda value: value.nonzero(),
        lambda value: torch.ones(4, 3, 7).copy_(value),
        lambda value: torch.ones(4, 3, 7).add_(value),
        lambda value: torch.add(value, 1, out=torch.empty(4, 3, 7)),
        lambda value: torch.ones(7)[value[0, 0].long()].tolist(),
    ],
)
def test_numbers_are_refused(use):
    with pytest.raises(Divergence, match="followers are not told"):
        use(logits())


@pytest.fixture
def large(monkeypatch):
    """An output above 64 KiB that leads to a loss, as a follower's script gets it."""
    monkeypatch.setattr(Guess, "first_taken", "")
    record = codec.decode(codec.encode(outputs.encode(torch.ones(4, 5000, requires_grad=True))))
    value = outputs.decode(record, CPU)
    (behind,) = cut(Graph(0, None), outputs.differentiable(value))
    assert value.shape == behind.shape == (4, 5000) and behind.requires_grad
    return behind


LABELS = torch.arange(4)
LOSSES = [
    lambda logits: torch.nn.functional.cross_entropy(logits, LABELS),
    lambda logits: torch.zeros(()).add_(logits.detach().float().mean()),
    lambda logits: torch.isnan(logits[0]).any(),
]


@pytest.mark.parametrize("loss_of", LOSSES)
@pytest.mark.parametrize("take", [torch.Tensor.item, bool, str, lambda loss: loss.tolist(), "{:.1f}".format])
def test_it_is_noted_where_a_script_first_takes_a_number_of_an_output_it_does_not_know(large, loss_of, take):
    loss = loss_of(large)
    assert loss.shape == () and not Guess.first_taken
    take(loss)
    assert Guess.first_taken == f"{__file__}:{take.__code__.co_firstlineno}" if hasattr(take, "__code__") else True
    assert Guess.first_taken.startswith(f"{__file__}:")


def test_what_it_was_told_meanwhile_is_no_guess(large):
    loss = LOSSES[0](large)
    collect(loss.backward)
    with torch.no_grad():
        loss.copy_(torch.tensor(5.0))
    halved: object = (loss / 2).detach().tolist()
    assert loss.item() == 5 and halved == 2.5 and type(loss / 2) is torch.Tensor
    assert not Guess.first_taken
    mean = LOSSES[0](large).detach()
    mean.copy_(torch.tensor(3.0))  # as what a collective gave is
    assert float(mean) == 3 and not Guess.first_taken


def test_what_a_collective_gave_is_known():
    gathered, values = torch.empty_like(logits()), torch.arange(84.0).view(4, 3, 7)
    gathered.copy_(values)
    assert gathered.tolist() == values.tolist() and (gathered.numpy() == values.numpy()).all()
    assert torch.equal(gathered.argmax(-1), values.argmax(-1)) and float(gathered.sum()) == values.sum()
    joined = torch.cat([gathered, torch.ones(1, 3, 7)])
    assert torch.equal(joined[:4], values)
    with pytest.raises(Divergence):
        (gathered + logits()).sum().item()


class Cache:
    """As Hugging Face's models return one beside the loss (past_key_values): no pytree, and full of tensors."""

    def __init__(self):
        self.layers = [torch.ones(2)]


def test_of_an_object_beside_the_loss_a_follower_knows_the_type():
    record = codec.decode(codec.encode(outputs.encode({"loss": torch.ones(1), "past_key_values": Cache()})))
    value = outputs.decode(record, CPU)
    assert torch.equal(value["loss"], torch.ones(1)) and value["past_key_values"] is not None


@pytest.mark.parametrize(
    "use", [lambda cache: cache.layers, lambda cache: cache[0], bool, len, list, lambda cache: cache == 3]
)
def test_such_an_object_is_of_no_use(use):
    _, cache = outputs.decode(outputs.encode([torch.ones(1), Cache()]), CPU)
    with pytest.raises(Divergence, match=r"test_deepspeed_placeholders.Cache that the engine's model returned"):
        use(cache[1])
