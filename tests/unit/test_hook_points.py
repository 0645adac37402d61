"""Hook points of the Megatron adapter: they are there in every tag that is run, also in those this Python cannot run.

MEGATRON_LM_GIT: a clone of NVIDIA/Megatron-LM with its tags, whose newest commit stands for main.
"""

import ast
import functools
import os
import subprocess

import pytest

from deadpool_plugin import versions

TAGS = tuple("HEAD" if one.tag == "main" else one.tag for one in versions.CHECKOUTS)
CORE = "megatron/core/"
HELD = {
    "distributed/distributed_data_parallel.py": [
        "DistributedDataParallel.no_sync", "DistributedDataParallel.zero_grad_buffer",
        "DistributedDataParallel.start_param_sync", "DistributedDataParallel.enable_forward_pre_hook",
        "DistributedDataParallel.disable_forward_pre_hook",
    ],
    "optimizer/optimizer.py": ["MegatronOptimizer.step", "MegatronOptimizer.zero_grad", "ChainedOptimizer.step"],
    "optimizer_param_scheduler.py": ["OptimizerParamScheduler.step"],
    "pipeline_parallel/schedules.py": [
        "forward_backward_no_pipelining", "forward_backward_pipelining_without_interleaving",
        "forward_backward_pipelining_with_interleaving", "get_forward_backward_func",
    ],
    "transformer/moe/moe_utils.py": ["reduce_aux_losses_tracker_across_ranks"],
    "rerun_state_machine.py": ["RerunDataIterator", "RerunStateMachine.validate_result"],
    "transformer/multi_token_prediction.py": ["MTPLossLoggingHelper"],
    "timers.py": ["Timer.start", "Timer.stop"],
    "tensor_parallel/random.py": ["get_cuda_rng_tracker"],
    "dist_checkpointing/serialization.py": ["save"],
    "dist_checkpointing/strategies/async_utils.py": [
        "AsyncCallsQueue.schedule_async_request", "AsyncCallsQueue.maybe_finalize_async_calls", "AsyncCallsQueue.close",
    ],
    "dist_checkpointing/strategies/filesystem_async.py": ["FileSystemWriterAsync.write_preloaded_data"],
}  # fmt: skip


@functools.cache
def defined(tag, path):
    """Names of the module's functions and, after a dot, of its classes' methods."""
    clone = os.environ["MEGATRON_LM_GIT"]
    shown = subprocess.run(["git", "-C", clone, "show", f"{tag}:{CORE}{path}"], capture_output=True, check=True)
    found = set()
    for node in ast.parse(shown.stdout).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            found.add(node.name)
        if isinstance(node, ast.ClassDef):
            found |= {f"{node.name}.{one.name}" for one in node.body if isinstance(one, ast.FunctionDef)}
    return found


@pytest.mark.skipif(
    "MEGATRON_LM_GIT" not in os.environ,
    reason="MEGATRON_LM_GIT is not set; expected the folder of a clone of NVIDIA/Megatron-LM with its tags",
)
@pytest.mark.parametrize("tag", TAGS)
def test_every_hook_point_is_there(tag):
    missing = [f"{path}: {name}" for path, names in HELD.items() for name in names if name not in defined(tag, path)]
    assert not missing
