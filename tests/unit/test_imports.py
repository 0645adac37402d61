"""Layers of the package: every import of the package is held to the table in the design (downward only).

Imports inside functions count for the layers; only what runs at import time counts for what a process loads.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import deadpool_plugin

PACKAGE = "deadpool_plugin"
ROOT = Path(deadpool_plugin.__file__).parent

ANYWHERE_ABOVE_CORE = {"errors", "config", "events", "versions"}
LAYERS: dict[str, set[str]] = {
    "errors": set(),
    "config": {"errors"},
    "events": {"errors", "core"},
    "versions": {"errors"},
    "core": set(),
    "transport": {"core"},
    "mirror": {"transport", "core"},
    "comm": {"transport", "core"},
    "worker": {"comm", "mirror", "transport", "core"},
    "adapters": {"worker", "comm", "mirror", "transport", "core"},
    "host": {"mirror", "transport", "core"},
    "agent": {"host", "mirror", "transport", "core"},
    "launch": {"adapters", "agent", "comm", "host", "worker", "transport", "core"},
    "cli": {"__init__", "launch", "agent", "host", "transport", "core"},
    "run": {"launch", "host"},
    "data": set(),
    "__init__": {"launch", "run"},
    "__main__": {"cli"},
}
"""Layer -> the layers it may import; errors, config, events and versions are open to everything above core."""

IMPURE = {
    "asyncio", "concurrent", "ctypes", "datetime", "logging", "multiprocessing", "os", "pathlib", "queue", "random",
    "secrets", "select", "selectors", "signal", "socket", "subprocess", "sys", "tempfile", "threading", "time", "torch",
    "uuid",
}  # fmt: skip
TORCH_FREE = {
    "core", "cli", "transport", "mirror", "host", "agent", "launch", "run", "__init__", "__main__", "data",
    "errors", "config", "events", "versions",
}  # fmt: skip
MODULES = sorted(ROOT.rglob("*.py"))


def name_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join((PACKAGE, *(parts[:-1] if parts[-1] == "__init__" else parts)))


NAMES = {name_of(path): path for path in MODULES}


def layer_of(module: str) -> str:
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else "__init__"


@cache
def imports_of(module: str, at_import_time: bool = False) -> frozenset[str]:
    """The modules `module` imports; names of this package are resolved to modules."""
    tree = ast.parse(NAMES[module].read_text())
    package = module if NAMES[module].name == "__init__.py" else module.rpartition(".")[0]
    return frozenset(name for node in statements(tree, at_import_time) for name in targets(node, package))


def statements(node: ast.AST, at_import_time: bool) -> Iterator[ast.Import | ast.ImportFrom]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (ast.Import, ast.ImportFrom)):
            yield child
        elif not (at_import_time and runs_later(child)):
            yield from statements(child, at_import_time)


def runs_later(node: ast.AST) -> bool:
    """Return whether `node` is a function's body, or for type checkers only."""
    if isinstance(node, ast.If):
        return "TYPE_CHECKING" in ast.dump(node.test)
    return isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))


def targets(node: ast.Import | ast.ImportFrom, package: str) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
        return
    base = node.module or ""
    if node.level:
        above = package.split(".")[: len(package.split(".")) - node.level + 1]
        base = ".".join([*above, base] if base else above)
    submodules = [f"{base}.{alias.name}" for alias in node.names if f"{base}.{alias.name}" in NAMES]
    yield from submodules
    if len(submodules) < len(node.names):
        yield base


def is_ours(module: str) -> bool:
    return module == PACKAGE or module.startswith(PACKAGE + ".")


@cache
def loaded_by(module: str) -> frozenset[str]:
    """Everything imported when `module` is, packages on the way included."""
    found: set[str] = set()
    todo = [module]
    while todo:
        current = todo.pop()
        if current in found:
            continue
        found.add(current)
        if current in NAMES:
            todo += imports_of(current, at_import_time=True)
            todo += [current.rpartition(".")[0]] if "." in current else []
    return frozenset(found)


def test_every_layer_is_in_the_table():
    assert {layer_of(module) for module in NAMES} <= LAYERS.keys()


@pytest.mark.parametrize("module", sorted(NAMES))
def test_imports_go_downward(module):
    layer = layer_of(module)
    allowed = LAYERS[layer] | {layer} | (ANYWHERE_ABOVE_CORE if layer not in ANYWHERE_ABOVE_CORE | {"core"} else set())
    wrong = {name for name in imports_of(module) if is_ours(name) and layer_of(name) not in allowed}
    assert not wrong, f"{layer} may import {sorted(allowed)} only"


@pytest.mark.parametrize("module", sorted(name for name in NAMES if layer_of(name) == "agent"))
def test_the_agent_knows_no_time_and_no_thread_but_its_loops_and_its_hosts(module):
    """Or the simulator, which has others, would not run what jobs run."""
    outside = {name.partition(".")[0] for name in imports_of(module) if not is_ours(name)}
    assert not outside & {"time", "threading", "concurrent", "subprocess", "multiprocessing", "random", "socket"}
    assert not re.search(r"to_thread|run_in_executor|time\.sleep", NAMES[module].read_text())


@pytest.mark.parametrize("module", sorted(name for name in NAMES if layer_of(name) == "core"))
def test_core_is_pure(module):
    outside = {name.partition(".")[0] for name in imports_of(module) if not is_ours(name)}
    assert not outside & IMPURE
    plain = {"__future__", "collections", "dataclasses", "enum", "functools", "itertools", "types", "typing"}
    assert outside <= {*plain, "msgspec"}


@pytest.mark.parametrize("module", sorted(name for name in NAMES if layer_of(name) in TORCH_FREE))
def test_processes_without_torch_load_none(module):
    direct = {name for name in imports_of(module) if name.partition(".")[0] == "torch"}
    assert not direct, f"{module} imports torch"
    heavy = {name for name in loaded_by(module) if name.partition(".")[0] in {"torch", "megatron", "deepspeed"}}
    assert not heavy, f"importing {module} loads {heavy}"


@pytest.mark.parametrize("module", sorted(NAMES))
def test_nothing_unpickles(module):
    assert not {name.partition(".")[0] for name in imports_of(module)} & {
        "pickle",
        "cPickle",
        "dill",
        "cloudpickle",
        "shelve",
    }


def test_test_files_are_told_apart_by_name():
    """pytest imports those that are in no package by their bare names: two of one name cannot run in one command."""
    tests = Path(__file__).resolve().parents[1]
    loose = [path for path in tests.rglob("*.py") if not (path.parent / "__init__.py").exists()]
    names = Counter(path.name for path in loose if path.name != "conftest.py")
    assert not [name for name, count in names.items() if count > 1]
