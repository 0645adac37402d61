"""What a forked process tells its standby process of its imports."""

from __future__ import annotations

import os
import threading

from deadpool_plugin.launch.lessons import Lessons, tell_modules


def heard_all(lessons: Lessons) -> None:
    while lessons.pipes:
        lessons.begin()
    lessons.pause()


def test_the_names_are_had_once_although_somebody_else_holds_the_pipe():
    """The script may have forked (a DataLoader) before it told: there is no end of file then."""
    lessons = Lessons()
    tell = lessons.ask(trains=False)
    held = os.dup(tell)
    telling = threading.Thread(target=tell_modules, args=(tell,))  # more names than a pipe holds
    telling.start()
    heard_all(lessons)
    telling.join()
    assert lessons.ask(trains=False) == -1
    os.close(held)


def test_a_process_that_ended_without_a_word_is_no_lesson():
    lessons = Lessons()
    os.close(lessons.ask(trains=False))
    heard_all(lessons)
    again = lessons.ask(trains=False)
    assert again >= 0
    os.write(again, b"json\ncut of")
    os.close(again)
    heard_all(lessons)
    last = lessons.ask(trains=False)
    assert last >= 0
    os.close(last)
    heard_all(lessons)
