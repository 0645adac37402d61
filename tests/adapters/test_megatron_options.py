"""Options of Megatron-core: those refused by name, and what the others keep outside model and optimizer."""

import functools
import sys
import types
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from adapters.test_megatron_state import Job, arguments

from deadpool_plugin.adapters.megatron import bookkeeping
from deadpool_plugin.adapters.megatron.adapter import ForwardBackward, MegatronAdapter
from deadpool_plugin.errors import Unsupported
from deadpool_plugin.worker import codec
from deadpool_plugin.worker.calls import CallKind
from deadpool_plugin.worker.staging import Layout

REFUSED = [
    ("model", "fp8", "hybrid"),
    ("model", "tp_comm_overlap", True),
    ("model", "cuda_graph_impl", "local"),
    ("model", "moe_token_dispatcher_type", "flex"),
    ("model", "delay_wgrad_compute", True),
    ("model", "overlap_dispatch_backward_with_experts_wgrad", True),
    ("model", "fine_grained_activation_offloading", True),
    ("model", "qk_clip", True),
    ("model", "log_max_attention_logit", True),
    ("model", "moe_enable_routing_replay", True),
    ("model", "symmetric_ar_type", "two_shot"),
    ("model", "hybrid_context_parallel", True),
    ("model", "moe_shared_expert_overlap", True),
    ("model", "defer_embedding_wgrad_compute", True),
    ("model", "cpu_offloading", True),
    ("model", "gtp_weight_remat_size", 2),
    ("model", "expert_gtp_weight_remat_size", 2),
    ("model", "moe_router_force_biased", -0.5),
    ("gradients", "nccl_ub", True),
    ("optimizer", "overlap_param_gather_with_optimizer_step", True),
]


@pytest.mark.parametrize(("place", "name", "value"), REFUSED, ids=[name for _, name, _ in REFUSED])
def test_options_that_a_swap_cannot_bring_back_are_refused_by_name(train_gpt, place, name, value):
    job = Job(train_gpt, arguments(train_gpt))
    chunk = job.model[0]
    config = {"model": chunk.config, "gradients": chunk.ddp_config, "optimizer": job.optimizer.config}[place]
    setattr(config, name, value)
    with pytest.raises(Unsupported, match=f"{name} = {value!r}.*to do: "):
        job.adapter()


REFUSED_OF_MEGATRON_LM = [
    ("inprocess_restart", False, True, "leave it out"),
    ("async_strategy", "mcore", "nvrx", "set it to mcore"),
    ("log_straggler", False, True, "leave it out"),
    ("optimizer_cuda_graph", False, True, "leave it out"),
    ("use_sharp", False, True, "leave it out"),
    ("skip_train", False, True, "leave it out"),
    ("use_legacy_models", False, True, "use megatron-core's models"),
    ("perform_rl_step", False, True, "leave it out"),
    ("save_dgrads_interval", None, 5, "leave it out"),
    ("save_activations_interval", None, 5, "leave it out"),
    ("save_tokens_per_expert_interval", None, 5, "leave it out"),
    ("non_persistent_ckpt_type", "global", "local", "set it to global"),
]


@pytest.mark.parametrize(("name", "harmless", "value", "remedy"), REFUSED_OF_MEGATRON_LM)
def test_megatron_lms_own_options_are_refused_by_name(train_gpt, monkeypatch, name, harmless, value, remedy):
    loop = SimpleNamespace(_GLOBAL_ARGS=SimpleNamespace(**{name: harmless}))
    monkeypatch.setitem(sys.modules, "megatron.training.global_vars", loop)
    job = Job(train_gpt, arguments(train_gpt))
    job.adapter()
    setattr(loop._GLOBAL_ARGS, name, value)
    with pytest.raises(Unsupported, match=f"{name} = {value!r}.*to do: {remedy}"):
        job.adapter()


def test_data_that_draw_of_their_own_are_refused_where_a_newcomer_would_pass_over_them(train_gpt, monkeypatch):
    loop = SimpleNamespace(_GLOBAL_ARGS=SimpleNamespace(fim_data=True, num_workers=2))
    monkeypatch.setitem(sys.modules, "megatron.training.global_vars", loop)
    job = Job(train_gpt, arguments(train_gpt))
    job.adapter()
    loop._GLOBAL_ARGS.num_workers = 0
    with pytest.raises(Unsupported, match="fim_data=True with num_workers=0.*to do: add --num-workers 1"):
        job.adapter()


def test_routers_that_draw_of_their_own_are_refused_and_those_that_do_not_are_not(train_gpt, monkeypatch):
    from megatron.core.transformer.moe.moe_utils import RandomSTE

    job = Job(train_gpt, arguments(train_gpt))
    config = job.model[0].config
    config.gtp_weight_remat_size, config.moe_router_force_biased = 1, 0.5
    monkeypatch.setattr(RandomSTE, "generator", None, raising=False)  # as in 0.14 and 0.15
    job.adapter()
    config.moe_router_force_load_balancing = True
    with pytest.raises(Unsupported, match="moe_router_force_load_balancing = True.*to do: "):
        job.adapter()
    monkeypatch.delattr(RandomSTE, "generator")
    job.adapter()


def test_who_trains_with_muon_is_told_so_and_not_how_many_optimizers_it_is_made_of(train_gpt):
    class TensorParallelMuon:
        pass

    adapter = MegatronAdapter()
    adapter._optimizers = [SimpleNamespace(optimizer=TensorParallelMuon()), SimpleNamespace(optimizer=None)]
    with pytest.raises(Unsupported, match=r"TensorParallelMuon; expected one of Adam"):
        adapter.attach()


def test_a_model_that_is_not_in_megatrons_wrapper_is_refused(train_gpt):
    job = Job(train_gpt, arguments(train_gpt))
    job.model = []
    with pytest.raises(Unsupported, match="DistributedDataParallel"):
        job.adapter()


def test_ranks_with_buffers_are_not_taken_for_replicas(train_gpt, monkeypatch):
    monkeypatch.setattr(torch.distributed, "get_process_group_ranks", lambda group: [0, 1])
    job = Job(train_gpt, arguments(train_gpt))
    assert job.adapter().state.replicas() == (0, 1)
    job.model[0].module.register_buffer("seen", torch.zeros(1))
    assert job.adapter().state.replicas() == (0,)


def test_a_tensor_that_changes_its_form_in_training_is_refused():
    tensor = torch.zeros(4)
    layout = Layout([tensor])
    layout.check()
    tensor.data = tensor.data.to(torch.bfloat16)
    with pytest.raises(Unsupported, match="tensor 0 .* became torch.bfloat16"):
        layout.check()


def test_all_ranks_look_again_for_cached_logits_after_a_restore(train_gpt, monkeypatch):
    listings = types.SimpleNamespace(_STORAGE_GLOB_CACHE={"msc://logits/*.tar": ["0.tar"]})
    monkeypatch.setitem(sys.modules, "megatron.training.distillation.utils_logits", listings)
    Job(train_gpt, arguments(train_gpt)).adapter().state.after_restore()
    assert not listings._STORAGE_GLOB_CACHE


def test_a_window_without_reductions_left_open_by_an_interruption_never_closes_a_later_one(train_gpt):
    job = Job(train_gpt, arguments(train_gpt))
    chunk = job.model[0]
    (group,) = bookkeeping.bucket_groups(chunk)
    interrupted = bookkeeping.no_sync(chunk)
    interrupted.__enter__()
    assert not group.is_last_microbatch
    bookkeeping.reset_gradient_buckets([chunk])
    assert group.is_last_microbatch
    with bookkeeping.no_sync(chunk):
        interrupted.__exit__(None, None, None)
        assert not group.is_last_microbatch
    assert group.is_last_microbatch


def test_forward_hooks_are_put_back_as_they_were(train_gpt):
    job = Job(train_gpt, arguments(train_gpt, distributed_optimizer=True, overlap_grad_reduce=True,
                                   overlap_param_gather=True))  # fmt: skip
    adapter, chunk = job.adapter(), job.model[0]
    restore = adapter.state.entry_state()
    chunk.disable_forward_pre_hook(param_sync=False)
    without = adapter.state.entry_state()
    restore()
    assert chunk.remove_forward_pre_hook_handles
    without()
    assert not chunk.remove_forward_pre_hook_handles


def test_gradients_are_reduced_again_in_the_way_they_were(train_gpt):
    job = Job(train_gpt, arguments(train_gpt, distributed_optimizer=True, overlap_grad_reduce=True))
    adapter, chunk = job.adapter(), job.model[0]
    chunk.force_all_reduce = True  # by the script, for a step whose gradients it saves
    restore = adapter.state.entry_state()
    chunk.force_all_reduce = False
    without = adapter.state.entry_state()
    restore()
    assert chunk.force_all_reduce
    without()
    assert not chunk.force_all_reduce


def test_a_forward_is_redone_in_the_step_it_was_first_done_in(train_gpt, monkeypatch):
    machines = sys.modules["megatron.core.rerun_state_machine"]
    machine = machines.RerunStateMachine(mode=machines.RerunMode.VALIDATE_RESULTS)
    monkeypatch.setattr(machines, "_GLOBAL_RERUN_STATE_MACHINE", machine)
    machine.first_iteration_complete = True  # nothing is validated before
    machine.state = machines.RerunState.INITIAL_RUN
    adapter = Job(train_gpt, arguments(train_gpt)).adapter()

    def forward():
        large = functools.partial(machine.is_unexpectedly_large, threshold=10, context="loss")
        machine.validate_result(torch.tensor(2.0), large, "spiky loss")

    restore = adapter.state.entry_state()
    forward()
    machine.state = machines.RerunState.NOT_RUNNING_YET  # the script has ended the loop around the forward
    for _ in range(2):
        restore()
        forward()
    assert machine.large_value_counts == {"loss": 1}
    assert list(machine.validation_counts.values()) == [1]

    saved = codec.decode(codec.encode(adapter.state.scalars()))
    machine.large_value_counts, machine.max_values = {}, {}  # a newcomer has run no forward
    adapter.state.load(saved)
    assert machine.large_value_counts == {"loss": 1} and machine.max_values == {"loss": 2.0}


def test_lengths_of_packed_sequences_are_those_of_the_step(train_gpt, monkeypatch):
    loop = SimpleNamespace(_seqlen_stats_in_iteration=torch.tensor([3.0, 5.0]).double(), _seqlen_stats_active=True)
    monkeypatch.setitem(sys.modules, "megatron.training.training", loop)
    adapter = Job(train_gpt, arguments(train_gpt)).adapter()
    saved, restore = codec.decode(codec.encode(adapter.state.scalars())), adapter.state.entry_state()
    for _ in range(2):
        loop._seqlen_stats_in_iteration += 1
        restore()
        assert loop._seqlen_stats_in_iteration.tolist() == [3.0, 5.0]
    loop._seqlen_stats_in_iteration, loop._seqlen_stats_active = None, False  # a newcomer has run no forward
    adapter.state.load(saved)
    assert loop._seqlen_stats_in_iteration.tolist() == [3.0, 5.0] and loop._seqlen_stats_active


def test_timers_that_an_interrupted_call_has_started_can_be_started_again(train_gpt, monkeypatch):
    from megatron.core.timers import Timer

    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    adapter = Job(train_gpt, arguments(train_gpt)).adapter()
    around, inside, new = Timer("around"), Timer("inside"), Timer("new")
    adapter._timers += [around, inside]
    around.start()
    restore = adapter.state.entry_state()
    around.stop()
    adapter._timers.append(new)
    inside.start()
    new.start()
    restore()
    inside.start()
    new.start()
    around.stop()


def test_auxiliary_losses_are_counted_once_however_often_a_forward_is_redone(train_gpt):
    job = Job(train_gpt, arguments(train_gpt, num_experts=2))
    adapter = job.adapter()
    job.step()
    saved = codec.decode(codec.encode(adapter.state.scalars()))
    tracker = sys.modules["megatron.core.transformer.moe.moe_utils"].get_moe_layer_wise_logging_tracker()
    values = {name: entry["values"].clone() for name, entry in tracker.items()}
    groups = {name: entry["reduce_group"] for name, entry in tracker.items()}
    assert any(float(value.sum()) > 0 for value in values.values())
    restore = adapter.state.entry_state()
    job.step()
    restore()
    assert all(torch.equal(tracker[name]["values"], value) for name, value in values.items())
    job.step()
    adapter.state.load(saved)
    assert all(torch.equal(tracker[name]["values"], value) for name, value in values.items())

    tracker.clear()  # a newcomer has run no forward
    adapter.state.load(saved)
    assert all(torch.equal(tracker[name]["values"], value) for name, value in values.items())
    assert {name: entry["reduce_group"] for name, entry in tracker.items()} == groups


def prediction(monkeypatch):
    from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper

    entry: dict[str, Any] = {}
    monkeypatch.setattr(MTPLossLoggingHelper, "tracker", entry)
    world = torch.distributed.group.WORLD
    return entry, lambda sums: entry.update(values=sums, avg_group=world), lambda: entry["values"].tolist()


def routers_of_core_0_18(monkeypatch):
    metrics: dict[str, Any] = {}
    module = SimpleNamespace(
        MetricEntry=lambda values: SimpleNamespace(values=values, reduce_group=None, needs_dp_avg=True),
        get_moe_metrics_tracker=lambda: SimpleNamespace(metrics=metrics),
    )
    monkeypatch.setitem(sys.modules, f"{bookkeeping.CORE}.moe.moe_logging", module)
    add = lambda sums: metrics.update(balance=module.MetricEntry(sums))  # noqa: E731
    return metrics, add, lambda: metrics["balance"].values.tolist()


@pytest.mark.parametrize("tracked", [prediction, routers_of_core_0_18])
def test_other_tracked_losses_go_back_with_a_call_and_into_a_newcomer(tracked, monkeypatch, train_gpt):
    tracker, add, sums = tracked(monkeypatch)
    before = bookkeeping.noted()
    add(torch.tensor([1.5, 2.5]))
    noted = bookkeeping.noted()
    saved = codec.decode(codec.encode(bookkeeping.plain(noted)))
    bookkeeping.put_back(before)
    assert sums() == [0.0, 0.0]
    bookkeeping.put_back(noted)
    assert sums() == [1.5, 2.5]
    tracker.clear()
    bookkeeping.put_back(saved)
    assert sums() == [1.5, 2.5]
    assert codec.encode(bookkeeping.plain(bookkeeping.noted())) == codec.encode(saved)


def test_who_follows_the_reduction_of_a_loss_logs_what_the_rank_itself_logs(monkeypatch, train_gpt):
    from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper

    assert (MTPLossLoggingHelper, "reduce_loss_in_tracker") in bookkeeping.reductions()
    monkeypatch.setattr(MTPLossLoggingHelper, "tracker", {"values": torch.tensor([2.0])})
    reduction = bookkeeping.Reduction("f", CallKind.PLAIN, lambda: MTPLossLoggingHelper.tracker["values"].mul_(3))
    outcome = codec.decode(codec.encode(reduction.outcome(reduction())))
    monkeypatch.setattr(MTPLossLoggingHelper, "tracker", {})
    reduction.skipped(outcome)
    logged: dict[str, Any] = {}
    monkeypatch.setattr(MTPLossLoggingHelper, "reduce_loss_in_tracker", lambda: None)
    MTPLossLoggingHelper.track_mtp_metrics(0.5, 1, None, total_loss_dict=logged)
    assert {name: float(value) for name, value in logged.items()} == {"mtp_1 loss": 3.0}


@pytest.mark.parametrize(
    ("reported", "loss"),
    [
        ([{"loss": 1.0}, {"loss": torch.tensor(3.0)}], 2.0),
        ([{"loss": torch.tensor([6.0, 2.0])}, {"loss": (torch.tensor(8.0), torch.tensor([4]))}], 2.5),
        ([{"loss": (4.0, 0)}], 4.0),
        ([{"loss": 1.0}, {}], None),
        ([{"loss": 1.0}, None], None),
        ([{"logits": torch.zeros(3)}], None),
        ([{"loss": torch.zeros(0)}], None),
        ([{"loss": "low"}], None),
        ([{"loss": ()}], None),
        ([{}], None),
        ([], None),
        (7, None),
    ],
    ids=str,
)
def test_a_loss_is_told_where_numbers_are_reported_and_nothing_else_ends_the_job(reported, loss):
    assert ForwardBackward("f", CallKind.FORWARD, list).loss(reported, lambda value: value) == loss
