"""Functions replaced wherever a module has them; what is done with a module as soon as a script imports it."""

import importlib
import importlib.util
import subprocess
import sys
import textwrap
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


def run(tmp_path, code):
    """In a process of its own, as it takes all that is there out of garbage collection."""
    (tmp_path / "home.py").write_text("def save(): return 'home'")
    for name in ("early", "late"):
        (tmp_path / f"{name}.py").write_text("from home import save as keep\nfrom home import save")
    begin = f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
    begin += "import home, early\nfrom home import save\nfrom deadpool_plugin.worker.patching import *\n"
    begin += "from deadpool_plugin.worker.patching import before_fork\nours = lambda: 'ours'\n"
    subprocess.run([sys.executable, "-c", begin + textwrap.dedent(code)], check=True)


def test_a_function_is_replaced_in_modules_of_before_the_fork_and_after_it(tmp_path):
    run(
        tmp_path,
        """
        before_fork.note()
        import late
        def everywhere():
            return {one() for one in (home.save, early.keep, early.save, late.keep, late.save, save)}
        kept = [home.save]  # its name here would be one more
        replace({home.save: around(home.save, lambda original: 'around ' + original())})
        assert everywhere() == {'around home'}
        replace({home.save: kept[0]})
        assert everywhere() == {'home'}
        """,
    )


def test_a_function_is_replaced_that_somebody_has_put_there_since_the_fork(tmp_path):
    run(
        tmp_path,
        """
        before_fork.note()
        theirs = home.save = early.keep = lambda: 'theirs'
        replace({theirs: ours})
        assert (home.save(), early.keep(), early.save(), theirs()) == ('ours', 'ours', 'home', 'ours')
        """,
    )


def test_an_alias_that_a_module_gets_between_two_forks_is_found(tmp_path):
    run(
        tmp_path,
        """
        before_fork.note()
        early.another = save
        before_fork.note()
        replace({home.save: ours})
        assert early.another() == 'ours'
        """,
    )


def test_replacing_a_function_and_collecting_garbage_copy_little_of_what_was_there_before_the_fork(tmp_path):
    run(
        tmp_path,
        """
        import gc, os, torch
        def private_mib():
            rows = [line.split() for line in open('/proc/self/smaps_rollup')]
            return {row[0]: int(row[1]) for row in rows if row[-1] == 'kB'}['Private_Dirty:'] / 1024
        before_fork.note()
        child = os.fork()
        if not child:
            before = private_mib()
            replace({torch.save: ours})
            gc.collect()
            os._exit(int(private_mib() - before))
        copied = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        assert 0 <= copied < 8, f'{copied} MiB'
        """,
    )
