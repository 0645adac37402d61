"""What is done with a module as soon as a script imports it."""

import importlib
import importlib.util
import sys
from functools import partial

from support import present

from deadpool_plugin.worker.patching import when_imported


def test_a_module_is_acted_on_when_it_is_imported_and_not_before(tmp_path, monkeypatch):
    (tmp_path / "imported_later.py").write_text("VALUE = 1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    acted = []
    when_imported("imported_later", lambda module: acted.append(module.VALUE))
    assert acted == []
    import imported_later

    assert acted == [1]
    when_imported("imported_later", lambda module: acted.append(2))
    assert acted == [1, 2]
    del sys.modules["imported_later"]
    import imported_later  # noqa: F401, F811

    assert acted == [1, 2]


def test_a_module_that_several_wait_for_is_imported_for_all_of_them(tmp_path, monkeypatch):
    (tmp_path / "waited_for.py").write_text("VALUE = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    acted = []

    def act(number, module):
        acted.append((number, module.VALUE))

    for number in (1, 2, 3):
        when_imported("waited_for", partial(act, number))
    assert importlib.util.find_spec("waited_for") is not None and not acted
    importlib.import_module("waited_for")
    assert sorted(acted) == [(1, 1), (2, 1), (3, 1)]


def test_a_module_that_was_looked_for_first_is_acted_on_when_it_is_imported(tmp_path, monkeypatch):
    """Libraries ask `find_spec` whether wandb is installed before they import it."""
    (tmp_path / "package_of_a_test").mkdir()
    (tmp_path / "package_of_a_test" / "__init__.py").write_text("value = 1")
    monkeypatch.syspath_prepend(str(tmp_path))
    acted, finders = [], list(sys.meta_path)
    when_imported("package_of_a_test", lambda module: acted.append(module.value))
    for _ in range(2):
        spec = present(importlib.util.find_spec("package_of_a_test"))
        assert spec.origin is not None and spec.origin.endswith("__init__.py")
    assert not acted
    for _ in range(2):
        importlib.import_module("package_of_a_test")
    assert acted == [1] and sys.meta_path == finders
    del sys.modules["package_of_a_test"]
