"""One tiny Megatron-core job in this process (world of one, gloo): the adapter sees the real objects."""

import os
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"


@pytest.fixture(scope="session")
def train_gpt():
    """The training script as a module, with a world of one rank initialised."""
    pytest.importorskip("megatron.core")
    sys.path.insert(0, str(SCRIPTS))
    os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0")
    import torch
    import torch.distributed as dist
    import train_gpt
    from megatron.core import parallel_state

    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel(create_gloo_process_groups=False)
    yield train_gpt
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()
