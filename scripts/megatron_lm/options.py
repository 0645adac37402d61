"""Options of Megatron-LM's pretrain_gpt.py that people train with: by name, what is added to the base job.

Rules of this file: standard library only. The base is what base_job.py says without a layout: 4 ranks, bf16, the
distributed optimizer, dropout, real text. An option is tried alone where it can stand alone.
"""

from __future__ import annotations

from dataclasses import dataclass

_EXPERTS = "--num-experts 4 --expert-model-parallel-size 2 --moe-router-load-balancing-type aux_loss"
_INTERLEAVED = (
    "--pipeline-model-parallel-size 4 --num-layers 8 --num-virtual-stages-per-pipeline-rank 2 "
    "--no-overlap-p2p-communication"
)
"""Overlapped sends and receives give NaN over gloo, with and without the plugin."""
_OVERLAP = "--overlap-grad-reduce --overlap-param-gather"
_TP2, _PP2 = "--tensor-model-parallel-size 2", "--pipeline-model-parallel-size 2"
_SAVED = "--save {folder}/checkpoints --save-interval 2"
_TE = "--transformer-impl transformer_engine"
_LLAMA = "--swiglu --normalization RMSNorm --group-query-attention --num-query-groups 2 --disable-bias-linear"


@dataclass(frozen=True)
class Option:
    """`words` are added to the base job's, `without` left out of it; `meant` says what for, for people."""

    meant: str
    words: str = ""
    without: tuple[str, ...] = ()


OPTIONS: dict[str, Option] = {
    "base": Option("bf16, distributed optimizer, DP 4"),
    "tp2": Option("tensor parallel", _TP2),
    "sp": Option("sequence parallel", f"{_TP2} --sequence-parallel"),
    "pp2": Option("pipeline parallel", _PP2),
    "vpp": Option("interleaved pipeline", _INTERLEAVED),
    "vpp-overlap": Option("interleaved pipeline, overlapped reduction and gathering", f"{_INTERLEAVED} {_OVERLAP}"),
    "cp2": Option("context parallel", "--context-parallel-size 2"),
    "tp2-pp2": Option("tensor and pipeline parallel", f"{_TP2} {_PP2}"),
    "ep2-alltoall": Option("experts, all-to-all", f"{_EXPERTS} --moe-token-dispatcher-type alltoall"),
    "ep2-allgather": Option("experts, all-gather", f"{_EXPERTS} --moe-token-dispatcher-type allgather"),
    "ep2-bias": Option(
        "experts, router bias", f"{_EXPERTS} --moe-router-enable-expert-bias --moe-router-score-function sigmoid"
    ),
    "ep2-tp2": Option(
        "experts with tensor parallel", f"{_EXPERTS} {_TP2} --sequence-parallel --disable-bias-linear"
    ),
    "grouped-gemm": Option("grouped experts", f"{_EXPERTS} --moe-grouped-gemm"),
    "instances": Option("two optimizer instances", "--num-distributed-optimizer-instances 2"),
    "overlap-grad": Option("overlapped gradient reduction", "--overlap-grad-reduce"),
    "overlap": Option("overlapped reduction and gathering", _OVERLAP),
    "precision-aware": Option("precision-aware optimizer", "--use-precision-aware-optimizer"),
    "replicated": Option("without the distributed optimizer", without=("--use-distributed-optimizer",)),
    "fp32": Option("fp32", without=("--bf16",)),
    "fp16": Option(
        "fp16, dynamic loss scale", "--fp16 --initial-loss-scale 131072 --loss-scale-window 4 --hysteresis 1",
        without=("--bf16",),
    ),
    "recompute-full": Option(
        "full recompute", "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
    ),
    "recompute-selective": Option("selective recompute", "--recompute-activations"),
    "untied": Option("untied embeddings", f"--untie-embeddings-and-output-weights {_PP2}"),
    "llama": Option("SwiGLU, RMSNorm, grouped queries, no biases", _LLAMA),
    "mla": Option("multi-latent attention", "--multi-latent-attention"),
    "mtp": Option("multi-token prediction", "--mtp-num-layers 1"),
    "ramp-up": Option(
        "batch-size ramp-up", "--rampup-batch-size 4 4 16 --train-samples 80",
        without=("--train-iters", "--lr-warmup-iters"),
    ),
    "mock-data": Option("mock data", "--mock-data", without=("--data-path",)),
    "blend": Option("a blend of two data sets", "--data-path 0.3 {corpus} 0.7 {corpus}", without=("--data-path",)),
    "cyclic": Option("a shuffling loader", "--dataloader-type cyclic"),
    "workers": Option("two loader workers", "--num-workers 2"),
    "logging": Option(
        "all of the logging", "--log-throughput --log-params-norm --log-num-zeros-in-grad --timing-log-level 2 "
        "--log-timers-to-tensorboard --log-memory-to-tensorboard",
    ),
    "rerun": Option("rerun state machine off", "--rerun-mode disabled"),
    "hashes": Option("comparing hashes of parameters", "--check-weight-hash-across-dp-replicas-interval 3"),
    "save-async": Option("asynchronous checkpoints", f"{_SAVED} --async-save --use-persistent-ckpt-worker"),
    "save-async-mcore": Option(
        "asynchronous checkpoints without NVRx (0.17 and later)",
        f"{_SAVED} --async-save --use-persistent-ckpt-worker --async-strategy mcore",
    ),
    "save-async-gathered": Option(
        "asynchronous checkpoints with a gathered optimizer",
        f"{_SAVED} --async-save --use-persistent-ckpt-worker --dist-ckpt-optim-fully-reshardable --no-load-optim",
    ),
    "save-torch": Option("checkpoints of format torch", f"{_SAVED} --ckpt-format torch"),
    "save-gathered": Option(
        "checkpoints with a gathered optimizer", f"{_SAVED} --dist-ckpt-optim-fully-reshardable --no-load-optim"
    ),
    "save-retain": Option("checkpoints of which few are kept", f"{_SAVED} --save-retain-interval 8"),
    "manual-gc": Option("collecting garbage by hand", "--manual-gc --manual-gc-interval 3"),
    "unclipped": Option("no gradient clipping", "--clip-grad 0.0"),
    "exit-interval": Option("--exit-interval", "--exit-interval 10"),
    "signal-handler": Option("--exit-signal-handler", "--exit-signal-handler"),
    "sgd": Option("SGD", "--optimizer sgd"),
    "muon": Option("Muon", "--optimizer muon", without=("--use-distributed-optimizer",)),
    "cpu-offload": Option("optimizer offloaded to the CPU", "--optimizer-cpu-offload --use-precision-aware-optimizer"),
    "fsdp2": Option(
        "torch FSDP2", "--use-torch-fsdp2 --untie-embeddings-and-output-weights",
        without=("--use-distributed-optimizer",),
    ),
    "megatron-fsdp": Option(
        "Megatron-FSDP", "--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads_params"
    ),
    "tp-comm-overlap": Option(
        "Transformer Engine user buffers",
        f"{_TP2} --sequence-parallel --tp-comm-overlap {_TE}",
    ),
    "deepep": Option("DeepEP", f"{_EXPERTS} --moe-token-dispatcher-type flex --moe-enable-deepep"),
    "nccl-ub": Option("memory registered with NCCL", "--use-nccl-ub"),
    "cuda-graphs": Option("captured CUDA graphs", "--cuda-graph-impl local"),
    "fp8": Option("fp8", f"--fp8-format hybrid {_TE}"),
}  # fmt: skip
