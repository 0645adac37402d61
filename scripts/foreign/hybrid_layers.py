"""The layers of pretrain_hybrid.py (`--spec foreign.hybrid_layers stack`) that run on a CPU: attention and MLP.

Megatron-core's own specification asks for Transformer Engine; Mamba layers and gated delta nets ask for kernels of a
GPU.

Rules of this file: the checkout's classes only; nothing of the plugin.
"""

from dataclasses import replace

from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_submodules
from megatron.core.models.hybrid.hybrid_block import HybridStack, HybridStackSubmodules
from megatron.core.ssm.mlp_layer import MLPLayer
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules

_whole, _empty = get_gpt_layer_local_submodules(), TransformerLayerSubmodules()
_attention = replace(_whole, pre_mlp_layernorm=_empty.pre_mlp_layernorm, mlp=_empty.mlp, mlp_bda=_empty.mlp_bda)
_mlp = replace(_empty, pre_mlp_layernorm=_whole.pre_mlp_layernorm, mlp=_whole.mlp, mlp_bda=_whole.mlp_bda)
stack = ModuleSpec(
    module=HybridStack,
    params={"post_layer_norm": False},  # it would be Transformer Engine's
    submodules=HybridStackSubmodules(
        attention_layer=ModuleSpec(module=TransformerLayer, submodules=_attention),
        mlp_layer=ModuleSpec(module=MLPLayer, submodules=_mlp),
    ),
)
