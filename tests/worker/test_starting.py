"""Start-up of a rank: what trains past every framework that is known is refused where the script says so."""

import contextlib
import sys
from types import ModuleType

import pytest
import torch
from support.stand_in import fake
from torch.distributed import fsdp
from torch.nn.parallel import DistributedDataParallel

from deadpool_plugin.config import Config
from deadpool_plugin.core import local
from deadpool_plugin.errors import GenerationChanged, Unsupported
from deadpool_plugin.launch import worker
from deadpool_plugin.worker.calls import Call, CallKind
from deadpool_plugin.worker.starting import UNKNOWN_STEPS_MAX, Starting, imported


@pytest.fixture
def context(monkeypatch):
    for owner, name in ((DistributedDataParallel, "__init__"), (fsdp.FullyShardedDataParallel, "__init__")):
        monkeypatch.setattr(owner, name, getattr(owner, name))  # so that the original comes back afterwards
    monkeypatch.setattr(fsdp, "fully_shard", fsdp.fully_shard)
    context = fake(groups=fake(recording_limit_bytes=0))
    context.mode = starting = Starting(context, 0, 4096)
    starting.watch()
    yield context
    starting.unwatch()


@pytest.mark.parametrize(
    ("wrap", "said"),
    [
        (lambda model: DistributedDataParallel(model), "DistributedDataParallel"),
        (lambda model: fsdp.FullyShardedDataParallel(model), "FSDP"),
        (lambda model: fsdp.fully_shard(model), "fully_shard"),
    ],
    ids=["ddp", "fsdp", "fsdp2"],
)
def test_a_wrapper_of_torchs_own_is_refused_by_name_before_training(context, wrap, said):
    model = torch.nn.Linear(2, 2)
    with pytest.raises(Unsupported, match=f"{said}.*DeepSpeed engine.*DeepSpeed configuration"):
        wrap(model)
    context.mode = "of a rank in training"
    try:
        wrap(model)
    except Exception as without_a_group:  # another test's may be left
        assert not isinstance(without_a_group, Unsupported)


def test_a_loop_that_no_framework_runs_is_told_once_while_it_trains(context):
    weight, notes = torch.nn.Parameter(torch.ones(2)), []
    context.link = fake(event=lambda kind, text: notes.append((kind, text)))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    weight.grad = torch.ones(2)
    for _ in range(UNKNOWN_STEPS_MAX - 1):
        optimizer.step()
    assert notes == []
    for _ in range(UNKNOWN_STEPS_MAX):
        optimizer.step()
    ((kind, text),) = notes
    assert kind == "Note" and "20 optimizer steps of rank 0, and not one training call" in text


def test_nothing_of_a_save_before_the_first_forward_is_recorded_nor_what_its_thread_exchanges():
    order = []

    @contextlib.contextmanager
    def unrecorded():
        order.append("off")
        yield
        order.append("on")

    context = fake(
        groups=fake(unrecorded=unrecorded),
        saves=fake(wait_for_threads=lambda: order.append("its thread")),
    )
    Starting(context, 0, 4096).call(Call("save", CallKind.SAVE, lambda: order.append("save")))
    assert order == ["off", "save", "its thread", "on"]


def test_a_swap_while_groups_are_made_is_no_error_of_the_script(monkeypatch):
    """The agents decide what becomes of the process: its script has not begun."""

    def interrupted(generation, store):
        raise GenerationChanged(generation + 1)

    context = fake(
        link=fake(
            receive=lambda kind: (local.StartGroups(0, "store"), []),
            wait_for_end=lambda interruptible: 3,
        ),
        groups=fake(start=interrupted),
    )
    monkeypatch.setattr(worker, "_context", lambda *_: context)
    with pytest.raises(SystemExit) as ended:
        worker.start_live(fake(), Config(), local.RunRank(0, {}), 0)
    assert ended.value.code == 3


def test_what_is_told_of_the_imports_is_what_every_host_has_and_nothing_of_the_users(monkeypatch, tmp_path):
    class Raises(ModuleType):
        @property
        def __file__(self):  # type: ignore[override]
            raise ImportError

    (tmp_path / "of_the_user.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    import of_the_user  # type: ignore[import-not-found]  # noqa: F401

    monkeypatch.setitem(sys.modules, "raises", Raises("raises"))
    found = set(imported())
    assert {"torch", "torch.nn", "deadpool_plugin.worker.starting"} <= found
    assert not {"of_the_user", "raises", "sys", "contextlib"} & found
    monkeypatch.delitem(sys.modules, "of_the_user")
