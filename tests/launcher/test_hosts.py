"""`deadpool launch` and plain `deepspeed` over pdsh and ssh, on emulated hosts: four of one rank, and a spare.

A minute each or two; they need root, sshd and pdsh. The first runs with all others, the rest by `pytest -m hosts`.
"""

import contextlib
import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from clusters import netns, netns_host
from clusters.launched import read_events
from compare_runs import compare

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.launcher
more = pytest.mark.hosts
ENVIRONMENT = {
    "DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1",
    "CUDA_DEVICE_MAX_CONNECTIONS": "1",
}  # fmt: skip
SECRET = "the secret of a test, known to the host that launches only"


STEPS = 60
MEMBERS = ("h1", "h2", "h3", "h4", "h5")
"""The last one is the spare."""
OUTSIDE = "h6"
SSHD = ("sshd:", "sshd-session:", "sshd-auth:")
"""Names of its processes: the first until OpenSSH 9.8, the others since."""
MEGATRON = ("train_gpt.py", "--tp", "2")
DEEPSPEED = ("train_deepspeed.py", "--zero", "2", "--dtype", "bf16")
HELD_AT = (20, 40)
"""Steps after which a held script waits: no job is over before a test has broken what it is to break."""
HELD = f"""
import fcntl, runpy, sys

sys.argv[0], sys.path[0] = "{ROOT}/scripts/train_gpt.py", "{ROOT}/scripts"
from gpt import output

log = output.log_step


def log_step(args, step, *more):
    log(args, step, *more)
    if step in {HELD_AT}:
        with open(f"{{__file__}}-{{step}}") as gate:
            fcntl.flock(gate, fcntl.LOCK_SH)


output.log_step = log_step
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def training(script, corpus, steps):
    name, *words = script
    common = ["--data-path", corpus, "--train-iters", str(steps), "--log-all-ranks", "--digest"]
    return [str(ROOT / "scripts" / name), *words, *common]


@pytest.fixture
def held(tmp_path):
    """A script that waits after each step of HELD_AT in train_gpt.py, and what lets it go on."""
    script = tmp_path / "held.py"
    script.write_text(HELD)
    with contextlib.ExitStack() as stack:
        gates = {step: stack.enter_context(open(f"{script}-{step}", "w")) for step in HELD_AT}
        for gate in gates.values():
            fcntl.flock(gate, fcntl.LOCK_EX)
        yield str(script), lambda step: gates[step].close()


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory, corpus):
    """Return a function of a script: the folder of what its ranks print in STEPS steps without the plugin."""
    known = {}

    def run(script):
        if script not in known:
            folder = known[script] = tmp_path_factory.mktemp("undisturbed")
            plain = [sys.executable, str(ROOT / "scripts/run_plain.py"), "--ranks", "4", "--logs", str(folder), "--"]
            words = [*plain, *training(script, corpus, STEPS)]
            subprocess.run(words, env=os.environ | ENVIRONMENT, check=True, timeout=300)
        return known[script]

    return run


class Launched:
    """A job on MEMBERS, launched on `launcher`."""

    def __init__(
        self, network, folder, corpus, launcher="h1", command="deadpool", steps=4000, script=MEGATRON, members=MEMBERS,
        **settings
    ):  # fmt: skip
        self.network, self.output, self.said, self.script = network, folder / "output", folder / "said.txt", script
        hostfile, config, secret = folder / "hostfile", folder / "deadpool.yaml", network.folder / launcher / "secret"
        hostfile.write_text("".join(f"{name} slots=1\n" for name in members))
        secret.touch(mode=0o600)
        secret.write_text(SECRET)
        fields = {"patience_s": 4.0, "memory_headroom_gib": 0.1, "secret_file": str(secret), **settings}
        fields["output_dir"] = str(self.output)
        config.write_text("".join(f"{name}: {json.dumps(value)}\n" for name, value in fields.items()))
        start = [sys.executable, "-m", "deadpool_plugin", "launch"]
        if command == "deepspeed":
            start = [sys.executable, "-m", "deepspeed.launcher.runner"]
        options = ["--hostfile", str(hostfile)] + ["--module", "deadpool_plugin.run"] * (command == "deepspeed")
        words = [*start, *options, *training(script, corpus, steps), "--deadpool-config", str(config)]
        with self.said.open("wb") as out:
            self.process = subprocess.Popen(
                network.command(launcher, words), cwd=ROOT, stdin=subprocess.DEVNULL, stdout=out,
                stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip

    def events(self, kind):
        return [event for event in read_events(self.output) if event["event"] == kind]

    def wait_for(self, what, done, timeout_s=400.0):
        deadline = time.monotonic() + timeout_s
        while not done():
            assert time.monotonic() < deadline, f"no {what}\n{self.said.read_text()[-6000:]}"
            time.sleep(0.05)

    def in_training(self):
        """The spare may still rehearse: how long that takes does not depend on the number of steps."""
        self.wait_for("training", lambda: self.process.poll() is not None or self._trains())
        assert self.process.poll() is None, self.said.read_text()[-6000:]

    def _trains(self):
        return self.events("Mirrored") and len(self.events("StepDone")) > 6

    def end(self):
        """Exit code and last line."""
        self.wait_for("end", lambda: self.process.poll() is not None)
        return self.process.returncode, self.said.read_text().strip().splitlines()[-1]

    def equals(self, undisturbed, script=None):
        """Every rank's losses, gradient norms and final state, bit for bit."""
        found = compare(undisturbed(script or self.script), self.output)
        assert found["bit_exact"] and found["steps"] == STEPS, found

    def signal(self, number):
        """To the command itself; between it and us there is nsenter."""
        [command] = netns_host.children(self.process.pid)
        os.kill(command, number)

    def left(self, host):
        """Command lines of what runs there, sshd aside."""
        script = "for p in /proc/[0-9]*; do tr '\\0' ' ' <$p/cmdline; echo; done 2>&-; ls -d /dev/shm/deadpool* 2>&-"
        words = self.network.command(host, ["bash", "-c", script])
        lines = subprocess.run(words, capture_output=True, text=True, timeout=30).stdout.splitlines()
        return [line for line in lines if line.strip() and not line.startswith((*SSHD, "bash -c for p"))]

    def wait_gone(self, *hosts):
        for host in hosts:
            self.wait_for(f"end of {self.left(host)} on {host}", lambda host=host: not self.left(host), 30.0)


@pytest.fixture
def network(tmp_path):
    if lacking := netns_host.missing():
        pytest.skip("; ".join(lacking))
    with netns.Network(tmp_path / "net", len(MEMBERS) + 1, ENVIRONMENT) as made:
        yield made


@pytest.fixture
def launch(network, tmp_path, corpus):
    jobs = []

    def start(*args, **more):
        jobs.append(Launched(network, tmp_path, corpus, *args, **more))
        return jobs[-1]

    yield start
    for job in jobs:
        if job.process.poll() is None:
            os.killpg(job.process.pid, signal.SIGKILL)
            job.process.wait()


@pytest.mark.slow
def test_one_of_two_hosts_cut_from_each_other_goes_and_then_a_killed_host_does(launch, network, undisturbed, held):
    """h3 and h4 run ranks 2 and 3, one tensor-parallel group: no step is done without a word between the two.

    Which of them goes depends on who complains first. OUTSIDE is a second spare.
    """
    script, go_on = held
    job = launch(steps=STEPS, script=(script, *MEGATRON[1:]), members=(*MEMBERS, OUTSIDE), spares=2)
    job.in_training()
    network.cut_pair("h3", "h4")
    go_on(HELD_AT[0])
    job.wait_for("swap", lambda: job.events("SwapDone"))
    job.wait_for("mirrors", lambda: any(event["generation"] == 1 for event in job.events("Mirrored")))
    [left] = job.events("NodeFenced")
    assert left["node"] in (2, 3) and "cannot reach each other" in left["reason"]
    network.kill("h2")
    go_on(HELD_AT[1])
    lost = f"h2,h{left['node'] + 1}"
    assert job.end() == (0, f"[deadpool] the job finished; exit code 0; lost hosts: {lost}")
    assert len(job.events("SwapDone")) == 2 and SECRET not in job.said.read_text()
    job.wait_gone(*{*MEMBERS, OUTSIDE} - {"h2"})
    job.equals(undisturbed, MEGATRON)


@more
def test_a_killed_host_is_named_and_the_job_ends_well(launch, network, undisturbed):
    job = launch(steps=STEPS, script=DEEPSPEED)
    job.in_training()
    network.kill("h2")
    assert job.end() == (0, "[deadpool] the job finished; exit code 0; lost hosts: h2")
    assert job.events("SwapDone") and SECRET not in job.said.read_text()
    job.wait_gone(*{*MEMBERS} - {"h2"})
    job.equals(undisturbed)


@more
def test_hosts_that_are_not_ready_are_named_before_anything_starts(launch, network):
    network.kill("h3")
    job = launch()
    code, said = job.end()
    assert code == 78 and said.startswith("[deadpool] h3: ssh: connect to host h3") and "or remove them" in said
    assert not job.events("NodeJoined")
    job.wait_gone(*{*MEMBERS} - {"h3"})


@more
def test_ctrl_c_ends_this_job_everywhere_and_no_other(launch, network):
    words = network.command("h2", ["bash", "-c", "exec -a 'python -u -m deepspeed.launcher.launch' sleep 600"])
    with subprocess.Popen(words) as other:
        job = launch()
        job.in_training()
        job.signal(signal.SIGINT)
        assert job.end() == (130, "[deadpool] interrupted (SIGINT); exit code 130; lost hosts: none")
        job.wait_gone(*{*MEMBERS} - {"h2"})
        job.wait_for("the end of all but the other job", lambda: len(job.left("h2")) == 1)
        assert other.poll() is None
        other.kill()


@more
def test_a_host_that_is_cut_off_ends_itself(launch, network, undisturbed):
    job = launch(steps=STEPS)
    job.in_training()
    network.cut("h2")
    assert job.end() == (0, "[deadpool] the job finished; exit code 0; lost hosts: h2")
    job.wait_gone(*MEMBERS)
    job.equals(undisturbed)


@more
@pytest.mark.parametrize("launcher", ["h1", OUTSIDE])
def test_the_launchers_host_is_lost_and_the_job_goes_on(launch, network, undisturbed, launcher):
    """h1 runs rank 0 too; the other one runs nothing else."""
    job = launch(launcher, steps=STEPS, on_launcher_loss="continue")
    job.in_training()
    network.kill(launcher)
    job.wait_for("finish", lambda: job.events("JobFinished"))
    assert bool(job.events("SwapDone")) == (launcher == "h1")
    job.wait_gone(*{*MEMBERS} - {launcher})
    job.equals(undisturbed)


@more
@pytest.mark.parametrize("launcher", ["h1", OUTSIDE])
def test_the_launchers_host_is_lost_and_the_job_stops(launch, network, launcher):
    job = launch(launcher, on_launcher_loss="stop")
    job.in_training()
    network.kill(launcher)
    job.wait_gone(*{*MEMBERS} - {launcher})
    assert any("found the launcher gone" in event["reason"] for event in job.events("NodeFenced"))


@more
def test_plain_deepspeed_loses_a_host(launch, network, undisturbed):
    """Its exit code says that a host was lost; the job's end does not depend on it."""
    job = launch(command="deepspeed", steps=STEPS)
    job.in_training()
    os.kill(network.hosts["h2"].pid, signal.SIGKILL)
    code, _ = job.end()
    assert code != 0 and job.events("JobFinished")
    job.wait_gone(*{*MEMBERS} - {"h2"})
    job.equals(undisturbed)


@more
def test_ctrl_c_of_plain_deepspeed_leaves_nothing(launch):
    job = launch(command="deepspeed")
    job.in_training()
    job.signal(signal.SIGINT)
    assert job.end()[0] != 0
    job.wait_gone(*MEMBERS)


@more
def test_plain_deepspeed_is_missed_when_its_connections_end(launch, network):
    job = launch(OUTSIDE, command="deepspeed", on_launcher_loss="stop")
    job.in_training()
    os.kill(network.hosts[OUTSIDE].pid, signal.SIGKILL)
    job.wait_gone(*MEMBERS)
    assert any("found the launcher gone" in event["reason"] for event in job.events("NodeFenced"))
