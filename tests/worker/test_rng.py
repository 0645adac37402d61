"""What a script draws between two calls: recorded in few bytes, and drawn again bit for bit."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from support.live_rank import Rank, follower

from deadpool_plugin.errors import Unsupported
from deadpool_plugin.worker import codec, rng
from deadpool_plugin.worker.calls import Call, CallKind

PYTHON: Any = random
NUMPY: Any = np.random
DRAWS: dict[str, Callable[[], Any]] = {
    "the seed that a DataLoader's iterator draws": lambda: torch.empty((), dtype=torch.int64).random_().item(),
    "torch, one normal of a pair": lambda: torch.randn(1).tolist(),
    "torch, many normals": lambda: torch.randn(40).tolist(),
    "torch, doubles": lambda: torch.rand(7, dtype=torch.double).tolist(),
    "torch, a permutation": lambda: torch.randperm(20).tolist(),
    "torch, masks": lambda: torch.bernoulli(torch.full((9,), 0.5)).tolist(),
    "Python": lambda: (random.random(), random.sample(range(100), 5), random.getrandbits(70)),
    "Python, one normal of a pair": lambda: random.gauss(0, 1),
    "numpy": lambda: (np.random.rand(3).tolist(), np.random.permutation(9).tolist()),
    "numpy, one normal of a pair": lambda: np.random.standard_normal(),
    "all of them": lambda: (torch.rand(2).tolist(), random.random(), np.random.rand()),
    "more than a generator has words": lambda: (torch.rand(700).tolist(), np.random.rand(700).tolist()),
    "after seeding": lambda: (random.random(), random.seed(5), torch.manual_seed(5), torch.rand(3).tolist()),
}


def move(seed: int, draws: int) -> None:
    """Bring all generators to some state."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)
    for _ in range(draws):
        torch.rand(1), random.random(), np.random.rand()


@pytest.mark.parametrize("name", DRAWS)
def test_who_follows_draws_the_same_from_whatever_state_it_is_in(name):
    draw = DRAWS[name]
    with rng.preserved():
        for draws in (0, 1, 5, 300, 309, 310, 311, 312, 620, 623, 624, 625):
            move(1, draws)
            before = rng.capture_host()
            expected = [draw() for _ in range(2)]
            record = codec.decode(codec.encode(rng.drawn(before, rng.capture_host())))
            move(2, 40)
            if draws % 2:  # of two normal values it keeps the second
                random.gauss(0, 1), np.random.standard_normal(), torch.randn(1)
            rng.restore_host(record)
            assert [draw() for _ in range(2)] == expected, draws


def told() -> list[Any]:
    """Ask all generators for their state, in public ways."""
    name, words, *rest = NUMPY.get_state()
    return [random.getstate(), (name, words.tolist(), *rest), torch.get_rng_state().tolist()]


@pytest.mark.parametrize("name", DRAWS)
def test_states_are_copied_from_memory_and_back(name):
    assert {type(generator).__name__ for generator in rng._GENERATORS.values()} == {"_Memory"}
    with rng.preserved():
        for draws in (0, 1, 623, 624, 625):
            move(3, draws)
            for _ in range(3):
                DRAWS[name]()
                before, expected = rng.capture_host(), told()
                assert rng.equal(rng.capture_host(), before)
                DRAWS[name]()
                assert told() == expected or not rng.equal(rng.capture_host(), before)
                rng.restore_host(before)
                assert told() == expected


def test_generators_are_asked_where_their_place_in_memory_is_not_known(monkeypatch):
    monkeypatch.setattr(rng, "_found", lambda *_: None)
    asked = {"python": rng._python_state(), **rng._numpy_states(), "torch": rng._torch_state()}
    assert {type(generator).__name__ for generator in asked.values()} == {"_Asked"}
    monkeypatch.setattr(rng, "_GENERATORS", asked)
    for name in DRAWS:
        test_who_follows_draws_the_same_from_whatever_state_it_is_in(name)


def test_another_engine_of_numpy_is_refused():
    engine = NUMPY.get_bit_generator()
    try:
        NUMPY.set_bit_generator(np.random.PCG64(3))
        with pytest.raises(Unsupported, match="numpy.random draws from PCG64, which the script has set"):
            rng.capture_host()
    finally:
        NUMPY.set_bit_generator(engine)


def test_generators_that_nothing_was_drawn_from_stay_as_they_are():
    with rng.preserved():
        move(1, 10)
        before = rng.capture_host()
        random.random()
        record = rng.drawn(before, rng.capture_host())
        assert list(record) == ["python", "pair"]
        move(2, 40)
        mine = rng.capture_host()
        rng.restore_host(record)
        assert [name for name, state in rng.capture_host().items() if state != mine[name]] == ["python"]


def test_a_few_numbers_take_a_few_bytes():
    with rng.preserved():
        move(1, 10)
        before = rng.capture_host()
        DRAWS["the seed that a DataLoader's iterator draws"]()
        assert len(codec.encode(rng.drawn(before, rng.capture_host()))) < 150
        assert len(codec.encode(before)) > 7_000


def test_a_process_that_draws_alike_keeps_its_whole_state():
    with rng.preserved():
        move(1, 10)
        before = rng.capture_host()
        DRAWS["all of them"]()
        after = rng.capture_host()
        rng.restore_host(before)
        rng.restore_host(rng.drawn(before, after))
        assert rng.equal(rng.capture_host(), before)


@pytest.mark.parametrize("interrupted", (False, True))
def test_a_loop_that_draws_between_calls_that_draw_is_followed_alike(interrupted):
    def dropout() -> float:
        return float(torch.rand(50).sum()) + random.random()

    def draw_some(number: int) -> list[Any]:
        return [draw() for _ in range(number % 3) for name, draw in DRAWS.items() if name != "after seeding"]

    def light(one: Any, generation: int) -> None:
        if interrupted and isinstance(one, Rank):
            one.generations.announce(generation)

    def script(one: Any) -> list[Any]:
        found: list[Any] = []
        for number in range(120):
            found.append(one.call(Call("call", CallKind.PLAIN, dropout)))
            found += draw_some(number)
            for again in range(number % 4):
                one.call(Call("light", CallKind.LIGHT, light, (one, number // 4)))
                found += draw_some(number + again)
            found.append(torch.rand(3).tolist() if number % 7 == 5 else None)
        return [*found, one.call(Call("last", CallKind.PLAIN, int))]

    with rng.preserved():
        move(1, 10)
        rank = Rank()
        expected = script(rank)
        move(1, 10)
        mine = follower(rank)
        assert script(mine) == expected
        assert not mine._records and rank.swaps == (29 if interrupted else 0)
