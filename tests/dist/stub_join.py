"""`deadpool join` for the stub cluster: everything but the script's check, supervisors with stub workers.

`stub_join.py OUTPUT_DIR`, or, where only a member's address is known, `stub_join.py CONFIG HOST:PORT`: as the former
finds the secret, and is told the configuration.
"""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

from deadpool_plugin.cli.main import address
from deadpool_plugin.launch import job_files, running_job

LAUNCH = str(Path(__file__).with_name("stub_launch.py"))


def main(where: str, *to: str) -> int:
    wish = running_job.Wish(to=address(to[0]), config=where) if to else running_job.Wish(job=Path(where))
    invitation = running_job.find(wish)
    job_files.new_job = lambda: os.environ["DEADPOOL_TEST_NODE"]  # whoever kills this process knows what to remove
    with running_job.configured(invitation) as config:
        return take_part(invitation, config)


def take_part(invitation: running_job.FoundJob, config: str) -> int:
    job = invitation.description
    node = asyncio.run(running_job.reserve(invitation))
    print("found the job", flush=True)
    sys.stdin.read()  # a test may hold this host here
    slots = range(job.hellos[0].local_size)
    words = [word for word in job.command if not word.startswith("--local_rank=")]
    supervisor = [sys.executable, "-u", LAUNCH, "supervise", config]
    commands = [[*supervisor, f"--local_rank={local_rank}", *words] for local_rank in slots]
    environments = [running_job.environment(job, node, slot) for slot in slots]
    return asyncio.run(running_job.play_launcher(commands, environments, os.getcwd()))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
