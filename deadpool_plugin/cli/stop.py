"""`deadpool stop [OUTPUT_DIR | --to HOST:PORT] [--deadpool-config FILE]`.

For a job whose launcher is gone (`on_launcher_loss: continue`) or out of reach; whoever has its secret may.
"""

from __future__ import annotations

import argparse

from ..launch.stop import stop
from .join import add_place, place


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_place(parser, "job", nargs="?")


def run(args: argparse.Namespace) -> int:
    """Raises: ConfigError, TransportError."""
    silent = stop(place(args))
    unheard = f"; no answer came from {', '.join(silent)}" if silent else ""
    print(f"[deadpool] the job has ended; its last processes may need some seconds more{unheard}", flush=True)
    return 0
