"""Byte-level corpus out of Python's own standard library, in Megatron's .bin/.idx format.

Rules of this file: the same interpreter gives the same bytes (files sorted by name, no clock, no randomness); one
source file is one document, one byte is one token, and every document ends with `END_OF_DOCUMENT`. Finished files
appear under their names at once, so a reader never sees half a corpus.

    python scripts/make_corpus.py PREFIX [--mebibytes 3]
"""

from __future__ import annotations

import argparse
import logging
import os
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

END_OF_DOCUMENT = 256
"""The token after each document; 0 to 255 are the bytes themselves."""
VOCABULARY = 257


def source_files() -> list[Path]:
    """The standard library's top-level modules and its packages' modules, sorted, tests left out."""
    root = Path(sysconfig.get_path("stdlib"))
    left_out = {"test", "tests", "site-packages", "idlelib", "lib2to3", "__pycache__"}
    paths = (path for path in root.rglob("*.py") if not left_out.intersection(path.relative_to(root).parts))
    return sorted(paths, key=lambda path: path.relative_to(root).as_posix())


def documents(limit_bytes: int) -> Iterator[bytes]:
    """Contents of the source files, until `limit_bytes` bytes have been given."""
    given_bytes = 0
    for path in source_files():
        if given_bytes >= limit_bytes:
            return
        content = path.read_bytes()
        if content:
            given_bytes += len(content)
            yield content


def write_corpus(prefix: Path, limit_bytes: int) -> int:
    """Write `prefix`.bin and `prefix`.idx. Returns the number of tokens.

    Source: megatron.core.datasets.indexed_dataset.IndexedDatasetBuilder, the writer of Megatron's own preprocessing.
    """
    import numpy
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    prefix.parent.mkdir(parents=True, exist_ok=True)
    temporary = prefix.with_name(f".{prefix.name}.{os.getpid()}")
    builder = IndexedDatasetBuilder(f"{temporary}.bin", dtype=numpy.uint16)
    tokens_total = 0
    for content in documents(limit_bytes):
        tokens = numpy.append(numpy.frombuffer(content, dtype=numpy.uint8).astype(numpy.uint16), END_OF_DOCUMENT)
        builder.add_document(tokens, [tokens.size])
        tokens_total += int(tokens.size)
    builder.finalize(f"{temporary}.idx")
    os.replace(f"{temporary}.bin", f"{prefix}.bin")
    os.replace(f"{temporary}.idx", f"{prefix}.idx")
    return tokens_total


def ensure(prefix: Path) -> None:
    """Make it unless it is there, in a process of its own: whoever needs it may be about to fork."""
    if not Path(f"{prefix}.idx").exists():
        subprocess.run([sys.executable, "-W", "ignore", __file__, str(prefix)], check=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("prefix", type=Path, help="path without .bin/.idx")
    parser.add_argument("--mebibytes", type=float, default=3.0, help="stop after this much source text")
    args = parser.parse_args()
    logging.basicConfig(level=logging.ERROR)
    tokens_total = write_corpus(args.prefix, int(args.mebibytes * 2**20))
    print(f"{args.prefix}.bin: {tokens_total} tokens")


if __name__ == "__main__":
    main()
