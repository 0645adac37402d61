"""`deadpool config`: every field of the configuration file, its default and what it means, as a file to begin with."""

from __future__ import annotations

import argparse

from ..config import explained


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = "deadpool config > deadpool.yaml"


def run(args: argparse.Namespace) -> int:
    print(explained(), end="")
    return 0
