"""controller.py, input by input: what is said, what is ignored, what comes first."""

from __future__ import annotations

import msgspec
import pytest
from support import expect, present

from deadpool_plugin.core import api, events, local
from deadpool_plugin.core.controller import Controller
from deadpool_plugin.core.messages import (
    Accepted,
    AnyMessage,
    Compare,
    Decided,
    Goodbye,
    NodeFailed,
    Prepare,
    Promise,
    Propose,
    RankFailed,
    Refused,
    Rehearse,
    Report,
    Start,
    Status,
    Verdict,
)
from deadpool_plugin.core.policy import Policy, Timing
from deadpool_plugin.core.types import NEVER, NO_STEP, Ballot, Checkpoint, Failure, Holding, SwapPlan, World

WORLD = World(0, (0, 1, 2), (3,))
TIMING = Timing(
    heartbeat_interval_s=1.0, silent_after_s=10.0, phase_timeout_s=20.0, decision_timeout_s=100.0, start_timeout_s=100.0
)
PLAN = SwapPlan(World(1, (0, 1, 3)), 4, (2,), (), "store")
YOU_ARE_OUT = NodeFailed(1, 2, "counted as lost in generation 1")


def formed(node: int, world: World = WORLD) -> Controller:
    controller = Controller(node, TIMING)
    controller.step(api.WorldFormed(world), 0.0)
    return controller


def said(actions: list[api.Action]) -> list[tuple[int, AnyMessage]]:
    """Return what goes to each receiver; the times of reports are test_contact.py's."""
    return [(action.to, untimed(action.message)) for action in actions if isinstance(action, api.Send)]


def untimed(message: AnyMessage) -> AnyMessage:
    return msgspec.structs.replace(message, sent_at=NEVER) if isinstance(message, (Report, Status)) else message


def decided(plan: SwapPlan, ballot: Ballot | None = None) -> Decided:
    return Decided(plan, ballot or Ballot(plan.world.generation, 1, 0))


def hear(controller: Controller, sender: int, message, now: float = 0.1) -> list[api.Action]:
    return controller.step(api.Received(sender, message), now)


def test_messages_before_the_world_is_formed_are_kept():
    controller = Controller(0, TIMING)
    assert hear(controller, 1, Report(0, ready=(1,))) == []
    for rank, node in ((2, 2),):
        hear(controller, node, Report(0, ready=(rank,)))
    controller.step(api.WorkerReady(0), 0.2)
    actions = controller.step(api.WorldFormed(WORLD), 0.3)
    kinds = [type(action.event) for action in actions if isinstance(action, api.Emit)]
    assert kinds == [events.WorldFormed, events.TrainingStarted]


def test_of_beats_before_the_world_is_formed_the_newest_is_kept():
    controller = Controller(0, TIMING)
    failed = RankFailed(0, Failure(1, 1, "error"))
    for moved in range(100):
        for node in (1, 2):
            hear(controller, node, Report(0, moved=moved))
        hear(controller, 1, Status(0, NO_STEP, False))
    for _ in range(2):
        hear(controller, 1, failed)
    kept = [(received.sender, received.message) for received in controller._early.values()]
    assert kept == [
        (1, Report(0, moved=99)), (2, Report(0, moved=99)), (1, Status(0, NO_STEP, False)), (1, failed), (1, failed),
    ]  # fmt: skip


def test_the_coordinator_knows_which_ranks_it_awaits():
    outside, follower, coordinator = Controller(0, TIMING), formed(2), formed(0)
    assert outside.awaited == () == follower.awaited
    ranks = tuple(range(len(WORLD.node_of)))
    assert coordinator.awaited == ranks
    hear(coordinator, WORLD.node_of[ranks[-1]], Report(0, ready=ranks[-1:]))
    assert coordinator.awaited == ranks[:-1]
    for rank in ranks[:-1]:
        hear(coordinator, WORLD.node_of[rank], Report(0, ready=(rank,)))
    coordinator.step(api.WorkerReady(0), 0.2)
    assert coordinator.awaited == ()


def test_start_is_said_once_and_obeyed_once():
    controller = formed(0)
    actions = controller.step(api.StoreOffered("node0:1"), 0.1)
    starts = [(to, message) for to, message in said(actions) if isinstance(message, Start)]
    assert [to for to, _ in starts] == [1, 2, 3]
    assert [action for action in actions if isinstance(action, api.StartWorkers)] == [
        api.StartWorkers(WORLD, "node0:1")
    ]
    assert not any(isinstance(a, api.StartWorkers) for a in hear(controller, 0, Start(WORLD, "node0:1")))


def test_commit_opens_the_gate_once_and_never_goes_back():
    controller = formed(2)
    assert hear(controller, 0, Status(0, 3, True)) == [api.Commit(3)]
    for late in (Status(0, 3, True), Status(0, 2, True)):
        assert hear(controller, 0, late) == []
    assert not [action for action in hear(controller, 0, Status(7, 9, True)) if isinstance(action, api.Commit)]
    assert controller._ctx.committed == 3


def test_a_word_of_a_newer_generation_is_answered_with_ones_own_so_that_one_is_told():
    controller = formed(2)
    assert said(hear(controller, 1, Status(7, 9, True))) == [(1, Report(0))]
    assert said(hear(controller, 1, Goodbye(7))) == [(0, NodeFailed(0, 1, "it has left the job"))]


def test_heartbeats():
    controller = formed(2)
    assert controller.step(api.Ticked(), 0.5) == []
    assert said(controller.step(api.Ticked(), 1.0)) == [(0, Report(0))]
    coordinator = formed(0)
    assert {to for to, _ in said(coordinator.step(api.Ticked(), 1.0))} == {1, 2, 3}


def test_a_voter_fences_first_and_says_nothing_of_the_old_generation_after():
    controller = formed(3)
    holding = Holding(0, 4, True, (0,))
    controller.step(api.SnapshotHeld(holding, 0), 0.1)
    ballot = Ballot(1, 1, 0)
    actions = hear(controller, 0, Prepare(ballot, (2,)))
    assert actions == [api.AbortWorkers(1), api.Send(0, Promise(ballot, None, (holding,), ""))]
    controller.step(api.SnapshotHeld(Holding(1, 4, True, (1,)), 0), 0.2)
    assert said(controller.step(api.Ticked(), 1.5)) == [(0, Report(0))]
    assert hear(controller, 0, Status(0, 9, True), 1.6) == []
    assert said(controller.step(api.StoreOffered("node3:1"), 1.7))[0] == (
        0,
        Promise(ballot, None, (holding, Holding(1, 4, True, (1,))), "node3:1"),
    )
    assert hear(controller, 0, Propose(ballot, PLAN), 1.8) == [api.Send(0, Accepted(ballot))]
    assert said(hear(controller, 1, Prepare(Ballot(1, 0, 1), (2,)), 1.9)) == [(1, Refused(Ballot(1, 0, 1), ballot))]
    actions = hear(controller, 0, decided(PLAN), 2.0)
    assert actions[:2] == [api.Send(2, YOU_ARE_OUT), api.Reconfigure(PLAN)]
    assert hear(controller, 0, decided(PLAN), 2.1) == []


def test_a_decision_without_its_prepare_fences_first():
    actions = hear(formed(3), 0, decided(PLAN))
    assert actions[:3] == [api.AbortWorkers(1), api.Send(2, YOU_ARE_OUT), api.Reconfigure(PLAN)]


def test_whoever_is_behind_is_told_the_decision_again():
    controller = formed(0)
    hear(controller, 1, decided(PLAN))
    for sender in (1, 2):  # a member, and the node that was lost
        for message in (Report(0), Prepare(Ballot(1, 5, sender), (0,)), Status(0, 9, True)):
            assert (sender, decided(PLAN)) in said(hear(controller, sender, message))


def test_who_is_counted_as_lost_leaves():
    for message in (
        Prepare(Ballot(1, 1, 0), (2,)),
        decided(PLAN),
        NodeFailed(0, 2, "you are"),
        Propose(Ballot(1, 1, 0), PLAN),
    ):
        controller = formed(2)
        assert expect(api.Leave, hear(controller, 0, message)[-1]).exit_code == 87
        assert controller._ctx.ended and controller.step(api.Ticked(), 99.0) == []


def test_who_was_lost_in_a_newer_generation_leaves_whoever_says_so():
    controller = formed(2)
    controller.step(api.LinkLost(1, "gone"), 0.1)
    assert said(hear(controller, 1, NodeFailed(0, 2, "you are"))) == []  # each counts the other as lost
    assert expect(api.Leave, hear(controller, 1, YOU_ARE_OUT)[-1]).exit_code == 87


def test_a_rival_of_the_coordinator_is_told_that_this_node_lives_and_is_not_followed():
    controller = formed(3)
    hear(controller, 1, Prepare(Ballot(1, 1, 1), (0,)))
    assert said(hear(controller, 0, Status(0, -1, True, True, 5.0, 4.0), 1.0)) == [(0, Report(0))]
    hear(controller, 1, Status(0, -1, True, True, 6.0, 4.0), 1.1)
    hear(controller, 0, Status(0, -1, True, True, 7.0, 4.0), 1.2)
    (report,) = [message for to, message in said(controller.step(api.Ticked(), 2.2)) if to == 1]
    assert expect(Report, report).heard == 6.0


def test_a_silence_that_ends_within_the_swap_is_over_unless_the_swap_goes_on_without_that_node():
    for proposes, evidence in ((0, {}), (1, {2: "silent"})):
        controller = formed(3)
        hear(
            controller, proposes, Prepare(Ballot(1, 1, proposes), (2,) if evidence else (1,), (2,) if evidence else ())
        )
        controller._ctx.suspect(2, "silent", silent=True)
        hear(controller, 2, Report(0), 1.0)
        assert controller._ctx.watch.evidence == evidence


def test_a_verdict_of_another_generation_or_of_no_member_ends_nothing_here():
    controller = formed(0)
    hear(controller, 1, decided(PLAN))
    assert hear(controller, 2, Verdict(1, 1, "mine")) == []
    assert hear(controller, 2, Verdict(0, 1, "mine")) == [api.Send(2, decided(PLAN))]
    actions = hear(controller, 1, Verdict(0, 1, "it ended before it heard of the swap"))
    assert not controller._ctx.ended and any(isinstance(message, Prepare) for _, message in said(actions))
    controller = formed(0)
    hear(controller, 1, decided(PLAN))
    assert hear(controller, 1, ours := Verdict(1, 1, "ours"))[-1] == api.Leave(1, "ours", ours)


def test_an_accusation_of_an_older_generation_is_answered_by_the_newest_plan():
    controller = formed(1)
    hear(controller, 0, decided(PLAN))
    for node in (0, 1):
        assert hear(controller, 3, NodeFailed(0, node, "gone")) == [api.Send(3, decided(PLAN))]
    assert not controller._ctx.ended
    hear(controller, 0, NodeFailed(0, 0, "who gives itself up is gone in any generation"))
    assert 0 not in controller._ctx.living


def test_who_says_goodbye_without_a_verdict_is_lost():
    actions = hear(formed(0), 2, Goodbye(0))
    assert api.Emit(events.NodeLost((2,), "node 2 was lost (it has left the job)")) in actions


def test_ones_own_pause_is_no_evidence():
    controller = formed(0)
    for node in (1, 2, 3):
        hear(controller, node, Report(0), 1.0)
    controller.step(api.Ticked(), 60.0)
    assert not controller._ctx.ended
    for now in range(61, 69):
        assert not any(isinstance(action, api.Emit) for action in controller.step(api.Ticked(), float(now)))
    actions = [action for now in range(69, 72) for action in controller.step(api.Ticked(), float(now))]
    assert any(isinstance(action, api.Leave) for action in actions), "nobody was heard of before training: a verdict"


def test_who_was_asked_and_has_answered_while_one_slept_is_not_late():
    controller = formed(0)
    for node in sorted(controller._ctx.watch.unheard):
        hear(controller, node, Report(0), 0.2)
    controller.step(api.LinkLost(2, "gone"), 0.25)
    actions = controller.step(api.Ticked(), 60.0)
    assert not [action for action in actions if isinstance(action, (api.Emit, api.Leave))]
    assert 1 not in controller._ctx.suspects
    for now in range(61, 60 + int(TIMING.phase_timeout_s) + 1):
        controller.step(api.Received(1, Report(0)), float(now))
        controller.step(api.Received(3, Report(0)), float(now))
        controller.step(api.Ticked(), float(now))
    assert 1 in controller._ctx.watch.evidence, "the phase has gone on since"


def test_who_may_still_link_up_has_as_long_to_answer_as_linking_takes():
    """Its links to others may wait for a host that stands still; until then it does not know the world."""
    controller = formed(0)
    hear(controller, 1, Report(0))
    controller.step(api.LinkLost(2, "gone"), 0.3)
    limit_s = int(TIMING.linking_s)
    for now in range(1, limit_s):
        hear(controller, 1, Promise(Ballot(1, 1, 0), None, (), ""), float(now))
        controller.step(api.Ticked(), float(now))
    assert 3 not in controller._ctx.suspects and now > TIMING.phase_timeout_s
    controller.step(api.Ticked(), float(limit_s))
    assert 3 in controller._ctx.suspects


@pytest.mark.parametrize("held_by_a_spare, undone", [(4, True), (5, False)])
def test_going_behind_a_committed_step_is_said_and_believed(held_by_a_spare, undone):
    """Node 2 is lost; of rank 2 nobody holds step 5, which was committed, or (the usual case) its buddy does."""
    controller = formed(0)
    hear(controller, 0, Status(0, 5, True))
    for step in (4, 5):
        controller.step(api.SnapshotHeld(Holding(0, step, True, (0,)), 0, step - 1), 0.2)
    controller.step(api.LinkLost(2, "gone"), 0.3)
    ballot = Ballot(1, 1, 0)
    hers = tuple(Holding(1, step, True, (1,)) for step in (4, 5))
    hear(controller, 1, Promise(ballot, None, hers, "store", committed=5, training=True))
    hear(controller, 3, Promise(ballot, None, (Holding(2, held_by_a_spare, True, (2,)),), "", training=True))
    told = [action for action in hear(controller, 1, Accepted(ballot)) if isinstance(action, api.Emit)]
    told += [action for action in hear(controller, 3, Accepted(ballot)) if isinstance(action, api.Emit)]
    reason = "no node that is left holds the snapshot of step 5 of rank(s) 2"
    event = api.Emit(events.StepsUndone(5, 5, reason))
    assert present(controller.world).node_of == (0, 1, 3) and (event in told) is undone
    (stopped,) = [a for a in controller.step(api.StopRequested("operator", 1), 0.4) if isinstance(a, api.Emit)]
    assert expect(events.JobStopped, stopped.event).newest_committed == held_by_a_spare


def test_a_rehearsal_is_started_once_and_announced():
    controller = formed(3)
    task = Rehearse(0, 0, 1)
    assert hear(controller, 0, task) == [api.StartRehearsal(0, 1, 1)]
    assert hear(controller, 0, task) == []
    actions = controller.step(api.SpareRehearsed(0, 1), 1.0)
    assert api.Emit(events.SpareReady(3, (1,), 1, 3)) in actions
    assert (0, Report(0, rehearsed=((0, 1),), able=True)) in said(actions)
    assert hear(controller, 0, Rehearse(0, 0, 1)) == [], "done is done, wherever the recording came from"
    assert hear(controller, 0, Rehearse(0, 0, 2))[0] == api.StartRehearsal(0, 2, 2)


def test_verdicts_name_the_newest_checkpoint_wherever_it_was_saved():
    controller = formed(0)
    hear(controller, 2, Report(0, checkpoint=Checkpoint(True, 7, "/ckpt/7")))
    hear(controller, 1, Report(0, checkpoint=Checkpoint(True, 5, "/ckpt/5")))
    controller.step(local.CheckpointSaved(9, "/ckpt/training_args.bin", whole=False), 0.2)
    actions = controller.step(api.StopRequested("operator", 143), 0.2)
    left = expect(api.Leave, actions[-1])
    assert (left.exit_code, left.reason) == (143, "operator; newest checkpoint: step 7 in /ckpt/7")
    assert (
        expect(api.Leave, formed(0).step(api.StopRequested("operator", 143), 0.2)[-1]).reason
        == "operator; no checkpoint was saved"
    )


def test_a_checkpoint_is_reported_and_promised():
    controller = formed(3)
    newest = Checkpoint(True, 7, "/ckpt/7")
    assert said(controller.step(local.CheckpointSaved(7, "/ckpt/7"), 0.1)) == [(0, Report(0, checkpoint=newest))]
    assert controller.step(local.CheckpointSaved(5, "/ckpt/5"), 0.2) == []
    ballot = Ballot(1, 1, 0)
    promise = Promise(ballot, None, (), "", checkpoint=newest)
    assert (0, promise) in said(hear(controller, 0, Prepare(ballot, (2,))))
    proposer = formed(0)
    hear(proposer, 1, NodeFailed(0, 2, "gone"))
    for node in (1, 3):
        actions = hear(proposer, node, Promise(ballot, None, (), "", training=True, checkpoint=newest))
    left = expect(api.Leave, actions[-1])
    assert "step 7 in /ckpt/7" in left.reason and left.exit_code == 86


def rehearses(policy: Policy) -> Controller:
    """Node 3, a spare, which was told to rehearse rank 1."""
    controller = Controller(3, TIMING, policy)
    controller.step(api.WorldFormed(WORLD), 0.0)
    assert hear(controller, 0, Rehearse(0, 0, 1)) == [ORDER]
    return controller


ORDER, FAILURE = api.StartRehearsal(0, 1, 1), api.SpareFailed(0, 1, "signal 9")


def waited(controller: Controller, begin: float, seconds: float) -> list[api.Action]:
    """Return what it says while the coordinator is heard and so much time passes, `seconds` a whole number."""
    found: list[api.Action] = []
    for second in range(1, int(seconds) + 1):
        hear(controller, 0, Status(0, 0, True), begin + second)
        found += controller.step(api.Ticked(), begin + second)
    return found


def test_a_rehearsal_that_fails_is_ordered_again_within_the_budget_after_pauses_that_double():
    controller, pause_s = rehearses(Policy(restarts_max=4)), TIMING.silent_after_s
    assert ORDER in controller.step(FAILURE, 0.2)
    assert controller.step(api.SpareFailed(0, 2, "of an order before"), 0.2) == []
    now = 1.0
    for times in (1, 2, 4):
        assert ORDER not in controller.step(FAILURE, now)
        assert ORDER not in hear(controller, 0, Rehearse(0, 0, 1), now), "said again, it waits no less"
        assert ORDER not in waited(controller, now, times * pause_s - 1)
        now += times * pause_s
        assert ORDER in controller.step(api.Ticked(), now)
    assert expect(api.Leave, controller.step(FAILURE, now)[-1]).exit_code == 87


def test_a_spare_that_failed_again_and_again_is_ready_once_it_has_not_for_as_long():
    controller, pause_s = rehearses(Policy(restarts_max=9)), TIMING.silent_after_s
    ready, rehearsed = api.Emit(events.SpareReady(3, (1,), 1, 3)), api.SpareRehearsed(0, 1)
    assert ready in controller.step(rehearsed, 0.1)
    assert (0, Report(0, unable="rank 1: signal 9")) in said(controller.step(FAILURE, 0.2))
    assert ready in controller.step(rehearsed, 0.3), "one failure may be anything"
    now = 1.0
    for times in (1, 2):
        controller.step(FAILURE, now)
        assert ORDER in waited(controller, now, times * pause_s)
        now += times * pause_s
        actions = controller.step(rehearsed, now) + waited(controller, now, 3)
        assert ready not in actions and not any(expect(Report, message).able for _, message in said(actions))
        now += 3
    controller.step(FAILURE, now)
    waited(controller, now, 4 * pause_s)
    now += 4 * pause_s
    assert ready not in controller.step(rehearsed, now)
    actions = waited(controller, now, 4 * pause_s)
    assert ready in actions
    report = expect(Report, said(actions)[-1][1])
    assert (report.able, report.unable) == (True, "")


def test_a_spare_whose_rehearsal_is_of_no_use_never_calls_itself_ready():
    controller = rehearses(Policy())
    assert (0, Report(0, unable="too little memory")) in said(
        controller.step(api.SpareUnable("too little memory"), 0.1)
    )
    actions = controller.step(api.SpareRehearsed(0, 1), 0.1)
    assert actions == [api.Send(0, Report(0, rehearsed=((0, 1),), unable="too little memory", sent_at=0.1))]


def test_rehearsals_that_failed_long_ago_do_not_count():
    controller = rehearses(Policy(restarts_max=1, restarts_window_s=60.0))
    for now in (1.0, 61.0, 121.0):
        assert ORDER in controller.step(FAILURE, now)
    assert expect(api.Leave, controller.step(FAILURE, 180.0)[-1]).exit_code == 87


def test_a_rehearsal_that_fails_during_a_swap_is_the_next_generations():
    controller = formed(3)
    hear(controller, 0, Rehearse(0, 0, 1))
    hear(controller, 0, Prepare(Ballot(1, 1, 0), ()))
    assert not any(isinstance(a, api.StartRehearsal) for a in controller.step(api.SpareFailed(0, 1, "signal 9"), 0.2))
    hear(controller, 0, decided(SwapPlan(World(1, (0, 1, 2), (3,)), 4, (), (), "store")))
    assert hear(controller, 0, Rehearse(1, 0, 1)) == [api.StartRehearsal(0, 1, 1)]


def test_a_failure_is_said_at_once_and_with_every_report_until_it_is_healed():
    controller = formed(2)
    hear(controller, 0, Status(0, 3, True))
    message = (0, RankFailed(0, Failure(2, -1, "signal 9")))
    assert message in said(controller.step(api.WorkerLost(2, "signal 9"), 0.2))
    assert controller.step(api.WorkerLost(2, "again"), 0.3) == []
    assert controller.step(api.WorkerLost(1, "another node's"), 0.3) == []
    assert message in said(controller.step(api.Ticked(), 1.3))
    hear(controller, 0, decided(SwapPlan(World(1, (0, 1, 2), (3,)), 4, (), (), "store")), 1.4)
    assert not any(isinstance(message, RankFailed) for _, message in said(controller.step(api.Ticked(), 2.5)))


@pytest.mark.parametrize("when", ["promised", "decided"])
@pytest.mark.parametrize("node", [2, 3], ids=["active", "spare"])
def test_without_the_store_it_builds_upon_a_generation_is_stuck(node, when):
    """The spare's is a standing-by process: it runs no rank whose death would say so."""
    controller = formed(node)
    hear(controller, 0, Status(0, 3, True))
    controller.step(api.StoreOffered("ours"), 0.1)
    hear(controller, 0, Prepare(Ballot(1, 1, 0), ()))
    message = decided(SwapPlan(World(1, (0, 1, 2), (3,)), 4, (), (), "ours"))
    if when == "decided":
        hear(controller, 0, message, 0.2)
    controller.step(api.WorkerLost(2, "signal 9"), 0.2)
    actions = controller.step(api.StoreLost("ours"), 0.2)
    if when == "promised":
        actions = hear(controller, 0, message, 0.3)
    (report,) = [message for to, message in said(actions) if isinstance(message, Report) and to == 0]
    assert report.generation == 1 and "store" in report.stuck
    coordinator = formed(0)
    hear(coordinator, 0, message)
    prepared = said(hear(coordinator, node, report))
    assert (1, Prepare(Ballot(2, 1, 0), ())) in prepared
    hear(controller, 0, decided(SwapPlan(World(2, (0, 1, 2), (3,)), 4, (), (), "another")), 0.4)
    assert not expect(Report, said(controller.step(api.Ticked(), 2.0))[0][1]).stuck


def test_a_store_that_is_gone_after_the_groups_were_built_is_missed_by_nobody():
    controller = formed(3)
    hear(controller, 0, decided(SwapPlan(World(1, (0, 1, 2), (3,)), 4, (), (), "ours")))
    hear(controller, 0, Status(1, 4, True), 0.2)
    assert controller.step(api.StoreLost("ours"), 0.3) == []


def test_a_part_of_a_step_is_no_news():
    """One report a step and node: node 2 runs ranks 4 and 5 and mirrors 2 and 3."""
    controller = formed(2, World(0, (0, 0, 1, 1, 2, 2), (3,)))
    for rank in (4, 2, 5):
        assert controller.step(api.SnapshotHeld(Holding(rank, 0, True, (rank,)), 0), 0.1) == []
    ((to, report),) = said(controller.step(api.SnapshotHeld(Holding(3, 0, True, (3,)), 0), 0.2))
    assert to == 0 and {holding.rank for holding in expect(Report, report).holdings} == {2, 3, 4, 5}
    controller.step(api.SnapshotHeld(Holding(4, 1, True, (4,)), 0, 0), 0.3)
    assert len(expect(Report, said(controller.step(api.Ticked(), 1.3))[0][1]).holdings) == 5, (
        "a heartbeat says what there is"
    )


def test_the_newest_store_of_a_process_that_runs_a_rank_is_offered():
    controller = formed(2, World(0, (0, 0, 1, 1, 2, 2), (3,)))

    def store() -> str:
        return expect(Report, said(controller.step(api.Ticked(), controller._ctx.now + 1.5))[0][1]).store

    controller.step(api.StoreOffered("a", 0), 0.1)
    controller.step(api.StoreOffered("b", 1), 0.1)
    assert store() == "b"
    controller.step(api.StoreLost("b"), controller._ctx.now)
    assert store() == "a", "the other process has one too"
    controller.step(api.StoreOffered("c", 1, stand_in=True), controller._ctx.now)
    assert store() == "a"
    controller.step(api.StoreLost("a"), controller._ctx.now)
    assert store() == "c", "better than none"


def test_a_rehearsal_that_fails_for_want_of_its_lost_source_is_nobodys_fault():
    controller = Controller(3, TIMING, Policy(restarts_max=0))
    controller.step(api.WorldFormed(WORLD), 0.0)
    hear(controller, 0, Rehearse(0, 0, 1))
    controller.step(api.LinkLost(1, "reset"), 0.1)
    controller.step(api.SpareFailed(0, 1, "no recording"), 0.2)
    assert not controller._ctx.ended


def test_a_rehearsal_is_ordered_again_from_who_runs_the_rank_now():
    """With more spares than active nodes two rehearse one rank; the other one has taken it over."""
    controller = Controller(4, TIMING, Policy(restarts_max=0))
    controller.step(api.WorldFormed(World(0, (0, 1), (2, 3, 4))), 0.0)
    assert hear(controller, 0, Rehearse(0, 0, 1)) == [api.StartRehearsal(0, 1, 1)]
    controller.step(api.SpareRehearsed(0, 1), 0.2)
    hear(controller, 0, decided(SwapPlan(World(1, (0, 3), (2, 4)), 4, (1,), (), "store")), 0.3)
    assert hear(controller, 0, Rehearse(1, 0, 1), 0.4) == []
    assert api.StartRehearsal(0, 1, 3) in controller.step(api.SpareFailed(0, 1, "signal 9"), 0.5)
    assert expect(api.Leave, controller.step(api.SpareFailed(0, 1, "signal 9"), 0.6)[-1]).exit_code == 87


def test_who_is_fenced_and_cut_off_stands_still_too():
    """Its process may be in a call that cannot be interrupted, such as a save; the swap is decided without it."""
    controller = formed(1)
    hear(controller, 0, Status(0, 4, True, sent_at=5.0, certain=5.0), 5.0)
    hear(controller, 0, Prepare(Ballot(1, 1, 0), (2,)), 6.0)
    assert api.PauseWorkers() not in controller.step(api.Ticked(), 13.9)
    assert api.PauseWorkers() in controller.step(api.Ticked(), 14.1)
    hear(controller, 0, Status(0, 4, True, sent_at=14.2, certain=14.0), 14.3)
    assert not controller._ctx.paused, "whoever leads the swap hears it still"


def test_who_votes_late_knows_that_it_may_be_decided_already():
    """A majority had accepted without it: the others have watched its silence since, and it stands still at once."""
    controller = formed(1)
    hear(controller, 0, Status(0, 4, True, sent_at=1.0, certain=1.0), 1.0)
    ballot, plan = Ballot(1, 1, 0), SwapPlan(World(1, (0, 1, 3)), 4, (2,), (), "store")
    hear(controller, 0, Prepare(ballot, (2,)), 2.0)
    assert said(hear(controller, 0, Propose(ballot, plan), 12.0)) != []
    actions = hear(controller, 0, decided(plan, ballot), 12.1)
    assert api.Reconfigure(plan) in actions and api.PauseWorkers() in actions[actions.index(api.Reconfigure(plan)) :]


def test_who_has_promised_lately_goes_on_at_once():
    controller = formed(1)
    hear(controller, 0, Status(0, 4, True, sent_at=1.0, certain=1.0), 1.0)
    hear(controller, 0, Prepare(Ballot(1, 1, 0), (2,)), 2.0)
    hear(controller, 0, Prepare(Ballot(1, 2, 0), (2,)), 11.0)
    plan = SwapPlan(World(1, (0, 1, 3)), 4, (2,), (), "store")
    actions = hear(controller, 0, decided(plan, Ballot(1, 2, 0)), 12.0)
    assert api.Reconfigure(plan) in actions and not controller._ctx.paused


def test_it_leads_from_when_nobody_before_it_is_there():
    """Before it has met the others a node speaks for itself."""
    controller = Controller(1, TIMING)
    assert controller.leads
    controller.step(api.WorldFormed(WORLD), 0.0)
    assert not controller.leads
    for now in range(1, 29):
        hear(controller, 2, Status(7, 9, True), float(now))
        controller.step(api.Ticked(), float(now))
    assert not controller.leads, "node 0 has yet to say its first word"
    hear(controller, 0, Status(7, 9, True), 29.0)
    for now in range(30, 40):
        controller.step(api.Ticked(), float(now))
    assert controller.leads, "node 0 is silent"
    controller = formed(1)
    controller.step(api.LinkLost(0, "reset"), 0.1)
    assert controller.leads
    controller = formed(1)
    hear(controller, 0, decided(SwapPlan(World(1, (3, 1, 2)), 4, (0,), (), "store")))
    assert controller.leads, "of a new world without it"


def looks(controller: Controller, since: int, until: int, ask: bool = False) -> list[tuple[int, tuple[int, ...]]]:
    """Have the coordinator heard each second (and ask). Returns: when this node looked, and for whom."""
    found = []
    for now in range(since, until):
        ctx = controller._ctx
        actions = hear(controller, 0, Status(0, ctx.committed, ctx.training, certain=float(now)), now)
        actions += hear(controller, 0, Compare(0, question=now), now) if ask else []
        actions += controller.step(api.Ticked(), now)
        found += [(now, action.nodes) for action in actions if isinstance(action, api.LookAround)]
    return found


def test_who_gets_no_further_looks_whom_it_can_reach_less_and_less_often():
    assert looks(formed(2), 1, 45) == [(10, (1, 0)), (20, (1, 0)), (40, (1, 0))]
    assert looks(formed(0), 1, 45) == [], "the larger of two looks"
    assert looks(formed(3), 1, 45) == [], "a spare trains with nobody"


def test_in_training_it_looks_when_it_is_asked_where_its_ranks_are():
    controller = formed(2)
    hear(controller, 0, Status(0, 1, training=True), 0.0)
    assert looks(controller, 1, 60) == [], "a step may take long"
    assert looks(controller, 60, 130, ask=True) == [(60, (1, 0)), (120, (1, 0))]
    hear(controller, 0, Status(0, 2, training=True), 130.0)
    assert looks(controller, 131, 142, ask=True) == [(134, (1, 0)), (138, (1, 0))], "a step begins the time anew"
