"""NVIDIA/Megatron-LM's own training scripts on emulated clusters, with and without the plugin."""
