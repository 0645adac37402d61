"""Which checkout of NVIDIA/Megatron-LM is tested (MEGATRON_LM_PATH), and a corpus and undisturbed runs to share.

MEGATRON_LM_RESULTS names a file that gets a JSON line per test: what became of it, in how many seconds.
"""

import importlib.util
import os
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "scripts"), str(ROOT)]

from support import corpus as corpora, record  # noqa: E402

NEEDED = ("megatron.core", "six", "regex")
"""Besides torch; the last two are imported by megatron.training's tokenizers."""


def reason_to_skip():
    path = os.environ.get("MEGATRON_LM_PATH", "")
    if not path:
        return "MEGATRON_LM_PATH is not set; expected the folder of a Megatron-LM checkout, core_v0.16.1"
    if not Path(path, "pretrain_gpt.py").is_file():
        return f"MEGATRON_LM_PATH={path}: there is no pretrain_gpt.py; expected a Megatron-LM checkout"
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    return f"not installed: {', '.join(missing)}" if missing else ""


def version(path):
    """As the checkout itself says it."""
    found = dict(re.findall(r"(MAJOR|MINOR|PATCH) = (\d+)", Path(path, "megatron/core/package_info.py").read_text()))
    return ".".join(found[name] for name in ("MAJOR", "MINOR", "PATCH"))


def versions():
    return {"megatron_lm": version(os.environ["MEGATRON_LM_PATH"])}


def pytest_runtest_logreport(report):
    record.keep(report, "megatron_lm", "MEGATRON_LM_RESULTS", versions)


@pytest.fixture(scope="session")
def checkout():
    if reason := reason_to_skip():
        pytest.skip(reason)
    return Path(os.environ["MEGATRON_LM_PATH"]).resolve()


@pytest.fixture(scope="session")
def corpus(checkout, tmp_path_factory):
    """Prefix of real text as a .bin/.idx pair."""
    return corpora.make(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="session")
def references(tmp_path_factory):
    """Folder in which undisturbed runs are kept."""
    return tmp_path_factory.mktemp("references")
