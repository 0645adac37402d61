"""Files that other hosts or programs may look at at any moment: each appears whole or not at all.

- `OUTPUT_DIR/nodes/<id>.json`, where a host that wants to join finds a living member. A killed node's is harmless,
  because nobody of its job answers there. It says where the secret lies, not the secret.
- The witness of ties: one file per generation on storage that all hosts share, written by the first node.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from pathlib import Path

import msgspec

from ..core.types import Generation, NodeId, SwapPlan
from ..transport.rendezvous import Hello
from ..transport.sockets import Address

CONTACTS_FOLDER = "nodes"


def put(path: Path, content: bytes, mode: int = 0o666) -> None:
    """Replace the content of `path` as a whole. Raises: OSError. Args: mode: as for open(2), less the umask."""
    draft = path.with_name(f".{path.name}.{os.uname().nodename}.{os.getpid()}")  # hosts may share the folder
    draft.unlink(missing_ok=True)  # of one that had our number and was killed here
    with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode), "wb") as file:
        file.write(content)
    draft.replace(path)


def put_once(path: Path, content: bytes) -> None:
    """Make `path` hold `content`, unless somebody has put something there before. Raises: OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=".draft-") as draft:
        draft.write(content)
        draft.flush()
        os.fsync(draft.fileno())
        # link(2) is atomic, over NFS too; whether a link whose answer was lost was made is seen by reading.
        with contextlib.suppress(FileExistsError):
            os.link(draft.name, path)


class ContactFile(msgspec.Struct, frozen=True):
    """One node's file. `secret_files`: where the job's secret may lie; `job`: the id of its job."""

    node: NodeId
    host: str
    pid: int
    control: Address
    secret_files: tuple[str, ...]
    job: str


_contact: msgspec.json.Decoder[ContactFile] = msgspec.json.Decoder(ContactFile)  # made here: see mirror/wire.py
_plan: msgspec.msgpack.Decoder[SwapPlan] = msgspec.msgpack.Decoder(SwapPlan)


def contact_file(output_dir: Path, node: NodeId) -> Path:
    return output_dir / CONTACTS_FOLDER / f"{node}.json"


def publish(output_dir: Path, hello: Hello, secret_files: tuple[str, ...], job: str) -> None:
    path = contact_file(output_dir, hello.node)
    path.parent.mkdir(parents=True, exist_ok=True)
    put(path, msgspec.json.encode(ContactFile(hello.node, hello.host, os.getpid(), hello.control, secret_files, job)))


def withdraw(output_dir: Path, node: NodeId) -> None:
    """Remove this process's contact; one that another process has written in its place stays."""
    with contextlib.suppress(OSError, msgspec.MsgspecError):
        path = contact_file(output_dir, node)
        if _contact.decode(path.read_bytes()).pid == os.getpid():
            path.unlink()


def published(output_dir: Path) -> list[ContactFile]:
    """Read all nodes' contacts, the youngest first; what cannot be read is left out."""
    found: list[tuple[float, ContactFile]] = []
    for path in (output_dir / CONTACTS_FOLDER).glob("[0-9]*.json"):
        with contextlib.suppress(OSError, msgspec.MsgspecError):
            found.append((path.stat().st_mtime, _contact.decode(path.read_bytes())))
    return [contact for _, contact in sorted(found, key=lambda entry: -entry[0])]


class SharedFolder:
    """The witness of ties: a directory on storage that all hosts share, whose files never change.

    Thread: any. Every method blocks for the storage and raises OSError.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def __str__(self) -> str:
        return str(self._directory)

    def keep(self, job: str, plan: SwapPlan) -> SwapPlan:
        """Return the plan that the folder has for this job and generation from now on: `plan`, unless there was one."""
        path = self._directory / f"{job}.{plan.world.generation}"
        put_once(path, msgspec.msgpack.encode(plan))
        return _plan.decode(path.read_bytes())

    def look(self, job: str, generation: Generation) -> SwapPlan | None:
        with contextlib.suppress(FileNotFoundError):
            return _plan.decode((self._directory / f"{job}.{generation}").read_bytes())
        return None

    def share(self, job: str) -> None:
        """Leave a file there for `is_shared`, made as plans are."""
        put_once(self._directory / f"{job}.shared", b"")

    def is_shared(self, job: str) -> bool:
        """Return whether another host's `share` is seen here."""
        return (self._directory / f"{job}.shared").exists()
