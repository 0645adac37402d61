"""`deadpool config [--examples]`: every field of the configuration file, its default and what it means; or examples.

Rules of this file: what pip puts beside the package (configs/, patches/) is found by `shipped`, in a checkout too.
"""

from __future__ import annotations

import argparse
import os
import sysconfig
from pathlib import Path

from ..config import explained
from ..errors import EXIT_OK, ConfigError

_ROOT = Path(__file__).resolve().parents[2]
_SHARE = "share/deadpool_plugin"
_PLACES = (
    _ROOT,  # a checkout
    _ROOT / _SHARE,  # pip install --target
    Path(sysconfig.get_path("data")) / _SHARE,
    Path(sysconfig.get_path("data", f"{os.name}_user")) / _SHARE,
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--examples", action="store_true", help="list the example files (Slurm, DeepSpeed) instead")
    parser.epilog = "deadpool config > deadpool.yaml"


def run(args: argparse.Namespace) -> int:
    """Raises: ConfigError if the examples are not there."""
    if args.examples:
        print(*sorted(shipped("configs/minimal.yaml").parent.iterdir()), sep="\n")
    else:
        print(explained(), end="")
    return EXIT_OK


def shipped(path: str) -> Path:
    """Find `path` of the repository in a checkout, or where pip has put it. Raises: ConfigError."""
    found = next((place / path for place in _PLACES if (place / path).exists()), None)
    if found is None:
        raise ConfigError(f"no {path} in {' or '.join(map(str, _PLACES))}", remedy="install deadpool_plugin again")
    return found
