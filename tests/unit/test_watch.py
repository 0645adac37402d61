"""The view of a person who watches a job: the fold of a recorded swap, the table, the plain lines, the files."""

from __future__ import annotations

import io
import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
from rich.console import Console
from support import present

from deadpool_plugin import events
from deadpool_plugin.cli import watch
from deadpool_plugin.cli.jobview import RECENT_BYTES, Follower, JobView
from deadpool_plugin.cli.main import main
from deadpool_plugin.cli.watch import figures

# Three nodes of two ranks and one spare; node 0, the coordinator, is killed after step 23.
START = """
{"event":"NodeJoined","host":"alpha2","ranks":[4,5],"spare":false,"time":33.2337,"node":2,"generation":0}
{"event":"NodeJoined","host":"alpha1","ranks":[2,3],"spare":false,"time":33.2352,"node":1,"generation":0}
{"event":"NodeJoined","host":"alpha3","ranks":[],"spare":true,"time":33.2367,"node":3,"generation":0}
{"event":"WorldFormed","node_of":[0,0,1,1,2,2],"spares":[3],"time":33.2380,"node":0,"generation":0}
{"event":"NodeJoined","host":"alpha0","ranks":[0,1],"spare":false,"time":33.2387,"node":0,"generation":0}
"""
TRAINING = """
{"event":"TrainingStarted","time":33.2605,"node":0,"generation":0}
{"event":"StepDone","rank":4,"step":1,"loss":1.0,"time":33.2793,"node":2,"generation":0}
{"event":"StepDone","rank":2,"step":1,"loss":null,"time":33.2844,"node":1,"generation":0}
{"event":"StepCommitted","step":0,"time":33.2872,"node":0,"generation":0}
{"event":"Mirrored","step":0,"uncovered":[0,1,2],"reason":"no spare can","time":33.2875,"node":0,"generation":0}
"""
READY = """
{"event":"Rehearsed","rank":1,"duration_s":0.4,"time":33.7529,"node":3,"generation":0}
{"event":"Rehearsed","rank":0,"duration_s":0.6,"time":33.9574,"node":3,"generation":0}
{"event":"SpareReady","spare":3,"ranks":[0,1],"time":33.9575,"node":3,"generation":0}
{"event":"Protected","step":20,"spares_left":1,"time":33.9576,"node":0,"generation":0}
{"event":"StepDone","rank":0,"step":23,"loss":null,"time":34.0065,"node":0,"generation":0}
{"event":"StepDone","rank":4,"step":24,"loss":0.0417,"time":34.0073,"node":2,"generation":0}
{"event":"StepCommitted","step":22,"time":34.0081,"node":0,"generation":0}
"""
LOST = """
{"event":"NodeLost","lost":[0],"evidence":"node 0 was lost (link lost)","time":34.0176,"node":1,"generation":0}
"""
PLANNED = """
{"event":"SwapPlanned","restore_step":23,"lost_nodes":[0],"takers":{"0":3},"duration_s":0.007,"time":34.0248,"node":1,"generation":0}
{"event":"Unprotected","reason":"step 23 is not mirrored again yet","time":34.0249,"node":1,"generation":0}
{"event":"WorkerUnblocked","rank":4,"duration_s":0.01,"time":34.0255,"node":2,"generation":0}
{"event":"SnapshotFetched","rank":0,"step":23,"nbytes":65536,"duration_s":0.0205,"time":34.0532,"node":3,"generation":1}
"""
OVER = """
{"event":"SwapDone","duration_s":0.0407,"time":34.0582,"node":1,"generation":1}
{"event":"Mirrored","step":23,"uncovered":[1,2,3],"reason":"none","spares_left":0,"time":34.0626,"node":1,"generation":1}
{"event":"StepDone","rank":0,"step":24,"loss":null,"time":34.0700,"node":3,"generation":1}
{"event":"FirstStepDone","rank":0,"step":24,"duration_s":0.03,"time":34.0701,"node":3,"generation":1}
{"event":"FirstStepDone","rank":4,"step":24,"duration_s":0.06,"time":34.0702,"node":2,"generation":1}
{"event":"StepDone","rank":4,"step":25,"loss":0.04,"time":34.0800,"node":2,"generation":1}
{"event":"StepCommitted","step":24,"time":34.0810,"node":1,"generation":1}
"""
END = """
{"event":"JobFinished","exit_code":0,"time":34.5743,"node":2,"generation":1}
{"event":"JobFinished","exit_code":0,"time":34.5842,"node":3,"generation":1}
{"event":"JobFinished","exit_code":0,"time":34.5908,"node":1,"generation":1}
"""
ENDED = """
{"event":"NodeEnded","exit_code":0,"time":34.9743,"node":2,"generation":1}
{"event":"NodeEnded","exit_code":0,"time":34.9842,"node":3,"generation":1}
{"event":"NodeEnded","exit_code":0,"time":34.9908,"node":1,"generation":1}
"""
ALL = (START, TRAINING, READY, LOST, PLANNED, OVER, END)


def decoded(text: str) -> list[events.Event]:
    return [events.decoder.decode(line) for line in text.split("\n") if line]


def view_of(*parts: str) -> JobView:
    view = JobView()
    for part in parts:
        for event in decoded(part):
            view.apply(event)
    return view


def states(view: JobView) -> list[str]:
    return [row.state for row in view.rows()]


def picture(view: JobView, now: float, width: int = 120, height: int | None = None) -> str:
    console = Console(record=True, width=width, file=io.StringIO())
    console.print(watch.picture(console, view, now, height))
    return console.export_text()


def test_a_swap_changes_the_nodes_states() -> None:
    seen = [states(view_of(*ALL[:count])) for count in range(1, len(ALL))]
    assert seen == [
        ["joining", "joining", "joining", "spare"],
        ["active", "active", "active", "rehearsing"],
        ["active", "active", "active", "spare"],
        ["lost", "active", "active", "spare"],
        ["lost", "active", "active", "joining"],
        ["lost", "active", "active", "active"],
    ]


def test_ranks_move_and_steps_go_back() -> None:
    view = view_of(*ALL[:3])
    assert (view.step, view.committed, view.protection, view.rows()[3].stands_in_for) == (24, 22, "Protected", (0, 1))
    view = view_of(*ALL[:5])
    assert (view.step, view.generation, view.protection) == (23, 1, "Unprotected")
    assert [row.ranks for row in view.rows()] == [(), (2, 3), (4, 5), (0, 1)]
    view = view_of(*ALL[:6])
    assert (view.step, view.committed, view.protection) == (25, 24, "Mirrored")
    assert [row.generation for row in view.rows()] == [0, 1, 1, 1]
    (swap,) = view.swaps
    assert (swap.plan.takers, swap.duration_s, swap.first_step_s, swap.began) == ({"0": 3}, 0.0407, 0.06, 34.0176)
    assert view.swapping_since is None


def test_the_table_during_a_swap() -> None:
    shown = picture(view_of(*ALL[:5]), now=35.5176)
    assert "swap for 1.5 s: all ranks go back to step 23" in shown
    rows = [line.split("│")[1:-1] for line in shown.splitlines() if line.startswith("│")]
    assert [[cell.strip() for cell in row] for row in rows] == [
        ["0", "alpha0", "lost", "-", "0", "-", "-"],
        ["1", "alpha1", "active", "2-3", "0", "1", "-"],
        ["2", "alpha2", "active", "4-5", "0", "23", "0.0417"],
        ["3", "alpha3", "joining", "0-1", "1", "23", "-"],
    ]
    assert "swap 1  node 3 (alpha3) takes over from node 0 (alpha0), back to step 23: under way" in shown
    assert "node 1  node 0 (alpha0) was lost (link lost)" in shown


def test_the_table_at_the_end() -> None:
    assert "deadpool  the job finished; some hosts are still at work" in picture(view_of(*ALL), now=40.0)
    shown = picture(view_of(*ALL, ENDED), now=40.0)
    assert "deadpool  the job finished; exit code 0" in shown
    said = (
        "generation 1   newest step 25   committed step 24   newest loss 0.0400   spares left 0   "
        "protection Mirrored only"
    )
    assert said in shown
    in_one_line = " ".join(shown.split())
    assert "back to step 23: in training again after 0.04 s, first step done after 0.06 s" in in_one_line
    assert shown.count("finished") == 2, "the headline and one node's last line, not every node's"


def test_nothing_yet() -> None:
    assert "waiting for the first event" in picture(JobView(), now=0.0)


def test_who_leaves_the_job_does_not_say_who_is_lost() -> None:
    view = view_of(START, TRAINING)
    view.apply(events.NodeLost(time=50.0, node=2, lost=(0, 1, 3), evidence="silent"))
    assert states(view) == ["lost", "lost", "active", "lost"]
    view.apply(events.NodeFenced(time=50.1, node=2, reason="1 of 4 members is left"))
    assert states(view) == ["active", "active", "fenced", "rehearsing"]
    assert view.swapping_since is None


def test_a_decision_carried_out_twice_is_one_swap() -> None:
    view = view_of(*ALL[:5], PLANNED)
    assert len(view.swaps) == 1


def test_a_host_that_joins_is_a_spare_that_is_left() -> None:
    view = view_of(*ALL[:6])
    assert present(view.world).spares == ()
    view.apply(events.SwapPlanned(time=36.0, node=1, generation=1, restore_step=24, joined=(4,)))
    assert present(view.world).spares == (4,) and "spares left 1" in picture(view, now=36.0)
    view.apply(events.SwapPlanned(time=37.0, node=1, generation=2, restore_step=24, lost_nodes=(4,)))
    assert present(view.world).spares == () and "spares left 0" in picture(view, now=37.0)


def test_a_loss_during_a_swap_continues_it() -> None:
    view = view_of(*ALL[:5])
    view.apply(events.NodeLost(time=34.1, node=1, generation=1, lost=(3,), evidence="node 3 was lost"))
    view.apply(events.SwapPlanned(time=34.2, node=1, generation=1, restore_step=23, lost_nodes=(3,)))
    assert [swap.began for swap in view.swaps] == [34.0176, 34.0176]
    assert (
        "swap 1  node 3 (alpha3) takes over from node 0 (alpha0), back to step 23: went into the next swap"
        in picture(view, now=35.0)
    )


def test_late_lines_of_an_older_generation_change_nothing() -> None:
    view = view_of(*ALL[:6])
    view.apply(events.StepDone(time=99.0, node=2, generation=0, rank=4, step=99, loss=9.0))
    view.apply(events.Unprotected(time=99.0, node=1, generation=0, reason="late"))
    assert (view.step, view.protection) == (25, "Mirrored")


def test_a_swap_that_goes_behind_what_was_committed_takes_it_back() -> None:
    view = view_of(*ALL[:4])
    planned = events.SwapPlanned(time=35.0, node=1, generation=0, restore_step=21, lost_nodes=(0,), takers={"0": 3})
    view.apply(planned)
    view.apply(events.StepsUndone(time=35.0, node=1, generation=0, first=22, last=22, reason="nobody holds it"))
    view.apply(events.StepCommitted(time=35.1, node=0, generation=0, step=22))
    assert view.committed == 21 and "is done again" in view.lines[-1].text
    view.apply(events.StepCommitted(time=35.2, node=1, generation=1, step=22))
    assert view.committed == 22


def test_only_some_nodes_logs_are_there() -> None:
    mine = [event for part in ALL[:6] for event in decoded(part) if event.node == 1]
    view = JobView()
    for event in mine:
        view.apply(event)
    assert {row.node: row.state for row in view.rows()} == {0: "lost", 1: "active"}
    assert picture(view, now=35.0)


def test_a_stop_is_told_once_with_its_reason() -> None:
    view = view_of(START, TRAINING)
    for node in (0, 1):
        view.apply(events.JobStopped(time=40.0, node=node, exit_code=86, reason="no spare", newest_committed=7))
    assert (view.outcome, view.exit_code) == ("the job stopped: no spare", 86)
    assert "deadpool  the job stopped: no spare; exit code 86" in picture(view, now=341.0)
    assert [line.text for line in view.lines if "stopped" in line.text] == [
        "job stopped (exit code 86): no spare; newest committed step: 7"
    ]


@pytest.mark.parametrize("world_first", [False, True])
def test_the_next_job_in_the_same_folder_replaces_the_view(world_first: bool) -> None:
    following = sorted(decoded(START), key=lambda event: not (world_first and isinstance(event, events.WorldFormed)))
    view = view_of(*ALL)
    for event in following:
        view.apply(event)
    assert (view.outcome, view.generation, view.step, view.swaps) == ("", 0, -1, [])
    assert states(view) == ["joining", "joining", "joining", "spare"]
    assert view.rows()[1].ranks == (2, 3)


def test_a_host_that_only_the_next_job_has_may_speak_first() -> None:
    other = START.replace('"node":2', '"node":4').replace("[0,0,1,1,2,2]", "[0,0,1,1,4,4]").replace("alpha2", "alpha4")
    view = view_of(START, TRAINING, READY, END, other, TRAINING.replace('"node":2', '"node":4'))
    assert [(row.node, row.host) for row in view.rows()] == [(0, "alpha0"), (1, "alpha1"), (3, "alpha3"), (4, "alpha4")]


def test_plain_lines_are_few() -> None:
    view, plain, said = JobView(), watch.PlainLines(every_s=10.0), []
    for part in (*ALL, ENDED):
        for event in decoded(part):
            view.apply(event)
            said += [line.split(" ", 2)[2] for line in plain.update(view, now=event.time)]
    assert said == [
        "node 0: 3 node(s) run 6 rank(s), 1 node(s) stand by",
        "node 0: all ranks are in training",
        "generation 0, step 1, committed -, loss 1.0000, protection: not yet",
        "node 0: mirrored: step 0 is in other hosts' memory; not protected: no spare can",
        "node 3: spare node 3 (alpha3) is ready for rank(s) 0, 1",
        "node 0: protected: step 20 survives the loss of any node",
        "node 1: node 0 (alpha0) was lost (link lost)",
        "node 1: swap: node 3 (alpha3) takes over from node 0 (alpha0); "
        "all ranks go back to step 23 (decided in 0.01 s)",
        "node 1: unprotected: step 23 is not mirrored again yet",
        "node 1: swap done, all ranks are in training again after 0.04 s",
        "node 1: mirrored: step 23 is in other hosts' memory; not protected: NO SPARE LEFT, the next lost node "
        "ends the job (on_no_spare: stop)",
        "node 2: the job has finished",
        "generation 1, step 25, committed 24, loss 0.0400, protection: Mirrored only",
        "the job finished; some hosts are still at work",
        "the job finished; exit code 0; lost hosts: alpha0",
    ]
    assert plain.update(view, now=1e9) == []


def test_files_are_followed_by_whole_lines(tmp_path: Path) -> None:
    follower = Follower(tmp_path / "later")
    assert follower.poll() == []
    (tmp_path / "later").mkdir()
    first, second = tmp_path / "later/events.0.jsonl", tmp_path / "later/events.1.jsonl"
    a, b = events.encode(events.StepCommitted(time=1.0, step=1)), events.encode(events.StepCommitted(time=3.0, step=3))
    first.write_bytes(a + b[:9])
    assert [event.time for event in follower.poll()] == [1.0]
    assert follower.poll() == []
    with first.open("ab") as file:
        file.write(b[9:])
    second.write_bytes(events.encode(events.JobFinished(time=2.0, node=1)))
    assert [event.time for event in follower.poll()] == [2.0, 3.0]
    first.write_bytes(a)
    assert [event.time for event in follower.poll()] == [1.0], "a file that shrank was written anew"


def test_unknown_events_are_counted_and_left_out(tmp_path: Path) -> None:
    lines = b'{"event":"FromTheFuture","time":1.0}\nnot json\n' + events.encode(events.JobFinished(time=2.0))
    (tmp_path / "events.0.jsonl").write_bytes(lines)
    follower = Follower(tmp_path)
    assert [type(event) for event in follower.poll()] == [events.JobFinished]
    assert follower.unreadable == 2


def test_of_what_recurs_only_the_newest_is_read_and_of_all_else_everything(tmp_path: Path) -> None:
    steps = [events.StepDone(time=float(step), rank=0, step=step) for step in range(20_000)]
    lines = [events.encode(step) for step in steps]
    ready = [events.SpareReady(time=float(number), spare=1) for number in range(2000)]
    for path, part in zip(events.recent_of(tmp_path, 0), (lines[:10_000], lines[10_000:]), strict=True):
        path.write_bytes(b"".join(part))
    events.log_of(tmp_path, 0).write_bytes(b"".join(map(events.encode, ready)))
    follower = Follower(tmp_path)
    found = follower.poll()
    done = [event for event in found if isinstance(event, events.StepDone)]
    assert [event for event in found if isinstance(event, events.SpareReady)] == ready
    assert done[-1] == steps[-1] and len(done) * len(lines[0]) <= 2 * RECENT_BYTES and not follower.unreadable
    with events.recent_of(tmp_path, 0)[1].open("ab") as file:
        file.writelines(lines)
    assert steps[-1] in (again := follower.poll()) and len(again) * len(lines[-1]) <= RECENT_BYTES
    events.recent_of(tmp_path, 0)[1].write_bytes(lines[7])
    assert follower.poll() == [steps[7]], "it began anew"


def test_a_job_that_says_nothing_any_more_is_noticed() -> None:
    view, plain = view_of(*ALL[:6]), watch.PlainLines(every_s=10.0)
    assert "in training" in picture(view, now=300.0)
    assert "no event for 2 h" in picture(view, now=34.0 + 7300)
    said = [line.split(" ", 2)[2] for now in (100.0, 400.0, 500.0) for line in plain.update(view, now)]
    assert [line for line in said if "no event" in line] == [
        "no event for 6 min: the job is gone, or its hosts cannot write to its output_dir"
    ]
    view.apply(events.Alive(time=420.0, node=1, generation=1))
    assert "in training" in picture(view, now=700.0), "it may have very long steps"
    assert "no event" not in picture(view_of(*ALL), now=1e6)


def test_a_job_that_trains_and_does_no_step_says_for_how_long() -> None:
    view, plain = view_of(*ALL[:6]), watch.PlainLines(every_s=10.0)
    view.apply(events.Alive(time=200.0, node=1, generation=1))
    assert "no step" not in picture(view, now=38.0)
    assert "in training, but no step for 59 s" in picture(view, now=93.0), "it may be a save: no line of its own"
    assert "in training, but no step for 3 min" in picture(view, now=34.08 + 180)
    said = [line.split(" ", 2)[2] for now in range(40, 324, 5) for line in plain.update(view, float(now))]
    steps = [line for line in said if "no step" in line]
    assert steps == [f"in training, but no step for {told}" for told in ("61 s", "2 min", "4 min")], "few lines"
    view.apply(events.StepDone(time=330.0, node=1, rank=2, step=26, generation=1))
    assert "no step" not in picture(view, now=331.0) + "".join(plain.update(view, 331.0))
    assert watch.headline(view, 391.0) == "in training, but no step for 61 s", "one slow step is not the usual one"


def test_what_is_long_without_a_step_goes_by_the_usual_time_of_a_step() -> None:
    view = view_of(START, TRAINING)
    for step in range(2, 12):
        view.apply(events.StepDone(time=33.3 + 50.0 * (step - 1), node=2, rank=4, step=step))
    view.apply(events.Alive(time=983.0, node=0))
    assert watch.headline(view, 983.0) == "in training"
    assert watch.headline(view, 533.4 + 500.0) == "in training, but no step for 8 min"
    view.apply(events.WaitingForHost(time=1000.0, node=0))
    assert "no step" not in watch.headline(view, 1100.0), "what it waits for is known"


def test_a_half_that_gives_up_is_not_the_end_of_the_other_one() -> None:
    view = view_of(START, TRAINING)
    view.apply(events.NodeLost(time=50.0, node=0, lost=(2,), evidence="silent"))
    view.apply(events.SwapPlanned(time=50.1, node=0, restore_step=0, lost_nodes=(2,), takers={"2": 3}))
    view.apply(events.JobStopped(time=60.0, node=2, exit_code=86, reason="a tie"))
    assert (view.outcome, view.exit_code, view.over(now=60.0)) == ("", 0, False)
    view.apply(events.JobStopped(time=70.0, node=0, generation=1, exit_code=3, reason="ours"))
    assert (view.outcome, view.exit_code) == ("the job stopped: ours", 3)


def test_nor_is_it_if_the_other_one_waits_for_a_host() -> None:
    view = view_of(START, TRAINING)
    view.apply(events.NodeLost(time=50.0, node=0, lost=(1, 2), evidence="silent"))
    view.apply(events.WaitingForHost(time=50.1, node=0, reason="no spare"))
    assert "waiting for a host to join" in picture(view, now=51.0)
    for node in (1, 2):
        view.apply(events.JobStopped(time=60.0, node=node, exit_code=86, reason="a tie"))
    assert view.outcome == "" and "waiting for a host to join" in picture(view, now=61.0)
    view.apply(events.JobStopped(time=70.0, node=0, exit_code=86, reason="told to end"))
    assert (view.outcome, view.exit_code) == ("the job stopped: a tie", 86)


def test_a_job_that_all_have_left_is_over_once_they_have_had_a_moment_for_their_exit_codes() -> None:
    view = view_of(*ALL[:-1])
    for node in (1, 2, 3):
        assert not view.outcome
        view.apply(events.NodeFenced(time=40.0, node=node, generation=1, reason="told to end"))
    assert (view.exit_code, view.doing(now=41.0), view.doing(now=50.1)) == (1, "ending", "ended")
    for node in (1, 2, 3):
        view.apply(events.NodeEnded(time=40.5, node=node, generation=1, exit_code=87))
    assert view.doing(now=41.0) == "ended"
    assert watch.headline(view, 41.0) == (
        "the job is over, and no host says how it ended: node 1 (alpha1), node 2 (alpha2), node 3 (alpha3) left with "
        "87; start again from the newest checkpoint; exit code 1; lost hosts: alpha0"
    )


def test_it_is_over_when_every_living_node_has_said_how_its_scripts_ended() -> None:
    view = view_of(*ALL)
    for node, code in ((1, 0), (2, 3)):
        view.apply(events.NodeEnded(time=35.0, node=node, generation=1, exit_code=code))
        assert not view.over(now=36.0)
    view.apply(events.NodeEnded(time=35.1, node=3, generation=1, exit_code=0))
    assert view.over(now=36.0), "node 0 is lost"
    assert (view.outcome, view.exit_code) == ("training finished, but a script failed afterwards", 3)


def test_the_watchers_exit_code_is_the_jobs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(signal, "signal", lambda *arguments: None)
    write_job(tmp_path)
    assert main(["watch", str(tmp_path)]) == 0
    with (tmp_path / "events.1.jsonl").open("ab") as file:
        for event in (
            events.NodeJoined(time=50.0, node=1, host="alpha1"),
            events.WorldFormed(time=50.1, node=1, node_of=(1,)),
            events.JobStopped(time=51.0, node=1, exit_code=86, reason="no spare"),
        ):
            file.write(events.encode(event))
    assert main(["watch", str(tmp_path)]) == 86


def test_the_watcher_stays_until_the_last_word(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "POLL_S", 0.0)
    view, now = JobView(), time.time()
    turns = watch.updates(Follower(tmp_path), view)
    write(tmp_path, *(msgspec.structs.replace(event, time=now) for part in ALL for event in decoded(part)))
    for _ in range(5):
        next(turns)
    assert view.outcome == "the job finished"
    write(tmp_path, *(events.NodeEnded(time=now, node=node, exit_code=3 * (node == 2)) for node in (1, 2, 3)))
    assert len(list(turns)) == 1 and view.exit_code == 3


@pytest.mark.parametrize(
    ("planned", "said"),
    [
        ({"joined": (4,)}, "node 4 joined, no rank moves, back to step 23"),
        ({"lost_nodes": (3,)}, "lost node 3, no rank moves, back"),
        (
            {"lost_nodes": (0, 3), "takers": {"0": 4}, "joined": (5,)},
            "node 4 takes over from node 0, lost node 3, node 5 joined, back",
        ),
        ({"lost_ranks": (2,)}, "new process for rank 2, no rank moves, back"),
        ({}, "no rank moves, back"),
    ],
)
def test_a_swap_says_what_it_was_for(planned: dict[str, object], said: str) -> None:
    view = view_of(START, TRAINING)
    view.apply(events.make("SwapPlanned", {"restore_step": 23, **planned}, node=1, generation=0))
    assert watch.described(view.swaps[-1]).startswith(said)


CATCHING_UP = """
{"event":"CatchingUp","rank":0,"step":5,"target":23,"left_s":7.2,"time":34.0400,"node":3,"generation":1}
"""


def test_a_swap_says_how_far_a_newcomer_is_that_everybody_waits_for() -> None:
    view = view_of(*ALL[:5], CATCHING_UP)
    said = "all ranks go back to step 23; rank 0's new process on node 3 (alpha3) replays past steps; it has reached "
    assert watch.headline(view, 35.0).endswith(f"{said}step 5 of 23 (21 %); about 7 s are left")
    assert figures(view, 35.0)["catching_up"] == {"rank": 0, "step": 5, "target_step": 23, "left_s": 7.2}
    assert figures(view_of(*ALL[:5]), 35.0)["catching_up"] is None
    view.apply(decoded(OVER)[0])
    assert figures(view, 35.0)["catching_up"] is None and watch.headline(view, 35.0) == "in training"
    view = view_of(*ALL[:4])
    view.apply(events.CatchingUp(time=34.02, node=3, generation=0, rank=0, step=5))
    assert figures(view, 35.0)["catching_up"] == {"rank": 0, "step": 5, "target_step": None, "left_s": None}
    for event in decoded(PLANNED):
        view.apply(event)
    assert figures(view, 35.0)["catching_up"] is None, "of the process before"


def test_more_hosts_than_lines_are_counted_and_those_in_trouble_shown() -> None:
    view = JobView()
    view.apply(events.WorldFormed(node=0, node_of=tuple(range(31)), spares=(31,)))
    for node in range(32):
        view.apply(events.NodeJoined(node=node, host=f"h{node}", ranks=(node,) if node < 31 else (), spare=node == 31))
    view.apply(events.TrainingStarted(node=0, time=1.0))
    view.apply(events.NodeLost(node=0, lost=(30,), evidence="node 30 was lost", time=2.0))
    for height in (14, 30, 100):
        shown = picture(view, 3.0, height=height)
        assert "h30" in shown and "lost" in shown and len(shown.splitlines()) <= height
        assert ("more node(s): " in shown) == (height < 40), shown
    assert "h31" in shown, "with room for all of them nobody is left out"


@pytest.mark.parametrize("height", [20, 24, 50])
def test_in_a_narrow_terminal_nothing_is_cut_off_and_the_newest_lines_win(height: int) -> None:
    view = view_of(*ALL[:6])
    reason = (
        "no host answers: " + ", ".join(f"host{number} refused the connection" for number in range(6)) + ". THE END"
    )
    for number in range(20):
        view.apply(events.Note(time=40.0 + number, node=2, generation=1, text=f"note number {number}"))
    view.apply(events.NodeLost(time=61.0, node=1, generation=1, lost=(2,), evidence=reason))
    shown = picture(view, now=62.0, width=80, height=height)
    rows = shown.splitlines()
    assert len(rows) < height and all(len(row) <= 80 for row in rows), shown
    assert all(row.endswith("│") for row in rows if row.startswith("│")), "the table's last column"
    in_one_line = " ".join(shown.split())
    assert reason in in_one_line and "…" not in shown, "the newest line, whole"
    for row in ("generation", "newest step", "committed step", "newest loss 0.0400", "spares left 0", "protection"):
        assert row in in_one_line
    assert all(f"alpha{number}" in shown for number in range(4)), "the table is there, too"
    assert "note number 19" in in_one_line and (height < 50 or "note number 16" in in_one_line)


def test_without_a_spare_nothing_is_green() -> None:
    view = view_of(*ALL[:5])
    view.apply(events.Protected(time=35.0, node=1, generation=1, step=23))  # as versions before `Mirrored` said
    assert watch._style(view) != watch.STYLES["Protected"]


def test_a_folder_that_is_not_there_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["--once"], ["--json"], ["--once", "--json"]):
        assert main(["watch", str(tmp_path / "nowhere"), *words]) == 78
        assert "nowhere is not there; expected the job's output_dir" in capsys.readouterr().err


def test_a_file_is_no_folder_to_wait_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "events.0.jsonl").touch()
    for words in ([], ["--once"], ["--json"]):
        assert main(["watch", str(tmp_path / "events.0.jsonl"), *words]) == 78
        assert "events.0.jsonl is a file; expected the job's output_dir" in capsys.readouterr().err


def test_a_folder_without_a_job_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["watch", str(tmp_path), "--once"]) == 78
    assert f"no event log of a job in {tmp_path}; expected the job's output_dir" in capsys.readouterr().err
    assert main(["watch", str(tmp_path), "--json"]) == 0, "its monitoring may begin before a job does"
    assert json.loads(capsys.readouterr().out)["state"] == "unknown"


@pytest.mark.parametrize("words", [["config"], ["watch", "{folder}"], ["watch", "{folder}", "--json"]])
def test_whoever_reads_no_further_gets_no_traceback(tmp_path: Path, words: list[str]) -> None:
    write_job(tmp_path)
    command = [sys.executable, "-m", "deadpool_plugin", *(word.format(folder=tmp_path) for word in words)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()  # nobody reads, whenever it comes to write
    assert process.stderr.read() == b""
    assert process.wait(timeout=60) == 141


def test_a_job_in_figures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    view = view_of(*ALL[:5])
    told = figures(view, now=35.0249)
    assert (told["state"], told["generation"], told["step"], told["committed_step"]) == ("swapping", 1, 23, 22)
    assert {name: round(told[name], 4) for name in ("committed_age_s", "unprotected_s", "swapping_s", "silent_s")} == {
        "committed_age_s": 1.0168, "unprotected_s": 1.0073, "swapping_s": 1.0073, "silent_s": 0.9717,
    }  # fmt: skip
    assert (told["mirrored"], told["uncovered"]) == (False, ())
    assert [figures(view_of(*ALL[:count]), 40.0)["protected"] for count in range(1, 7)] == [0, 0, 1, 0, 0, 0]
    assert figures(view_of(*ALL[:6]), 40.0)["uncovered"] == (1, 2, 3)
    assert (told["protected"], told["spares_left"], told["swaps"], told["last_swap_s"]) == (False, 0, 1, None)
    assert (told["outcome"], told["exit_code"], told["history"]) == (None, None, "ok")
    assert told["members"][3] == {
        "node": 3, "host": "alpha3", "state": "joining", "ranks": (0, 1), "stands_in_for": (), "generation": 1,
        "step": 23,
    }  # fmt: skip
    view.apply(events.HistoryFilling(time=34.1, node=1, rank=2, step=23))
    assert figures(view, now=34.0)["history"] == "filling" and figures(view, now=34.0)["unprotected_s"] == 0.0
    view.apply(events.HistoryFilling(time=34.2, node=1, rank=2, step=23, full=True))
    assert figures(view, now=1e6)["state"] == "silent" and figures(view, now=1e6)["history"] == "full"
    ending = figures(view_of(*ALL), now=35.0)
    assert (ending["state"], ending["outcome"], ending["exit_code"]) == ("ending", "the job finished", None)
    write_job(tmp_path)
    assert main(["watch", str(tmp_path), "--once", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed.keys() == told.keys() == figures(JobView(), now=0.0).keys()
    assert (printed["state"], printed["exit_code"], printed["last_swap_s"]) == ("ended", 0, 0.0407)
    assert (printed["mirrored"], printed["protected"], printed["swapping_s"]) == (True, False, None)


def test_what_becomes_of_the_command_that_brings_hosts() -> None:
    view, said = view_of(START), []
    assert figures(view, now=40.0)["spare_command"] is None
    for event in (
        events.SpareCommandStarted(hosts=2),
        events.SpareCommandDone(said="job 7", limit_s=1800.0),
        events.SpareCommandFailed(reason="none has joined within 1800 s of its end", retry_s=10.0),
        events.SpareCommandExhausted(attempts=10, window_s=86400.0),
        events.HostJoined(joined=7),
    ):
        view.apply(events.stamped(event, node=0, generation=0))
        said.append(figures(view, now=40.0)["spare_command"])
    assert said == ["running", "awaited", "failed", "exhausted", None]
    assert [line.text for line in list(view.lines)[-5:-1]] == [
        "2 hosts are missing; spare_command runs (attempt 1)",
        "spare_command has ended well: job 7; its host may take 1800 s to join",
        "spare_command has brought no host: none has joined within 1800 s of its end; it is run again in 10 s",
        "spare_command has brought no host 10 times within 24 h and is not run for now; to do: deadpool join",
    ]


def test_what_holds_training_up_is_said_until_it_gets_on() -> None:
    view = view_of(*ALL)
    view.outcome, view.swaps = "", []
    at = view.stepped_at
    what = "rank 1 has not come to collective 3"
    here: dict[str, Any] = {"node": 0, "generation": view.generation}
    view.apply(events.Stalled(time=at + 6, **here, step=9, waited_s=6, ranks=(1,), what=what))
    view.outcome = ""
    assert watch.headline(view, at + 240.0).endswith(f"for 4 min: {what}")
    told = figures(view, at + 7.0)
    assert (told["stalled"], told["stalled_ranks"]) == (what, (1,))
    rank = min(rank for node in view.nodes.values() for rank in node.ranks)
    view.apply(events.StepDone(time=at + 8, **here, rank=rank, step=view.step + 1))
    assert figures(view, at + 8.0)["stalled"] is None


def test_every_figure_is_explained() -> None:
    said = (Path(__file__).resolve().parents[2] / "configs" / "README.md").read_text()
    told = figures(view_of(START), now=40.0)
    for name in [*told, *told["members"][0]]:
        assert f"`{name}`" in said, name


def test_what_is_known_now_of_a_job_that_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for part in ALL[:3]:
        write(tmp_path, *decoded(part))
    assert main(["watch", str(tmp_path), "--once"]) == 0
    assert "generation 0, step 24, committed 22" in capsys.readouterr().out


def write_job(folder: Path) -> None:
    write(folder, *(event for part in ALL for event in decoded(part)))


def write(folder: Path, *said: events.Event) -> None:
    for event in said:
        with (folder / f"events.{event.node}.jsonl").open("ab") as file:
            file.write(events.encode(event))


def test_without_a_terminal_it_prints_lines_and_ends_with_the_job(tmp_path: Path) -> None:
    write_job(tmp_path)
    code = (
        "import sys; from deadpool_plugin.cli.main import main; code = main(['watch', *sys.argv[1:]]); "
        "assert 'torch' not in sys.modules; sys.exit(code)"
    )
    ran = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, timeout=60)
    assert ran.returncode == 0, ran.stderr
    assert "swap done" in ran.stdout and "step 25" in ran.stdout and "\x1b" not in ran.stdout


def test_on_a_terminal_the_last_picture_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    write_job(tmp_path)
    screen = io.StringIO()
    watch.show_table(Follower(tmp_path), JobView(), Console(file=screen, force_terminal=True, width=120, height=40))
    assert "alpha3" in screen.getvalue() and screen.getvalue().rstrip().endswith("\x1b[?25h")


def test_numbers_are_listed_as_runs() -> None:
    assert watch.ranges((0, 1, 2, 5, 7, 8)) == "0-2, 5, 7-8"
    assert watch.ranges(()) == ""
