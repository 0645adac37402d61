"""Jobs under the real `deepspeed` launcher, one launcher per emulated node: few, because each takes about a minute.

LAUNCHER_RESULTS names a file that gets a JSON line per test: what became of it, in how many seconds.
"""

import contextlib
import importlib.metadata
import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "scripts")]

from support import corpus as corpora, record  # noqa: E402


def pytest_runtest_logreport(report):
    record.keep(report, "launcher", "LAUNCHER_RESULTS", versions)


def versions():
    from clusters import netns_host

    asked = {name: netns_host.tool(name) for name in ("sshd", "pdsh")}
    answers = {
        name: subprocess.run([tool, "-V"], capture_output=True, text=True) for name, tool in asked.items() if tool
    }
    lines = {name: f"{answer.stdout}{answer.stderr}".splitlines() for name, answer in answers.items()}
    known = ("OpenSSH", "pdsh-")
    found = {name: next((line for line in its if line.startswith(known)), "unknown") for name, its in lines.items()}
    return found | {"deepspeed": importlib.metadata.version("deepspeed")}


class Job:
    """The training script under launcher and plugin; nothing of it is left when the test ends."""

    def __init__(self, folder, corpus, nodes, ranks_per_node, spares, steps, *words, faults=(), patience_s=10.0):
        from clusters.launched import Cluster

        self.folder, self.cluster = folder, Cluster(folder, nodes + spares, ranks_per_node)
        secret = folder / "secret"
        secret.touch(mode=0o600)
        secret.write_text("a secret of the test, long enough")
        settings = {
            "spares": spares, "patience_s": patience_s, "secret_file": str(secret), "memory_headroom_gib": 0.1,
            "output_dir": str(folder / "output"), "interface_address": "127.0.0.1",
        }  # fmt: skip
        (folder / "deadpool.yaml").write_text("".join(f"{k}: {json.dumps(v)}\n" for k, v in settings.items()))
        self.marker = folder / "kills.jsonl"
        injector = [word for fault in faults for word in ("--at", fault)] + ["--marker", str(self.marker)]
        script = [str(ROOT / "scripts/train_gpt.py"), "--data-path", corpus, "--train-iters", str(steps), *words]
        command = ["--module", "deadpool_plugin.run", str(ROOT / "scripts/faults/inject.py"), *injector, "--", *script]
        self.cluster.launch([*command, "--deadpool-config", str(folder / "deadpool.yaml")])

    def events(self, kind):
        from clusters.launched import read_events

        return [event for event in read_events(self.folder / "output") if event["event"] == kind]

    def wait_for(self, done, timeout_s=240.0):
        """Until `done()` or every launcher has ended; on a hang the stacks of all processes are dumped."""
        deadline = time.monotonic() + timeout_s
        while not done() and None in self.cluster.exit_codes():
            if time.monotonic() > deadline:
                self.cluster.dump_stacks(self.folder / "stacks")
                raise AssertionError(f"the job hangs; stacks and output are in {self.folder}")
            time.sleep(0.05)

    def end(self, timeout_s=240.0):
        """Exit codes of the launchers, once all have ended by themselves."""
        self.wait_for(lambda: False, timeout_s)
        return self.cluster.exit_codes()

    def output(self):
        return "".join(path.read_text(errors="replace") for path in sorted((self.folder / "launcher").iterdir()))

    def pids(self, node, words):
        """Processes of a node whose command line contains `words`."""
        found = []
        for pid, where in self.cluster.processes().items():
            with contextlib.suppress(OSError):  # it has gone
                command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
                if where == node and words in command:
                    found.append(pid)
        return sorted(found)

    def leftovers(self):
        """Processes still there some seconds after the end."""
        return self.cluster.close(grace_s=5.0)


@pytest.fixture
def start(tmp_path, corpus):
    jobs = []

    def start_job(*args, **kwargs):
        jobs.append(Job(tmp_path, corpus, *args, **kwargs))
        return jobs[-1]

    yield start_job
    for job in jobs:
        job.cluster.close()


@pytest.fixture(scope="session")
def corpus(tmp_path_factory):
    pytest.importorskip("megatron.core")
    pytest.importorskip("deepspeed")
    return corpora.make(tmp_path_factory.mktemp("corpus"))
