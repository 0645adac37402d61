"""Whole jobs in memory: start, commits, every single loss, several losses, verdicts. No hang, no mixed history."""

from __future__ import annotations

from collections.abc import Collection
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import expect

from deadpool_plugin import events
from deadpool_plugin.core import io
from deadpool_plugin.core.coordination import STALLS_MAX
from deadpool_plugin.core.failures import AGAIN_WITHIN_STEPS
from deadpool_plugin.core.types import NO_STEP, World

from .cluster import TIMING, Cluster

WORLD = World(0, (0, 0, 1, 1, 2, 2), (3, 4))
SEEDS = [None, 1, 2, 3]


def finished(cluster: Cluster, lost: Collection[int] = ()) -> None:
    """Everybody who was not lost has ended well, at the last step, in one history."""
    assert cluster.exits() == {n: (None if cluster.nodes[n].killed else 0) for n in cluster.nodes if n not in lost} | {
        n: cluster.exits()[n] for n in lost
    }
    states = {
        worker.state
        for node in cluster.nodes.values()
        if node.exit and node.exit[0] == 0
        for worker in node.workers.values()
    }
    assert len(states) == 1, states
    assert len(states.pop()) == cluster.last_step + 1
    check_events(cluster)


def check_events(cluster: Cluster) -> None:
    for node in cluster.nodes.values():
        for event in node.events:
            events.make(event.kind, event.fields, node=node.number, generation=0)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_job_without_losses(seed):
    cluster = Cluster(WORLD, seed=seed)
    cluster.form()
    assert cluster.run()
    finished(cluster)
    assert cluster.starts == {n: 1 for n in range(5)}
    assert len(cluster.said("TrainingStarted")) == 1
    steps = [expect(int, event["step"]) for event in cluster.said("StepCommitted")]
    assert steps == sorted(steps)
    assert len(cluster.said("Mirrored")) == 1
    assert {e["spare"]: e["ranks"] for e in cluster.said("SpareReady")} == {3: (0, 1), 4: (2, 3)}
    assert not cluster.said("NodeLost")


@pytest.mark.parametrize("at", [0, 1, 3, 6])
@pytest.mark.parametrize("lost", range(5))
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("silent", [False, True])
def test_one_loss_of_any_node(seed, lost, at, silent):
    cluster = Cluster(WORLD, seed=seed)
    cluster.form()
    assert cluster.run(lambda: cluster.training() and cluster.at_step(at) and bool(cluster.said("Mirrored")))
    if silent:
        cluster.nodes[lost].frozen = cluster.hold = True
        assert cluster.run(lambda: 1 in cluster.plans)
        cluster.hold = False
    else:
        cluster.kill(lost)
    assert cluster.run(lambda: all(node.exit for n, node in cluster.nodes.items() if n != lost))
    finished(cluster, {lost})
    assert max(cluster.plans) == 1
    assert cluster.plans[1].lost_nodes == (lost,)
    for node in cluster.nodes.values():
        if node.number != lost:
            assert node.controller.generation == 1
    assert len(cluster.said("SwapPlanned")) == 1
    assert len(cluster.said("Unprotected")) == 1
    if lost < 3:
        assert len(cluster.said("SwapDone")) == 1
        assert cluster.said("NodeLost")[0]["lost"] == (lost,)


def test_the_last_host_says_that_nobody_is_left_to_hold_its_snapshots():
    cluster = Cluster(World(0, (0,), (1,)))  # node 0 decides a tie
    cluster.form()
    assert cluster.run(lambda: cluster.training() and cluster.at_step(2) and bool(cluster.said("Mirrored")))
    cluster.kill(1)
    assert cluster.run(lambda: bool(cluster.said("Unprotected")))
    assert [fields["reason"] for fields in cluster.said("Unprotected")] == [
        "no other host is left to hold snapshots; to do: deadpool join"
    ]


@pytest.mark.parametrize("lost", range(5))
def test_a_stopped_node_that_wakes_up_leaves(lost):
    cluster = Cluster(WORLD, seed=lost, last_step=8)
    cluster.form()
    assert cluster.run(lambda: cluster.at_step(3))
    cluster.nodes[lost].frozen = cluster.hold = True
    assert cluster.run(lambda: 1 in cluster.plans)
    cluster.nodes[lost].frozen = cluster.hold = False
    assert cluster.run()
    assert cluster.exits() == {n: 87 if n == lost else 0 for n in range(5)}


@pytest.mark.parametrize("pair", list(combinations(range(5), 2)))
@pytest.mark.parametrize("seed", SEEDS)
def test_a_cut_link_costs_one_of_its_two_nodes(seed, pair):
    cluster = Cluster(WORLD, seed=seed)
    cluster.form()
    assert cluster.run(lambda: bool(cluster.said("Mirrored")) and cluster.training() and cluster.at_step(2))
    cluster.cut(*pair)
    assert cluster.run()
    codes = cluster.exits()
    assert {codes.pop(pair[0]), codes.pop(pair[1])} == {0, 87}
    assert set(codes.values()) == {0}


@pytest.mark.parametrize("seed", range(20))
def test_a_second_coordinator_is_lost_during_the_swap(seed):
    cluster = Cluster(World(0, (0, 1, 2), (3, 4)), seed=seed, last_step=8)
    cluster.form()
    assert cluster.run(lambda: bool(cluster.said("Mirrored")) and cluster.training() and cluster.at_step(3))
    cluster.kill(0)
    assert cluster.run(lambda: any(node.fence > 0 for node in cluster.nodes.values()))
    cluster.kill(1)
    assert cluster.run()
    # Rank 0 is mirrored by node 1: both gone before the newcomer has it is a verdict, otherwise the job goes on.
    assert {code for n, code in cluster.exits().items() if n > 1} in ({0}, {86})


@pytest.mark.parametrize("seed", SEEDS)
def test_losses_one_after_another_while_spares_last(seed):
    cluster = Cluster(WORLD, seed=seed, last_step=12)
    cluster.form()
    assert cluster.run(lambda: bool(cluster.said("Mirrored")) and cluster.training() and cluster.at_step(2))
    for generation, lost in enumerate((0, 2), start=1):
        cluster.kill(lost)
        assert cluster.run(
            lambda n=generation: len(cluster.said("Mirrored")) > n and len(cluster.said("SwapDone")) == n
        )
    assert cluster.run()
    finished(cluster)
    assert cluster.plans[2].world.spares == ()


@pytest.mark.parametrize("lost", range(3))
@pytest.mark.parametrize("seed", SEEDS)
def test_no_spare_is_a_verdict_known_to_all(seed, lost):
    cluster = Cluster(World(0, (0, 0, 1, 2)), seed=seed)
    cluster.form()
    assert cluster.run(lambda: cluster.at_step(3))
    cluster.kill(lost)
    assert cluster.run()
    for number, node in cluster.nodes.items():
        if number != lost:
            code, reason = node.left
            assert code == 86 and "no spare" in reason and f"node {lost}" in reason
            (stopped,) = [e.fields for e in node.events if e.kind == "JobStopped"]
            assert stopped["lost_ranks"] == cluster.world.ranks_of(lost)
            assert expect(int, stopped["newest_committed"]) >= 1
    check_events(cluster)


@pytest.mark.parametrize("lost", range(2))
def test_two_nodes_without_spare(lost):
    cluster = Cluster(World(0, (0, 1)))
    cluster.form()
    assert cluster.run(lambda: cluster.at_step(3))
    cluster.kill(lost)
    assert cluster.run()
    assert cluster.nodes[1 - lost].left[0] == 86


@pytest.mark.parametrize("lost", range(2))
def test_one_active_node_and_a_spare(lost):
    """The half with the active node decides; the spare alone cannot know that it is not the one cut off."""
    cluster = Cluster(World(0, (0, 0), (1,)))
    cluster.form()
    assert cluster.run(lambda: cluster.at_step(3))
    cluster.kill(lost)
    assert cluster.run()
    assert cluster.nodes[1 - lost].left[0] == (86 if lost == 0 else 0)


@pytest.mark.parametrize("lost", range(5))
def test_a_loss_before_training_begins_the_script_again(lost):
    cluster = Cluster(WORLD, seed=lost)
    cluster.form()
    cluster.run(lambda: any(cluster.starts.values()))
    assert not cluster.training()
    cluster.kill(lost)
    assert cluster.run()
    finished(cluster)
    assert cluster.plans[1].restore_step == NO_STEP
    assert all(n == lost or cluster.starts[n] >= 1 for n in cluster.starts)
    assert len(cluster.said("TrainingStarted")) == 1 and len(cluster.said("Mirrored")) == 1


def test_a_loss_before_training_without_a_spare_is_a_verdict():
    cluster = Cluster(World(0, (0, 1, 2)))
    cluster.form()
    cluster.kill(1)
    assert cluster.run()
    assert [cluster.nodes[n].left[0] for n in (0, 2)] == [86, 86]
    assert "no spare is left" in cluster.nodes[2].left[1] and "no checkpoint was saved" in cluster.nodes[2].left[1]


def test_a_rank_that_never_gets_ready_is_a_verdict():
    cluster = Cluster(WORLD)
    cluster.form()
    cluster.nodes[0].inputs.pop()  # no store is ever offered
    assert cluster.run()
    assert set(cluster.exits().values()) == {86}
    assert "have not reached training" in cluster.nodes[4].left[1]


def test_a_newcomer_on_its_way_through_past_steps_is_waited_for_while_it_gets_on():
    cluster = Cluster(WORLD)
    cluster.form()
    cluster.nodes[0].inputs.pop()  # no store is ever offered
    rank = WORLD.ranks_of(1)[0]
    for _ in range(3):
        cluster.feed(cluster.nodes[1], io.WorkerMoved(rank))
        cluster.idle(0.8 * TIMING.start_timeout_s)
    assert set(cluster.exits().values()) == {None}
    assert cluster.run()
    assert set(cluster.exits().values()) == {86}
    assert "start_timeout_s" in cluster.nodes[4].left[1]


def hanging_cluster(seed=None, last_step=6):
    """In training, protected; all processes live and do nothing."""
    cluster = Cluster(WORLD, seed=seed, last_step=last_step)
    cluster.form()
    assert cluster.run(lambda: bool(cluster.said("Mirrored")) and cluster.at_step(2))
    cluster.hold = True
    return cluster


@pytest.mark.parametrize("seed", SEEDS)
def test_when_nothing_comes_of_training_all_are_interrupted_and_go_on(seed):
    cluster = hanging_cluster(seed)
    cluster.idle(1.1 * TIMING.stall_timeout_s)
    assert cluster.run(lambda: cluster.generation_protected())
    assert list(cluster.plans) == [1]
    assert cluster.newest().lost_nodes == cluster.newest().lost_ranks == ()
    assert any("got any further" in str(note["text"]) for note in cluster.said("Note"))
    cluster.hold = False
    assert cluster.run()
    assert set(cluster.exits().values()) == {0}


def test_when_nothing_comes_of_that_either_the_job_ends():
    cluster = hanging_cluster()
    assert cluster.run(events=400_000)
    assert list(cluster.plans) == [1]
    assert set(cluster.exits().values()) == {86}
    assert "stall_timeout_s" in cluster.nodes[4].left[1] and "again" in cluster.nodes[4].left[1]


def test_whoever_goes_on_after_a_stall_may_stall_again():
    cluster = hanging_cluster()
    cluster.idle(1.1 * TIMING.stall_timeout_s)
    cluster.hold = False
    assert cluster.run(lambda: cluster.at_step(5))
    cluster.hold = True
    cluster.idle(1.1 * TIMING.stall_timeout_s)
    cluster.hold = False
    assert cluster.run()
    assert list(cluster.plans) == [1, 2] and set(cluster.exits().values()) == {0}


def stall_after(cluster, steps):
    """Let so many more steps be committed, and then nothing for too long; tell whether the job has ended."""

    def committed():
        return max(node.controller._ctx.newest_committed for node in cluster.nodes.values())

    cluster.hold, before = False, committed()
    cluster.run(lambda: committed() >= before + steps)
    cluster.hold, end = True, cluster.now + 1.2 * TIMING.stall_timeout_s
    cluster.run(lambda: cluster.now >= end)
    return any(code is not None for code in cluster.exits().values())


def test_a_job_that_stalls_after_each_step_ends():
    """A cause that interrupting does not mend may let one step through each time: a receive that nobody answers."""
    cluster = hanging_cluster(last_step=40)
    cluster.idle(1.1 * TIMING.stall_timeout_s)
    assert not stall_after(cluster, 1)
    assert stall_after(cluster, 1)
    assert set(cluster.exits().values()) == {86}
    assert "stalls after steps" in cluster.nodes[4].left[1]


def test_stalls_with_steps_between_them_end_no_job():
    cluster = hanging_cluster(last_step=40)
    cluster.idle(1.1 * TIMING.stall_timeout_s)
    assert not any(stall_after(cluster, AGAIN_WITHIN_STEPS + 1) for _ in range(STALLS_MAX + 1))


def test_a_long_step_is_none_as_long_as_somebody_gets_on():
    cluster = hanging_cluster()
    for number in (2, 1, 0):
        cluster.feed(cluster.nodes[number], io.WorkerMoved(WORLD.ranks_of(number)[0]))
        cluster.idle(0.8 * TIMING.stall_timeout_s)
    assert not cluster.plans


def test_whoever_has_finished_leaves_the_others_all_the_time_they_need():
    cluster = hanging_cluster()
    cluster.feed(cluster.nodes[2], io.WorkerFinished(WORLD.ranks_of(2)[0]))
    cluster.idle(2 * TIMING.stall_timeout_s)
    assert not cluster.plans


def test_a_coordinator_that_stood_still_takes_its_own_pause_for_no_stall():
    cluster = hanging_cluster()
    cluster.idle(0.8 * TIMING.stall_timeout_s)
    for node in cluster.nodes.values():
        node.frozen = True
    cluster.now += 0.5 * TIMING.stall_timeout_s
    for node in cluster.nodes.values():
        node.frozen = False
    cluster.idle(0.1 * TIMING.stall_timeout_s)
    assert not cluster.said("Note")


def test_a_silence_of_the_coordinator_that_only_one_has_noticed_costs_nobody():
    cluster = hanging_cluster()
    cluster.silent.add((0, 2))
    assert cluster.run(lambda: 0 in cluster.nodes[2].controller._ctx.suspects)
    cluster.silent.clear()
    cluster.idle(4 * TIMING.silent_after_s)
    assert not cluster.plans and 0 not in cluster.nodes[2].controller._ctx.suspects
    cluster.hold = False
    assert cluster.run()
    assert set(cluster.exits().values()) == {0}


@pytest.mark.parametrize("number", range(5))
@pytest.mark.parametrize("seed", SEEDS)
def test_a_node_that_gives_up_costs_nobody_else(seed, number):
    cluster = Cluster(WORLD, seed=seed)
    cluster.form()
    assert cluster.run(lambda: bool(cluster.said("Mirrored")) and cluster.at_step(2))
    cluster.nodes[number].inputs.append(io.NodeGivenUp("signal 11"))
    assert cluster.run()
    assert cluster.exits() == {n: 87 if n == number else 0 for n in range(5)}
    assert any("signal 11" in str(event["evidence"]) for event in cluster.said("NodeLost"))


def test_stop_requested_reaches_all():
    cluster = Cluster(WORLD)
    cluster.form()
    assert cluster.run(lambda: cluster.at_step(2))
    cluster.nodes[4].inputs.append(io.StopRequested("operator", 143))
    assert cluster.run()
    assert set(cluster.exits().values()) == {143}


@pytest.mark.parametrize("lost", range(3))
def test_replicas_need_no_payload_mirrors(lost):
    replicas = {0: (0, 1), 1: (0, 1), 2: (2, 3), 3: (2, 3)}
    cluster = Cluster(World(0, (0, 1, 0, 1), (2,)), seed=lost, replicas=replicas)
    cluster.form()
    assert cluster.run(lambda: cluster.at_step(3) and bool(cluster.said("Mirrored")))
    cluster.kill(lost)
    assert cluster.run()
    finished(cluster)


@settings(max_examples=150, derandomize=True)
@given(seed=st.integers(0, 10**6), data=st.data())
def test_losses_one_after_another_never_hang(seed, data):
    """Any nodes, any time, perhaps during a swap: the job ends well, or with a verdict, and never mixes histories."""
    cluster = Cluster(World(0, (0, 0, 1, 2), (3, 4)), seed=seed, last_step=8)
    cluster.duplicates = data.draw(st.booleans())
    cluster.form()
    assert cluster.run(lambda: bool(cluster.said("Mirrored")) and cluster.training())
    for _ in range(data.draw(st.integers(1, 3))):
        for _ in range(data.draw(st.integers(0, 300))):
            cluster.one_event()
        victim = data.draw(st.integers(0, 4))
        if data.draw(st.booleans()):
            cluster.kill(victim)
        else:
            cluster.nodes[victim].frozen = True
    assert cluster.run(lambda: not any(node.up and not node.frozen for node in cluster.nodes.values())), "LIVENESS"
    codes = {code for n, code in cluster.exits().items() if cluster.nodes[n].exit and not cluster.nodes[n].frozen}
    assert codes <= {0, 86, 87}
    if 0 in codes:
        states = {
            w.state for node in cluster.nodes.values() if node.exit and node.exit[0] == 0 for w in node.workers.values()
        }
        assert len(states) <= 1
    check_events(cluster)
