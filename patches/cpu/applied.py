"""Importing this applies the patches: for lists of modules to import beforehand (`preload` in the plugin's YAML)."""

from patches import cpu

cpu.apply()
