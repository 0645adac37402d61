"""Importing this applies the patches for Megatron-LM's own scripts: as applied.py, with the checkout on sys.path."""

from patches import cpu
from patches.cpu import megatron_lm

cpu.apply()
megatron_lm.apply()
