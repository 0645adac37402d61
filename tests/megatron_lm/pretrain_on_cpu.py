"""pretrain_on_cpu.py CHECKOUT/SCRIPT ARGUMENTS: an unedited script of a Megatron-LM checkout where there is no GPU."""

import os
import runpy
import sys
import warnings
from pathlib import Path

SCRIPT = sys.argv[1] if len(sys.argv) > 1 else ""
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
sys.path[:0] = [str(Path(SCRIPT).resolve().parent), str(Path(__file__).resolve().parents[2])]
warnings.filterwarnings("ignore")

from patches import cpu  # noqa: E402

cpu.apply()

from patches.cpu import megatron_lm  # noqa: E402

megatron_lm.apply()

if __name__ == "__main__":
    sys.argv = sys.argv[1:]
    runpy.run_path(SCRIPT, run_name="__main__")
