"""The layouts that training must survive faults in: by name, the training script's arguments and the number of ranks.

Rules of this file: standard library only; small models, so that a case is seconds. What every layout has in common
(data, steps, logging) is the caller's.
"""

from __future__ import annotations

from dataclasses import dataclass

SCRIPT_OF = {"megatron": "train_gpt.py", "deepspeed": "train_deepspeed.py"}
"""Files in scripts/."""


@dataclass(frozen=True)
class Layout:
    """One way to spread a model over `world_size` ranks."""

    arguments: tuple[str, ...]
    world_size: int = 4
    framework: str = "megatron"

    @property
    def script(self) -> str:
        """Its file in scripts/."""
        return SCRIPT_OF[self.framework]


def _layout(arguments: str, world_size: int = 4) -> Layout:
    return Layout(tuple(arguments.split()), world_size)


_SMALL = "--hidden-size 32 --seq-length 32 --micro-batch-size 1"
_SHARDED = "--use-distributed-optimizer"
_EXPERTS = "--num-experts 4 --expert-model-parallel-size 2"
_FP16 = "--dtype fp16 --initial-loss-scale 1048576 --loss-scale-window 2 --hysteresis 1"
"""The scale doubles every second step until gradients overflow: about every third step is skipped."""

MEGATRON: dict[str, Layout] = {
    name: Layout((*_SMALL.split(), *layout.arguments), layout.world_size)
    for name, layout in {
        "tp4": _layout(f"--tp 4 --dtype bf16 {_SHARDED}"),
        "pp4": _layout(f"--pp 4 --num-layers 4 --num-microbatches 4 --dtype bf16 {_SHARDED}"),
        "dp4": _layout(f"--dtype bf16 {_SHARDED}"),
        "dp4-replicated": _layout("--dtype bf16"),
        "dp4-fp32": _layout(_SHARDED),
        "dp4-unclipped": _layout("--clip-grad 0 --dtype bf16"),
        "dp4-unclipped-sharded": _layout(f"--clip-grad 0 --dtype bf16 {_SHARDED}"),
        "dp4-unclipped-fp32": _layout("--clip-grad 0"),
        "tp2-pp2-dp2": _layout(f"--tp 2 --pp 2 --dtype bf16 {_SHARDED}", 8),
        "interleaved": _layout(
            "--pp 2 --num-layers 4 --num-layers-per-virtual-pipeline-stage 1 --num-microbatches 4 --dtype bf16 "
            f"{_SHARDED}"
        ),
        "interleaved-overlap": _layout(
            "--pp 2 --num-layers 4 --num-layers-per-virtual-pipeline-stage 1 --num-microbatches 4 --dtype bf16 "
            f"{_SHARDED} --overlap-grad-reduce --overlap-param-gather"
        ),
        "sequence-parallel": _layout(f"--tp 2 --sequence-parallel --dtype bf16 {_SHARDED}"),
        "cp2": _layout(f"--cp 2 --dtype bf16 {_SHARDED}"),
        "cp2-tp2": _layout("--cp 2 --tp 2 --sequence-parallel --dtype bf16"),
        "ep2-alltoall": _layout(f"{_EXPERTS} --dtype bf16 {_SHARDED}"),
        "ep2-allgather": _layout(f"{_EXPERTS} --moe-token-dispatcher-type allgather --dtype bf16"),
        "ep2-bias": _layout(f"{_EXPERTS} --moe-router-enable-expert-bias --dtype bf16 {_SHARDED}"),
        "ep2-tp2-pp2": _layout(f"{_EXPERTS} --tp 2 --sequence-parallel --pp 2 --dtype bf16 {_SHARDED}", 8),
        "overlap": _layout(
            f"{_SHARDED} --overlap-grad-reduce --overlap-param-gather --ddp-bucket-size 8000 --num-microbatches 4 "
            "--dtype bf16"
        ),
        "overlap-pp2": _layout(
            f"--pp 2 {_SHARDED} --overlap-grad-reduce --overlap-param-gather --ddp-bucket-size 8000 "
            "--num-microbatches 4 --dtype bf16"
        ),
        "overlap-replicated": _layout("--overlap-grad-reduce --ddp-bucket-size 8000 --dtype bf16"),
        "optimizer-instances": _layout(f"{_SHARDED} --num-distributed-optimizer-instances 2 --dtype bf16"),
        "optimizer-instances-overlap": _layout(
            f"{_SHARDED} --num-distributed-optimizer-instances 2 --overlap-grad-reduce --overlap-param-gather "
            "--ddp-bucket-size 8000 --dtype bf16"
        ),
        "recompute-full": _layout(
            f"--tp 2 --recompute-granularity full --recompute-method uniform --recompute-num-layers 1 --dtype bf16 "
            f"{_SHARDED}"
        ),
        "recompute-selective": _layout(f"--tp 2 --recompute-granularity selective --dtype bf16 {_SHARDED}"),
        "fp16": _layout(f"{_FP16} --tp 2 {_SHARDED}"),
        "fp16-replicated": _layout(f"{_FP16} --pp 2"),
        "fp16-unclipped": _layout(f"{_FP16} --clip-grad 0 {_SHARDED}"),
        "microbatches4": _layout(f"--tp 2 --num-microbatches 4 --dtype bf16 {_SHARDED}"),
    }.items()
}

_CARD = f"--deterministic-mode --num-microbatches 4 --dtype bf16 {_SHARDED}"
ON_CARDS: dict[str, Layout] = {
    "pp2-dp2": Layout((*_SMALL.split(), *f"--pp 2 {_CARD}".split())),
    "tp2-dp2": Layout((*_SMALL.split(), *f"--tp 2 {_CARD}".split())),
}
"""Those of megatron-core that are tried on CUDA devices, over NCCL; DeepSpeed's are ENGINES_ON_CARDS."""

_ENGINES = {
    "zero0": "--zero 0",
    "zero1": "--zero 1",
    "zero2": "--zero 2",
    "zero3": "--zero 3",
    "pipeline2": "--zero 0 --pipeline 2",
    "pipeline2-zero1": "--zero 1 --pipeline 2",
}
_OPTIMIZERS = {"adamw": "--optimizer adamw", "fused": "--optimizer fused", "offload": "--optimizer cpu --offload"}
DEEPSPEED: dict[str, Layout] = {
    f"{engine}-{dtype}-{optimizer}": Layout(
        ("--samples", "24", "--dtype", dtype, *_ENGINES[engine].split(), *_OPTIMIZERS[optimizer].split()),
        framework="deepspeed",
    )
    for engine in _ENGINES
    for dtype in ("fp32", "bf16")
    for optimizer in _OPTIMIZERS
    if optimizer != "offload" or engine in ("zero1", "zero2", "zero3")
}

ENGINES_ON_CARDS = {name: DEEPSPEED[name] for name in ("zero1-bf16-adamw", "zero3-bf16-adamw")}

LAYOUTS = MEGATRON | ON_CARDS | DEEPSPEED
