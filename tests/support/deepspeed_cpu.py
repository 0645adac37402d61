"""DeepSpeed where there is no GPU, imported once for all processes that tests fork."""

import os

import pytest

try:
    from patches.cpu import deepspeed as deepspeed_on_cpu

    deepspeed_on_cpu.apply()
    import deepspeed.runtime.zero.muon.muon_optimizer  # noqa: F401 - preloaded for the forks: 5 CPU seconds

    IS_INSTALLED = True
except ImportError:
    IS_INSTALLED = False

needs_deepspeed = pytest.mark.skipif(not IS_INSTALLED, reason="deepspeed is not installed")
os.environ.setdefault("MASTER_ADDR", "127.0.0.1")  # DeepSpeed wants to see them; nobody connects there
os.environ.setdefault("MASTER_PORT", "1")
