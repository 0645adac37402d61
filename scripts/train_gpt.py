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
import hashlib
import json
import logging
import os
import sys
import time
import warnings
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(1, str(Path(__file__).resolve().parents[1]))
warnings.filterwarnings("ignore")

import torch
import torch.distributed as dist

from patches import cpu

cpu.apply()

from megatron.core import parallel_state, tensor_parallel
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import Float16Module

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    on_off = argparse.BooleanOptionalAction
    parser.add_argument("--tensor-model-parallel-size", "--tp", dest="tp", type=int, default=1)
    parser.add_argument("--pipeline-model-parallel-size", "--pp", dest="pp", type=int, default=1)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--seq-length", type=int, default=64)
    parser.add_argument("--micro-batch-size", type=int, default=2)
    parser.add_argument("--num-microbatches", type=int, default=2, help="per step and data-parallel rank")
    parser.add_argument("--train-iters", type=int, default=30)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--warmup-iters", type=int, default=3)
    parser.add_argument("--clip-grad", type=float, default=1.0)
    parser.add_argument("--optimizer", choices=("adam", "sgd"), default="adam")
    parser.add_argument("--distributed-optimizer", action=on_off, default=False)
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--dtype", choices=DTYPES, default="fp32")
    parser.add_argument("--eval-interval", type=int, default=10, help="steps between evaluations; 0: none")
    parser.add_argument("--eval-iters", type=int, default=2)
    parser.add_argument("--seed", type=int, default=1234)
    parser.add_argument("--data-path", required=True, help="prefix of an indexed data set (.bin and .idx)")
    parser.add_argument("--data-cache-path", help="where the sample indices are kept; default: beside the data")
    parser.add_argument("--num-workers", type=int, default=0, help="processes of the training DataLoader")
    parser.add_argument("--log-all-ranks", action="store_true", help="one exact `metrics` line per rank and step")
    parser.add_argument("--digest", action="store_true", help="one `digest` line per rank at the end")
    parser.add_argument("--local-rank", "--local_rank", type=int, default=int(os.environ.get("LOCAL_RANK", "0")))
    return parser.parse_args()


# Set-up


def initialize(args: argparse.Namespace) -> None:
    """Process groups, model parallelism, seeds."""
    if torch.cuda.is_available():
        torch.cuda.set_device(args.local_rank)
    else:
        torch.set_num_threads(1)
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    dist.init_process_group(backend, rank=rank, world_size=world_size)
    parallel_state.initialize_model_parallel(args.tp, args.pp, create_gloo_process_groups=False)
    seed = args.seed + 100 * parallel_state.get_pipeline_model_parallel_rank()
    torch.manual_seed(seed)
    tensor_parallel.model_parallel_cuda_manual_seed(seed)


def model_config(args: argparse.Namespace) -> TransformerConfig:
    return TransformerConfig(
        num_layers=args.layers,
        hidden_size=args.hidden,
        num_attention_heads=args.heads,
        tensor_model_parallel_size=args.tp,
        pipeline_model_parallel_size=args.pp,
        params_dtype=DTYPES[args.dtype],
        pipeline_dtype=DTYPES[args.dtype],
        bf16=args.dtype == "bf16",
        hidden_dropout=args.dropout,
        attention_dropout=args.dropout,
        attention_softmax_in_fp32=True,
        use_cpu_initialization=not torch.cuda.is_available(),
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        bias_dropout_fusion=False,
        persist_layer_norm=False,
    )


def build_model(args: argparse.Namespace, config: TransformerConfig) -> DistributedDataParallel:
    multiple = 16 * args.tp
    model: torch.nn.Module = GPTModel(
        config,
        get_gpt_layer_local_spec(normalization="LayerNorm"),
        vocab_size=-(-ByteTokenizer.vocab_size // multiple) * multiple,
        max_sequence_length=args.seq_length,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        position_embedding_type="rope",
        share_embeddings_and_output_weights=True,
    )
    model = model.to(torch.cuda.current_device())
    if args.dtype != "fp32":
        model = Float16Module(config, model)
    ddp_config = DistributedDataParallelConfig(
        use_distributed_optimizer=args.distributed_optimizer, grad_reduce_in_fp32=True
    )
    return DistributedDataParallel(config, ddp_config, model)


def build_optimizer(
    args: argparse.Namespace, config: TransformerConfig, model: DistributedDataParallel
) -> tuple[Any, OptimizerParamScheduler]:
    optimizer_config = OptimizerConfig(
        optimizer=args.optimizer,
        lr=args.lr,
        min_lr=0.1 * args.lr,
        weight_decay=0.01,
        clip_grad=args.clip_grad,
        bf16=args.dtype == "bf16",
        params_dtype=DTYPES[args.dtype],
        use_distributed_optimizer=args.distributed_optimizer,
    )
    optimizer = get_megatron_optimizer(optimizer_config, [model], use_gloo_process_groups=False)
    samples_per_step = global_batch_size(args)
    scheduler = OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=args.lr,
        min_lr=0.1 * args.lr,
        lr_warmup_steps=args.warmup_iters * samples_per_step,
        lr_decay_steps=max(args.train_iters, args.warmup_iters + 1) * samples_per_step,
        lr_decay_style="cosine",
        start_wd=0.01,
        end_wd=0.01,
        wd_incr_steps=args.train_iters * samples_per_step,
        wd_incr_style="constant",
    )
    config.finalize_model_grads_func = finalize_model_grads
    config.grad_scale_func = optimizer.scale_loss
    return optimizer, scheduler


def global_batch_size(args: argparse.Namespace) -> int:
    return args.micro_batch_size * args.num_microbatches * parallel_state.get_data_parallel_world_size()


# Data


class ByteTokenizer:
    """What a GPTDataset asks of a tokenizer whose tokens are bytes."""

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
        return (self.total_samples - self.consumed_samples) // self.stride

    def __iter__(self) -> Iterator[list[int]]:
        for first in range(self.consumed_samples, self.total_samples - self.stride + 1, self.stride):
            mine = first + self.rank * self.micro_batch_size
            yield list(range(mine, mine + self.micro_batch_size))


def reads_data() -> bool:
    """Only one rank of a tensor-parallel group reads, and only where the pipeline begins and ends."""
    at_an_end = parallel_state.is_pipeline_first_stage() or parallel_state.is_pipeline_last_stage()
    return parallel_state.get_tensor_model_parallel_rank() == 0 and at_an_end


def build_data_iterators(args: argparse.Namespace) -> tuple[dict[str, Any], Iterator[Any] | None, Iterator[Any] | None]:
    """Data sets and loaders, and what all ranks must know of them, which rank 0 tells."""
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
    return facts[0], data_iterator(args, train, args.num_workers), data_iterator(args, valid, 0)


def data_iterator(args: argparse.Namespace, dataset: GPTDataset | None, num_workers: int) -> Iterator[Any] | None:
    if dataset is None:
        return None
    loader = torch.utils.data.DataLoader(
        dataset,
        batch_sampler=PretrainingSampler(len(dataset), 0, args.micro_batch_size),
        num_workers=num_workers,
        generator=torch.Generator().manual_seed(args.seed),
    )
    return iter(loader)


def get_batch(data: Iterator[Any] | None) -> dict[str, torch.Tensor]:
    """The next micro-batch: read by tensor-parallel rank 0, broadcast to the others of its group."""
    batch = next(data) if data is not None else None
    found = tensor_parallel.broadcast_data(["tokens", "labels", "position_ids"], batch, torch.int64)
    return found | tensor_parallel.broadcast_data(["loss_mask"], batch, torch.float32)


# Training


def loss_func(loss_mask: torch.Tensor, output: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    loss = (output.float().view(-1) * loss_mask.view(-1)).sum() / loss_mask.sum()
    return loss, {"lm loss": loss.detach().clone()}


def forward_step(data: Iterator[Any] | None, model: torch.nn.Module) -> tuple[torch.Tensor, Any]:
    if not (parallel_state.is_pipeline_first_stage() or parallel_state.is_pipeline_last_stage()):
        return model(None, None, None), None
    batch = get_batch(data)
    labels = batch["labels"] if parallel_state.is_pipeline_last_stage() else None
    output = model(batch["tokens"], batch["position_ids"], None, labels=labels)
    return output, functools.partial(loss_func, batch["loss_mask"])


def run_microbatches(args: argparse.Namespace, model: torch.nn.Module, data: Any, forward_only: bool) -> list[Any]:
    return get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=data,
        model=[model],
        num_microbatches=args.num_microbatches,
        seq_length=args.seq_length,
        micro_batch_size=args.micro_batch_size,
        forward_only=forward_only,
    )


def average_loss(losses: list[dict[str, torch.Tensor]]) -> float:
    """Mean over micro-batches and data-parallel ranks. Only the last stage has losses: it tells its pipeline."""
    mean = torch.zeros((), dtype=torch.float32, device=torch.cuda.current_device())
    if parallel_state.is_pipeline_last_stage():
        mean = torch.stack([loss["lm loss"] for loss in losses]).mean()
        dist.all_reduce(mean, group=parallel_state.get_data_parallel_group())
        mean /= parallel_state.get_data_parallel_world_size()
    if parallel_state.get_pipeline_model_parallel_world_size() > 1:
        last = parallel_state.get_pipeline_model_parallel_last_rank()
        dist.broadcast(mean, src=last, group=parallel_state.get_pipeline_model_parallel_group())
    return mean.item()


def evaluate(args: argparse.Namespace, model: torch.nn.Module, data: Iterator[Any] | None) -> float:
    model.eval()
    with torch.no_grad():
        losses = [average_loss(run_microbatches(args, model, data, forward_only=True)) for _ in range(args.eval_iters)]
    model.train()
    return sum(losses) / len(losses)


def train(
    args: argparse.Namespace,
    model: DistributedDataParallel,
    optimizer: Any,
    scheduler: OptimizerParamScheduler,
    train_data: Iterator[Any] | None,
    valid_data: Iterator[Any] | None,
    do_valid: bool,
) -> None:
    model.train()
    for step in range(1, args.train_iters + 1):
        started = time.perf_counter()
        model.zero_grad_buffer()
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


# Output


def log_step(args: argparse.Namespace, step: int, duration_s: float, numbers: dict[str, float | None]) -> None:
    """Every rank for programs, exactly; rank 0 for people."""
    if args.log_all_ranks:
        exact = {name: None if value is None else float(value).hex() for name, value in numbers.items()}
        write_line("metrics", {"rank": dist.get_rank(), "step": step, **exact})
    if dist.get_rank() == 0:
        known = " | ".join(f"{name} {value:.5g}" for name, value in numbers.items() if value is not None)
        print(f"step {step:4d}/{args.train_iters} | {known} | {1e3 * duration_s:.0f} ms", flush=True)


def write_line(kind: str, fields: dict[str, Any]) -> None:
    """One line in one write, so that ranks sharing a file do not interleave."""
    os.write(sys.stdout.fileno(), f"{kind} {json.dumps(fields)}\n".encode())


def digest(tensors: Iterator[tuple[str, torch.Tensor]]) -> str:
    state = hashlib.sha256()
    for name, tensor in tensors:
        state.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        state.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
    return state.hexdigest()


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
    model = build_model(args, config)
    optimizer, scheduler = build_optimizer(args, config, model)
    facts, train_data, valid_data = build_data_iterators(args)
    if facts["do_train"]:
        train(args, model, optimizer, scheduler, train_data, valid_data, facts["do_valid"])
    if args.digest:
        parameters, state = digest(model.named_parameters()), digest(optimizer_tensors(optimizer))
        write_line("digest", {"rank": dist.get_rank(), "parameters": parameters, "optimizer": state})
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
