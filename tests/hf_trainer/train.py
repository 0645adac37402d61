"""A small GPT-2 trained by Hugging Face's Trainer with a DeepSpeed configuration: the kind of script people have.

Rules of this file: not a test, but what the tests run, with and without the plugin; it knows nothing of either. Where
there is no GPU, `patches/cpu` lets DeepSpeed and accelerate run without one.

    deepspeed --num_gpus 8 tests/hf_trainer/train.py --corpus corpus --deepspeed zero2.json --output-dir out
"""

# ruff: noqa: E402 (the CPU is chosen before DeepSpeed is imported)
from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
ROOT = Path(__file__).resolve().parents[2]
sys.path[1:1] = [str(ROOT), str(ROOT / "scripts")]

import torch
import torch.distributed as dist

from patches.cpu import accelerate as accelerate_on_cpu, deepspeed as deepspeed_on_cpu

deepspeed_on_cpu.apply()
accelerate_on_cpu.apply()

from gpt.output import digest, write_line, write_metrics
from gpt.plain import VOCABULARY, Windows
from transformers import EvalPrediction, GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

NOT_COMPARED = ("runtime", "per_second", "total_flos")
"""Values of clocks; and under ZeRO 3 the Trainer counts the parameters that happen to be gathered when it looks."""


class Texts(torch.utils.data.Dataset[Any]):
    """Windows of the corpus under the names that Hugging Face's models want."""

    def __init__(self, corpus: str, samples: int, length: int, first: int = 0) -> None:
        self._windows = Windows(corpus, samples, length, first)

    def __len__(self) -> int:
        return len(self._windows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = self._windows[index]["tokens"]
        return {"input_ids": tokens, "labels": tokens}


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--corpus", required=True, help="prefix of an indexed data set (.bin)")
    parser.add_argument("--deepspeed", required=True, help="DeepSpeed's configuration file")
    parser.add_argument("--output-dir", required=True)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--samples", type=int, default=24, help="in an epoch")
    parser.add_argument("--vocabulary", type=int, default=VOCABULARY)
    parser.add_argument("--arguments", type=json.loads, default={}, help="more TrainingArguments, as JSON")
    parser.add_argument("--metrics", action="store_true", help="evaluate the model's guesses, too")
    parser.add_argument("--local-rank", "--local_rank", type=int, default=0)
    return parser.parse_args()


def build_trainer(args: argparse.Namespace) -> Trainer:
    ours = {
        "output_dir": args.output_dir, "deepspeed": args.deepspeed, "seed": 1234, "report_to": [],
        "disable_tqdm": True, "max_steps": args.steps, "per_device_train_batch_size": 2,
        "per_device_eval_batch_size": 2, "gradient_accumulation_steps": 2, "learning_rate": 2e-3, "warmup_steps": 3,
        "weight_decay": 0.01, "max_grad_norm": 1.0, "logging_steps": 1, "eval_strategy": "steps", "eval_steps": 4,
        "save_strategy": "steps", "save_steps": 4, "save_total_limit": 2,
    }  # fmt: skip
    config = GPT2Config(
        vocab_size=args.vocabulary, n_positions=64, n_embd=64, n_layer=2, n_head=4, bos_token_id=256, eos_token_id=256
    )
    return Trainer(
        model=GPT2LMHeadModel(config),
        args=TrainingArguments(**{**ours, **args.arguments}),
        train_dataset=Texts(args.corpus, args.samples, 64),
        eval_dataset=Texts(args.corpus, 16, 64, first=10**6),
        compute_metrics=accuracy if args.metrics else None,
        preprocess_logits_for_metrics=(lambda logits, labels: logits.argmax(-1)) if args.metrics else None,
    )


def accuracy(prediction: EvalPrediction) -> dict[str, float]:
    guessed = prediction.predictions[:, :-1] == prediction.label_ids[:, 1:]
    return {"accuracy": float(guessed.mean())}


def report(trainer: Trainer) -> None:
    """Every rank's whole log history, exactly but for what clocks say, and digests of its state."""
    steps: dict[int, dict[str, Any]] = {}
    rank = dist.get_rank()
    history = [compared(entry) for entry in trainer.state.log_history]
    for entry in history:
        steps.setdefault(int(entry["step"]), {}).update(entry)
    for step, entry in steps.items():
        numbers = {"loss": entry.get("loss"), "grad_norm": entry.get("grad_norm")}
        write_metrics(rank, step, {**numbers, "lr": entry.get("learning_rate"), "eval": entry.get("eval_loss")})
    state = trainer.deepspeed.basic_optimizer.state
    found = {"history": hashlib.sha256(json.dumps(history).encode()).hexdigest()}
    found["parameters"] = digest(
        (name, getattr(one, "ds_tensor", one)) for name, one in trainer.model.named_parameters()
    )
    found["masters"] = digest((str(number), master) for number, master in enumerate(state))
    found["moments"] = digest(
        (f"{number} {name}", torch.as_tensor(value))
        for number, one in enumerate(state.values())
        for name, value in sorted(one.items())
    )
    write_line("digest", {"rank": rank, **found})


def compared(entry: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in entry.items() if not any(part in name for part in NOT_COMPARED)}


def main() -> None:
    args = parse_args()
    trainer = build_trainer(args)
    trainer.train()
    trainer.save_model()
    report(trainer)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
