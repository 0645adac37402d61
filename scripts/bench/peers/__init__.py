"""What scripts/bench_swap.py is made of: training scripts with each peer's wrapper, drivers, figures, tables."""
