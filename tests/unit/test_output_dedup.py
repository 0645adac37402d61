"""Lines a lost process had printed are dropped once from what its replacement prints; everything else stays."""

import asyncio
import os
from collections import Counter

from deadpool_plugin.host.output import (
    CUTS_BYTES,
    Cuts,
    Pipe,
    Repeats,
    Writer,
    cuts_of,
    printed_since,
    rank_file,
    words,
)

JOB = "0123456789abcdef"


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


def step_done(cuts, pipe, step, kind="StepDone"):
    cuts.heard(pipe, kind, {"rank": 7, "step": step, "loss": None})


def cut(rank, step, output, job=JOB):
    return f'{{"job":"{job}","rank":{rank},"step":{step},"output":{output}}}\n'.encode()


def test_what_a_lost_process_has_printed_is_found_and_dropped_from_its_replacements_file(tmp_path):
    async def lost(writer):
        """Prints of steps 3, 4 and the beginning of 5 on node 3, and dies in the middle of a line."""
        pipe, end = pipe_into(writer, rank_file(tmp_path, 7, 3))
        cuts = Cuts(3, writer, tmp_path, lambda: JOB)
        for step in (3, 4, 5):
            step_done(cuts, pipe, step)
            os.write(end, f"iteration {step} took 1.5 s\n".encode())
        os.write(end, b"half a li")
        os.close(end)
        await asyncio.wait_for(pipe.ended.wait(), 60)

    async def replacement(writer, printed, step):
        pipe, end = pipe_into(writer, rank_file(tmp_path, 7, 4))
        cuts = Cuts(4, writer, tmp_path, lambda: JOB)
        step_done(cuts, pipe, step, "WorkerResumed")
        pipe.repeats = Repeats(printed, step)
        for later in (4, 5, 6):
            if later > step:
                step_done(cuts, pipe, later)
            os.write(end, f"iteration {later} took 11.25 s\n".encode())
        os.close(end)
        await asyncio.wait_for(pipe.ended.wait(), 60)

    def played(work):
        writer = Writer()
        asyncio.run(work(writer))
        writer.close()

    played(lost)
    assert {step: sum(lines.values()) for step, lines in printed_since(tmp_path, JOB, 7, 4).items()} == {4: 1, 5: 1}
    assert printed_since(tmp_path, JOB, 6, 4) == {}
    played(lambda writer: replacement(writer, printed_since(tmp_path, JOB, 7, 4), 4))
    assert rank_file(tmp_path, 7, 4).read_text() == "iteration 6 took 11.25 s\n"
    assert printed_since(tmp_path, JOB, 7, 6)[6] == Counter([b"iteration # took # s"])  # for whoever replaces that one


def test_cuts_that_are_cut_off_say_what_they_can(tmp_path):
    rank_file(tmp_path, 0, 1).write_bytes(b"old\nnew\n")
    first, second = cuts_of(tmp_path, 1)
    first.write_bytes(b'cut off"}\n' + cut(0, 2, 4) + cut(0, 2, 4)[:20])
    second.touch()
    assert printed_since(tmp_path, JOB, 0, 2) == {2: Counter([b"new"])}


def test_a_line_counts_for_the_newest_of_the_cuts_before_it_in_whichever_file_they_are(tmp_path):
    rank_file(tmp_path, 0, 1).write_bytes(b"of step 4\n")
    first, second = cuts_of(tmp_path, 1)
    first.write_bytes(cut(0, 4, 0))
    second.write_bytes(cut(0, 2, 0) + cut(0, 3, 0))
    assert {step for step, lines in printed_since(tmp_path, JOB, 0, 2).items() if lines} == {4}


def test_an_earlier_job_in_the_same_folder_has_printed_nothing(tmp_path):
    rank_file(tmp_path, 0, 1).write_bytes(b"of the first job\nof the second\n")
    first, second = cuts_of(tmp_path, 1)
    first.write_bytes(cut(0, 2, 0))
    second.write_bytes(cut(0, 3, 0))

    async def job():
        writer = Writer()
        read_end, write_end = os.pipe()
        pipe = Pipe(read_end, writer)
        pipe.assign(tmp_path / "other", forward=False)
        cuts = Cuts(1, writer, tmp_path, lambda: JOB)
        pipe._file_bytes = 17
        cuts.heard(pipe, "StepDone", {"rank": 0, "step": 2})
        os.close(write_end)
        await asyncio.wait_for(pipe.ended.wait(), 60)
        writer.close()

    asyncio.run(job())
    assert printed_since(tmp_path, JOB, 0, 2) == {2: Counter([b"of the second"])}


def test_a_node_that_only_an_earlier_job_in_the_same_folder_had_has_printed_nothing(tmp_path):
    rank_file(tmp_path, 0, 5).write_bytes(b"of the first job\n")
    for path in cuts_of(tmp_path, 5):
        path.write_bytes(cut(0, 2, 0, job="the one before"))
    assert printed_since(tmp_path, JOB, 0, 2) == {}


def test_one_log_that_cannot_be_read_hides_no_other(tmp_path):
    for node in (1, 2):
        rank_file(tmp_path, 0, node).write_bytes(b"new\n")
    for path in cuts_of(tmp_path, 2):
        path.write_bytes(cut(0, 2, 0))
    assert printed_since(tmp_path, JOB, 0, 2) == {2: Counter([b"new"])}


def test_cuts_take_no_more_room_in_a_longer_job_and_the_newest_are_there_at_any_time(tmp_path):
    async def job():
        writer = Writer()
        read_end, write_end = os.pipe()
        pipe = Pipe(read_end, writer)
        pipe.assign(rank_file(tmp_path, 7, 3), forward=False)
        cuts = Cuts(3, writer, tmp_path, lambda: JOB)
        for step in range(5000):
            os.write(write_end, b"a line\n")
            step_done(cuts, pipe, step)
        os.write(write_end, b"the last one\n")
        os.close(write_end)
        await asyncio.wait_for(pipe.ended.wait(), 60)
        writer.close()

    asyncio.run(job())
    sizes = [path.stat().st_size for path in cuts_of(tmp_path, 3)]
    assert sum(sizes) <= 2 * CUTS_BYTES and max(sizes) > CUTS_BYTES // 2
    found = printed_since(tmp_path, JOB, 7, 4997)
    assert found == {4997: Counter([b"a line"]), 4998: Counter([b"a line"]), 4999: Counter([b"the last one"])}
