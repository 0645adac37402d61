import ctypes
import errno
import mmap
import os
import re
import select
import signal
import socket
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given, settings, strategies as st
from support.descriptors import none_left_open

from deadpool_plugin.core.local import ArenaHandOver, Staged
from deadpool_plugin.errors import ConfigError, MemoryShortage, TransportError
from deadpool_plugin.mirror import arena
from deadpool_plugin.mirror.arena import PAGE_BYTES, SlotPair, SnapshotHeader
from deadpool_plugin.transport.unix import LocalConnection

PAYLOAD = 3 * PAGE_BYTES + 17


def test_two_slots_hold_two_steps() -> None:
    pair = SlotPair.create(5, 4096, PAYLOAD)
    assert pair.open(0) is None and pair.open(1) is None
    for step in (6, 7):
        pair.invalidate(step)
        pair.payload(step)[:] = bytes([step]) * PAYLOAD
        pair.seal(step, 2, "layout", b"scalars %d" % step)
    assert pair.open(6) == SnapshotHeader(5, 6, 2, "layout", PAYLOAD, b"scalars 6")
    assert pair.open(7) == SnapshotHeader(5, 7, 2, "layout", PAYLOAD, b"scalars 7")
    assert bytes(pair.payload(6)) == b"\x06" * PAYLOAD
    assert pair.open(8) is None and pair.open(4) is None
    pair.invalidate(8)
    assert pair.open(6) is None and pair.open(7) is not None
    pair.close()


def test_a_step_that_was_written_before_is_not_written_again_over_what_must_stay() -> None:
    agents = SlotPair.create(5, 4096, PAYLOAD)
    workers = SlotPair.attach(os.dup(agents.fd), 5, 4096, PAYLOAD)
    for step in (4, 6):
        agents.invalidate(step)
        agents.seal(step, 0, "layout", b"")
    workers.drop_newer(4)
    workers.invalidate(5, keep=4)
    workers.seal(5, 1, "layout", b"")
    agents.invalidate(6, keep=5)
    agents.payload(6)[:] = b"\x06" * PAYLOAD
    agents.seal(6, 1, "layout", b"")
    assert agents.open(5) is not None and agents.open(6) is not None and agents.open(4) is None
    agents.close()
    workers.close()


def test_what_is_announced_is_seen_by_who_has_the_same_slots() -> None:
    agents = SlotPair.create(5, 4096, PAYLOAD)
    workers = SlotPair.attach(os.dup(agents.fd), 5, 4096, PAYLOAD)
    for step in (0, 1):
        workers.payload(step)[:] = b"\xff" * PAYLOAD
        workers.seal(step, 0, "layout", b"\xff" * 4000)
    assert workers.announced == 0
    agents.announce(3)
    assert workers.announced == 3
    assert all(bytes(agents.payload(step)) == b"\xff" * PAYLOAD and agents.open(step) for step in (0, 1))
    agents.close()
    workers.close()


def test_too_large_scalars_name_the_setting() -> None:
    pair = SlotPair.create(0, 4096, 0)
    with pytest.raises(ConfigError, match="set header_kib to at least 5"):
        pair.seal(0, 0, "layout", bytes(4097))
    assert pair.open(0) is None
    pair.close()


@settings(max_examples=60)
@given(st.integers(0, 100), st.integers(1, 255))
def test_a_damaged_header_is_no_header(position: int, flip: int) -> None:
    pair = SlotPair.create(0, 4096, 0)
    pair.seal(0, 0, "layout", bytes(100))
    area = memoryview(pair._map)
    area[position] ^= flip
    assert pair.open(0) is None
    area.release()
    pair.close()


def test_nobody_can_resize_and_only_the_right_shape_is_attached() -> None:
    pair = SlotPair.create(0, 4096, PAYLOAD)
    with pytest.raises(PermissionError):
        os.ftruncate(pair.fd, 1)
    with pytest.raises(TransportError, match="expected"):
        SlotPair.attach(pair.fd, 0, 4096, PAYLOAD + PAGE_BYTES)
    unsealed = os.memfd_create("unsealed")
    os.ftruncate(unsealed, os.fstat(pair.fd).st_size)
    with pytest.raises(TransportError, match="not sealed"):
        SlotPair.attach(unsealed, 0, 4096, PAYLOAD)
    os.close(unsealed)
    pair.close()


@pytest.mark.parametrize("advice", [23, 9999], ids=["populated", "an older kernel"])
def test_all_pages_are_in_memory_from_the_beginning(monkeypatch: pytest.MonkeyPatch, advice: int) -> None:
    monkeypatch.setattr("deadpool_plugin.mirror.arena._MADV_POPULATE_WRITE", advice)
    pair = SlotPair.create(0, 4096, 20 << 20)
    assert os.fstat(pair.fd).st_blocks * 512 >= 40 << 20
    pair.close()


@pytest.mark.parametrize("refuses", ["madvise", "posix_fallocate"], ids=["populated", "an older kernel"])
def test_memory_that_is_refused_is_a_shortage(monkeypatch: pytest.MonkeyPatch, refuses: str) -> None:
    """As where vm.overcommit_memory is 2, or a cgroup is full: there a plain write would be SIGBUS."""
    calls = 0

    def refused(*arguments: object) -> int:
        nonlocal calls
        calls += 1
        if calls == 1:
            return 0
        if refuses != "madvise":
            raise OSError(errno.ENOSPC, "No space left on device")
        ctypes.set_errno(errno.ENOMEM)
        return -1

    if refuses == "madvise":
        monkeypatch.setattr(arena, "libc", SimpleNamespace(madvise=refused))
    else:
        monkeypatch.setattr(arena, "_MADV_POPULATE_WRITE", 9999)
        monkeypatch.setattr(os, "posix_fallocate", refused)
    why = rf"slots of {arena.arena_bytes(4096, 20 << 20)} bytes for rank 0 .* after 8388608 bytes"
    with none_left_open(), pytest.raises(MemoryShortage, match=why) as caught:
        SlotPair.create(0, 4096, 20 << 20)
    assert calls == 2 and caught.value.exit_code == 78


def test_a_core_dump_of_either_process_has_no_snapshots_in_it() -> None:
    pair = SlotPair.create(77, 4096, PAYLOAD)
    attached = SlotPair.attach(os.dup(pair.fd), 77, 4096, PAYLOAD)
    regions = re.findall(r"deadpool-rank77\b.*\n(?:\w+:.*\n)*?VmFlags:(.*)", Path("/proc/self/smaps").read_text())
    assert len(regions) == 2 and all("dd" in flags.split() for flags in regions)
    attached.close()
    pair.close()


def test_making_slots_can_be_given_up() -> None:
    calls = 0

    def twice() -> None:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise TransportError("enough")

    with none_left_open(), pytest.raises(TransportError, match="enough"):
        SlotPair.create(0, 4096, 20 << 20, twice)
    assert calls == 2


def test_what_the_kernel_does_not_give_is_a_shortage_of_memory() -> None:
    with none_left_open(), pytest.raises(MemoryShortage, match="for rank 3 cannot be made"):
        SlotPair.create(3, 4096, 1 << 58)


def test_views_outlive_close() -> None:
    pair = SlotPair.create(0, 4096, PAYLOAD)
    view = pair.payload(0)
    pair.close()
    view[:3] = b"abc"
    assert pair.open(0) is None
    assert isinstance(view.obj, mmap.mmap)


def stage_for_ever(sock: socket.socket) -> None:
    """The worker of the next test: seals step 0, then rewrites the slot of step 1 until it is killed."""
    agent = LocalConnection(sock)
    order, (fd,) = agent.recv()
    assert isinstance(order, ArenaHandOver)
    pair = SlotPair.attach(fd, order.rank, order.header_bytes, order.payload_bytes)
    for step in (0, 1):
        pair.payload(step)[:] = bytes([step + 1]) * order.payload_bytes
        pair.seal(step, 0, "layout", b"")
    pair.invalidate(3, keep=0)
    source = b"\x07" * order.payload_bytes
    pair.payload(3)[: len(source) // 2] = source[: len(source) // 2]
    agent.send(Staged(0, 0, 0, [b""]))
    while True:
        pair.payload(3)[:] = source


def test_a_writer_killed_in_mid_copy_leaves_the_other_slot() -> None:
    near, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    pair = SlotPair.create(0, 4096, 8 << 20)
    child = os.fork()
    if child == 0:
        try:
            near.close()
            stage_for_ever(far)
        finally:
            os._exit(1)
    far.close()
    worker = LocalConnection(near)
    worker.send(ArenaHandOver(0, 4096, 8 << 20), [pair.fd])
    assert select.select([worker], [], [], 20)[0], "nothing in time"
    assert worker.recv() == (Staged(0, 0, 0, [b""]), [])
    os.kill(child, signal.SIGKILL)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL
    assert pair.payload(1)[0] == 7, "the kill must have struck a slot in mid copy"
    assert pair.open(1) is None and pair.open(3) is None
    header = pair.open(0)
    assert header is not None and header.step == 0
    assert pair.payload(0) == b"\x01" * (8 << 20)
    worker.close()
    pair.close()
