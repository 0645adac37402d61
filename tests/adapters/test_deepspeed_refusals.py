"""Features of DeepSpeed that are refused: by name, before training, with what to do instead."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.stand_in import fake

deepspeed = pytest.importorskip("deepspeed")

from deepspeed.runtime.config import DeepSpeedConfig  # noqa: E402
from deepspeed.runtime.engine import DeepSpeedEngine  # noqa: E402

from deadpool_plugin.adapters.common import value_at  # noqa: E402
from deadpool_plugin.adapters.deepspeed import zero3  # noqa: E402
from deadpool_plugin.adapters.deepspeed.adapter import COMPRESSION, OPTIONS, DeepSpeedAdapter, check  # noqa: E402
from deadpool_plugin.adapters.deepspeed.calls import EngineCalls, Forward  # noqa: E402
from deadpool_plugin.adapters.deepspeed.optimizer import Adam  # noqa: E402
from deadpool_plugin.errors import Unsupported  # noqa: E402
from deadpool_plugin.worker.copies import COPIED_BYTES_MAX, Inputs  # noqa: E402

PATHS = {path: option for option in OPTIONS for path in option.paths.split()}


@pytest.mark.parametrize("path", PATHS)
def test_every_option_is_known_to_this_deepspeed_or_refused_with_a_remedy(path):
    option, engine = PATHS[path], made(path, "something else")
    with pytest.raises(Unsupported) as refusal:
        check(engine)
    assert (option.called or path) in str(refusal.value)
    assert option.remedy in str(refusal.value)
    for harmless in option.harmless:
        check(made(path, harmless))


def made(path, value):
    """Something that is called DeepSpeedEngine and has `value` at `path`."""
    kind = type("DeepSpeedEngine", (SimpleNamespace,), {})
    *outer, last = path.split(".")
    inner = fake(**{last: value})
    for name in reversed(outer):
        inner = fake(**{name: inner})
    return kind(**vars(inner), module=torch.nn.Module())


@pytest.mark.parametrize("technique", COMPRESSION)
def test_compression_of_earlier_versions_is_found_in_their_configuration(technique):
    """As `get_compression_config` of DeepSpeed 0.18 has it: all techniques, whatever the file names."""
    every = {name: {"shared_parameters": {"enabled": False}, "different_groups": {}} for name in COMPRESSION}
    engine = made("_config", fake(compression_config={**every, "layer_reduction": {"enabled": True}}))
    check(engine)
    every[technique]["shared_parameters"]["enabled"] = True
    with pytest.raises(Unsupported, match=f"compression_training: {technique} = True"):
        check(engine)


def test_activations_that_go_elsewhere_are_refused():
    calls, engine = EngineCalls(lambda *call: None), fake()
    Forward(calls, "engine.forward", lambda engine: None, engine)
    with torch.autograd.graph.save_on_cpu(), pytest.raises(Unsupported, match="saved-tensor hooks .*checkpointing"):
        Forward(calls, "engine.forward", lambda engine: None, engine)


def test_other_engines_are_refused():
    class HybridEngine:
        pass

    with pytest.raises(Unsupported, match="HybridEngine"):
        check(HybridEngine())


class Engine:
    """One that the script keeps."""


@pytest.mark.parametrize("engines", [2, 3])
def test_a_script_with_a_teacher_or_a_discriminator_is_told_the_way_out_before_training(engines, monkeypatch):
    monkeypatch.setattr(zero3, "watch_model", lambda calls, engine: None)
    script, adapter = [Engine() for _ in range(engines)], DeepSpeedAdapter()
    adapter.calls = fake(is_training=False)
    for engine in script:
        adapter._engine_made(engine)
    with pytest.raises(Unsupported, match=rf"{engines} DeepSpeed engines.* torch\.no_grad"):
        adapter.attach()


def test_an_engine_made_during_training_is_refused_and_not_taken_for_the_first(monkeypatch):
    monkeypatch.setattr(zero3, "watch_model", lambda calls, engine: None)
    adapter = DeepSpeedAdapter()
    adapter.calls = fake(is_training=True)
    with pytest.raises(Unsupported, match=r"another DeepSpeed engine during training.* torch\.no_grad"):
        adapter._engine_made(Engine())


def test_the_methods_of_an_engine_that_are_asked_exist():
    asked = {path for path in PATHS if "." not in path and hasattr(DeepSpeedEngine, path)}
    assert {"zero_hpz_partition_size", "zero_quantized_gradients", "autotp_size", "is_deepcompile_enabled"} <= asked
    assert {"zero_partial_offload", "curriculum_learning_enabled", "random_ltd_enabled"} <= asked


OFFLOAD = {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu", "ratio": 0.5}}}
CURRICULUM = {"curriculum_learning": {"enabled": True, "curriculum_metrics": {}}}
BATCHING = {"dynamic_batching": {"enabled": True, "max_tokens": 8}}


@pytest.mark.parametrize(
    ("options", "name"),
    [
        (OFFLOAD, "Twin-Flow"),
        ({"data_efficiency": {"data_sampling": CURRICULUM}}, "curriculum_learning"),
        ({"data_efficiency": {"data_routing": {"random_ltd": {"enabled": True}}}}, "random_ltd"),
        ({"data_efficiency": {"data_sampling": BATCHING}}, "dynamic_batching"),
    ],
)
def test_what_a_configuration_asks_for_is_found_in_the_engine(options, name):
    """Nothing else of it is refused, and the same without it is not."""
    engine = DeepSpeedEngine.__new__(DeepSpeedEngine)
    torch.nn.Module.__init__(engine)
    nothing: dict[str, Any] = {}
    for words in (nothing, options):
        engine._config = DeepSpeedConfig({"train_micro_batch_size_per_gpu": 1, **words})
        refused = [option.called or path for path, option in PATHS.items() if is_refused(engine, path)]
        assert len(refused) == len(words) and all(name in one for one in refused)


def is_refused(engine, path):
    """Options of parts that this engine does not have are not."""
    try:
        return value_at(path, engine) not in PATHS[path].harmless
    except AttributeError:
        return False


def test_other_optimizers_and_masters_are_refused_by_name():
    parameter = torch.nn.Parameter(torch.zeros(3))
    with pytest.raises(Unsupported, match="SGD"):
        Adam(torch.optim.SGD([parameter], lr=0.1), [parameter])
    with pytest.raises(Unsupported, match="amsgrad"):
        Adam(torch.optim.AdamW([parameter], amsgrad=True), [parameter])
    with pytest.raises(Unsupported, match="bitsandbytes.optim.adamw.AdamW"):
        Adam(made_by("bitsandbytes.optim.adamw", "AdamW")([parameter]), [parameter])
    fused = made_by("deepspeed.ops.adam.fused_adam", "FusedAdam")([parameter])
    Adam(fused, [parameter], fake(cycle_momentum=False))
    with pytest.raises(Unsupported, match="betas"):
        Adam(fused, [parameter], fake(cycle_momentum=True))
    with pytest.raises(Unsupported, match="bfloat16"):
        Adam(torch.optim.AdamW([parameter]), [parameter.to(torch.bfloat16)])


def made_by(module, name):
    return type(name, (torch.optim.AdamW,), {"__module__": module})


def test_state_made_beforehand_is_what_adam_makes_itself():
    ours, its = (torch.nn.Parameter(torch.linspace(0, 1, 5)) for _ in range(2))
    optimizers = [torch.optim.AdamW([one], lr=0.1) for one in (ours, its)]
    Adam(optimizers[0], [ours])
    for _ in range(3):
        for one, optimizer in zip((ours, its), optimizers, strict=True):
            one.grad = one.detach() * 2
            optimizer.step()
    assert torch.equal(ours, its)
    left, right = (dict(optimizer.state[one]) for one, optimizer in zip((ours, its), optimizers, strict=True))
    assert left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def test_an_input_that_requires_grad_is_refused():
    calls = EngineCalls(lambda *call: None)
    with pytest.raises(Unsupported, match="requires grad"):
        Forward(calls, "engine.forward", lambda engine: None, fake(), torch.zeros(2, requires_grad=True))


def test_a_small_input_is_kept_as_it_was_and_a_large_one_must_stay_so():
    small, large = torch.ones(4), torch.ones(COPIED_BYTES_MAX // 4 + 1)
    inputs = Inputs((small,), {"large": large}, "the engine's forward")
    small.zero_()
    args, kwargs = inputs.again()
    assert torch.equal(args[0], torch.ones(4)) and kwargs["large"] is large
    large.zero_()
    with pytest.raises(Unsupported, match="changed in place"):
        inputs.again()
