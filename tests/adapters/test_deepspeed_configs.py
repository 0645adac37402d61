"""The DeepSpeed configurations in configs/: DeepSpeed builds an engine from each, and nothing in it is refused."""

import json
import os
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT)]

from support.deepspeed_cpu import needs_deepspeed  # noqa: E402
from support.zygote import in_zygote  # noqa: E402

pytestmark = needs_deepspeed

CONFIGS = sorted((ROOT / "configs").glob("deepspeed_*.json"))


def build(options):
    """An engine of one rank, with torch's AdamW: DeepSpeed's own ones would be compiled first."""
    import deepspeed
    import torch
    from deepspeed.pipe import PipelineModule

    parts = [torch.nn.Linear(4, 4) for _ in range(2)]
    model = torch.nn.Sequential(*parts)
    if "pipeline" in options:
        model = PipelineModule(parts, num_stages=1, loss_fn=torch.nn.functional.mse_loss)
    optimizer = torch.optim.AdamW(model.parameters())
    return deepspeed.initialize(
        model=model, optimizer=optimizer, config={**options, "zero_force_ds_cpu_optimizer": False}
    )[0]


@pytest.mark.parametrize("name", [path.name for path in CONFIGS])
@in_zygote
def test_an_engine_built_from_it_can_be_protected(name):
    os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT="1")
    import deepspeed
    import torch.distributed as dist

    from deadpool_plugin.adapters.deepspeed.adapter import check
    from deadpool_plugin.adapters.deepspeed.state import EngineState

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    deepspeed.init_distributed(verbose=False)
    options = json.loads((ROOT / "configs" / name).read_text())
    engine = build(options)
    check(engine)
    moments = EngineState(engine).adam.moments
    assert all(moment.untyped_storage().nbytes() == moment.nbytes for moment in moments)  # torch.save writes storages
    assert engine.zero_optimization_stage() == options["zero_optimization"]["stage"] and engine.bfloat16_enabled()
    assert engine.gradient_accumulation_steps() == options["gradient_accumulation_steps"]
