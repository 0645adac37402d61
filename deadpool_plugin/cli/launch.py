"""`deadpool launch DEEPSPEED'S ARGUMENTS... SCRIPT ARGUMENTS... [--deadpool-config FILE]`.

The `deepspeed` command with the same arguments; `--module deadpool_plugin.run` is put in where it is not given.
"""

from __future__ import annotations

import argparse

from ..launch.launcher import launch

VERBATIM = True
"""All words are deepspeed's and the script's."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "deadpool launch DEEPSPEED'S ARGUMENTS... SCRIPT ARGUMENTS... [--deadpool-config FILE]"
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = (
        "example:\n  deadpool launch --hostfile hosts.txt train.py --deepspeed_config ds.json \\\n"
        "    --deadpool-config deadpool.yaml"
    )
    parser.add_argument(
        "words",
        nargs="+",
        metavar="SCRIPT",
        help="deepspeed's arguments (`deepspeed --help`), the script, its arguments",
    )


def run(args: argparse.Namespace) -> int:
    """Raises: ConfigError."""
    return launch(args.words)
