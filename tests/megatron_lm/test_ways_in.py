"""Two ways to protect a job of Megatron-LM under the real `deepspeed` launcher: no edit at all, and the patch.

Nothing stands between the launcher and pretrain_gpt.py here (`preload` makes it run on a CPU). The logging node is
killed from outside; the job's log must be that of the job without the plugin, each line about an iteration once.
"""

import os
import shutil
import signal
import time

import pytest
from clusters import launched
from clusters.events import Tail
from megatron_lm import base_job, jobs
from support.zygote import in_zygote

from deadpool_plugin.cli.main import main as deadpool

pytestmark = pytest.mark.launcher

STEPS, KILL_AFTER, LAST_RANK = 12, 4, 1
NEEDED = ("megatron", "pretrain_gpt.py", "gpt_builders.py", "model_provider.py")
DEADLINE_S = 240


def words(corpus):
    data = ["--data-path", corpus, "--data-cache-path", f"{corpus}.indices"]
    usual = f"{base_job.MODEL} {base_job.TRAINING} {base_job.OPTIMIZER}"
    return [*f"{usual} --tensor-model-parallel-size 2 --train-iters {STEPS}".split(), *data]


@in_zygote
def undisturbed(checkout, corpus, references):
    jobs.preload(checkout)
    jobs.Training(checkout, words(corpus), references, world=2).undisturbed()


def patched(checkout, folder):
    for name in NEEDED:
        copy = shutil.copytree if (checkout / name).is_dir() else shutil.copy
        copy(checkout / name, folder / name)
    assert deadpool(["patch", "megatron-lm", str(folder)]) == 0
    return folder


def configuration(folder):
    (folder / "secret").touch(mode=0o600)
    (folder / "secret").write_text("a secret of the test, long enough")
    path = folder / "deadpool.yaml"
    path.write_text(
        "spares: 1\npatience_s: 10\nmemory_headroom_gib: 0.1\ninterface_address: 127.0.0.1\n"
        f"output_dir: {folder / 'output'}\nsecret_file: {folder / 'secret'}\n"
        "preload: [patches.cpu.applied_to_megatron_lm]\n"
    )
    return ["--deadpool-config", str(path)]


class Job:
    """One rank on each of two nodes, and a spare."""

    def __init__(self, folder):
        self.cluster = launched.Cluster(folder, nodes=3, slots=1)
        self.tail = Tail(folder / "output")

    def until(self, done):
        deadline = time.monotonic() + DEADLINE_S
        while not done():
            assert time.monotonic() < deadline, self.outputs()
            assert not any(self.cluster.exit_codes()[:1]), self.outputs()
            time.sleep(0.1)
            self.tail.read()

    def outputs(self):
        return "\n".join(path.read_text()[-3000:] for path in (self.cluster.folder / "launcher").glob("*.txt"))

    def kill(self, node):
        for pid, where in launched.tagged_processes(self.cluster.job):
            if where == node:
                os.kill(pid, signal.SIGKILL)

    def steps(self):
        return max((event["step"] for event in self.tail.of("StepDone")), default=0)


@pytest.mark.parametrize("way", ["no edit", "patch"])
def test_a_job_loses_its_logging_node(tmp_path, checkout, corpus, references, monkeypatch, way):
    undisturbed(checkout, corpus, references / "ways_in")
    (expected,) = (references / "ways_in").glob("*/command.json")
    tree = checkout
    if way == "patch":
        (tmp_path / "checkout").mkdir()
        tree = patched(checkout, tmp_path / "checkout")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tree), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    start = [] if way == "patch" else ["--module", "deadpool_plugin.run"]
    job = Job(tmp_path)
    try:
        job.cluster.launch([*start, str(tree / "pretrain_gpt.py"), *words(corpus), *configuration(tmp_path)])
        job.until(lambda: job.steps() >= KILL_AFTER and job.tail.protected and job.tail.spares_ready())
        job.kill(LAST_RANK)
        job.until(lambda: None not in job.cluster.exit_codes())
    finally:
        left = job.cluster.close(grace_s=5.0)
    assert job.cluster.exit_codes()[0] == job.cluster.exit_codes()[2] == 0 and not left, job.outputs()
    assert len(job.tail.of("SwapPlanned")) >= 1
    assert jobs.iterations(tmp_path / "output", LAST_RANK) == jobs.iterations(expected.parent, LAST_RANK)
