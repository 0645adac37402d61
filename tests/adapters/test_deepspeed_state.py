"""The content of an engine's snapshot."""

import copy
import operator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("deepspeed")

from deepspeed.profiling.flops_profiler.profiler import FlopsProfiler
from deepspeed.runtime.activation_checkpointing import checkpointing
from deepspeed.runtime.zero.parameter_offload import FWD_MODULE_STACK

from deadpool_plugin.adapters.deepspeed.optimizer import Adam, LastingGradients
from deadpool_plugin.adapters.deepspeed.state import EngineState
from deadpool_plugin.config import Config
from deadpool_plugin.errors import Divergence, Unsupported
from deadpool_plugin.worker import codec


@pytest.fixture
def engine():
    """As without ZeRO: a backbone that no group of the optimizer has, and a head."""
    backbone, head = torch.nn.Linear(2, 3), torch.nn.Linear(3, 1)
    scale = SimpleNamespace(cur_scale=512.0, cur_iter=700, last_overflow_iter=650)
    return SimpleNamespace(
        module=torch.nn.Sequential(backbone, head),
        basic_optimizer=torch.optim.AdamW(head.parameters(), lr=0.1),
        optimizer=SimpleNamespace(loss_scale_config=scale, overflow=False),
        lr_scheduler=None,
        zero_optimization_stage=lambda: 0,
        global_steps=7,
        micro_steps=14,
    )


def test_parameters_that_no_group_has_are_not_copied_but_compared(engine):
    backbone, head = engine.module
    state = EngineState(engine)
    kept = {tensor.data_ptr() for tensor in state.shard}
    assert all(parameter.data_ptr() in kept for parameter in head.parameters())
    assert not any(parameter.data_ptr() in kept for parameter in backbone.parameters())
    saved = state.scalars()
    EngineState(engine).load(saved)
    with torch.no_grad():
        backbone.weight[1, 1] += 1
    with pytest.raises(Divergence, match="frozen parameters of digest"):
        EngineState(engine).load(saved)


def test_of_what_is_kept_on_modules_only_the_models_own_is_told(engine):
    state, head = EngineState(engine), engine.module[1]
    head.ds_grads_remaining, head.applied_pre_backward_ref_cnt, head.__flops__ = 3, 1, 5
    head.pre_bwd_fn, head._external_params, head.tau = object(), {1: object()}, 0.5
    assert state.visible()["values"] == {2: {"tau": 0.5}}


@pytest.mark.parametrize("change", [lambda weight: weight.zero_(), lambda weight: setattr(weight, "data", weight + 0)])
def test_a_script_that_changes_them_in_training_is_refused(engine, change):
    state = EngineState(engine)
    with torch.no_grad():
        change(engine.module[0].weight)
    with pytest.raises(Unsupported, match=r"a parameter of \[3, 2\] that the optimizer does not update"):
        state.scalars()


def test_layers_that_train_in_eight_bits_are_refused(engine):
    engine.module[1].fp8_initialized = False
    state = EngineState(engine)
    state.scalars()
    engine.module[1].fp8_initialized = True
    with pytest.raises(Unsupported, match="a Linear trains in fp8, .*bf16"):
        state.scalars()


def test_a_checkpoint_may_bring_the_same_ones(engine):
    state = EngineState(engine)
    engine.module.load_state_dict(copy.deepcopy(engine.module.state_dict()))
    state.frozen.check_loaded()
    state.scalars()
    torch.nn.init.zeros_(engine.module[0].weight)
    with pytest.raises(Unsupported, match="changed frozen parameters"):
        state.frozen.check_loaded()


def test_counters_rates_and_loss_scales_come_back(engine):
    state = EngineState(engine)
    saved = state.scalars()
    engine.global_steps, engine.optimizer.overflow = 9, True
    engine.basic_optimizer.param_groups[0]["lr"] = 0.3
    vars(engine.optimizer.loss_scale_config).update(cur_scale=1.0, cur_iter=0, last_overflow_iter=None)
    state.load(saved)
    assert (engine.global_steps, engine.optimizer.overflow) == (7, False)
    assert engine.basic_optimizer.param_groups[0]["lr"] == 0.1
    assert vars(engine.optimizer.loss_scale_config) == {"cur_scale": 512.0, "cur_iter": 700, "last_overflow_iter": 650}


def test_settings_of_the_optimizer_that_a_script_makes_in_training_are_kept(engine):
    optimizer = engine.optimizer = zero_optimizer(clip_grad=1.0, custom_loss_scaler=False, external_loss_scale=None)
    vars(engine).update(timers=None, tput_timer=SimpleNamespace())
    state = EngineState(engine)
    vars(optimizer).update(clip_grad=0.25, custom_loss_scaler=True, external_loss_scale=128.0)
    saved = state.scalars()
    optimizer.clip_grad = 0.5
    state.clean()
    state.load(saved)
    assert (optimizer.clip_grad, optimizer.custom_loss_scaler, optimizer.external_loss_scale) == (0.25, True, 128.0)


def zero_optimizer(**attributes):
    """Return a stand-in that `TransientState` takes for one."""
    return type("Optimizer", (SimpleNamespace,), {"__module__": "deepspeed.runtime.zero.stage3"})(**attributes)


def test_entry_brings_back_what_a_script_sets_between_calls(engine):
    state = EngineState(engine)
    engine._is_gradient_accumulation_boundary = None
    restore = state.entry_state()
    engine._is_gradient_accumulation_boundary = True
    engine.module.eval()
    engine.module[1].weight.requires_grad_(False)  # of two halves that are trained in turns
    restore()
    assert engine._is_gradient_accumulation_boundary is None
    assert all(module.training for module in engine.module.modules())
    assert engine.module[1].weight.requires_grad


def test_entry_has_the_buffers_that_a_script_writes_between_calls(engine):
    engine.module.register_buffer("mask", torch.ones(2))
    state = EngineState(engine)
    engine.module.mask[0] = 0.0
    restore = state.entry_state()
    state.buffers.left()
    engine.module.mask.fill_(1.0)  # the rollback
    restore()
    assert engine.module.mask.tolist() == [0.0, 1.0]


def test_what_a_checkpoint_puts_into_the_optimizer_gives_its_values_and_leaves(engine):
    optimizer = engine.basic_optimizer
    state = EngineState(engine)
    ours, groups, dicts = list(state.shard), optimizer.param_groups, list(optimizer.param_groups)
    updates(optimizer, rate=0.2)
    saved = copy.deepcopy(optimizer.state_dict())
    updates(optimizer, rate=0.7)
    optimizer.load_state_dict(saved)
    assert optimizer.param_groups is not groups
    state.adam.take_back()
    assert optimizer.param_groups is groups and all(map(operator.is_, groups, dicts)) and groups[0]["lr"] == 0.2
    assert all(map(operator.is_, state.shard, ours))
    for number, moments in saved["state"].items():
        live = optimizer.state[state.adam.masters[number]]
        assert torch.equal(live["exp_avg"], moments["exp_avg"]) and live["step"] == moments["step"]
        assert live["exp_avg"].data_ptr() in {tensor.data_ptr() for tensor in ours}
    updates(optimizer, rate=0.2)
    assert optimizer.state[state.adam.masters[0]]["exp_avg"] is state.adam.moments[0]


def updates(optimizer, rate):
    optimizer.param_groups[0]["lr"] = rate
    for parameter in optimizer.param_groups[0]["params"]:
        parameter.grad = torch.full_like(parameter, rate)
    optimizer.step()


def test_the_products_of_an_optimizer_in_cpp_are_counted_from_where_the_job_began():
    """In the order of the updates: groups with betas of their own share the products."""
    counted = []

    class DeepSpeedCPUAdam(torch.optim.AdamW):
        __module__ = "deepspeed.ops.adam.cpu_adam"
        opt_id = 0
        ds_opt_adam = SimpleNamespace(
            adam_update=lambda number, step, lr, beta1, *rest: counted.append((step, round(beta1, 1)))
        )

    masters = [torch.nn.Parameter(torch.zeros(2)) for _ in range(2)]
    groups: list[dict[str, Any]] = [{"params": [masters[0]]}, {"params": [masters[1]], "betas": (0.8, 0.9)}]
    optimizer = DeepSpeedCPUAdam(groups)
    for group in optimizer.param_groups:
        group["bias_correction"] = True
    Adam(optimizer, masters)
    for master in masters:
        optimizer.state[master]["step"] = 1000  # by a checkpoint
    Adam(optimizer, masters).load_steps([1003.0, 1003.0])
    assert counted == [(step, beta) for step in (1001, 1002, 1003) for beta in (0.9, 0.8)]
    assert optimizer.state[masters[0]]["step"] == 1003


def test_what_deepspeed_keeps_beside_its_engine_is_put_back(engine, monkeypatch):
    """A profiled forward was interrupted, with activations in buffers that a backward would have freed, and in a block
    of which the time is taken."""
    vars(engine).update(flops_profiler=FlopsProfiler(engine.module), timers=None, tput_timer=SimpleNamespace())
    state, linear = EngineState(engine), torch.nn.functional.linear
    engine.flops_profiler.start_profile()
    for name, value in (("CONTIGUOUS_CHECKPOINTING", True), ("data_offsets", [1]), ("contiguous_data_buffers", [[]])):
        monkeypatch.setattr(checkpointing, name, value)
    monkeypatch.setattr(checkpointing, "timers", checkpointing.Timers())
    checkpointing.timers("forward").start()
    assert torch.nn.functional.linear is not linear
    state.clean()
    assert torch.nn.functional.linear is linear and not hasattr(engine.module, "__flops__")
    assert checkpointing.data_offsets == checkpointing.contiguous_data_buffers == []
    checkpointing.timers("forward").start()


def test_modules_under_way_with_zero_3_are_not_remembered(engine):
    master = torch.nn.Parameter(torch.zeros(3))
    engine.module, engine.basic_optimizer = torch.nn.Sequential(), torch.optim.AdamW([master])
    engine.optimizer = zero_optimizer(fp32_partitioned_groups_flat=[master], fp16_groups=[], partition_grads=print)
    vars(engine).update(zero_optimization_stage=lambda: 3, timers=None, tput_timer=SimpleNamespace())
    state, before = EngineState(engine), list(FWD_MODULE_STACK)
    FWD_MODULE_STACK.append(torch.nn.Linear(1, 1))
    state.clean()
    assert before == FWD_MODULE_STACK


def test_the_first_snapshot_of_a_large_model_with_zero_3_fits_into_its_header():
    """None of its parameters has had a gradient by then."""
    model = torch.nn.Module()
    for number in range(20_000):
        model.register_parameter(f"model_layers_31_mlp_experts_{number}_gate_proj_weight", torch.nn.Parameter())
    optimizer = SimpleNamespace(partition_grads=lambda released, partitions: None, micro_step_id=0)
    engine = SimpleNamespace(module=model, optimizer=optimizer, zero_optimization_stage=lambda: 3)
    lasting = LastingGradients(engine)
    assert len(codec.encode(lasting.without())) < Config.model_fields["header_kib"].default * 512
    first, *others = model.parameters()
    optimizer.partition_grads([first], [])
    lasting.check()
    newcomer = LastingGradients(engine)
    newcomer.load(lasting.without())
    assert newcomer.without() == list(range(1, 1 + len(others)))
