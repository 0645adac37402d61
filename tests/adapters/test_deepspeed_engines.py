"""The content of real engines' snapshots, where only a real one tells."""

import os
import sys
from pathlib import Path

import pytest
from support.stand_in import fake, stand_in

from deadpool_plugin.adapters.deepspeed.state import EngineState

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT)]

from support.deepspeed_cpu import needs_deepspeed  # noqa: E402
from support.zygote import in_zygote  # noqa: E402

pytestmark = needs_deepspeed


def build(model, optimizer="AdamW", **options):
    """An engine of one rank around `model()`, with an optimizer of torch's."""
    os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT="1")
    import deepspeed
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    deepspeed.init_distributed(verbose=False)
    torch.manual_seed(3)
    built = model()
    made = getattr(torch.optim, optimizer)(built.parameters(), lr=0.1)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 10**9,
        **options,
    }
    return deepspeed.initialize(model=built, optimizer=made, config=config)[0]


@in_zygote
def test_a_pipeline_that_seeds_its_layers_counts_from_where_it_was():
    import torch
    from deepspeed.pipe import PipelineModule

    from deadpool_plugin.adapters.deepspeed.state import EngineState

    def model():
        parts = [torch.nn.Linear(4, 4), torch.nn.Dropout(0.5), torch.nn.Linear(4, 4)]
        loss = torch.nn.functional.mse_loss
        return PipelineModule(
            parts, num_stages=1, loss_fn=loss, seed_layers=True, seed_fn=lambda n: torch.manual_seed(int(n))
        )

    engine = build(model, gradient_accumulation_steps=2)
    data = iter([(torch.ones(1, 4), torch.zeros(1, 4))] * 8)
    state = EngineState(engine)
    engine.train_batch(data)
    saved = state.scalars()
    assert engine.module.micro_offset == 2
    engine.train_batch(data)
    state.clean()
    state.load(saved)
    assert engine.module.micro_offset == 2


OFFLOADED = {"offload_optimizer": {"device": "cpu"}}


@pytest.mark.parametrize(
    ("zero", "steps", "refused"),
    [
        ({"stage": 3}, ["00", "00", "00"], None),
        ({"stage": 3}, ["00", "11"], 1),
        ({"stage": 3}, ["00", "01", "11"], 2),
        ({"stage": 3}, ["01", "01"], 1),
        ({"stage": 3, **OFFLOADED}, ["00", "01"], 1),
        ({"stage": 2, **OFFLOADED}, ["00", "00"], None),
        ({"stage": 2, **OFFLOADED}, ["00", "11"], 1),
        ({"stage": 2, **OFFLOADED}, ["01", "01"], 1),
        ({"stage": 2}, ["00", "11", "01"], None),
    ],
    ids=str,
)
@in_zygote
def test_a_parameter_that_has_gradients_now_and_then_is_refused_where_old_ones_would_be_used(zero, steps, refused):
    """Steps of two backwards, each through head 0 or 1. A head that never takes part is no matter. What a newcomer
    has been told is as good as what a rank has seen."""
    import torch

    from deadpool_plugin.adapters.deepspeed.state import EngineState
    from deadpool_plugin.errors import Unsupported

    class Heads(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.heads = torch.nn.ModuleList(torch.nn.Linear(4, 1) for _ in range(2))

        def forward(self, batch, head):
            return self.heads[head](batch).sum()

    engine = build(Heads, zero_optimization=zero, gradient_accumulation_steps=2)
    state = EngineState(engine)
    for number, (first, second) in enumerate(steps):
        engine.backward(engine(torch.ones(1, 4), int(first)))
        engine.step()
        engine.backward(engine(torch.ones(1, 4), int(second)))
        if number == refused:
            with pytest.raises(Unsupported, match=r"2 parameters \(first: heads\.[01]\.weight\)"):
                state.lasting.check()
            return
        state.lasting.check()
        engine.step()
        saved, state = state.scalars(), EngineState(engine)
        state.load(saved)
    assert refused is None


@pytest.mark.parametrize("stage", [0, 2, 3])
@in_zygote
def test_what_a_script_reads_of_gradients_and_optimizer_state_is_told_to_followers(stage):
    """Also by functions that it imported before anything was installed."""
    import torch
    from deepspeed.utils import safe_get_full_grad, safe_get_full_optimizer_state

    from deadpool_plugin.adapters.deepspeed.calls import EngineCalls
    from deadpool_plugin.worker import codec

    made = []

    def handler(call):
        value = call()
        made.append((call.name, call, codec.decode(codec.encode(call.outcome(value)))))
        return value

    engine = build(lambda: torch.nn.Linear(4, 1), zero_optimization={"stage": stage})
    weight = engine.module.weight
    calls = EngineCalls(handler)
    calls.state, calls.is_training = stand_in(EngineState), True
    calls._wrap_reads()
    engine.backward(engine(torch.ones(1, 4)).sum())
    gradient = safe_get_full_grad(weight)
    assert gradient.flatten().tolist() == [1.0] * 4
    engine.step()
    state = safe_get_full_optimizer_state(weight, optim_state_key="exp_avg")
    assert [name for name, *_ in made] == ["safe_get_full_grad", "safe_get_full_optimizer_state"]
    (_, _, gradients), (_, read, states) = made
    assert gradients.flatten().tolist() == [1.0] * 4
    if stage == 0:  # DeepSpeed knows of none then
        assert read() is read.skipped(states) is state is None
    else:
        assert state.any() and torch.equal(read.skipped(states), state) and torch.equal(read(), state)


@in_zygote
def test_taking_the_hooks_of_zero_3_off_for_a_while_is_refused_before_they_are():
    import torch
    from deepspeed.runtime.zero import unwrap_model_for_generation

    from deadpool_plugin.adapters.deepspeed import zero3
    from deadpool_plugin.errors import Unsupported

    calls = fake(busy=False, is_training=False)
    zero3.refuse_taking_hooks(calls)
    engine = build(lambda: torch.nn.Linear(4, 1), zero_optimization={"stage": 3})
    full = len(engine.module._forward_hooks)
    with unwrap_model_for_generation(engine):
        assert len(engine.module._forward_hooks) < full
    hooks = list(engine.module._forward_hooks)
    calls.is_training = True
    with pytest.raises(Unsupported, match="unwrap_model_for_generation"), unwrap_model_for_generation(engine):
        pass
    engine.backward(engine(torch.ones(1, 4)).sum())
    assert list(engine.module._forward_hooks) == hooks and len(hooks) == full
    engine.destroy()
    assert len(engine.module._forward_hooks) < full


@in_zygote
def test_an_optimizer_that_deepspeed_refuses_is_named_and_no_option_asked_for():
    import torch
    from deepspeed.runtime.engine import DeepSpeedEngine

    from deadpool_plugin.adapters.deepspeed.adapter import refuse_methods
    from deadpool_plugin.errors import Unsupported

    refuse_methods(DeepSpeedEngine, lambda: False)
    kept = {"zero_optimization": {"stage": 1}, "zero_allow_untested_optimizer": False}
    with pytest.raises(Unsupported, match=r"torch\.optim\.sgd\.SGD; expected one of Adam"):
        build(lambda: torch.nn.Linear(4, 1), "SGD", **kept)
