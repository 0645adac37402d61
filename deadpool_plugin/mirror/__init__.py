"""Snapshots in host memory: the arena, what is held of whom, and the transfer between nodes. Imports no torch."""
