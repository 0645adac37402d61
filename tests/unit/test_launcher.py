"""`deadpool launch` as a whole, with stand-ins: `ssh` runs the command here, `deepspeed` is a script of the test."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support import slow_but
from support.stand_in import fake

from deadpool_plugin import config, events
from deadpool_plugin.errors import ConfigError
from deadpool_plugin.host import proc
from deadpool_plugin.host.output import say
from deadpool_plugin.launch import job_files, launcher, steward
from deadpool_plugin.launch.fate import Outcome
from deadpool_plugin.launch.launcher import shell_command
from deadpool_plugin.launch.request import Request

SECRET = "a secret that is long enough"
SSH = """#!/bin/sh
echo "$@" >> ssh.txt
for word; do
  case "$before$word" in -o*|-p*|-T|--) ;; *) [ "$host" ] || host=$word;; esac
  before=; case "$word" in -o|-p) before=$word;; esac
done
[ "$host" = slow ] && sleep 4
[ "$host" = unreachable ] && { echo "ssh: no route to $host" >&2; exit 255; }
echo "Welcome to $host"
sh -c "echo \\$\\$ > $host.pid; $word"
exit $?
"""
DEEPSPEED = """
import os, sys, signal
from pathlib import Path
from deadpool_plugin import events
from deadpool_plugin.config import load
from deadpool_plugin.launch.job_files import secret_of
given = load(sys.argv[-1])
Path("seen.txt").write_text(" ".join([*sys.argv, *(f"{k}={v}" for k, v in os.environ.items())]))
Path("secret.txt").write_bytes(secret_of(given, sys.argv[-1]))
os.makedirs("logs", exist_ok=True)
"""


@pytest.fixture
def job(tmp_path, monkeypatch):
    """A directory with everything; `job(code)` launches on two hosts, `code` being what deepspeed does."""
    ssh, secret = tmp_path / "bin" / "ssh", tmp_path / "secret"
    ssh.parent.mkdir()
    ssh.write_text(SSH)
    ssh.chmod(0o755)
    (ssh.parent / "pdsh").symlink_to("/bin/false")
    secret.touch(mode=0o600)
    secret.write_text(SECRET)
    (tmp_path / "s.py").touch()
    (tmp_path / "d.yaml").write_text(f"secret_file: {secret}\noutput_dir: logs\npatience_s: 3\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{ssh.parent}:{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", str(Path(launcher.__file__).parents[2]))

    def launch(code="", hosts=("h1", "h2"), slots=(), first=()):
        (tmp_path / "deepspeed.py").write_text(DEEPSPEED + code)
        monkeypatch.setattr(launcher, "DEEPSPEED", (sys.executable, str(tmp_path / "deepspeed.py")))
        request = Request(["--module"], ["s.py", "--lr", "1"], "d.yaml", list(hosts), slots=list(slots))
        monkeypatch.setattr(launcher, "understood", lambda words: request)
        return launcher.launch([*first, "--hostfile", "H", "s.py"])

    jobs: list[str] = []
    named = job_files.new_job

    def new_job() -> str:
        jobs.append(named())
        return jobs[-1]

    monkeypatch.setattr(job_files, "new_job", new_job)
    yield launch
    for file in tmp_path.glob("*.pid"):
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(file.read_text()), signal.SIGCONT)
    deadline = time.monotonic() + 30.0
    while left := [folder for folder in map(job_files.folder_of, jobs) if folder.exists()]:
        assert time.monotonic() < deadline, f"{left} outlive their job"
        time.sleep(0.05)


def log(node, *said):
    lines = b"".join(map(events.encode, said))
    return f"open('logs/events.{node}.jsonl', 'ab').write({lines!r})\n"


def test_a_finished_job_is_a_success_whatever_the_launcher_says(job, capfd):
    swap = events.SwapPlanned(restore_step=1, lost_nodes=(1,))
    assert job(log(0, swap, events.JobFinished()) + "sys.exit(255)") == 0
    assert capfd.readouterr().out.splitlines()[-1] == "[deadpool] the job finished; exit code 0; lost hosts: h2"


def test_a_verdict_is_the_exit_code(job, capfd):
    assert job(log(1, events.JobStopped(exit_code=86, reason="too much")) + "sys.exit(255)") == 86
    assert "the job stopped: too much" in capfd.readouterr().out


def test_the_secret_is_in_a_file_only(job, tmp_path):
    job()
    assert (tmp_path / "secret.txt").read_text() == SECRET
    seen = (tmp_path / "seen.txt").read_text()
    assert SECRET not in seen and SECRET not in (tmp_path / "ssh.txt").read_text()
    assert "ServerAliveInterval=3 -o ServerAliveCountMax=3" in seen
    words = seen.split()
    assert words[1:6] == ["--module", "deadpool_plugin.run", "s.py", "--lr", "1"]
    assert not Path(words[words.index("--deadpool-config") + 1]).parent.exists()


def test_hosts_that_join_can_be_told_of_the_users_own_secret_file(job, tmp_path):
    copies = "import shutil\nshutil.copy(sys.argv[-1], 'told.yaml')\n"
    assert job(copies + log(0, events.JobFinished())) == 0
    known = config.load(tmp_path / "told.yaml")
    assert (known.secret_path, known.patience_s) == (tmp_path / "secret", 3.0)


@pytest.mark.parametrize("first", [("--resume", "left/job"), ("--resume=left/job",)])
def test_a_job_that_is_resumed_tells_its_hosts(job, tmp_path, first):
    copies = "import shutil\nshutil.copy(sys.argv[-1], 'told.yaml')\n"
    assert job(copies + log(0, events.JobFinished()), first=first) == 0
    assert config.load(tmp_path / "told.yaml").resume == tmp_path / "left" / "job"
    assert "--resume" not in (tmp_path / "seen.txt").read_text()


def test_a_job_on_one_host_is_resumed_by_a_configuration_of_its_own(job, monkeypatch, tmp_path):
    def execv(program, words):
        raise SystemExit(words[-1])

    monkeypatch.setattr(os, "execv", execv)
    with (tmp_path / "d.yaml").open("a") as file:
        file.write("spares: 0\n")
    with pytest.raises(SystemExit) as ended:
        job(hosts=[], first=("--resume", "/left/job"))
    told = config.load(str(ended.value))
    assert (told.resume, told.spares, told.secret_path) == (Path("/left/job"), 0, tmp_path / "secret")


def test_how_to_go_on_is_said_last_unless_the_job_has_finished(job, capfd):
    left = events.StateWritten(step=7, path="/left/a job")
    assert job(log(1, left, events.JobStopped(exit_code=86, reason="too much")), first=("--resume", "/x")) == 86
    said = capfd.readouterr().out.splitlines()
    assert said[-1] == "[deadpool] to go on: deadpool launch --resume '/left/a job' --hostfile H s.py"
    assert "newest checkpoint" not in said[-2]


def test_a_host_that_left_a_job_that_finished_is_no_reason_to_go_on(job, capfd):
    assert job(log(1, events.StateWritten(step=7, path="/left/job")) + log(0, events.JobFinished())) == 0
    assert "to go on" not in capfd.readouterr().out


def test_a_folder_to_go_on_from_is_named():
    with pytest.raises(ConfigError, match="--resume is the last word; expected `--resume STORE_DIR/JOB`"):
        launcher.launch(["--resume"])


def test_nothing_starts_unless_every_host_is_ready(job, tmp_path):
    with pytest.raises(ConfigError, match="unreachable: ssh: no route to unreachable; expected all hosts"):
        job(hosts=["h1", "unreachable"])
    assert not (tmp_path / "seen.txt").exists()


def test_a_spare_that_no_host_is_is_named_before_anything_starts(job, tmp_path):
    """Hosts say their own names, which need not be those of the hostfile."""
    with (tmp_path / "d.yaml").open("a") as config_file:
        config_file.write("spares: [h9]\n")
    with pytest.raises(ConfigError, match=f"`spares` names h9, but the hosts are 0:{os.uname().nodename}, 1:"):
        job()
    assert not (tmp_path / "seen.txt").exists()


def test_a_folder_that_no_host_can_write_to_is_told_once(job, tmp_path):
    (tmp_path / "logs").write_text("a file")
    with pytest.raises(ConfigError, match="^h1, h2: output_dir .* cannot be used") as refused:
        job()
    assert str(refused.value).count("output_dir") == 1


def test_what_all_hosts_say_is_said_once(job, tmp_path):
    (tmp_path / "s.py").unlink()
    with pytest.raises(ConfigError) as refused:
        job(hosts=["h1", "h2"])
    missing = f"there is no file s.py in {tmp_path}; expected the training script, on every host; to do: copy it there"
    assert str(refused.value) == f"h1, h2: {missing}"


def test_each_line_of_what_several_hosts_say_is_ours(capfd):
    say("\n".join(["h1: one; to do: this", "h2: other; to do: that"]), to=sys.stderr)
    assert capfd.readouterr().err == "[deadpool] h1: one; to do: this\n[deadpool] h2: other; to do: that\n"


def test_what_ssh_said_last_is_told_though_a_shared_connection_keeps_its_pipe(monkeypatch):
    """As with ControlPersist: the client ends, its master holds standard error."""
    master = "exec 3<&0; cat <&3 >/dev/null & echo 'no route' >&2; exit 255"
    word = steward.Prepare("j", 0, "", b"", ["-m", "m"], {})

    async def scenario():
        one = launcher.Connection("h1", 0)
        await asyncio.wait_for(one.prepare(["sh", "-c", master], word), 30)
        await one.close()
        return one.problem

    monkeypatch.setattr(launcher, "CLOSE_S", 0.2)
    assert asyncio.run(scenario()) == "no route"


def test_hosts_wait_for_those_that_take_longer_than_patience_s(job, capfd):
    assert job(log(0, events.JobFinished()), hosts=["h1", "slow"]) == 0
    assert capfd.readouterr().out.splitlines()[-1] == "[deadpool] the job finished; exit code 0; lost hosts: none"


def test_what_deepspeed_would_miss_is_said_at_once(job, monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(ConfigError, match="has no `ssh`"):
        job()


def test_a_job_that_outlives_deepspeed_is_waited_for(job, capfd, tmp_path):
    """The real launcher is killed; a process of the job finishes later."""
    later = tmp_path / "later.py"
    later.write_text("import time\ntime.sleep(3)\n" + log(0, events.JobFinished()))
    words = f"[sys.executable, {str(later)!r}, '-m', 'deadpool_plugin.run', sys.argv[-1]]"
    start = "import subprocess\nenv = {k: v for k, v in os.environ.items() if k != 'DEADPOOL_TAG'}\n"
    start += f"subprocess.Popen({words}, env=env, start_new_session=True)\n"
    assert job(start + "os.kill(os.getpid(), signal.SIGKILL)") == 0
    assert capfd.readouterr().out.splitlines()[-1] == "[deadpool] the job finished; exit code 0; lost hosts: none"


def test_ctrl_c_ends_a_launcher_that_does_not_end_by_itself(job, capfd, monkeypatch):
    monkeypatch.setattr(launcher, "LAST_WORD_S", 1.0)
    monkeypatch.setattr(config.Config, "phase_timeout_s", property(lambda self: 0.5))
    waits = "import subprocess\nchild = subprocess.Popen(['sleep', '600'], start_new_session=True)\n"
    waits += "Path('child.txt').write_text(str(child.pid))\n"
    waits += f"signal.signal(signal.SIGTERM, signal.SIG_IGN); os.kill({os.getpid()}, signal.SIGINT); signal.pause()\n"
    assert job(waits) == 130
    assert "[deadpool] interrupted (SIGINT); exit code 130" in capfd.readouterr().out
    child = Path("child.txt").read_text()
    deadline = time.monotonic() + 20
    while (seen := proc.look(int(child))) is not None and not seen.ending:
        assert time.monotonic() < deadline, f"{child} lives"
        time.sleep(0.01)


RUNS = """
import subprocess, time
env = {k: v for k, v in os.environ.items() if k != "DEADPOOL_TAG"}
command = [sys.executable, "-c", "import sys; sys.stdin.read()", "-m", "deadpool_plugin.run", sys.argv[-1]]
job = subprocess.Popen(command, env=env, start_new_session=True, stdin=subprocess.PIPE)
"""
"""A process of the job, which ends when its standard input does."""
STANDS_STILL = "os.kill(int(Path('h2.pid').read_text()), signal.SIGSTOP)\n"
"""Everything on h2; its sshd answers, so that deepspeed's connection there does not end."""
JOINED = events.NodeJoined(host="h1", ranks=(0,), spare=False)


@pytest.fixture
def soon(monkeypatch):
    monkeypatch.setattr(launcher, "LAST_WORD_S", 1.0)
    monkeypatch.setattr(config.Config, "phase_timeout_s", property(lambda self: 0.5))


@pytest.mark.parametrize(
    ("end", "code"),
    slow_but([(events.JobFinished(), 0), (events.JobStopped(exit_code=86, reason="too much"), 86)], 0),
    ids=["finished", "stopped"],
)
def test_a_host_that_stands_still_does_not_keep_a_job_that_is_over(job, capfd, soon, end, code):
    lost = events.SwapPlanned(restore_step=1, lost_nodes=(1,))
    ends = RUNS + STANDS_STILL + log(0, JOINED, lost, end) + "job.communicate()\nsignal.pause()\n"
    assert job(ends) == code
    said = capfd.readouterr().out
    assert "the job's commands on h2 have not returned" in said and f"exit code {code}; lost hosts: h2" in said


def test_ctrl_c_does_not_change_what_became_of_a_job_that_is_over(job, capfd, soon, monkeypatch):
    monkeypatch.setattr(launcher, "LAST_WORD_S", 600.0)
    settle = launcher.Launcher._settle

    def interrupted_then(self, has_returned):
        before = self._settled
        settle(self, has_returned)
        if before is None and self._settled is not None:
            monkeypatch.setattr(launcher, "LAST_WORD_S", 0.5)
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(launcher.Launcher, "_settle", interrupted_then)
    fate = (events.SwapPlanned(restore_step=1, lost_nodes=(1,)), events.JobFinished())
    assert job(RUNS + STANDS_STILL + log(0, JOINED, *fate) + "job.communicate()\nsignal.pause()\n") == 0
    said = capfd.readouterr().out
    assert (
        "interrupted after the job finished: ending the processes that are left" in said
        and "the job finished; exit code 0" in said
    )


def test_a_terminal_that_is_closed_ends_the_job_as_ctrl_c_does(job, soon, monkeypatch):
    """Nothing can be written to it any more, which the handler of its signal is the first to meet."""
    terminal, ours = os.openpty()
    interrupt = launcher.Launcher._interrupt

    def hung_up(self, number):
        os.close(terminal)
        interrupt(self, number)

    monkeypatch.setattr(launcher.Launcher, "_interrupt", hung_up)
    hangs_up = f"os.kill({os.getpid()}, signal.SIGHUP)\ntime.sleep(60)\n"
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests themselves may run under nohup
    try:
        with os.fdopen(ours, "w") as said:
            monkeypatch.setattr(sys, "stdout", said)
            assert job(RUNS + log(0, JOINED) + hangs_up) == 130
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize(("verdict_at", "code"), [(5.0, 78), (15.0, 130)])
def test_ctrl_c_while_hosts_clean_up_does_not_change_the_verdict(verdict_at, code):
    """They tell of it only when they have ended."""
    stopped = events.JobStopped(exit_code=78, reason="SGD", time=verdict_at)
    one = launcher.Launcher.__new__(launcher.Launcher)
    one._interrupted, one._interrupted_at, one._settled, one._unformed = signal.SIGINT, 10.0, None, None
    one._stewards, one._request = [fake(node=0, told=fake(events=[stopped]))], fake(command=["train.py"])
    assert one._conclude(Outcome(78, "the job stopped: SGD", [])) == code


def test_ctrl_c_before_the_job_has_formed_ends_it_at_once_and_says_so(job, capfd):
    """By SIGKILL: with the time that a job has to end, it would be 12 s, and here none of it listens."""
    deaf = RUNS.replace("import sys;", "import signal, sys; signal.signal(2, signal.SIG_IGN);")
    assert job(deaf + f"os.kill({os.getpid()}, signal.SIGINT)\nsignal.pause()\n") == 130
    said = capfd.readouterr().out
    assert "interrupted before the job has formed: ending it on 2 hosts" in said
    assert "interrupted (SIGINT); exit code 130" in said


def test_a_host_that_ends_before_the_job_forms_ends_it_everywhere(job, capfd):
    """deepspeed itself would wait for the others, which wait for that host."""
    ends = "Path(sys.argv[-1]).with_name('exit_code.0').write_text('70')\n"  # h2 has seen nothing of the job
    assert job(ends + "signal.pause()\n") == 70
    said = capfd.readouterr().out
    assert "h1 ended before the job formed: ending it on the other hosts" in said and "exit code 70" in said


def test_a_host_is_never_an_option_of_ssh(job, tmp_path):
    job(log(0, events.JobFinished()))
    assert all(" -- h" in line for line in (tmp_path / "ssh.txt").read_text().splitlines())


@pytest.mark.parametrize(
    ("more", "slots", "said"),
    [
        ("", [("h1", 2), ("h2", 1)], "host h1 has 2 slots, host h2 has 1; expected the same number on every host"),
        ("spares: 2", [("h1", 1), ("h2", 1)], "the job has 2 host(s), and `spares` asks for 2"),
        ('spares: ["5"]', [("h1", 1), ("h2", 1)], "`spares` names 5"),
        (
            "copies: 2",
            [("h1", 1), ("h2", 1)],
            "the job has 2 host(s), and `copies: 2` asks for 2 others; expected at least 3 hosts",
        ),
        ("secret_file: /nowhere", [("h1", 1), ("h2", 1)], "secret_file /nowhere cannot be read"),
    ],
)
def test_what_this_host_can_check_is_said_once_before_any_other_is_asked(job, tmp_path, more, slots, said):
    text = (tmp_path / "d.yaml").read_text()
    kept = [line for line in text.splitlines() if not more.startswith(line.partition(":")[0])]
    (tmp_path / "d.yaml").write_text("\n".join([*kept, more]))
    with pytest.raises(ConfigError) as caught:
        job(slots=slots)
    assert said in str(caught.value) and caught.value.exit_code == 78
    assert not (tmp_path / "ssh.txt").exists()


def test_one_host_is_deepspeeds_own_business(job, monkeypatch, tmp_path):
    def execv(program, words):
        raise SystemExit(" ".join(words[-7:]))

    monkeypatch.setattr(os, "execv", execv)
    with pytest.raises(ConfigError, match=r"the job has 1 host\(s\), and `spares` asks for 1"):
        job(hosts=[])
    with (tmp_path / "d.yaml").open("a") as file:
        file.write("spares: 0\n")
    with pytest.raises(SystemExit, match="--module deadpool_plugin.run s.py --lr 1 --deadpool-config d.yaml"):
        job(hosts=[])


def test_words_survive_the_hosts_shell(tmp_path):
    odd = tmp_path / "a b'c"
    odd.mkdir()
    command = shell_command(Request([], ["s.py"], "", ["h1"]), {"PYTHONWARNINGS": "ignore::x y", "HOME": "/"}, str(odd))
    shown = command.replace(f"exec {sys.executable} -m deadpool_plugin.launch.steward", "pwd; echo $PYTHONWARNINGS")
    done = subprocess.run(["sh", "-c", shown], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [str(odd), "ignore::x y"]


def test_an_interpreter_has_what_deepspeed_exports_for_it(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "nobody"))
    (tmp_path / ".deepspeed_env").write_text("LD_LIBRARY_PATH=/sw/lib:/usr/lib\nQUOTED='a b'\n\n")
    command = shell_command(Request([], ["s.py"], "", ["h1"]), {}, str(tmp_path))
    asked = "echo $LD_LIBRARY_PATH; echo $QUOTED"
    shown = command.replace(f"exec {sys.executable} -m deadpool_plugin.launch.steward", asked)
    done = subprocess.run(["sh", "-c", shown], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["/sw/lib:/usr/lib", "a b"]
