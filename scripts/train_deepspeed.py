"""A small GPT in plain torch, trained with DeepSpeed: the kind of script people have.

Rules of this file: plain DeepSpeed, plain loop; it knows nothing of faults, and nothing in it is there to make anyone
else's life easier. It is bitwise deterministic from run to run on a CPU. Where there is no GPU, `patches/cpu` lets
DeepSpeed run without one.

    deepspeed --num_gpus 8 scripts/train_deepspeed.py --data-path corpus --zero 2 --dtype bf16 --train-iters 30
"""

# ruff: noqa: E402 (the CPU is chosen before DeepSpeed is imported)
from __future__ import annotations

import argparse
import importlib.util
import json
import os
import random
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(1, str(Path(__file__).resolve().parents[1]))
warnings.filterwarnings("ignore")

import numpy as np
import torch
import torch.distributed as dist

from patches.cpu import deepspeed as deepspeed_on_cpu

deepspeed_on_cpu.apply()

import deepspeed
from deepspeed.utils import RepeatingLoader
from gpt.output import digest, log_step, write_line
from gpt.plain import Gpt, Windows, add_arguments, loss_of, pipeline


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_arguments(parser)
    parser.add_argument("--zero", type=int, choices=(0, 1, 2, 3), default=1, help="stage of ZeRO")
    parser.add_argument("--zero-init", action="store_true", help="stage 3: partition parameters as they are made")
    parser.add_argument("--zero-options", type=json.loads, default={}, help="more of zero_optimization, as JSON")
    parser.add_argument("--pipeline", type=int, default=0, help="stages of a pipeline; 0: none")
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--optimizer", choices=("adamw", "fused", "cpu"), default="adamw",
                        help="torch's AdamW, or DeepSpeed's FusedAdam or DeepSpeedCPUAdam")  # fmt: skip
    parser.add_argument("--offload", action="store_true", help="masters, moments and the update on the CPU")
    parser.add_argument("--fp32-gradients", action="store_true", help="bf16 only: accumulate gradients in fp32")
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--scheduler", choices=("engine", "script", "none"), default="engine",
                        help="who steps the schedule: DeepSpeed's WarmupLR, or torch's in the loop")  # fmt: skip
    parser.add_argument("--clip-grad", type=float, default=1.0, help="largest global norm of the gradient; 0: any")
    parser.add_argument("--decay-groups", action="store_true", help="norms and biases in a group without weight decay")
    parser.add_argument("--freeze", default="", metavar="NAME", help="parameters so called are not trained")
    parser.add_argument("--loss-outside", action="store_true", help="the model gives logits, the loop the loss")
    parser.add_argument(
        "--direct-backward", action="store_true", help="loss.backward() instead of engine.backward(loss)"
    )
    parser.add_argument("--micro-batch-size", type=int, default=2)
    parser.add_argument("--num-microbatches", type=int, default=2, help="accumulated per step")
    parser.add_argument("--samples", type=int, default=96, help="in an epoch")
    parser.add_argument("--train-iters", type=int, default=30)
    parser.add_argument("--eval-interval", type=int, default=10, help="steps between evaluations; 0: none")
    parser.add_argument("--inference-mode", action="store_true", help="evaluate in it, not only without gradients")
    parser.add_argument("--seed", type=int, default=1234)
    parser.add_argument("--deterministic-mode", action="store_true",
                        help="the same numbers in every run on a GPU, too; needs CUBLAS_WORKSPACE_CONFIG")  # fmt: skip
    parser.add_argument("--data-path", required=True, help="prefix of an indexed data set (.bin)")
    parser.add_argument("--save", type=Path, help="folder for checkpoints")
    parser.add_argument("--save-interval", type=int, default=0, help="steps between checkpoints; 0: none")
    parser.add_argument("--monitor", type=Path, help="folder for what DeepSpeed's own monitors write")
    parser.add_argument("--startup-s", type=float, default=0.0, help="sleep so long before training: a larger script")
    parser.add_argument("--log-all-ranks", action="store_true", help="one exact `metrics` line per rank and step")
    parser.add_argument("--digest", action="store_true", help="one `digest` line per rank at the end")
    parser.add_argument("--local-rank", "--local_rank", type=int, default=int(os.environ.get("LOCAL_RANK", "0")))
    return parser.parse_args()


# Set-up


def initialize(args: argparse.Namespace) -> None:
    if not torch.cuda.is_available():
        torch.set_num_threads(1)
    if args.deterministic_mode:
        torch.use_deterministic_algorithms(True)
    deepspeed.init_distributed(verbose=False)
    random.seed(args.seed)
    np.random.seed(args.seed)
    torch.manual_seed(args.seed)


def build_engine(args: argparse.Namespace) -> tuple[Any, Any]:
    """The engine, and the schedule if the loop steps it."""
    with deepspeed.zero.Init(config_dict_or_path=configuration(args), enabled=args.zero_init):
        model = pipeline(args) if args.pipeline else Gpt(args)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not (args.freeze and args.freeze in name))
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups: list[Any] = [{"params": trained}]
    if args.decay_groups:
        groups = [
            {"params": [parameter for parameter in trained if parameter.ndim > 1]},
            {"params": [parameter for parameter in trained if parameter.ndim <= 1], "weight_decay": 0.0},
        ]
    optimizer = build_optimizer(args, groups)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 40) if args.scheduler == "script" else None
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=configuration(args))
    return engine, schedule


def build_optimizer(args: argparse.Namespace, groups: list[Any]) -> torch.optim.Optimizer:
    if args.optimizer == "adamw":
        return torch.optim.AdamW(groups, lr=args.lr, weight_decay=0.01)
    if args.optimizer == "fused":
        return deepspeed.ops.adam.FusedAdam(groups, lr=args.lr, weight_decay=0.01)  # type: ignore[no-any-return]
    return deepspeed.ops.adam.DeepSpeedCPUAdam(groups, lr=args.lr, weight_decay=0.01)  # type: ignore[no-any-return]


def configuration(args: argparse.Namespace) -> dict[str, Any]:
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": args.micro_batch_size,
        "gradient_accumulation_steps": args.num_microbatches,
        "gradient_clipping": args.clip_grad,
        "zero_optimization": {"stage": args.zero, **args.zero_options},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 10**9,
    }
    if args.monitor:
        names = ["csv_monitor", *(["tensorboard"] if importlib.util.find_spec("tensorboard") else [])]
        config |= {name: {"enabled": True, "output_path": str(args.monitor), "job_name": name} for name in names}
        if importlib.util.find_spec("wandb") and "WANDB_MODE" in os.environ:
            args.monitor.mkdir(parents=True, exist_ok=True)
            os.environ["WANDB_DIR"] = str(args.monitor)
            config["wandb"] = {"enabled": True, "project": "test"}
    if args.pipeline and args.recompute:
        config["pipeline"] = {"activation_checkpoint_interval": 1, "use_reentrant": False}
    if args.offload:
        config["zero_optimization"]["offload_optimizer"] = {"device": "cpu"}
    if args.dtype == "bf16":
        config["bf16"] = {"enabled": True}
        if args.fp32_gradients:
            config["data_types"] = {"grad_accum_dtype": "fp32"}
    if args.scheduler == "engine":
        parameters = {"warmup_num_steps": 10, "warmup_max_lr": args.lr}
        config["scheduler"] = {"type": "WarmupLR", "params": parameters}
    return config


def loader(args: argparse.Namespace, engine: Any, samples: int, first: int, shuffle: bool) -> Any:
    dataset = Windows(args.data_path, samples, args.seq_length, first)
    replicas, rank = dist.get_world_size(), dist.get_rank()
    if args.pipeline:  # stages of one pipeline read the same
        replicas, rank = engine.grid.data_parallel_size, engine.grid.data_parallel_id
    sampler: torch.utils.data.DistributedSampler[Any] = torch.utils.data.DistributedSampler(
        dataset, replicas, rank, shuffle=shuffle, seed=args.seed
    )
    collate = pairs if args.pipeline else None
    loader = torch.utils.data.DataLoader(
        dataset, args.micro_batch_size, sampler=sampler, drop_last=True, collate_fn=collate
    )
    return RepeatingLoader(loader) if args.pipeline else loader


def pairs(samples: list[dict[str, torch.Tensor]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and labels, as pipelines want them."""
    tokens, labels = (torch.stack([sample[name] for sample in samples]) for name in ("tokens", "labels"))
    return tokens, labels


# Training


def train(args: argparse.Namespace, engine: Any, schedule: Any) -> None:
    data, valid = loader(args, engine, args.samples, 0, True), loader(args, engine, 16, 10**6, False)
    losses: list[float] = []
    began = time.perf_counter()
    for epoch in range(10**9):
        data.sampler.set_epoch(epoch)
        for batch in data:
            batch = {name: value.to(engine.device) for name, value in batch.items()}
            loss = forward(args, engine, batch)
            loss.backward() if args.direct_backward else engine.backward(loss)
            engine.step()
            losses.append(loss.item())
            if engine.micro_steps % args.num_microbatches:
                continue
            if schedule is not None:
                schedule.step()
            numbers = {"loss": sum(losses) / len(losses), "grad_norm": engine.get_global_grad_norm()}
            numbers |= {"lr": engine.get_lr()[0], "eval": None}
            if args.eval_interval and engine.global_steps % args.eval_interval == 0:
                numbers["eval"] = evaluate(args, engine, valid)
            log_step(args, engine.global_steps, time.perf_counter() - began, numbers)
            save(args, engine)
            losses, began = [], time.perf_counter()
            if engine.global_steps == args.train_iters:
                return


def train_pipeline(args: argparse.Namespace, engine: Any, schedule: Any) -> None:
    data, valid = iter(loader(args, engine, args.samples, 0, True)), iter(loader(args, engine, 16, 10**6, False))
    while engine.global_steps < args.train_iters:
        began = time.perf_counter()
        loss = engine.train_batch(data_iter=data)
        if schedule is not None:
            schedule.step()
        numbers = {"loss": loss.item(), "grad_norm": engine.get_global_grad_norm(), "lr": engine.get_lr()[0]}
        numbers["eval"] = None
        if args.eval_interval and engine.global_steps % args.eval_interval == 0:
            numbers["eval"] = engine.eval_batch(data_iter=valid).item()
        log_step(args, engine.global_steps, time.perf_counter() - began, numbers)
        save(args, engine)


def save(args: argparse.Namespace, engine: Any) -> None:
    if args.save_interval and engine.global_steps % args.save_interval == 0:
        engine.save_checkpoint(str(args.save), client_state={"seed": args.seed})


def forward(args: argparse.Namespace, engine: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    if args.loss_outside:
        return loss_of(engine(batch["tokens"]), batch["labels"])
    loss: torch.Tensor = engine(batch["tokens"], labels=batch["labels"])
    return loss


def evaluate(args: argparse.Namespace, engine: Any, data: Any) -> float:
    """Mean loss over all ranks."""
    engine.eval()
    with torch.inference_mode() if args.inference_mode else torch.no_grad():
        mean = torch.stack([forward(args, engine, batch) for batch in data]).mean()
        dist.all_reduce(mean)
    engine.train()
    return mean.item() / dist.get_world_size()


# Output


def model_tensors(engine: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters (with ZeRO 3 this rank's part of each) and buffers."""
    for name, parameter in engine.module.named_parameters():
        yield name, getattr(parameter, "ds_tensor", parameter)
    yield from engine.module.named_buffers()


def optimizer_tensors(engine: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield each parameter that the optimizer updates, in the order of its first update, and its optimizer state."""
    for number, (parameter, state) in enumerate(engine.basic_optimizer.state.items()):
        yield f"{number}.parameter", parameter
        for name, value in sorted(state.items()):
            yield f"{number}.{name}", torch.as_tensor(value)


def main() -> None:
    args = parse_args()
    initialize(args)
    engine, schedule = build_engine(args)
    time.sleep(args.startup_s)
    (train_pipeline if args.pipeline else train)(args, engine, schedule)
    if args.digest:
        parameters, state = digest(model_tensors(engine)), digest(optimizer_tensors(engine))
        write_line("digest", {"rank": dist.get_rank(), "parameters": parameters, "optimizer": state})
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
