"""`deadpool stop [OUTPUT_DIR | --to HOST:PORT] [--deadpool-config FILE]`.

For a job whose launcher is gone (`on_launcher_loss: continue`) or out of reach; whoever has its secret may.
"""

from __future__ import annotations

import argparse

from ..config import load
from ..errors import ConfigError, DeadpoolError
from ..launch.join import FoundJob, find
from ..launch.stop import stop
from .join import add_place, place
from .model import span
from .outcome import last_outcome


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_place(parser, "job", nargs="?")


def run(args: argparse.Namespace) -> int:
    """Raises: ConfigError, TransportError."""
    silent = stop(_found(args))
    unheard = f"; no answer came from {', '.join(silent)}" if silent else ""
    print(f"[deadpool] the job has ended; its last processes may need some seconds more{unheard}", flush=True)
    return 0


def _found(args: argparse.Namespace) -> FoundJob:
    """Find the job. Raises: ConfigError, TransportError; if its event logs say that it has ended, so does the error."""
    try:
        return find(place(args))
    except DeadpoolError as error:
        folder = None if args.to else args.job or load(args.config).output_dir
        if folder is None or (last := last_outcome(folder)) is None:
            raise
        ended, ago_s = last
        found = f"no running job is found in {folder}; the last one there ended {span(ago_s)} ago: {ended}"
        remedy = "nothing, if that is the one; one that is only starting is ended where it was launched"
        raise ConfigError(found, "a job that runs", remedy) from error
