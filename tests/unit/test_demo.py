"""The demonstration says how far it is and what failed: its setup (with a stand-in for Python), lines, pictures."""

import contextlib
import json
import multiprocessing
import os
import pty
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support.stand_in import fake

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))

import demo
from clusters import demo_report, references
from clusters.launched import last_error

ROOT = Path(__file__).resolve().parents[2]
STAND_IN = """#!/usr/bin/env bash
case $* in
    --version) echo Python 3.11.0 ;;
    "-m venv "*) mkdir -p "$3/bin" && cp "$0" "$3/bin/python" ;;
    *" pip "*)
        echo "Collecting torch"
        [[ $* != *"$FAILS"* ]] || { echo "ERROR: no such wheel"; exit 7; }
        until [[ -z $SEEN || -e $SEEN ]]; do read -r -t 0.1 <> <(:) || true; done ;;
esac
"""


@pytest.fixture
def setup(tmp_path):
    """Runs the setup in an empty repository, where Python is a stand-in; `stderr` gets its progress."""
    (tmp_path / "scripts").mkdir()
    for name in ("setup_env.sh", "requirements-cpu.txt", "requirements-test.txt"):
        shutil.copy(ROOT / "scripts" / name, tmp_path / "scripts")
    stand_in = tmp_path / "python"
    stand_in.write_text(STAND_IN)
    stand_in.chmod(0o755)

    def start(stderr, *words, fails="nothing", seen=""):
        environ = os.environ | {"PYTHON": str(stand_in), "FAILS": fails, "SEEN": str(seen)}
        return subprocess.Popen([tmp_path / "scripts" / "setup_env.sh", *words], env=environ, stderr=stderr)

    return start


@pytest.mark.parametrize(("words", "code", "said"), [
    (["--help"], 0, b"usage: demo.sh"),
    (["--steps", "8", "--kill", "9@3"], 2, b"--kill 9@3: there are nodes 0..4, steps 1..8"),
])  # fmt: skip
def test_options_are_checked_before_the_setup(tmp_path, words, code, said):
    shutil.copytree(ROOT / "scripts", tmp_path / "scripts", ignore=shutil.ignore_patterns("results", "__pycache__"))
    python = tmp_path / "a python"  # with the standard library only, and no way to make an environment
    python.write_text(f'#!/bin/sh\n[ "$1" != -m ] && exec {os.path.realpath(sys.executable)} -I -S "$@"\n')
    python.chmod(0o755)
    command = [tmp_path / "scripts" / "demo.sh", *words]
    environ = os.environ | {"PYTHON": "./a python"}
    done = subprocess.run(command, cwd=tmp_path, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    assert (done.returncode, said in done.stdout) == (code, True), done.stdout
    assert not (tmp_path / ".venv").exists()


def test_without_a_python_the_demonstration_says_so(tmp_path):
    shutil.copytree(ROOT / "scripts", tmp_path / "scripts", ignore=shutil.ignore_patterns("results", "__pycache__"))
    for name in ("bash", "dirname", "sha256sum", "basename", "env"):
        (tmp_path / name).symlink_to(shutil.which(name))
    done = subprocess.run(
        [tmp_path / "scripts" / "demo.sh"], env={"PATH": str(tmp_path)}, capture_output=True, text=True
    )
    assert (done.returncode, done.stderr.count("\n")) == (1, 1) and "found no Python 3.11, 3.12 or 3.13" in done.stderr


def test_two_demonstrations_do_not_write_to_one_folder(tmp_path):
    code = f"import pathlib, demo; demo.prepare_folder(pathlib.Path({str(tmp_path)!r}))"
    environ = os.environ | {"PYTHONPATH": str(ROOT / "scripts")}
    with demo.prepare_folder(tmp_path):
        (tmp_path / "summary.json").touch()
        second = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True)
        assert (second.returncode, (tmp_path / "summary.json").exists()) == (1, True)
        assert "another demonstration writes to" in second.stderr
    third = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True)
    assert third.returncode == 0 and "removing what an earlier demonstration left" in third.stdout
    assert not (tmp_path / "summary.json").exists()


def heard(pipe):
    assert pipe.poll(60)
    return pipe.recv()


def run_undisturbed(folder, orders, fails=False):
    """Make `folder` in a process of its own, whose end waits for a word. What it prints goes to `orders`."""
    vars(references)["print"] = lambda text, flush: orders.send(text)  # only in this process
    with contextlib.suppress(InterruptedError), references.made_once(folder) as running:
        orders.send(running is not None)
        if running is not None:
            (running / "losses").write_text("3.14")
            heard(orders)
            if fails:
                raise InterruptedError


@pytest.mark.parametrize("fails", [False, True])
def test_two_demonstrations_side_by_side_make_one_undisturbed_run(tmp_path, fails):
    forking = multiprocessing.get_context("fork")
    (first, of_first), (second, of_second) = forking.Pipe(), forking.Pipe()
    makes = forking.Process(target=run_undisturbed, args=(tmp_path / "made", of_first, fails), daemon=True)
    makes.start()
    assert heard(first) is True
    waits = forking.Process(target=run_undisturbed, args=(tmp_path / "made", of_second), daemon=True)
    waits.start()
    assert "waiting: another demonstration" in heard(second)
    first.send("end")
    assert heard(second) is fails  # it makes the run that the first one did not finish
    second.send("end")
    for process in (makes, waits):
        process.join()
        assert process.exitcode == 0
    assert (tmp_path / "made" / "losses").read_text() == "3.14"
    assert not (tmp_path / "made.running").exists()


def rest_of(terminal):
    """Read a terminal until its other end is closed, and close it."""
    said = b""
    try:
        while more := os.read(terminal, 4096):
            said += more
    except OSError:  # the other end is closed
        pass
    os.close(terminal)
    return said


def test_setup_prints_plain_lines_into_a_file_and_nothing_the_second_time(setup, tmp_path):
    with (tmp_path / "first.txt").open("wb") as log:
        assert setup(log).wait() == 0
    said = (tmp_path / "first.txt").read_bytes()
    assert b"\r" not in said and b"\x1b" not in said
    assert said.endswith(b"setup: done\n") and b"2/2 everything else: done after" in said
    with (tmp_path / "second.txt").open("wb") as log:
        assert setup(log).wait() == 0
    assert (tmp_path / "second.txt").read_bytes() == b""


def test_packages_of_the_tests_are_added_once_and_taken_from_nobody(setup, tmp_path):
    for words, parts in ((), 2), (("--tests",), 1), ((), 0), (("--tests",), 0):
        with (tmp_path / "said.txt").open("wb") as log:
            assert setup(log, *words).wait() == 0
        said = (tmp_path / "said.txt").read_text()
        assert said.count(": done after") == parts and ("packages of the tests" in said) == (parts == 1)


def test_setup_names_the_part_that_failed_and_its_log_and_begins_anew_the_next_time(setup, tmp_path):
    with (tmp_path / "said.txt").open("wb") as log:
        assert setup(log, fails="requirements-cpu.txt").wait() == 1
    said = (tmp_path / "said.txt").read_text()
    assert "ERROR: no such wheel" in said
    assert (
        f"FAILED: 2/2 everything else: pip ended with exit code 7; all it said is in {tmp_path}/.venv/setup.log" in said
    )
    with (tmp_path / "again.txt").open("wb") as log:
        assert setup(log).wait() == 0


def test_setup_on_a_terminal_says_in_one_changing_line_what_pip_does(setup, tmp_path):
    """The stand-in for pip ends only when that line has been seen."""
    ours, theirs = pty.openpty()
    process = setup(theirs, seen=tmp_path / "seen")
    os.close(theirs)
    said = b""
    while b"MB; Collecting torch" not in said:
        said += os.read(ours, 4096)
    (tmp_path / "seen").touch()
    said += rest_of(ours)
    assert process.wait() == 0
    assert said.count(b"\r\x1b[K") >= 2 and said.endswith(b"setup: done\r\n")


SHOW = """
import argparse, pathlib, sys
import demo
args = argparse.Namespace(out=pathlib.Path(sys.argv[1]), world=8)
with demo.Bar("protected run", 24) as bar:
    demo.Story(args, bar).look()
"""


@pytest.fixture
def swapped(tmp_path):
    """The folder of a run in which node 2 was lost in step 22 and node 4 took over: a recorded swap."""
    record = ROOT / "scripts" / "results" / "2026-11-23-swap.jsonl"
    kill, *events = map(json.loads, record.read_text().splitlines())
    began = {"time": events[0]["time"] - 1, "generation": 0}
    events[:0] = [{"event": "NodeJoined", "node": node, **began} for node in range(5)]
    formed = {"event": "WorldFormed", "node_of": [0, 0, 1, 1, 2, 2, 3, 3], "spares": [4]}
    events.insert(0, {**formed, **began, "node": 0})
    (tmp_path / "output").mkdir()
    (tmp_path / "kills.jsonl").write_text(json.dumps(kill) + "\n")
    (tmp_path / "output" / "events.0.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    (tmp_path / "output" / "rank0000.node0.log").write_text("step   23/24 | loss 3.5 | lr 0.1 | 9 ms\n")
    return tmp_path, kill, events


def test_into_a_file_a_swap_is_told_in_plain_lines_with_host_names(swapped, tmp_path):
    with (tmp_path / "said.txt").open("wb") as said:
        command = [sys.executable, "-c", SHOW, tmp_path]
        environ = os.environ | {"PYTHONPATH": str(ROOT / "scripts"), "FORCE_COLOR": "1", "TERM": "xterm"}
        subprocess.run(command, stdout=said, env=environ, check=True)
    told = (tmp_path / "said.txt").read_text()
    assert "\r" not in told and "\x1b" not in told
    wanted = (
        "node2 is killed in step 22, in the optimizer's update (SIGKILL)",
        "hosts of the 8 ranks: node0, node1, node2, node3; standing by: node4",
        "node2 was lost (",
        "node4 takes over ranks 4, 5 of node2; all go back to step 21",
        "the state of step 21 is restored on all 8 ranks",
        "training goes on, ",
        "step 22 is done by all 8 ranks",
        "step 23/24, loss 3.5000",
    )
    places = [told.find(line) for line in wanted]
    assert -1 not in places and places == sorted(places), told


def test_on_a_terminal_a_bar_with_step_and_loss_stays_below_the_lines(swapped, tmp_path):
    ours, theirs = pty.openpty()
    environ = os.environ | {"PYTHONPATH": str(ROOT / "scripts"), "TERM": "xterm"}
    process = subprocess.Popen([sys.executable, "-c", SHOW, tmp_path], stdout=theirs, env=environ)
    os.close(theirs)
    said = rest_of(ours)
    assert process.wait() == 0
    bar = said.decode().rsplit("step 22 is done by all 8 ranks", 1)[1]
    assert "protected run" in bar and "step 23/24, loss 3.5" in bar and "node2 lost" in bar and "node4 active" in bar


@pytest.mark.parametrize(("told", "covered", "words"), [
    ([True, True], True, "took over its ranks 4, 5, which it had rehearsed"),
    ([True, False], False, "took over its ranks 4, 5, whose script it had to start first"),
    ([], None, "took over its ranks 4, 5"),
])  # fmt: skip
def test_a_swap_is_covered_if_every_rank_went_to_a_process_from_before_the_loss(swapped, told, covered, words):
    _, kill, events = swapped
    planned = next(event for event in events if event["event"] == "SwapPlanned")
    base = {"event": "RankTakenOver", "time": planned["time"], "node": 4}
    events += [{**base, "rank": 4 + i, "covered": one, "generation": 1} for i, one in enumerate(told)]
    events.append({**base, "rank": 4, "covered": not covered, "generation": 0})  # of an earlier swap
    found = demo_report.swap(kill, events)
    assert found["covered"] is covered
    assert demo_report.swap_in_words(found, demo_report.moves(events)[2])[0].endswith(words)


def words_of(figure):
    import matplotlib.text

    return "\n".join(text.get_text() for text in figure.findobj(matplotlib.text.Text))


def test_a_picture_has_a_title_axes_with_units_both_hosts_and_a_sentence(swapped, monkeypatch):
    folder, kill, events = swapped
    plt, drawn = demo_report.pyplot(), []
    monkeypatch.setattr(plt, "close", lambda figure: drawn.append(words_of(figure)))
    found = demo_report.swaps([kill], events)
    losses = [(step, 5 / step) for step in range(1, 25)]
    demo_report.draw_losses(folder / "loss.png", losses, losses, [kill], events)
    demo_report.draw_losses(folder / "loss.png", losses, [*losses[:22], (23, 1.0)], [kill], events)
    demo_report.draw_losses(folder / "loss.png", losses, losses[:21], [kill], events)
    demo_report.draw_timeline(folder / "timeline.png", found, [kill], events, nodes=5)
    equal, apart, short, timeline = drawn
    for words in (equal, timeline):
        assert "node2 killed in step 22" in words and "node4 takes over ranks 4, 5" in words
    assert "training step" in equal and "nats a token" in equal and "equal to the last bit" in equal
    assert "differ for the first time in step 23" in apart and "ended after step 21; until then" in short
    assert "time since the kill (s)" in timeline and "node4\n(spare)" in timeline
    assert f"All ranks trained again {found[0]['ready_s']:.2f} s after the kill" in timeline


def test_a_traceback_that_was_cut_off_is_not_quoted(tmp_path):
    (tmp_path / "rank0.log").write_text("Traceback (most recent call last):\n    raise ValueError('cut off')\n")
    (tmp_path / "rank1.log").write_text("    raise ValueError('no')\n[rank1]: ValueError: no\n")
    assert last_error(tmp_path) == " (rank1.log: [rank1]: ValueError: no)"


def test_a_job_that_stops_is_one_problem_a_line_and_the_job_s_own_words_come_last(tmp_path):
    kill = {"node": 1, "step": 6, "phase": "forward", "time": 10.0}
    lost = {"event": "NodeLost", "lost": [1], "time": 10.5, "node": 0, "generation": 0}
    for name, line in (("kills.jsonl", kill), ("output/events.0.jsonl", lost)):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(json.dumps(line) + "\n")
    (tmp_path / "launcher").mkdir()
    said = "[deadpool] job stopped (exit code 86): node 1 was lost"
    (tmp_path / "launcher" / "node0.txt").write_text(f"{said}\nlauncher: leaving\n")
    args = fake(out=tmp_path, ranks_per_node=1, nodes=2, steps=10, kills=[(1, 6, "forward")])
    cluster = fake(folder=tmp_path, exit_codes=lambda: [86, -9])
    summary, problems = demo.judge(args, tmp_path / "undisturbed", cluster)
    assert summary["exit_code"] == 86
    assert sum("swap of node1: no event tells generation, plan_s" in problem for problem in problems) == 1
    assert "the survivors did not keep their processes, communicators, memory to the end" in problems
    assert problems[-1] == f"launcher of node0 ended with 86 (node0.txt: {said}); log: {tmp_path}/launcher/node0.txt"


def test_what_several_launchers_say_is_one_problem(tmp_path):
    (tmp_path / "launcher").mkdir()
    said = "[deadpool] torch is 2.9 on h1 and 2.13.0 on h2; expected the same; to do: install it alike"
    for node in (0, 1):
        (tmp_path / "launcher" / f"node{node}.txt").write_text(f"{said}\nlauncher: leaving\n")
    args = fake(out=tmp_path, ranks_per_node=1, nodes=2, steps=10, kills=[])
    _, problems = demo.judge(args, tmp_path / "undisturbed", fake(folder=tmp_path, exit_codes=lambda: [78, 78]))
    assert problems[-1] == f"launcher of node0, node1 ended with 78 (node0.txt: {said}); log: {tmp_path}/launcher"
    assert not [problem for problem in problems[:-1] if problem.startswith("launcher of")]


FAILING = """
import dataclasses, pathlib, sys
import demo
folder = pathlib.Path(sys.argv[1])
(folder / "train.py").write_text("raise ValueError('no data here')")
demo.CACHE, demo.make_corpus.ensure = folder / "cache", lambda path: None
job = dataclasses.replace(demo.JOBS["megatron"], script=folder / "train.py", plain_preload=("json",))
demo.JOBS["megatron"] = job
sys.argv[1:] = ["--out", str(folder / "out")]
sys.exit(demo.main())
"""


def test_a_demonstration_that_fails_says_what_failed_and_where_its_logs_are_before_its_json_line(tmp_path):
    environ = os.environ | {"PYTHONPATH": str(ROOT / "scripts")}
    command = [sys.executable, "-c", FAILING, tmp_path]
    ended = subprocess.run(command, stdout=subprocess.PIPE, env=environ, text=True)
    *told, last = ended.stdout.splitlines()
    summary = json.loads(last)
    assert (ended.returncode, summary["exit_code"], summary["bit_exact"]) == (1, 1, False)
    failed = next(line for line in told if "FAILED" in line)
    said = re.search(r"the undisturbed run ended with exit code 1 \((rank\d+.log): ValueError: no data here\)", failed)
    assert said and (Path(failed.rsplit("logs: ", 1)[1]) / "output" / said[1]).exists()
