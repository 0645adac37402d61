"""`OUTPUT_DIR/nodes/<id>.json`: where a host that wants to join finds a living member, on a shared file system.

Rules of this file: a file appears whole or not at all and goes with its node's orderly end; what a killed node leaves
behind is harmless, because nobody of its job answers there. Where the secret lies is in it, the secret is not.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import msgspec

from ..core.types import NodeId
from ..transport.rendezvous import Hello
from ..transport.sockets import Address
from . import files

FOLDER = "nodes"


class Contact(msgspec.Struct, frozen=True):
    """One node's file. `secret_files`: where the job's secret may lie; `job`: the id of its job."""

    node: NodeId
    host: str
    pid: int
    control: Address
    secret_files: tuple[str, ...]
    job: str


def path_of(output_dir: Path, node: NodeId) -> Path:
    return output_dir / FOLDER / f"{node}.json"


def publish(output_dir: Path, hello: Hello, secret_files: tuple[str, ...], job: str) -> None:
    """Write this node's file. Raises: OSError."""
    path = path_of(output_dir, hello.node)
    path.parent.mkdir(parents=True, exist_ok=True)
    contact = Contact(hello.node, hello.host, os.getpid(), hello.control, secret_files, job)
    files.put(path, msgspec.json.encode(contact))


def withdraw(output_dir: Path, node: NodeId) -> None:
    """Remove this process's file; one that another process has written in its place stays."""
    with contextlib.suppress(OSError, msgspec.MsgspecError):
        path = path_of(output_dir, node)
        if _read(path).pid == os.getpid():
            path.unlink()


def published(output_dir: Path) -> list[Contact]:
    """All nodes' files, the youngest first; what cannot be read is left out."""
    found: list[tuple[float, Contact]] = []
    for path in (output_dir / FOLDER).glob("[0-9]*.json"):
        with contextlib.suppress(OSError, msgspec.MsgspecError):
            found.append((path.stat().st_mtime, _read(path)))
    return [contact for _, contact in sorted(found, key=lambda entry: -entry[0])]


def _read(path: Path) -> Contact:
    return msgspec.json.decode(path.read_bytes(), type=Contact)
