"""`deadpool stop [OUTPUT_DIR | --to HOST:PORT] [--deadpool-config FILE]`.

For a job whose launcher is gone (`on_launcher_loss: continue`) or out of reach; whoever has its secret may.
"""

from __future__ import annotations

import argparse

from ..config import load
from ..errors import DeadpoolError
from ..launch.stop import stop
from .join import add_place, place
from .outcome import verdict


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_place(parser, "job", nargs="?")


def run(args: argparse.Namespace) -> int:
    """Raises: ConfigError, TransportError."""
    try:
        silent = stop(place(args))
    except DeadpoolError:
        # Without contacts or secret, which go with the job, it cannot be found: its event logs say why.
        ended = None if args.to else verdict(args.job or load(args.config).output_dir)
        if ended is None:
            raise
        print(f"[deadpool] nothing to stop: {ended}", flush=True)
        return 0
    unheard = f"; no answer came from {', '.join(silent)}" if silent else ""
    print(f"[deadpool] the job has ended; its last processes may need some seconds more{unheard}", flush=True)
    return 0
