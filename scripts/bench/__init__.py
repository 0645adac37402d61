"""What scripts/bench_mirror.py is made of: its job, the floor it compares with, its figures."""
