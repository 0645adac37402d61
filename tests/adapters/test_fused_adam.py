"""apex's and Transformer Engine's FusedAdam as Megatron's base optimizer: their real Python classes on a CPU.

Only what is compiled is replaced (support/fused.py). APEX_PATH and TRANSFORMER_ENGINE_PATH name checkouts.
"""

import os
import sys
from pathlib import Path

import pytest
import torch

sys.path[:0] = [str(Path(__file__).resolve().parents[1]), str(Path(__file__).resolve().parent)]

from adapters.test_megatron_state import Job, arguments  # noqa: E402
from support import fused  # noqa: E402

from deadpool_plugin.errors import Unsupported  # noqa: E402
from deadpool_plugin.worker import codec  # noqa: E402
from deadpool_plugin.worker.adapter import capture_rng, restore_rng  # noqa: E402
from deadpool_plugin.worker.staging import Layout  # noqa: E402


@pytest.fixture(params=["APEX_PATH", "TRANSFORMER_ENGINE_PATH"])
def fused_adam(request, train_gpt, monkeypatch):
    """Megatron as if the package were installed."""
    if not os.environ.get(request.param):
        pytest.skip(f"{request.param} is not set; expected the folder of a checkout")
    from megatron.core import optimizer
    from megatron.core.optimizer import distrib_optimizer

    root = Path(os.environ[request.param])
    is_apex = request.param == "APEX_PATH"
    cls = fused.apex(root) if is_apex else fused.transformer_engine(root)
    monkeypatch.setattr(optimizer, "Adam", cls)
    monkeypatch.setattr(distrib_optimizer, "Adam", cls)
    monkeypatch.setattr(optimizer, "USING_PYTORCH_OPTIMIZER", False)
    monkeypatch.setattr(distrib_optimizer, "HAVE_APEX_OR_TE", True)
    monkeypatch.setattr(distrib_optimizer, "USING_APEX_OPTIMIZER" if is_apex else "USING_TE_OPTIMIZER", True)
    if is_apex:  # imported by its constructor
        monkeypatch.setitem(sys.modules, "amp_C", fused.Stub("amp_C"))
    return cls


VARIANTS = [dict(distributed_optimizer=True), dict(distributed_optimizer=False), dict(dtype="fp32")]


def job(script, changes, cls):
    made = Job(script, arguments(script, **changes))
    assert all(type(part.optimizer) is cls for part in getattr(made.optimizer, "chained_optimizers", [made.optimizer]))
    return made


@pytest.mark.parametrize("changes", VARIANTS, ids=str)
def test_a_saved_shard_brings_back_the_same_future(train_gpt, fused_adam, changes):
    plain = job(train_gpt, changes, fused_adam)
    expected = [plain.step() for _ in range(4)], plain.digest()
    flat = job(train_gpt, changes, fused_adam)
    adapter = flat.adapter()
    layout = Layout(adapter.state.shard)
    fresh = codec.decode(codec.encode(adapter.state.scalars()))
    first = flat.step()
    payload = memoryview(bytearray(layout.payload_bytes))
    for tensor, view in zip(layout.tensors, layout.views(payload), strict=True):
        view.copy_(tensor)
    saved, position = codec.encode([adapter.state.scalars(), capture_rng(adapter)]), flat.data.get_state()
    assert ([first, *(flat.step() for _ in range(3))], flat.digest()) == expected
    scalars, random_states = codec.decode(saved)
    adapter.state.load(fresh)  # a newcomer has not counted any step yet
    layout.load(payload)
    adapter.state.load(scalars)
    adapter.state.after_restore()
    restore_rng(adapter, random_states)
    flat.data.set_state(position)
    assert ([first, *(flat.step() for _ in range(3))], flat.digest()) == expected


def test_its_state_can_be_saved_and_loaded_and_snapshots_go_on(train_gpt, fused_adam):
    first, second = (job(train_gpt, dict(distributed_optimizer=False), fused_adam) for _ in range(2))
    first.adapter()
    first.step()
    state = first.optimizer.state_dict()
    second.optimizer.load_state_dict(state)
    adapter = second.adapter()
    steps = {group["step"] for groups in adapter.state.scalars()["visible"]["groups"] for group in groups}
    assert steps == {1}


class DistributedFusedAdam(torch.optim.Adam):
    """As apex.contrib.optimizers has it: a whole distributed optimizer, which Megatron-core does not build."""


def test_apexs_distributed_optimizer_is_refused_by_name(train_gpt):
    made = Job(train_gpt, arguments(train_gpt))
    made.optimizer.optimizer.__class__ = DistributedFusedAdam
    with pytest.raises(Unsupported, match="DistributedFusedAdam; expected one of Adam, AdamW, FusedAdam"):
        made.adapter()
