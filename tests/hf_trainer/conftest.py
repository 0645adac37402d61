"""A corpus that all jobs of a session share, and a record of what was tested.

HF_TRAINER_RESULTS names a file that gets a JSON line per test: what became of it, in how many seconds, with what.
"""

import importlib.metadata
import json
import os
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "scripts"), str(ROOT)]
TESTED = ("transformers", "accelerate", "deepspeed", "safetensors", "torch")

from support import corpus as corpora  # noqa: E402


def pytest_runtest_logreport(report):
    if report.when == "call" and "tests/hf_trainer/" in report.nodeid and "HF_TRAINER_RESULTS" in os.environ:
        line = {"test": report.nodeid.removeprefix("tests/hf_trainer/"), "outcome": report.outcome}
        line["seconds"] = round(report.duration, 1)
        line.update((name, importlib.metadata.version(name)) for name in TESTED)
        with open(os.environ["HF_TRAINER_RESULTS"], "a") as file:
            file.write(json.dumps(line) + "\n")


@pytest.fixture(scope="session")
def corpus(tmp_path_factory):
    """Prefix of a small indexed data set (.bin, .idx)."""
    pytest.importorskip("megatron.core")
    return corpora.make(tmp_path_factory.mktemp("corpus"))
