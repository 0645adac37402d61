"""`deadpool join [--job OUTPUT_DIR | --to HOST:PORT] [--deadpool-config FILE] [-- SCRIPT ARGUMENTS...]`.

Run on the host that shall join a running job; it stays until the job ends, and what the host's ranks say appears here.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import msgspec

from ..errors import ConfigError
from ..launch.argv import FLAG
from ..launch.join import Wish, join
from ..transport.sockets import Address


def add_place(parser: argparse.ArgumentParser, name: str, **more: Any) -> None:
    """Add the options that say which job is meant. `name`: of the argument for its output_dir; `more`: about that."""
    where = parser.add_mutually_exclusive_group()
    where.add_argument(
        name, type=Path, metavar="OUTPUT_DIR",
        help="the job's output_dir, on a shared file system; without it and --to: that of the configuration", **more,
    )  # fmt: skip
    where.add_argument("--to", metavar="HOST:PORT", help="a node of the job, as its output says (`to add a host: ...`)")
    parser.add_argument(FLAG, dest="config", default="", metavar="FILE", help="the job's configuration file")


def place(args: argparse.Namespace) -> Wish:
    """Read the options of `add_place`. Raises: ConfigError."""
    return Wish(address(args.to) if args.to is not None else None, args.job, args.config)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_place(parser, "--job")
    parser.add_argument(
        "command", nargs="*", metavar="-- SCRIPT ARGUMENTS", help="the job's command, to be sure it is that one"
    )


def run(args: argparse.Namespace) -> int:
    """Raises: ConfigError, TransportError."""
    return join(msgspec.structs.replace(place(args), command=args.command))


def address(text: str) -> Address:
    """`HOST:PORT`, `[IPv6]:PORT`. Raises: ConfigError."""
    host, colon, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not colon or not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise ConfigError(f"--to is `{text}`", "HOST:PORT", "take it from the job's output: `to add a host: ...`")
    return host, int(port)
