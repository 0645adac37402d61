"""The small GPT and its optimizer: what the arguments of train_gpt.py mean in megatron-core's own terms.

Rules of this file: plain Megatron; a flag is spelled as in Megatron-LM wherever it has one. A model is a list of
chunks, one unless the pipeline is interleaved.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import Float16Module

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    on_off = argparse.BooleanOptionalAction
    model = parser.add_argument_group("model")
    model.add_argument("--num-layers", "--layers", dest="layers", type=int, default=2)
    model.add_argument("--hidden-size", "--hidden", dest="hidden", type=int, default=64)
    model.add_argument("--num-attention-heads", "--heads", dest="heads", type=int, default=4)
    model.add_argument("--dropout", type=float, default=0.1)
    model.add_argument("--dtype", choices=DTYPES, default="fp32")
    model.add_argument("--deterministic-mode", action="store_true", help="the same numbers in every run on a GPU, too")
    model.add_argument("--cuda-graph-impl", choices=("none", "local"), default="none", help="capture each layer")
    model.add_argument("--recompute-granularity", choices=("full", "selective"))
    model.add_argument("--recompute-method", choices=("uniform", "block"))
    model.add_argument("--recompute-num-layers", type=int)
    model.add_argument("--num-experts", type=int, help="layers become mixtures of this many experts")
    model.add_argument("--moe-router-topk", type=int, default=2)
    model.add_argument("--moe-aux-loss-coeff", type=float, default=1e-2)
    model.add_argument("--moe-router-enable-expert-bias", action="store_true")
    model.add_argument("--moe-token-dispatcher-type", choices=("alltoall", "allgather"), default="alltoall")
    layout = parser.add_argument_group("layout")
    layout.add_argument("--tensor-model-parallel-size", "--tp", dest="tp", type=int, default=1)
    layout.add_argument("--pipeline-model-parallel-size", "--pp", dest="pp", type=int, default=1)
    layout.add_argument("--num-layers-per-virtual-pipeline-stage", type=int, help="interleave the pipeline")
    layout.add_argument("--sequence-parallel", action="store_true")
    layout.add_argument("--context-parallel-size", "--cp", dest="cp", type=int, default=1)
    layout.add_argument("--expert-model-parallel-size", "--ep", dest="ep", type=int, default=1)
    layout.add_argument("--use-distributed-optimizer", "--distributed-optimizer", dest="distributed_optimizer",
                        action=on_off, default=False)  # fmt: skip
    layout.add_argument("--num-distributed-optimizer-instances", type=int, default=1)
    layout.add_argument("--overlap-grad-reduce", action="store_true")
    layout.add_argument("--overlap-param-gather", action="store_true")
    layout.add_argument("--ddp-bucket-size", type=int, help="parameters in a bucket of overlapped reductions")
    optimizer = parser.add_argument_group("optimizer")
    optimizer.add_argument("--optimizer", choices=("adam", "sgd"), default="adam")
    optimizer.add_argument("--lr", type=float, default=2e-3)
    optimizer.add_argument("--warmup-iters", type=int, default=3)
    optimizer.add_argument("--clip-grad", type=float, default=1.0, help="largest global norm of the gradient; 0: any")
    optimizer.add_argument("--initial-loss-scale", type=float, default=2.0**32, help="of fp16")
    optimizer.add_argument("--min-loss-scale", type=float, default=1.0)
    optimizer.add_argument("--loss-scale-window", type=int, default=1000, help="good steps before the scale doubles")
    optimizer.add_argument("--hysteresis", type=int, default=2, help="bad steps before it halves")


def virtual_stages(args: argparse.Namespace) -> int | None:
    """Model chunks per rank of an interleaved pipeline; None if it is not interleaved."""
    per_chunk = args.num_layers_per_virtual_pipeline_stage
    return args.layers // args.pp // per_chunk if per_chunk else None


def model_config(args: argparse.Namespace) -> TransformerConfig:
    graphs = {} if args.cuda_graph_impl == "none" else {"cuda_graph_impl": args.cuda_graph_impl}  # older ones lack it
    return TransformerConfig(
        num_layers=args.layers,
        hidden_size=args.hidden,
        num_attention_heads=args.heads,
        tensor_model_parallel_size=args.tp,
        pipeline_model_parallel_size=args.pp,
        virtual_pipeline_model_parallel_size=virtual_stages(args),
        sequence_parallel=args.sequence_parallel,
        context_parallel_size=args.cp,
        expert_model_parallel_size=args.ep,
        expert_tensor_parallel_size=1 if args.num_experts else None,
        num_moe_experts=args.num_experts,
        moe_router_topk=args.moe_router_topk,
        moe_aux_loss_coeff=args.moe_aux_loss_coeff if args.num_experts else 0.0,
        moe_router_score_function="sigmoid" if args.moe_router_enable_expert_bias else "softmax",
        moe_router_enable_expert_bias=args.moe_router_enable_expert_bias,
        moe_token_dispatcher_type=args.moe_token_dispatcher_type,
        add_bias_linear=not args.num_experts,
        recompute_granularity=args.recompute_granularity,
        recompute_method=args.recompute_method,
        recompute_num_layers=args.recompute_num_layers,
        params_dtype=DTYPES[args.dtype],
        pipeline_dtype=DTYPES[args.dtype],
        bf16=args.dtype == "bf16",
        fp16=args.dtype == "fp16",
        hidden_dropout=args.dropout,
        attention_dropout=args.dropout,
        attention_softmax_in_fp32=True,
        use_cpu_initialization=not torch.cuda.is_available(),
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        bias_dropout_fusion=False,
        persist_layer_norm=False,
        deterministic_mode=args.deterministic_mode,
        **graphs,
    )


def build_model(args: argparse.Namespace, config: TransformerConfig, vocab_size: int) -> list[DistributedDataParallel]:
    """The chunks of this rank's stages; `vocab_size` is padded so that tensor-parallel ranks have equal shares."""
    multiple = 16 * args.tp
    vocab_size = -(-vocab_size // multiple) * multiple
    virtual = virtual_stages(args)
    stages = [None] if virtual is None else range(virtual)
    ddp_config = DistributedDataParallelConfig(
        use_distributed_optimizer=args.distributed_optimizer,
        num_distributed_optimizer_instances=args.num_distributed_optimizer_instances,
        overlap_grad_reduce=args.overlap_grad_reduce,
        overlap_param_gather=args.overlap_param_gather,
        bucket_size=args.ddp_bucket_size,
        grad_reduce_in_fp32=True,
    )
    chunks = [build_chunk(args, config, vocab_size, stage) for stage in stages]
    return [
        DistributedDataParallel(config, ddp_config, chunk, disable_bucketing=number > 0)
        for number, chunk in enumerate(chunks)
    ]


def build_chunk(
    args: argparse.Namespace, config: TransformerConfig, vocab_size: int, stage: int | None
) -> torch.nn.Module:
    chunk: torch.nn.Module = GPTModel(
        config,
        get_gpt_layer_local_spec(num_experts=args.num_experts, normalization="LayerNorm"),
        vocab_size=vocab_size,
        max_sequence_length=args.seq_length,
        pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=stage),
        post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=stage),
        position_embedding_type="rope",
        share_embeddings_and_output_weights=True,
        vp_stage=stage,
    )
    chunk = chunk.to(torch.cuda.current_device())
    return chunk if args.dtype == "fp32" else Float16Module(config, chunk)


def build_optimizer(
    args: argparse.Namespace, config: TransformerConfig, model: list[DistributedDataParallel]
) -> tuple[Any, OptimizerParamScheduler]:
    """Also tells the pipeline schedules (through `config`) how gradients are scaled and reduced."""
    optimizer_config = OptimizerConfig(
        optimizer=args.optimizer,
        lr=args.lr,
        min_lr=0.1 * args.lr,
        weight_decay=0.01,
        clip_grad=args.clip_grad,
        bf16=args.dtype == "bf16",
        fp16=args.dtype == "fp16",
        initial_loss_scale=args.initial_loss_scale,
        min_loss_scale=args.min_loss_scale,
        loss_scale_window=args.loss_scale_window,
        hysteresis=args.hysteresis,
        params_dtype=DTYPES[args.dtype],
        use_distributed_optimizer=args.distributed_optimizer,
        overlap_param_gather=args.overlap_param_gather,
    )
    optimizer = get_megatron_optimizer(optimizer_config, model, use_gloo_process_groups=False)
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
    if args.overlap_grad_reduce:
        no_sync, grad_sync = [chunk.no_sync for chunk in model], [chunk.start_grad_sync for chunk in model]
        config.no_sync_func = no_sync if len(model) > 1 else no_sync[0]
        config.grad_sync_func = grad_sync if len(model) > 1 else grad_sync[0]
    config.finalize_model_grads_func = finalize_model_grads
    config.grad_scale_func = optimizer.scale_loss
    return optimizer, scheduler


def global_batch_size(args: argparse.Namespace) -> int:
    return int(args.micro_batch_size * args.num_microbatches * parallel_state.get_data_parallel_world_size())
