"""Importing this applies the patches for DeepSpeed: as applied.py, for lists of modules to import beforehand."""

from patches.cpu import deepspeed

deepspeed.apply()
