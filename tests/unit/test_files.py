"""A file is replaced as a whole, whatever a process that was killed has left beside it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from deadpool_plugin.host import files


@pytest.mark.parametrize("mode", [0o666, 0o600], ids=oct)
def test_a_file_is_replaced_and_nothing_left_beside_it(tmp_path, monkeypatch, mode):
    path = tmp_path / "one"
    path.write_text("before")
    umask = os.umask(0o022)
    try:
        with monkeypatch.context() as patch:
            patch.setattr(Path, "replace", lambda draft, target: None)  # killed here
            files.put(path, b"half")
        assert path.read_text() == "before" and len(list(tmp_path.iterdir())) == 2
        files.put(path, b"after", mode)
    finally:
        os.umask(umask)
    assert path.read_text() == "after" and path.stat().st_mode & 0o777 == mode & ~0o022
    assert [left.name for left in tmp_path.iterdir()] == ["one"]
