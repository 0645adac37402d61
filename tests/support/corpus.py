"""A corpus that all tests of one run share."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

MAKE = Path(__file__).resolve().parents[2] / "scripts" / "make_corpus.py"


def make(folder: Path) -> str:
    """Write 1 MiB of real text as an indexed data set; the prefix of its .bin and .idx."""
    prefix = folder / "python"
    command = [sys.executable, str(MAKE), str(prefix), "--mebibytes", "1"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return str(prefix)
