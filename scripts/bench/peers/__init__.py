"""Parts of scripts/bench_swap.py: training scripts with each peer's wrapper, drivers, figures, tables."""
