"""Iterations under `@deadpool_plugin.step` that the plugin would otherwise refuse, or get wrong: bit for bit."""

import sys
from pathlib import Path

import pytest
from support.stand_in import stand_in

from deadpool_plugin.transport.unix import LocalConnection

sys.path.insert(0, str(Path(__file__).resolve().parent))

from dist import test_deepspeed
from dist.test_deepspeed import arguments
from faults import deepspeed_hooks
from support import slow_but
from support.killed_ranks import assert_alike, run_with_kills, undisturbed
from support.scripted_agent import ScriptedAgent, Worker
from support.zygote import in_zygote

from deadpool_plugin.core import local

pytestmark = getattr(test_deepspeed, "pytestmark", [])
SCRIPT = str(Path(__file__).resolve().with_name("own_steps.py"))
CASES = [
    ("edited", "--zero 0", [(1, 4, "optimizer"), (0, 7, "backward")]),
    ("penalty", "--zero 1 --scheduler script", [(0, 3, "backward"), (1, 6, "mirror")]),
    ("gathered", "--zero 2 --dtype bf16 --loss-outside", [(1, 3, "forward"), (0, 6, "optimizer")]),
]


def command(corpus, mode, words):
    return [SCRIPT, mode, *arguments(corpus, words)[1:]]


@pytest.mark.parametrize(("mode", "words", "kills"), slow_but(CASES, 1), ids=[case[0] for case in CASES])
@in_zygote
def test_a_step_of_the_scripts_own_is_redone_as_a_whole(tmp_path, corpus, mode, words, kills):
    argv = command(corpus, mode, words)
    expected, run = undisturbed(tmp_path / "plain", argv, 2), tmp_path / "run"
    run_with_kills(run, argv, 2, kills, [kills[0][0]], deepspeed_hooks.install)
    assert_alike(expected, run)


@pytest.mark.slow
@in_zygote
def test_a_data_set_that_gives_other_items_to_a_newcomer_is_refused(tmp_path, corpus):
    with pytest.raises(
        AssertionError, match="rank 1 read other data than the rank itself for engine.forward of step 1"
    ):
        argv = [*command(corpus, "urandom", "--zero 1"), "--undecorated"]
        run_with_kills(tmp_path, argv, 2, [(1, 4, "forward")], [1], deepspeed_hooks.install)


@pytest.mark.parametrize("mode", slow_but(["penalty", "gathered"], 0))
@in_zygote
def test_without_the_decorator_it_is_refused_with_a_pointer_to_it(tmp_path, corpus, mode):
    with pytest.raises(AssertionError, match=r"(be|out)side.*to do:.*@deadpool_plugin\.step"):
        argv = [*command(corpus, mode, "--zero 1"), "--undecorated"]
        run_with_kills(tmp_path, argv, 2, [], [], deepspeed_hooks.install)


def test_a_rank_that_offers_its_store_late_takes_nothing_from_who_rehearses_it(tmp_path):
    """A rehearsal offers one store only. Once it had, the offer of its rank could be heard, and die with the rank: the
    loss after the next one found no store, and its swap never began."""
    agent = ScriptedAgent(2, [], tmp_path)
    agent.generation = 1
    rank, rehearsal = Worker(100, stand_in(LocalConnection)), Worker(200, stand_in(LocalConnection))
    agent.handle(1, rehearsal, local.StoreOffer("of who rehearses"))
    agent.handle(1, rank, local.StoreOffer("of the rank"))
    assert {address for address, _ in agent.stores.values()} == {"of who rehearses", "of the rank"}
