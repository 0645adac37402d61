"""Features of Megatron-core that a swap cannot restore, refused by name before training.

Rules of this file: an option is here because it keeps state or communicators where `TrainingState` and the group
handles do not reach, or works past the calls; a version of Megatron-core that lacks the option is fine.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from ...errors import Unsupported
from ..common import REMEDY, Option, options, refuse

FILLED = "keeps a queue of gradients to be computed, which an interruption leaves filled"
OFFLOADS = "counts what is offloaded, which an interruption leaves half-way"
CAPTURES = "captures communicators, which a swap replaces"
MODEL = (
    *options("fp8 fp4", "keeps scaling factors in the layers, which are not mirrored", "train in bf16"),
    Option("tp_comm_overlap", "communicates through buffers of its own, past the process groups", "switch it off"),
    Option("moe_enable_deepep", "communicates past the process groups", "use the alltoall or allgather dispatcher"),
    *options("enable_cuda_graph external_cuda_graph", CAPTURES, "switch it off"),
    Option("cuda_graph_impl", CAPTURES, "set it to none", (None, "none")),
    Option("moe_token_dispatcher_type", "communicates past the process groups", "use alltoall or allgather",
           (None, "alltoall", "allgather")),
    *options("delay_wgrad_compute defer_embedding_wgrad_compute", FILLED, "switch it off"),
    Option("overlap_dispatch_backward_with_experts_wgrad", FILLED, "switch it off"),
    *options("fine_grained_activation_offloading cpu_offloading", OFFLOADS, "switch it off, or recompute activations"),
    Option("qk_clip", "changes weights between the calls, which a redo leaves out", "switch it off"),
    Option("log_max_attention_logit", "reduces between the calls what a spare, which runs no forward, does not have",
           "switch it off"),
    Option("moe_enable_routing_replay", "routes by lists that the script sets between the calls"),
    Option("symmetric_ar_type", "communicates in symmetric memory, past the process groups"),
    Option("hybrid_context_parallel", "communicates while data is read, which a swap reads again from memory",
           "use context_parallel_size"),
    Option("moe_shared_expert_overlap", "keeps what the shared experts are at, which an interruption leaves half-way",
           "switch it off"),
    *(Option(f"{experts}gtp_weight_remat_size",
             "keeps communication under way in its parameters across an interruption",
             f"leave --{experts.replace('_', '-')}tensor-parallel-num-weight-shards out", (None, 1))
      for experts in ("", "expert_")),
)  # fmt: skip

ROUTERS = (
    Option("moe_router_force_load_balancing",
           "draws from a generator of its own, which is not mirrored, in this version",
           "leave it out, or use megatron-core 0.16 or later"),
)  # fmt: skip
"""Options of the model, where routers have such a generator."""

GRADIENTS = (
    *options("use_megatron_fsdp use_custom_fsdp", "keeps parameters where a rollback does not reach",
             "use the distributed optimizer"),
    Option("nccl_ub", "registers memory with communicators, which a swap replaces", "switch it off"),
)  # fmt: skip

OPTIMIZER = (
    Option("overlap_param_gather_with_optimizer_step", "gathers parameters across the end of a step", "switch it off"),
    Option("optimizer_cpu_offload", "keeps the state in parts that are not mirrored", "switch it off"),
)

TRAINING = (
    Option("inprocess_restart", "starts the training function again, which the plugin keeps running"),
    Option("async_strategy", "saves by another library, whose writers a swap cannot end", "set it to mcore",
           (None, "mcore")),
    Option("log_straggler", "divides by the time of forwards, of which a spare runs none"),
    Option("use_sharp", "has switches sum in groups of the start only: later ones would sum otherwise"),
    Option("optimizer_cuda_graph", CAPTURES),
    Option("use_legacy_models", "counts micro-batches in the layers, which an interruption leaves too far on",
           "use megatron-core's models"),
    Option("perform_rl_step", "changes weights between the calls, which a redo leaves out"),
    Option("skip_train", "trains nothing that could be protected"),
    *options("save_dgrads_interval save_activations_interval save_tokens_per_expert_interval",
             "saves what is seen in forwards, of which a spare runs none"),
    Option("non_persistent_ckpt_type", "saves by another library, on each host of its own", "set it to global",
           (None, "global")),
)  # fmt: skip
"""Options among Megatron-LM's own arguments, where its training loop runs."""


def check(chunks: Sequence[Any], optimizer_config: Any) -> None:
    """Raises: Unsupported, naming the option, why, and what to do instead."""
    args: Any = getattr(sys.modules.get("megatron.training.global_vars"), "_GLOBAL_ARGS", None)
    refuse(args, TRAINING)
    if getattr(args, "fim_data", False) and not args.num_workers:
        raise Unsupported(
            "fim_data=True with num_workers=0 draws random numbers of its own for every item: a process that passes "
            "over items would go on with others",
            "loader workers, whose items are all read",
            f"add --num-workers 1, {REMEDY}",
        )
    if not chunks:
        raise Unsupported(
            "an optimizer without a model in megatron.core.distributed.DistributedDataParallel",
            "all model chunks in DistributedDataParallel, not in FSDP or torch's own",
            f"wrap the model in it, {REMEDY}",
        )
    routing: Any = sys.modules.get("megatron.core.transformer.moe.moe_utils")
    has_generator = hasattr(getattr(routing, "RandomSTE", None), "generator")  # up to 0.15
    for chunk in chunks:
        refuse(chunk.config, (*MODEL, *ROUTERS) if has_generator else MODEL)
        if (bias := getattr(chunk.config, "moe_router_force_biased", None) or 0.0) < 0:
            raise Unsupported(
                f"moe_router_force_biased = {bias} adds to routers what they drew in their first forward, which a "
                "replacement does not run",
                "None, or a number that is not negative: it is drawn in every forward",
                f"make it positive, {REMEDY}",
            )
        refuse(chunk.ddp_config, GRADIENTS)
    refuse(optimizer_config, OPTIMIZER)
