"""A job one of whose hosts is told to end (SIGTERM), all of its processes at once, as deepspeed's launcher and
schedulers do.

Rules of this file: it ends the job and leaves nothing; a wait that is too long ends in the stacks of every process.
"""

from __future__ import annotations

from collections.abc import Callable

from faults.job import Hang, Job


def tell_one(job: Job, node: int, steps: int, is_over: Callable[[list[int | None]], object]) -> list[int | None]:
    """Start `job`, tell `node` after `steps` steps of training, wait until it is over by the exit codes and events: the
    codes by then. Raises: AssertionError naming the folder that has the stacks."""
    cluster, tail = job.cluster, job.tail
    try:
        cluster.start()
        job.until("steps", lambda: tail.spares_ready() and tail.protected and len(tail.of("StepDone")) > steps)
        cluster.tell_node(node)
        job.until("the end", lambda: is_over(cluster.exit_codes()))
        codes = cluster.exit_codes()
        assert None in codes or cluster.close(grace_s=5.0) == []
    except Hang as hang:
        cluster.dump_stacks(job.folder / "stacks")
        raise AssertionError(f"{hang}; see {job.folder}") from hang
    finally:
        cluster.close(grace_s=0.0)
    tail.read()
    return codes
