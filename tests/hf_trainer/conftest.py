"""A corpus that all jobs of a session share, and a record of what was tested.

HF_TRAINER_RESULTS names a file that gets a JSON line per test: what became of it, in how many seconds, with what.
"""

import importlib.metadata
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "scripts"), str(ROOT)]
TESTED = ("transformers", "accelerate", "deepspeed", "safetensors", "torch")

from support import corpus as corpora, record  # noqa: E402


def versions():
    return {name: importlib.metadata.version(name) for name in TESTED}


def pytest_runtest_logreport(report):
    record.keep(report, "hf_trainer", "HF_TRAINER_RESULTS", versions)


@pytest.fixture(scope="session")
def corpus(tmp_path_factory):
    """Prefix of a small indexed data set (.bin, .idx)."""
    pytest.importorskip("megatron.core")
    return corpora.make(tmp_path_factory.mktemp("corpus"))
