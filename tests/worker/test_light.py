"""Tensors of checkpoints that a process leaves unread: what it does with them gives what it would have given."""

import copy
import gc
import pickle
import random
import threading

import pytest
import torch
from torch.distributed import checkpoint as dcp

from deadpool_plugin.errors import Divergence
from deadpool_plugin.worker.light import Unread

BIG = (64, 100)


@pytest.fixture
def start():
    """Make an `Unread`; those that a test leaves unfinished are ended."""
    made = []

    def begin():
        said: list[str] = []
        made.append(Unread(said.append))
        made[-1].said = said  # type: ignore[attr-defined]
        return made[-1]

    yield begin
    for one in made:
        if not one._finished:
            one.finish([])


@pytest.fixture
def saved(tmp_path):
    """A file of `torch.save`, and what is in it."""
    flat = torch.randn(2 * 6400)
    content = {
        "weight": torch.randn(BIG), "half": torch.randn(BIG).half(), "flat": [flat[:6400], flat[6400:]],
        "parameter": torch.nn.Parameter(torch.randn(BIG)), "rng": torch.get_rng_state(), "step": torch.tensor(7.0),
        "args": {"lr": 0.5},
    }  # fmt: skip
    torch.save(content, tmp_path / "saved.pt")
    return tmp_path / "saved.pt", content


def load(path, **how):
    return torch.load(path, weights_only=False, **how)


@pytest.mark.parametrize("how", [{}, {"mmap": True}, {"map_location": "cpu"}], ids=["plain", "mapped", "located"])
def test_objects_and_small_tensors_are_read_large_ones_are_not(start, saved, how):
    path, content = saved
    unread = start()
    loaded = load(path, **how)
    assert torch.equal(loaded["rng"], content["rng"]) and loaded["step"] == 7 and loaded["args"] == {"lr": 0.5}
    assert unread.left_bytes == 6400 * (4 + 2 + 8 + 4) and unread.read_bytes == 0
    assert isinstance(loaded["parameter"], torch.nn.Parameter) and loaded["half"].dtype == torch.float16
    assert loaded["weight"].shape == BIG and not loaded["weight"].is_meta


LOOKS = {
    "item": lambda one: one[3, 3].item(),
    "sum": lambda one: float(one.sum()),
    "numpy": lambda one: one.numpy().tobytes(),
    "list": lambda one: one.tolist(),
    "view": lambda one: one.view(-1)[:50].detach().clone().mul(2).tolist(),
    "compare": lambda one: torch.equal(one, one + 0),
    "copy": lambda one: copy.deepcopy(one).tolist(),
    "cat": lambda one: torch.cat([one, one.t().reshape(BIG)]).tolist(),
    "to": lambda one: one.to(torch.float64).tolist(),
    "pickle": lambda one: pickle.loads(pickle.dumps(one)).tolist(),
}


@pytest.mark.parametrize("look", LOOKS.values(), ids=LOOKS.keys())
def test_who_looks_sees_what_was_saved(start, saved, look):
    path, content = saved
    expected = look(content["weight"])
    unread = start()
    loaded = load(path)
    assert look(loaded["weight"]) == expected
    assert unread.read_bytes == 6400 * 4 and len(unread.said) == 1


def test_what_is_restored_stays_unread_and_what_is_not_is_read_at_the_end(start, saved):
    path, content = saved
    model, teacher = torch.nn.Linear(100, 64, bias=False), torch.nn.Linear(100, 64, bias=False)
    first = model.weight.detach().clone()
    unread = start()
    loaded = load(path)
    model.load_state_dict({"weight": loaded["weight"]})
    masters = [loaded["half"].float(), loaded["parameter"]]
    teacher.load_state_dict({"weight": loaded["flat"][1].view(BIG)})
    average = copy.deepcopy(teacher)
    del loaded
    assert unread.read_bytes == 0
    unread.finish([model.weight, *masters])
    assert torch.equal(model.weight, first), "nothing was copied"
    for one in (teacher, average):
        assert torch.equal(one.weight, content["flat"][1].view(BIG))
    assert unread.read_bytes == 6400 * 8, "the storage that both have come from, once"


def test_what_nobody_holds_any_more_is_not_read(start, saved):
    unread = start()
    loaded = load(saved[0])
    loaded["itself"] = loaded
    target = torch.zeros(BIG)
    target.copy_(loaded["weight"])
    target.copy_(torch.ones(BIG))
    del loaded
    unread.finish([])
    assert unread.read_bytes == 0 and target.all()


def test_a_copy_has_what_its_source_was_when_it_was_made(start, saved):
    path, content = saved
    unread = start()
    loaded = load(path)
    before, through = torch.zeros(BIG), torch.zeros(BIG)
    before.copy_(loaded["weight"])
    between = loaded["weight"].clone()
    through.copy_(between)
    del between
    loaded["weight"].mul_(2)
    after = loaded["weight"].clone()
    unread.finish([])
    assert torch.equal(before, content["weight"]) and torch.equal(through, content["weight"])
    assert torch.equal(after, content["weight"] * 2)


@pytest.mark.parametrize("seed", range(30))
def test_any_order_of_operations_gives_what_it_gives_without(start, saved, seed):
    """Six tensors, some views of the same memory, go through random operations, twice: read and unread."""

    def work(loaded, seen):
        draw = random.Random(seed)
        flat = torch.zeros(6400)
        pool = [
            *[loaded["weight"].view(-1), loaded["half"].view(-1).float(), *loaded["flat"]],
            *[torch.arange(6400.0), flat[:3200], flat[3200:], flat[1000:4000]],
        ]
        for _ in range(25):
            one, other = draw.choice(pool), draw.choice(pool)
            size = min(len(one), len(other))
            start_at = draw.randrange(max(len(one), len(other)) - size + 1)
            part = one[start_at : start_at + size] if len(one) > size else one
            source = other[start_at : start_at + size] if len(other) > size else other
            match draw.randrange(8):
                case 0 | 1 | 2:
                    if part.untyped_storage().data_ptr() != source.untyped_storage().data_ptr():
                        part.copy_(source)
                case 3:
                    pool[draw.randrange(len(pool))] = other.clone()
                case 4:
                    part.add_(1)
                case 5:
                    seen.append(float(source[: draw.randrange(1, size)].sum()))
                case 6:
                    pool[draw.randrange(len(pool))] = torch.cat([one[:100], other[100:]])
                case 7:
                    part.zero_()
        return pool

    seen: list[float] = []
    expected = [one.clone() for one in work(load(saved[0]), seen)]
    unread, again = start(), list[float]()
    pool = work(load(saved[0]), again)
    restored = random.Random(seed).sample(pool, 2)
    unread.finish(restored)
    assert again == seen
    for one, same in zip(pool, expected, strict=True):
        shared = [one.untyped_storage().data_ptr() == some.untyped_storage().data_ptr() for some in restored]
        assert any(shared) or torch.equal(one, same)


def test_a_changed_file_is_not_read_as_if_it_were_the_same(start, saved):
    path, content = saved
    unread = start()
    loaded = load(path)
    torch.save({**content, "weight": torch.zeros(BIG)}, path)
    with pytest.raises(Divergence, match="changed while its tensors were still needed.*to do: keep"):
        loaded["weight"].sum()
    del loaded
    unread.finish([])


def test_a_block_of_inference_mode_around_the_load_or_the_end_changes_nothing(start, saved):
    path, content = saved
    unread = start()
    with torch.inference_mode():
        loaded = load(path)
    copied = loaded["weight"].clone()
    with torch.inference_mode():
        unread.finish([])
        with torch.autograd.profiler.record_function("an operation without tensors"):
            pass
    with torch.autograd.profiler.record_function("an operation without tensors"):
        pass
    assert torch.equal(copied, content["weight"])
    assert "Unread" not in str(torch.inference_mode.__exit__)


def test_what_another_thread_loads_is_read(start, saved):
    unread, loaded = start(), list[object]()
    one = threading.Thread(target=lambda: loaded.append(load(saved[0])))
    one.start()
    one.join()
    assert unread.left_bytes == 0 and torch.equal(loaded[0]["weight"], saved[1]["weight"])  # type: ignore[index]


def test_of_a_distributed_checkpoint_objects_and_small_tensors_are_read(start, tmp_path):
    def state(fill):
        torch.manual_seed(fill)
        return {"model": {"big": torch.randn(BIG), "small": torch.randn(4)}, "iteration": fill, "rng": torch.randn(3)}

    dcp.save(state(5), checkpoint_id=tmp_path / "saved", no_dist=True)
    unread, mine = start(), state(6)
    first = mine["model"]["big"].clone()
    dcp.load(mine, checkpoint_id=tmp_path / "saved", no_dist=True)
    assert mine["iteration"] == 5 and torch.equal(mine["model"]["small"], state(5)["model"]["small"])
    assert unread.left_bytes == 25600 and unread.read_bytes == 0
    unread.finish([mine["model"]["big"]])
    assert torch.equal(mine["model"]["big"], first)


def test_of_a_distributed_checkpoint_what_is_not_restored_is_read_at_the_end(start, tmp_path):
    dcp.save({"kept": torch.ones(BIG), "twice": torch.ones(BIG)}, checkpoint_id=tmp_path / "saved", no_dist=True)
    unread, mine = start(), {"kept": torch.zeros(BIG), "twice": torch.zeros(2, *BIG)[1]}
    dcp.load(mine, checkpoint_id=tmp_path / "saved", no_dist=True)
    copied = mine["twice"].clone()
    unread.finish([])
    assert mine["kept"].all() and mine["twice"].all() and copied.all() and unread.read_bytes == 51200


def test_a_copy_between_two_loads_is_of_the_first(start, tmp_path):
    for number in (1, 2):
        dcp.save({"big": torch.full(BIG, number)}, checkpoint_id=tmp_path / f"{number}", no_dist=True)
    unread, mine = start(), {"big": torch.zeros(BIG, dtype=torch.int64)}
    dcp.load(mine, checkpoint_id=tmp_path / "1", no_dist=True)
    between = mine["big"].clone()
    dcp.load(mine, checkpoint_id=tmp_path / "2", no_dist=True)
    unread.finish([])
    assert (between == 1).all() and (mine["big"] == 2).all()


def test_after_the_end_everything_is_as_before(start, saved):
    names = [(torch, "load"), (torch.Tensor, "numpy"), (torch.serialization, "_open_zipfile_reader")]
    before = [getattr(*name) for name in names]
    unread = start()
    load(saved[0])
    gc.collect()
    unread.finish([])
    assert [getattr(*name) for name in names] == before
    assert torch.equal(load(saved[0])["weight"], saved[1]["weight"])
    assert torch.utils._python_dispatch._len_torch_dispatch_stack() == 0


def test_nothing_is_left_within_a_mode_of_the_scripts_own(start, saved):
    from torch.utils._python_dispatch import TorchDispatchMode

    class Own(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            return func(*args, **(kwargs or {}))

    unread = start()
    with Own():
        loaded = load(saved[0])
    assert unread.left_bytes == 0 and torch.equal(loaded["weight"], saved[1]["weight"])
