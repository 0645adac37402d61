"""A small GPT trained with megatron-core: the kind of script people have.

Rules of this file: plain Megatron, plain loop; it knows nothing of faults, and nothing in it is there to make anyone
else's life easier. It is bitwise deterministic from run to run on a CPU. Where there is no GPU, `patches/cpu` is
applied to megatron-core first.

    deepspeed --num_gpus 8 scripts/train_gpt.py --data-path corpus --tp 2 --pp 2 --train-iters 30
"""

# ruff: noqa: E402 (torch is patched before megatron-core is imported)
from __future__ import annotations

import argparse
import functools
import logging
import os
import random
import sys
import time
import warnings
from collections import OrderedDict
from collections.abc import Iterator
from inspect import signature
from pathlib import Path
from typing import Any

os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(1, str(Path(__file__).resolve().parents[1]))
warnings.filterwarnings("ignore")

import numpy as np
import torch
import torch.distributed as dist

from patches import cpu

cpu.apply()

from gpt import checkpoint
from gpt.model import (
    add_arguments,
    build_model,
    build_optimizer,
    global_batch_size,
    model_config,
    virtual_stages,
)
from gpt.output import digest, log_step, write_line
from megatron.core import parallel_state, tensor_parallel
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.utils import get_attr_wrapped_model, get_batch_on_this_cp_rank

ASKED_BY_CP_RANK = signature(get_batch_on_this_cp_rank).parameters
"""From 0.18 on megatron-core takes all ranks for the context-parallel group, unless it is told which one is."""


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_arguments(parser)
    parser.add_argument("--seq-length", type=int, default=64)
    parser.add_argument("--micro-batch-size", type=int, default=2)
    parser.add_argument("--num-microbatches", type=int, default=2, help="per step and data-parallel rank")
    parser.add_argument("--train-iters", type=int, default=30)
    parser.add_argument("--eval-interval", type=int, default=10, help="steps between evaluations; 0: none")
    parser.add_argument("--eval-iters", type=int, default=2)
    parser.add_argument("--seed", type=int, default=1234)
    parser.add_argument("--data-path", required=True, help="prefix of an indexed data set (.bin and .idx)")
    parser.add_argument("--data-cache-path", help="where the sample indices are kept; default: beside the data")
    parser.add_argument("--num-workers", type=int, default=0, help="processes of the training DataLoader")
    checkpoint.add_arguments(parser)
    parser.add_argument("--backend", choices=("nccl", "gloo"), help="default: nccl where there is a GPU")
    parser.add_argument("--startup-s", type=float, default=0.0, help="sleep so long before training: a larger script")
    parser.add_argument("--log-all-ranks", action="store_true", help="one exact `metrics` line per rank and step")
    parser.add_argument("--digest", action="store_true", help="one `digest` line per rank at the end")
    parser.add_argument("--local-rank", "--local_rank", type=int, default=int(os.environ.get("LOCAL_RANK", "0")))
    return parser.parse_args()


# Set-up


def initialize(args: argparse.Namespace) -> None:
    """Process groups, model parallelism, seeds."""
    torch.use_deterministic_algorithms(args.deterministic_mode)
    if torch.cuda.is_available():
        torch.cuda.set_device(args.local_rank)
    else:
        torch.set_num_threads(1)
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    backend = args.backend or ("nccl" if torch.cuda.is_available() else "gloo")
    dist.init_process_group(backend, rank=rank, world_size=world_size)
    parallel_state.initialize_model_parallel(
        args.tp,
        args.pp,
        virtual_stages(args),
        context_parallel_size=args.cp,
        expert_model_parallel_size=args.ep,
        expert_tensor_parallel_size=1 if args.num_experts else None,
        num_distributed_optimizer_instances=args.num_distributed_optimizer_instances,
        create_gloo_process_groups=False,
    )
    seed = args.seed + 100 * parallel_state.get_pipeline_model_parallel_rank()
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    captures = args.cuda_graph_impl != "none"
    tensor_parallel.model_parallel_cuda_manual_seed(seed, use_cudagraphable_rng=captures)


# Data


class ByteTokenizer:
    """A tokenizer whose tokens are bytes, with what a GPTDataset asks of one."""

    eod = 256
    vocab_size = 257
    unique_identifiers = OrderedDict(**{"class": "ByteTokenizer"})


class PretrainingSampler:
    """Micro-batches of indices of this data-parallel rank, in order, from `consumed_samples` on."""

    def __init__(self, total_samples: int, consumed_samples: int, micro_batch_size: int) -> None:
        self.total_samples = total_samples
        self.consumed_samples = consumed_samples
        self.micro_batch_size = micro_batch_size
        self.rank = parallel_state.get_data_parallel_rank()
        self.stride = micro_batch_size * parallel_state.get_data_parallel_world_size()

    def __len__(self) -> int:
        return int((self.total_samples - self.consumed_samples) // self.stride)

    def __iter__(self) -> Iterator[list[int]]:
        for first in range(self.consumed_samples, self.total_samples - self.stride + 1, self.stride):
            mine = first + self.rank * self.micro_batch_size
            yield list(range(mine, mine + self.micro_batch_size))


def reads_data() -> bool:
    """Only one rank of a tensor-parallel group reads, and only where the pipeline begins and ends."""
    at_an_end = parallel_state.is_pipeline_first_stage() or parallel_state.is_pipeline_last_stage()
    return bool(parallel_state.get_tensor_model_parallel_rank() == 0 and at_an_end)


def build_data_iterators(args: argparse.Namespace) -> tuple[dict[str, Any], list[Any], list[Any]]:
    """Return what rank 0 tells all ranks of the data sets, and iterators over them, one per model chunk."""
    evaluations = args.train_iters // args.eval_interval if args.eval_interval else 0
    train_samples = args.train_iters * global_batch_size(args)
    valid_samples = max(1, evaluations * args.eval_iters) * global_batch_size(args)
    config = GPTDatasetConfig(
        random_seed=args.seed,
        sequence_length=args.seq_length,
        blend=([args.data_path], None),
        split="98,2,0",
        path_to_cache=args.data_cache_path,
        tokenizer=ByteTokenizer(),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
    )
    sizes = [train_samples, valid_samples, 0]
    train, valid, _ = BlendedMegatronDatasetBuilder(GPTDataset, sizes, reads_data, config).build()
    facts = [{"do_train": train is not None, "do_valid": valid is not None and evaluations > 0}]
    dist.broadcast_object_list(facts, src=0)
    done = checkpoint.latest(args.load)
    evaluated = done // args.eval_interval * args.eval_iters if evaluations else 0
    chunks = range(virtual_stages(args) or 1)
    train_data = [data_iterator(args, train, args.num_workers, done * global_batch_size(args)) for _ in chunks]
    valid_data = [data_iterator(args, valid, 0, evaluated * global_batch_size(args)) for _ in chunks]
    return facts[0], train_data, valid_data


def data_iterator(
    args: argparse.Namespace, dataset: GPTDataset | None, num_workers: int, consumed_samples: int
) -> Iterator[Any] | None:
    if dataset is None:
        return None
    loader = torch.utils.data.DataLoader(
        dataset,
        batch_sampler=PretrainingSampler(len(dataset), consumed_samples, args.micro_batch_size),
        num_workers=num_workers,
        generator=torch.Generator().manual_seed(args.seed),
    )
    return iter(loader)


def get_batch(data: Iterator[Any] | None) -> dict[str, torch.Tensor]:
    """This rank's part of the next micro-batch: tensor-parallel rank 0 reads it and tells the others."""
    batch = next(data) if data is not None else None
    found = tensor_parallel.broadcast_data(["tokens", "labels", "position_ids"], batch, torch.int64)
    found |= tensor_parallel.broadcast_data(["loss_mask"], batch, torch.float32)
    options = {"is_hybrid_cp": False, "cp_group": parallel_state.get_context_parallel_group()}
    asked = {name: value for name, value in options.items() if name in ASKED_BY_CP_RANK}
    part: dict[str, torch.Tensor] = get_batch_on_this_cp_rank(found, **asked)
    return part


# Training


def loss_func(loss_mask: torch.Tensor, output: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Mean over this rank's part of the sequence, as its share of the mean over the context-parallel group."""
    loss = (output.float().view(-1) * loss_mask.view(-1)).sum() / loss_mask.sum()
    return loss / parallel_state.get_context_parallel_world_size(), {"lm loss": loss.detach().clone()}


def forward_step(data: Iterator[Any] | None, model: torch.nn.Module) -> tuple[torch.Tensor, Any]:
    stage = get_attr_wrapped_model(model, "vp_stage")
    last = parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=stage)
    if not (last or parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=stage)):
        return model(None, None, None), None
    batch = get_batch(data)
    output = model(batch["tokens"], batch["position_ids"], None, labels=batch["labels"] if last else None)
    return output, functools.partial(loss_func, batch["loss_mask"])


def run_microbatches(
    args: argparse.Namespace, model: list[DistributedDataParallel], data: list[Any], forward_only: bool
) -> list[Any]:
    losses: list[Any] = get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=data if len(model) > 1 else data[0],
        model=model,
        num_microbatches=args.num_microbatches,
        seq_length=args.seq_length,
        micro_batch_size=args.micro_batch_size,
        forward_only=forward_only,
    )
    return losses


def average_loss(losses: list[dict[str, torch.Tensor]]) -> float:
    """Mean over micro-batches and ranks with other data. Only the last stage has losses: it tells its pipeline."""
    mean = torch.zeros((), dtype=torch.float32, device=torch.cuda.current_device())
    if parallel_state.is_pipeline_last_stage():
        mean = torch.stack([loss["lm loss"] for loss in losses]).mean()
        dist.all_reduce(mean, group=parallel_state.get_data_parallel_group(with_context_parallel=True))
        mean /= parallel_state.get_data_parallel_world_size(with_context_parallel=True)
    if parallel_state.get_pipeline_model_parallel_world_size() > 1:
        last = parallel_state.get_pipeline_model_parallel_last_rank()
        dist.broadcast(mean, src=last, group=parallel_state.get_pipeline_model_parallel_group())
    return mean.item()


def evaluate(args: argparse.Namespace, model: list[DistributedDataParallel], data: list[Any]) -> float:
    for chunk in model:
        chunk.eval()
    with torch.no_grad():
        losses = [average_loss(run_microbatches(args, model, data, forward_only=True)) for _ in range(args.eval_iters)]
    for chunk in model:
        chunk.train()
    return sum(losses) / len(losses)


def train(
    args: argparse.Namespace,
    model: list[DistributedDataParallel],
    optimizer: Any,
    scheduler: OptimizerParamScheduler,
    train_data: list[Any],
    valid_data: list[Any],
    do_valid: bool,
    checkpoints: checkpoint.Checkpoints,
) -> None:
    for chunk in model:
        chunk.train()
    for step in range(checkpoints.load() + 1, args.train_iters + 1):
        started = time.perf_counter()
        for chunk in model:
            chunk.zero_grad_buffer()
        optimizer.zero_grad()
        losses = run_microbatches(args, model, train_data, forward_only=False)
        updated, grad_norm, _ = optimizer.step()
        if updated:
            scheduler.step(increment=global_batch_size(args))
        numbers = {"loss": average_loss(losses), "grad_norm": grad_norm, "lr": optimizer.param_groups[0]["lr"]}
        numbers["eval"] = None
        if do_valid and step % args.eval_interval == 0:
            numbers["eval"] = evaluate(args, model, valid_data)
        log_step(args, step, time.perf_counter() - started, numbers)
        if checkpoints.after_step(step):
            break
    if args.overlap_param_gather:
        for chunk in model:
            chunk.start_param_sync(force_sync=True)  # else the next forward would


# Output


def model_tensors(model: list[DistributedDataParallel]) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters and buffers of all chunks."""
    for number, chunk in enumerate(model):
        for name, tensor in [*chunk.module.named_parameters(), *chunk.module.named_buffers()]:
            yield f"{number}.{name}", tensor


def optimizer_tensors(optimizer: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Main parameters and moments of every optimizer under Megatron's wrappers, in a fixed order."""
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        parameters = [param for group in part.optimizer.param_groups for param in group["params"]]
        for index, param in enumerate(parameters):
            yield f"{index}.parameter", param
            for name, value in sorted(part.optimizer.state[param].items()):
                if isinstance(value, torch.Tensor):
                    yield f"{index}.{name}", value


def main() -> None:
    args = parse_args()
    logging.basicConfig(level=logging.ERROR)
    initialize(args)
    config = model_config(args)
    model = build_model(args, config, ByteTokenizer.vocab_size)
    optimizer, scheduler = build_optimizer(args, config, model)
    facts, train_data, valid_data = build_data_iterators(args)
    if facts["do_train"]:
        checkpoints = checkpoint.Checkpoints(args, model, optimizer, scheduler)
        time.sleep(args.startup_s)
        train(args, model, optimizer, scheduler, train_data, valid_data, facts["do_valid"], checkpoints)
    if args.digest:
        parameters, state = digest(model_tensors(model)), digest(optimizer_tensors(optimizer))
        write_line("digest", {"rank": dist.get_rank(), "parameters": parameters, "optimizer": state})
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
