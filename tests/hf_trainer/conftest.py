"""Makes `support` and the scripts importable, and a corpus that all jobs of a session share."""

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "scripts")]

from support import corpus as corpora  # noqa: E402


@pytest.fixture(scope="session")
def corpus(tmp_path_factory):
    """Prefix of a small indexed data set (.bin, .idx)."""
    pytest.importorskip("megatron.core")
    return corpora.make(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="session")
def references(tmp_path_factory):
    """Directory in which undisturbed runs are kept, one per configuration."""
    return str(tmp_path_factory.mktemp("references"))
