"""The adapter's shard: training is bitwise what it was, and a saved shard brings back the same future."""

import argparse
import io
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from deadpool_plugin.adapters.common import MOMENTS, AdamState
from deadpool_plugin.adapters.megatron import state
from deadpool_plugin.adapters.megatron.adapter import MegatronAdapter
from deadpool_plugin.adapters.megatron.state import merge_neighbours
from deadpool_plugin.errors import Unsupported
from deadpool_plugin.worker import codec
from deadpool_plugin.worker.adapter import capture_rng, restore_rng
from deadpool_plugin.worker.staging import Layout


def arguments(script, **changes):
    parser = argparse.ArgumentParser()
    script.add_arguments(parser)
    defaults = dict(
        layers=1, hidden=32, heads=2, seq_length=16, micro_batch_size=2, num_microbatches=2, train_iters=10, lr=1e-2,
        warmup_iters=2, dtype="bf16", seed=5,
    )  # fmt: skip
    return argparse.Namespace(**{**vars(parser.parse_args([])), **defaults, **changes})


class Job:
    """Model, optimizer and scheduler of the script, and `step`, which trains on random bytes."""

    def __init__(self, script, args):
        from megatron.core import tensor_parallel

        self.script, self.args = script, args
        torch.manual_seed(args.seed)
        tensor_parallel.model_parallel_cuda_manual_seed(args.seed)
        config = script.model_config(args)
        self.model = script.build_model(args, config, 257)
        self.optimizer, self.scheduler = script.build_optimizer(args, config, self.model)
        self.data = torch.Generator().manual_seed(1)

    def batch(self):
        shape = (self.args.micro_batch_size, self.args.seq_length)
        tokens = torch.randint(0, 256, shape, generator=self.data)
        positions = torch.arange(shape[1]).expand(shape)
        return {"tokens": tokens, "labels": tokens, "position_ids": positions, "loss_mask": torch.ones(shape)}

    def step(self):
        self.model[0].zero_grad_buffer()
        self.optimizer.zero_grad()
        batches = iter([self.batch() for _ in range(self.args.num_microbatches)])
        losses = self.script.run_microbatches(self.args, self.model, [batches], forward_only=False)
        _, grad_norm, _ = self.optimizer.step()
        self.scheduler.step(increment=4)
        return [loss["lm loss"].item() for loss in losses], grad_norm

    def digest(self):
        script = self.script
        return script.digest(script.model_tensors(self.model)), script.digest(script.optimizer_tensors(self.optimizer))

    def adapter(self):
        adapter = MegatronAdapter()
        adapter._chunks, adapter._optimizers, adapter._schedulers = self.model, [self.optimizer], [self.scheduler]
        adapter.attach()
        return adapter


VARIANTS: list[dict[str, Any]] = [
    dict(dtype=dtype, distributed_optimizer=distributed) for dtype in ("fp32", "bf16") for distributed in (False, True)
]
VARIANTS += [
    dict(dtype="fp16", initial_loss_scale=2.0**20, loss_scale_window=2, hysteresis=1),
    dict(num_experts=2, moe_router_enable_expert_bias=True, distributed_optimizer=True),
]


@pytest.mark.parametrize("changes", VARIANTS, ids=str)
def test_training_with_the_adapter_is_bitwise_the_same(train_gpt, changes):
    plain = Job(train_gpt, arguments(train_gpt, **changes))
    expected = [plain.step() for _ in range(3)]
    protected = Job(train_gpt, arguments(train_gpt, **changes))
    protected.adapter()
    assert [protected.step() for _ in range(3)] == expected
    assert protected.digest() == plain.digest()


@pytest.mark.parametrize("changes", VARIANTS, ids=str)
def test_megatrons_own_modules_change_no_values_that_a_newcomer_is_told(train_gpt, changes):
    job = Job(train_gpt, arguments(train_gpt, **changes))
    adapter = job.adapter()
    job.step(), job.step()
    assert adapter.state.visible()["values"] == {}


def test_a_number_that_a_module_counts_comes_back_with_a_call_and_in_a_newcomer(train_gpt):
    def counting():
        job = Job(train_gpt, arguments(train_gpt))
        job.model[0].module.register_forward_hook(lambda module, *_: setattr(module, "calls", module.calls + 1))
        job.model[0].module.calls = 0
        return job, job.model[0].module, job.adapter()

    job, model, adapter = counting()
    put_back = adapter.state.entry_state()
    job.step()
    saved = codec.decode(codec.encode(adapter.state.scalars()))
    assert model.calls == 2
    put_back()
    assert model.calls == 0
    _, newcomers, its = counting()
    its.state.load(saved)
    assert newcomers.calls == 2
    its.state.show(adapter.state.visible())
    assert newcomers.calls == 0


@pytest.mark.parametrize("distributed", [False, True])
@pytest.mark.parametrize("steps", [0, 1])
def test_an_answer_the_optimizers_asked_all_ranks_for_is_known_to_all_or_to_none(train_gpt, steps, distributed):
    """As megatron-core does from 0.19 on: the first update asks by a collective, and the answer is kept."""

    def asking():
        job = Job(train_gpt, arguments(train_gpt, distributed_optimizer=distributed))
        asked = []
        for one in state.chain_of(job.optimizer):

            def answer(one=one):
                if getattr(one, "_has_a_group_cache", None) is None:
                    one._has_a_group_cache = {}
                if "a" not in one._has_a_group_cache:
                    asked.append(one)  # the collective
                    one._has_a_group_cache["a"] = False

            original = one.step
            one.step = lambda original=original, answer=answer: (answer(), original())[1]
        return job, asked, job.adapter()

    (survivor, by_survivor, its), (newcomer, by_newcomer, theirs) = asking(), asking()
    for _ in range(steps):
        survivor.step()
    saved = codec.decode(codec.encode(its.state.scalars()))
    put_back = its.state.entry_state()
    survivor.step()
    for adapter in (its, theirs):
        adapter.state.load(saved)
    by_survivor.clear()
    survivor.step(), newcomer.step()
    assert by_survivor == [] or steps == 0
    assert len(by_survivor) == len(by_newcomer)
    put_back()
    by_survivor.clear()
    survivor.step()
    assert len(by_survivor) == len(by_newcomer)


def test_generators_of_transformer_engines_tracker_go_on_where_they_were(monkeypatch):
    from megatron.core.tensor_parallel import random

    live: dict[str, Any] = {"model-parallel-rng": torch.Generator().manual_seed(3), "other": torch.get_rng_state()}
    tracker = SimpleNamespace(get_states=lambda: live, set_states=lambda states: live.update(states))
    monkeypatch.setattr(random, "get_cuda_rng_tracker", lambda: tracker)
    adapter, generator = MegatronAdapter(), live["model-parallel-rng"]
    saved = codec.decode(codec.encode(adapter.rng_states()))
    expected = torch.rand(4, generator=generator)
    adapter.set_rng_states(saved)
    assert live["model-parallel-rng"] is generator and torch.equal(torch.rand(4, generator=generator), expected)
    assert torch.equal(live["other"], saved[random.__name__]["other"])


@pytest.mark.parametrize("changes", VARIANTS, ids=str)
def test_a_saved_shard_brings_back_the_same_future(train_gpt, changes):
    job = Job(train_gpt, arguments(train_gpt, **changes))
    adapter = job.adapter()
    layout = Layout(adapter.state.shard)
    job.step()
    payload = memoryview(bytearray(layout.payload_bytes))
    for tensor, view in zip(layout.tensors, layout.views(payload), strict=True):
        view.copy_(tensor)
    saved = codec.encode({"scalars": adapter.state.scalars(), "rng": capture_rng(adapter)})
    position = job.data.get_state()
    future = [job.step() for _ in range(3)], job.digest()
    pointers = [p.data_ptr() for p in job.model[0].parameters()]

    with torch.no_grad():
        for parameter in job.model[0].parameters():
            parameter.zero_()  # the 16-bit parameters must come from the masters, not survive by luck
    state = codec.decode(saved)
    adapter.state.clean()
    layout.load(payload)
    adapter.state.load(state["scalars"])
    adapter.state.after_restore()
    restore_rng(adapter, state["rng"])
    job.data.set_state(position)
    assert ([job.step() for _ in range(3)], job.digest()) == future
    assert [p.data_ptr() for p in job.model[0].parameters()] == pointers


@pytest.mark.parametrize("changes", VARIANTS, ids=str)
def test_a_script_saves_the_bytes_that_it_saves_without_the_plugin_also_after_a_loss(train_gpt, changes):
    """`torch.save` writes the whole storage of a tensor, however much of it the tensor has."""

    def job():
        return Job(train_gpt, arguments(train_gpt, **changes))

    def trained(job):
        for _ in range(3):  # in fp16 the first two are skipped: without the plugin there are no moments till then
            job.step()
        return job

    expected = files(trained(job()))
    survivor = job()
    its = survivor.adapter().state
    assert files(trained(survivor)) == expected
    replacement = job()
    theirs = replacement.adapter().state
    for live, snapshot in zip(theirs.shard, its.shard, strict=True):
        live.copy_(snapshot)
    theirs.load(codec.decode(codec.encode(its.scalars())))
    assert files(replacement) == expected


def files(job):
    bases = [part.optimizer for part in state.parts_of(job.optimizer)]
    masters = [parameter.data for base in bases for group in base.param_groups for parameter in group["params"]]
    moments = [values[name] for base in bases for values in base.state.values() for name in MOMENTS]
    return [saved(one) for one in ([base.state_dict() for base in bases], masters, *moments)]


def saved(value):
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def test_unsupported_optimizers_and_frozen_parameters_are_refused_by_name(train_gpt):
    with pytest.raises(Unsupported, match="SGD.*Adam"):
        Job(train_gpt, arguments(train_gpt, optimizer="sgd")).adapter()
    job = Job(train_gpt, arguments(train_gpt))
    name, parameter = next(job.model[0].module.named_parameters())
    parameter.requires_grad_(False)
    with pytest.raises(Unsupported, match=f"1 parameters are frozen .first: {name}"):
        job.adapter()


class Chained:
    """megatron-core's chain: asking one of several for its base optimizer is an error of whoever asks."""

    def __init__(self, *inner):
        self.chained_optimizers = list(inner)

    @property
    def optimizer(self):
        assert len(self.chained_optimizers) == 1, "ChainedOptimizer has more than one optimizer"
        return self.chained_optimizers[0].optimizer


def test_chains_are_taken_apart_to_what_is_around_a_base_optimizer():
    """With expert parallelism there are two, and Megatron's chain asserts when it is asked for its base."""
    dense, experts, more = (SimpleNamespace(optimizer=torch.optim.AdamW([torch.ones(1)])) for _ in range(3))
    for part in state.parts_of(Chained(dense, experts)):
        state.check_base(part)
    assert state.parts_of(Chained(Chained(dense), Chained(experts, more))) == [dense, experts, more]
    assert state.parts_of(dense) == [dense]


def test_neighbouring_views_become_one_tensor():
    base = torch.arange(20.0)
    a, b, c = base[0:4].view(2, 2), base[4:10], base[12:20]
    merged = merge_neighbours([c, b, a])
    assert [t.tolist() for t in merged] == [base[0:10].tolist(), base[12:20].tolist()]
    merged[0][9] = -1
    assert b[5] == -1


def test_what_no_redo_would_do_again_is_refused_where_the_script_does_it_itself(train_gpt, monkeypatch):
    """As megatron-core's own example does, which finalizes gradients behind the schedule."""
    job = Job(train_gpt, arguments(train_gpt, distributed_optimizer=True))
    chunk = type(job.model[0])
    monkeypatch.setattr(chunk, "finish_grad_sync", chunk.finish_grad_sync)
    adapter = job.adapter()
    adapter.refuse_outside(chunk, "finish_grad_sync", "set config.finalize_model_grads_func")
    with pytest.raises(Unsupported, match="DistributedDataParallel.finish_grad_sync itself.*finalize_model_grads_func"):
        job.step()
    with adapter.inside_step():
        job.step()
    with pytest.raises(Unsupported, match="finish_grad_sync itself"):
        job.model[0].finish_grad_sync()


def test_counts_of_updates_are_read_where_they_lie_now():
    masters = [torch.nn.Parameter(torch.rand(3)) for _ in range(4)]
    optimizer = torch.optim.AdamW(masters)
    adam = AdamState(optimizer, masters, "")

    def updated(*whose: int) -> list[float | None]:
        for number, master in enumerate(masters):
            master.grad = torch.ones(3) if number in whose else None
        optimizer.step()
        return adam.steps()

    assert adam.steps() == [0.0] * 4
    assert updated(0, 1, 2, 3) == [1.0] * 4
    assert updated(0, 2) == [2.0, 1.0, 2.0, 1.0]
    optimizer.load_state_dict(optimizer.state_dict())  # which makes new tensors
    assert updated(1) == [2.0, 2.0, 2.0, 1.0]
    optimizer.state[masters[3]]["step"].data = torch.tensor(9.0)
    assert updated(3) == [2.0, 2.0, 2.0, 10.0]
    adam.load_steps([5.0, 6.0, 7.0, 8.0])
    assert adam.steps() == [5.0, 6.0, 7.0, 8.0]
    optimizer.state[masters[0]]["step"] = 3
    assert adam.steps() == [3.0, 6.0, 7.0, 8.0]
