"""Which adapters are put in place, and which one a job turns out to need."""

import sys
from types import ModuleType

import pytest
from support.stand_in import fake

from deadpool_plugin.errors import InvariantViolated, Unsupported
from deadpool_plugin.worker.calls import Call, CallKind
from deadpool_plugin.worker.context import Context, available


def adapter(framework):
    return fake(framework=framework)


def test_what_the_script_has_imported_counts(monkeypatch):
    monkeypatch.setitem(sys.modules, "one_framework", ModuleType("one_framework"))
    one, installed = adapter("one_framework"), adapter("json.tool")
    assert available([installed, one]) == [one]


def test_before_any_import_the_first_that_is_installed_counts(monkeypatch):
    for name in ("json.tool", "wave"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    installed, absent, homeless = adapter("json.tool"), adapter("no_such_framework"), adapter("no_such_package.core")
    assert available([absent, homeless, installed, adapter("wave")]) == [installed]


def test_without_any_it_is_said_which_are_known():
    with pytest.raises(Unsupported, match=r"no_such_framework or no_such_package\.core"):
        available([adapter("no_such_framework"), adapter("no_such_package.core")])


def test_the_first_that_runs_a_model_is_the_jobs():
    made = []
    one, other = adapter("one"), adapter("other")
    context = Context(fake(), fake(), [one, other], local_rank=0)
    context.mode = fake(call=lambda call: made.append(call.name))
    context._call(one, Call("zero_grad", CallKind.PLAIN, lambda: None))
    with pytest.raises(InvariantViolated, match="nobody knows before the first forward .*this is a bug"):
        _ = context.adapter
    context._call(other, Call("train_batch", CallKind.STEP, lambda: None))
    context._call(one, Call("forward", CallKind.FORWARD, lambda: None))
    assert context.adapter is other
    assert made == ["zero_grad", "train_batch", "forward"]
