"""Functions of the frameworks that communicate and keep an answer: each place is known, and what the plugin does there.

A replacement that lacks an answer its peers have kept issues a collective that they do not. The search reads sources: a
function that issues a collective, or makes a group, and tests something that it also keeps beyond the call, or that is
cached by a decorator. It does not see a collective that another function issues for it; replacements are compared with
their peers for that (core/pairing.py). The adapters' READMEs say more of each place.

MEGATRON_LM_GIT: a clone of NVIDIA/Megatron-LM with its tags, whose newest commit stands for main.
"""

from __future__ import annotations

import ast
import fnmatch
import importlib.util
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from unit.test_hook_points import TAGS

COLLECTIVES = {
    "_all_gather_base", "_reduce_scatter_base", "all_gather", "all_gather_coalesced", "all_gather_into_tensor",
    "all_gather_object", "all_reduce", "all_reduce_coalesced", "all_to_all", "all_to_all_single", "allgather_fn",
    "barrier", "broadcast", "broadcast_object_list", "create_group", "gather", "gather_object", "inference_all_reduce",
    "monitored_barrier", "new_group", "new_subgroups", "reduce", "reduce_scatter", "reduce_scatter_fn",
    "reduce_scatter_tensor", "scatter", "scatter_object_list",
}  # fmt: skip
CACHES = {"cache", "cached_property", "lru_cache"}
REFUSED = "refused before training"
BUILT = "runs in start-up, which every replacement goes through"
MEGATRON = {
    "core/distributed/fsdp/*": REFUSED,
    "core/distributed/param_and_grad_buffer.py:_ParamAndGradBucketGroup.start_*_sync": "handles and views of one step",
    "core/fault_injector.py:setup_fault_injection": BUILT,
    "core/full_cuda_graph.py:*": REFUSED,
    "core/inference/*": "not used in training",
    "inference/*": "not used in training",
    "core/models/common/language_module/*:LanguageModule.setup_embeddings_and_output_layer": BUILT,
    "legacy/model/module.py:MegatronModule.initialize_word_embeddings": BUILT,
    "core/optimizer/optimizer.py:MegatronOptimizer.has_grad_norm_group": "in the snapshot and at each call's entry",
    "core/optimizer/layer_wise_optimizer.py:LayerWiseDistributedOptimizer.has_grad_norm_group": "the same",
    "core/optimizer/layer_wise_optimizer.py:LayerWiseDistributedOptimizer.sharded_state_dict": "of one save",
    "core/optimizer/optimizer_cuda_graph.py:*": REFUSED,
    "core/optimizer/qk_clip.py:clip_qk": REFUSED,
    "core/parallel_state.py:*": BUILT,
    "core/pipeline_parallel/bridge_communicator.py:BridgeCommunicator._get_or_create_bridge_pg": BUILT,
    "core/rerun_state_machine.py:RerunStateMachine.should_run_forward_backward": "begins anew with each step",
    "core/resharding/*": "not used in training",
    "core/tensor_parallel/gtp_symmetric_memory.py:register_gtp_symm_pool": BUILT,
    "core/tensor_parallel/layers.py:LinearWithGradAccumulationAndAsyncCommunication.backward": "of one step",
    "core/utils.py:GlobalMemoryBuffer.get_tensor": "functools.reduce, no collective",
    "core/utils.py:StragglerDetector._check_toggle": REFUSED,
    "training/distillation/cached_logits_loss.py:LossFuncCallable.__call__": "a function; the same on all ranks",
    "training/distillation/utils_logits.py:_storage_glob_rank0": "all ranks forget it in a swap",
    "rl/*": REFUSED,
    "training/checkpointing.py:load_checkpoint": BUILT,
    "training/training.py:build_train_valid_test_data_loaders": BUILT,
    "training/training.py:consume_seqlen_stats_in_iteration": "in the snapshot; the reduction is a call",
    "training/training.py:pretrain": BUILT,
    "training/training.py:setup_model_and_optimizer": BUILT,
    "training/training.py:train": "counts of the loop",
}
DEEPSPEED = {
    "comm/comm.py:allgather_fn": "that a warning was printed",
    "comm/comm.py:reduce_scatter_fn": "that a warning was printed",
    "comm/comm.py:log_summary": "only if the script asks for it, on all ranks",
    "compile/*": REFUSED,
    "inference/*": "not used in training",
    "module_inject/*": REFUSED,
    "ops/sparse_attention/*": "a broadcast that a replacement repeats is named (DeepSpeed 0.18, Triton 1)",
    "runtime/activation_checkpointing/checkpointing.py:gather_partitioned_activations": "reset in a swap",
    "runtime/checkpoint_engine/decoupled_checkpoint_engine.py:DecoupledCheckpointEngine.commit": REFUSED,
    "runtime/comm/coalesced_collectives.py:*_quant_reduce": REFUSED,
    "runtime/data_pipeline/*": REFUSED,
    "runtime/engine.py:DeepSpeedEngine._configure_tensor_parallel_states": BUILT,
    "runtime/fp16/onebit/*": REFUSED,
    "runtime/hybrid_engine.py:*": REFUSED,
    "runtime/pipe/engine.py:PipelineEngine._aggregate_total_loss": "sums of one step",
    "runtime/pipe/engine.py:PipelineEngine._allocate_or_extend_buffers": "functools.reduce, no collective",
    "runtime/pipe/engine.py:PipelineEngine.eval_batch": REFUSED,
    "runtime/sequence_parallel/*": REFUSED,
    "runtime/utils.py:get_global_norm_of_tensors": REFUSED,
    "runtime/zenflow/*": REFUSED,
    "runtime/zero/parameter_offload.py:DeepSpeedZeRoOffload._register_deepspeed*": "all ranks forget it in a swap",
    "runtime/zero/muon/original_muon.py:Muon*.step": REFUSED,
    "runtime/zero/partition_parameters.py:Init._convert_to_deepspeed_param": BUILT,
    "runtime/zero/partition_parameters.py:Init._convert_to_deepspeed_param.all_gather_coalesced": "of one step",
    "runtime/zero/partition_parameters.py:InsertPostInitMethodToModuleSubClasses.patch_init_and_builtins": BUILT,
    "runtime/zero/stage3.py:DeepSpeedZeroOptimizer_Stage3.create_reduce_and_remove_grad_hooks": BUILT,
    "runtime/zero/stage3.py:DeepSpeedZeroOptimizer_Stage3._*muon_update*": REFUSED,
    "runtime/zero/stage3.py:DeepSpeedZeroOptimizer_Stage3._create_fp16_partitions_with_defragmentation": BUILT,
    "runtime/zero/stage3.py:DeepSpeedZeroOptimizer_Stage3._partitioned_buffers_all_gather": REFUSED,
    "runtime/zero/stage3.py:DeepSpeedZeroOptimizer_Stage3.has_overflow": "of one step",
    "runtime/zero/stage_1_and_2.py:DeepSpeedZeroOptimizer._muon_all_gather_partitions": REFUSED,
    "utils/groups.py:*": BUILT,
}


def dotted(node: ast.AST) -> str:
    """Name what `node` reads or writes, "" if it has no name; an item stands for its container."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        return f"{owner}.{node.attr}" if (owner := dotted(node.value)) else ""
    return dotted(node.value) if isinstance(node, ast.Subscript) else ""


def by_name(node: ast.AST, *functions: str) -> str:
    """Name the attribute that getattr and the like are asked for."""
    if isinstance(node, ast.Call) and dotted(node.func) in functions and len(node.args) > 1:
        attribute = node.args[1]
        return f"{dotted(node.args[0])}.{attribute.value!s}" if isinstance(attribute, ast.Constant) else ""
    return ""


def conditions(function: ast.AST) -> set[str]:
    """Names that the function's conditions read."""
    tests = [node.test for node in ast.walk(function) if isinstance(node, (ast.If, ast.IfExp, ast.While))]
    read = [node for test in tests for node in ast.walk(test)]
    return {name for node in read for name in (dotted(node), by_name(node, "getattr", "hasattr"))} - {""}


def kept(function: ast.AST) -> set[str]:
    """Names that the function writes and that outlive a call."""
    nodes = list(ast.walk(function))
    everywhere = {name for node in nodes if isinstance(node, ast.Global) for name in node.names}
    own = {node.arg for node in nodes if isinstance(node, ast.arg)}
    own |= {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)} - everywhere
    stored = [n for n in nodes if isinstance(n, (ast.Attribute, ast.Subscript)) and isinstance(n.ctx, ast.Store)]
    written = {dotted(node) for node in stored} | {by_name(node, "setattr") for node in nodes} | everywhere
    return {name for name in written - own - {""} if not name.startswith("ctx.")}  # autograd's, of one call


def communicates(function: ast.AST) -> bool:
    called = [node.func for node in ast.walk(function) if isinstance(node, ast.Call)]
    names = {func.attr if isinstance(func, ast.Attribute) else dotted(func) for func in called}
    return not names.isdisjoint(COLLECTIVES)


def places(node: ast.AST, prefix: str = "") -> Iterator[str]:
    """Find functions that communicate and keep an answer."""
    for child in ast.iter_child_nodes(node):
        named = isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef))
        name = (
            f"{prefix}{child.name}" if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)) else ""
        )
        if (
            isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef))
            and child.name != "__init__"
            and communicates(child)
        ):
            decorators = {dotted(d.func if isinstance(d, ast.Call) else d) for d in child.decorator_list}
            if conditions(child) & kept(child) or {d.rpartition(".")[2] for d in decorators} & CACHES:
                yield name
        yield from places(child, f"{name}." if named else prefix)


def unknown(root: Path, known: dict[str, str]) -> list[str]:
    """Places in the package at `root` that nobody has looked at."""
    paths = {path: path.relative_to(root).as_posix() for path in sorted(root.rglob("*.py"))}
    found = [f"{short}:{name}" for path, short in paths.items() for name in places(ast.parse(path.read_text()))]
    assert len(found) > 5, f"the search finds nothing in {root}"
    return [place for place in found if not any(fnmatch.fnmatchcase(place, pattern) for pattern in known)]


KEPT = [
    """
def has_group(self):
    if self._cache is None:
        self._cache = torch.distributed.all_reduce(flag)
    return self._cache
""",
    """
def listed(pattern):
    if (paths := _CACHE.get(pattern)) is not None:
        return paths
    dist.broadcast_object_list(payload)
    _CACHE[pattern] = payload[0]
""",
    """
def group_of(self):
    if not hasattr(self, "group"):
        setattr(self, "group", new_group([0, 1]))
""",
    """
def norm(optimizer):
    if optimizer._group is None:
        optimizer._group = dist.new_group()
""",
    """
@functools.lru_cache(maxsize=None)
def size(group):
    return dist.all_gather(found, 1)
""",
    """
class Model:
    def warm(self):
        global _warm
        while not _warm:
            _warm = self.group.barrier()
""",
]
FREE = [
    "def step(self):\n    if self.ready:\n        dist.all_reduce(self.grad)\n",
    "def step(self):\n    found = {}\n    if found:\n        found[0] = dist.all_reduce(self.grad)\n",
    "def step(self):\n    if self.count is None:\n        self.count = len(self.grads)\n",
]


@pytest.mark.parametrize("source", KEPT)
def test_an_answer_that_is_kept_is_found(source):
    assert len(list(places(ast.parse(source)))) == 1


@pytest.mark.parametrize("source", FREE)
def test_what_keeps_nothing_or_asks_nobody_is_not(source):
    assert not list(places(ast.parse(source)))


@pytest.mark.parametrize(("package", "known"), [("megatron.core", MEGATRON), ("deepspeed", DEEPSPEED)])
def test_every_place_in_the_installed_framework_is_known(package, known):
    name, _, part = package.partition(".")
    spec = importlib.util.find_spec(name)
    if spec is None:
        pytest.skip(f"{package} is not installed")
    (root, *_) = spec.submodule_search_locations or [""]
    strange = unknown(Path(root), known)
    assert not strange, f"{package} {part}: does a replacement need the answers that these keep? {strange}"


@pytest.mark.parametrize("tag", TAGS)
def test_every_place_in_a_tag_is_known(tmp_path, tag):
    clone = os.environ.get("MEGATRON_LM_GIT")
    if clone is None:
        pytest.skip("MEGATRON_LM_GIT is not set; expected the folder of a clone of NVIDIA/Megatron-LM with its tags")
    archive = subprocess.run(["git", "-C", clone, "archive", tag, "megatron"], capture_output=True, check=True)
    subprocess.run(["tar", "x", "-C", tmp_path], input=archive.stdout, check=True)
    assert not unknown(tmp_path / "megatron", MEGATRON)
