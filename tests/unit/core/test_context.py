"""context.py: every field that the parts of a controller share has one writer."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

import deadpool_plugin.core

CORE = Path(deadpool_plugin.core.__file__).parent
CHANGES = {"add", "append", "clear", "discard", "extend", "insert", "pop", "remove", "setdefault", "sort", "update"}
"""Methods of lists, sets and dictionaries that change them. (Who reads a queue takes from it.)"""


def is_context(node: ast.expr, where: str) -> bool:
    """Return whether `node` is the context: `ctx`, `self._ctx`, an argument `context`; in its own file `self`."""
    return ast.unparse(node) in ({"self"} if where == "context" else {"ctx", "self._ctx", "context"})


def field_of(node: ast.AST, where: str) -> str | None:
    """Return the field of the context that `node` writes, if it is one: by assignment, by item or by a method."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in CHANGES:
        node = node.func.value
    elif isinstance(node, ast.Subscript) and isinstance(node.ctx, (ast.Store, ast.Del)):
        node = node.value
    elif not (isinstance(node, ast.Attribute) and isinstance(node.ctx, (ast.Store, ast.Del))):
        return None
    return node.attr if isinstance(node, ast.Attribute) and is_context(node.value, where) else None


def writers() -> dict[str, set[str]]:
    """Return the modules that write each field after it was made."""
    found = defaultdict(set)
    for path in CORE.glob("*.py"):
        tree = ast.parse(path.read_text())
        if path.stem == "context":
            for made in [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]:
                made.body = [] if made.name == "__init__" else made.body
        for node in ast.walk(tree):
            if (field := field_of(node, path.stem)) is not None:
                found[field].add(path.stem)
    return found


def test_each_field_of_the_context_is_written_by_one_module():
    found = writers()
    assert {field: sorted(who) for field, who in found.items() if len(who) > 1} == {}
    assert {"world", "suspects", "changed"} <= found.keys() and found["paused"] == {"contact"}
