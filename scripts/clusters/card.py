"""Several ranks on one NVIDIA card: what NCCL, cuBLAS and torch must be told for that.

NCCL takes two ranks of one host on the same card for a mistake. Before 2.30 it goes by the host's hash, which follows
NCCL_HOSTID (src/misc/utils.cc, src/init.cc): ranks that pass for hosts of their own may share a card, and talk over
sockets. From 2.30 on NCCL_MULTI_RANK_GPU_ENABLE allows it.

Rules of this file: standard library only.
"""

from __future__ import annotations

import subprocess

TOGETHER = {
    "NCCL_MULTI_RANK_GPU_ENABLE": "1",
    "NCCL_P2P_DISABLE": "1",
    "NCCL_SHM_DISABLE": "1",
    "NCCL_SOCKET_IFNAME": "lo",
    "NCCL_IB_DISABLE": "1",
    "NCCL_NVLS_ENABLE": "0",
    "NCCL_MAX_CTAS": "2",
}
REPEATABLE = {
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    "NCCL_ALGO": "Ring",
    "NCCL_PROTO": "Simple",
}
"""With these and torch.use_deterministic_algorithms a job's numbers are the same in every run."""

STAND_IN = "stand-in"
"""A card with this word in its name is that of tests/fakecuda: what it shows proves nothing of a real one."""


def environment(cards: int = 1) -> dict[str, str]:
    """Return the variables that all processes of a job share whose emulated hosts all have these same cards."""
    cheap_question = {"PYTORCH_NVML_BASED_CUDA_CHECK": "1"}  # asking for a GPU must not initialise CUDA before a fork
    visible = {"CUDA_VISIBLE_DEVICES": ",".join(map(str, range(cards)))}
    return {**TOGETHER, **REPEATABLE, **cheap_question, **visible}


def host_id(host: int) -> dict[str, str]:
    """Return the variables that make the ranks of one emulated host pass for those of a host of their own."""
    return {"NCCL_HOSTID": f"node{host}"}


def used_mib() -> int:
    """Memory of the first card that is in use, by whatever process."""
    words = ["nvidia-smi", "--id=0", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    return int(subprocess.run(words, capture_output=True, text=True, check=True).stdout.split()[0])


def is_stand_in() -> bool:
    """Return whether the first card is a stand-in; CUDA is not initialised by asking."""
    words = ["nvidia-smi", "--id=0", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    return STAND_IN in subprocess.run(words, capture_output=True, text=True, check=True).stdout
