"""Lines a lost process had printed are dropped once from what its replacement prints; everything else stays."""

import asyncio
import os
from collections import Counter

from deadpool_plugin import events
from deadpool_plugin.agent.output import Pipe, Writer, rank_file
from deadpool_plugin.agent.repeats import Repeats, marked, printed_since, words


def test_numbers_do_not_make_a_line_another_one():
    first = b" [2026-11-21 07:49:58.790806] iteration   8/ 10 | lm loss: 5.536951E+00 | elapsed (ms): 427.7 |\n"
    again = b" [2026-11-21 07:50:03.1] iteration   8/ 10 | lm loss: 5.536951E+00 | elapsed (ms): 1427.7 |\n"
    assert words(first) == words(again) != words(b"validation loss at iteration 8")


def repeats(lines, step=4):
    return Repeats({step: Counter(words(line) for line in lines)}, step)


def test_a_line_is_dropped_once_and_in_its_step_only():
    filtered = repeats([b"loss 1.5\n"])
    assert filtered.without(b"new\nloss 1.7\nloss 1.7\n") == b"new\nloss 1.7\n"
    filtered = repeats([b"loss 1.5\n"])
    assert filtered.without(b"new\n") == b"new\n" and not filtered.over
    filtered.reached(5)
    assert filtered.over and filtered.without(b"loss 1.7\n") == b"loss 1.7\n"


def test_pieces_of_lines_are_put_together_and_nothing_is_kept_back_in_the_end():
    filtered = repeats([b"loss 1.5\n"])
    assert filtered.without(b"ne") == b"" and filtered.without(b"w\nlo") == b"new\n"
    assert filtered.without(b"ss 2.5\nand a beginning") == b"and a beginning"
    assert filtered.over and filtered.without(b" and more") == b" and more"
    unfinished = repeats([b"loss 1.5\n"])
    assert unfinished.without(b"half") == b"" and unfinished.flush() == b"half"


def pipe_into(writer, path):
    read_end, write_end = os.pipe()
    pipe = Pipe(read_end, writer)
    pipe.assign(path, forward=False)
    return pipe, write_end


def step_done(writer, log, pipe, node, step, kind="StepDone"):
    fields = marked(pipe, kind, {"rank": 7, "step": step})
    writer.write(log, events.encode(events.make(kind, fields, node=node, generation=0)))


def test_what_a_lost_process_has_printed_is_found_and_dropped_from_its_replacements_file(tmp_path):
    async def lost(writer):
        """Prints of steps 3, 4 and the beginning of 5 on node 3, and dies in the middle of a line."""
        pipe, end = pipe_into(writer, rank_file(tmp_path, 7, 3))
        log = writer.open(tmp_path / "events.3.jsonl")
        for step in (3, 4, 5):
            step_done(writer, log, pipe, 3, step)
            os.write(end, f"iteration {step} took 1.5 s\n".encode())
        os.write(end, b"half a li")
        os.close(end)
        await asyncio.wait_for(pipe.ended.wait(), 60)

    async def replacement(writer, printed, step):
        pipe, end = pipe_into(writer, rank_file(tmp_path, 7, 4))
        log = writer.open(tmp_path / "events.4.jsonl")
        step_done(writer, log, pipe, 4, step, "WorkerResumed")
        pipe.repeats = Repeats(printed, step)
        for later in (4, 5, 6):
            if later > step:
                step_done(writer, log, pipe, 4, later)
            os.write(end, f"iteration {later} took 11.25 s\n".encode())
        os.close(end)
        await asyncio.wait_for(pipe.ended.wait(), 60)

    def played(work):
        writer = Writer()
        asyncio.run(work(writer))
        writer.close()

    played(lost)
    assert {step: sum(lines.values()) for step, lines in printed_since(tmp_path, 7, 4).items()} == {4: 1, 5: 1}
    assert printed_since(tmp_path, 6, 4) == {}
    played(lambda writer: replacement(writer, printed_since(tmp_path, 7, 4), 4))
    assert rank_file(tmp_path, 7, 4).read_text() == "iteration 6 took 11.25 s\n"
    assert printed_since(tmp_path, 7, 6)[6] == Counter([b"iteration # took # s"])  # for whoever replaces that one


def test_a_log_that_is_cut_off_says_what_it_can(tmp_path):
    rank_file(tmp_path, 0, 1).write_bytes(b"old\nnew\n")
    line = events.encode(events.make("StepDone", {"rank": 0, "step": 2, "output": 4}, node=1, generation=0))
    (tmp_path / "events.1.jsonl").write_bytes(b'cut off"}\n' + line + line[:20])
    (tmp_path / "events.all.jsonl").write_bytes(line)  # a person's own
    assert printed_since(tmp_path, 0, 2) == {2: Counter([b"new"])}


def test_an_earlier_job_in_the_same_folder_has_printed_nothing(tmp_path):
    rank_file(tmp_path, 0, 1).write_bytes(b"of the first job\nof the second\n")
    first = events.encode(events.make("StepDone", {"rank": 0, "step": 2, "output": 0}, node=1, generation=0))
    joined = events.encode(events.make("NodeJoined", {"host": "h", "ranks": (), "spare": False}, node=1, generation=0))
    second = events.encode(events.make("StepDone", {"rank": 0, "step": 2, "output": 17}, node=1, generation=0))
    (tmp_path / "events.1.jsonl").write_bytes(first + joined + second)
    assert printed_since(tmp_path, 0, 2) == {2: Counter([b"of the second"])}


def test_one_log_that_cannot_be_read_hides_no_other(tmp_path):
    for node in (1, 2):
        rank_file(tmp_path, 0, node).write_bytes(b"new\n")
    line = events.encode(events.make("StepDone", {"rank": 0, "step": 2, "output": 0}, node=2, generation=0))
    (tmp_path / "events.2.jsonl").write_bytes(line)
    assert printed_since(tmp_path, 0, 2) == {2: Counter([b"new"])}
