"""`deadpool`, and `deadpool join` up to the moment anything is started: what is found wrong, and what is said."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import msgspec
import pytest
from support.hosts import local_node

from deadpool_plugin import __version__, events
from deadpool_plugin.agent.links import Links, versions
from deadpool_plugin.agent.world import Invitation, Job, job_from
from deadpool_plugin.cli.main import COMMANDS, address, main
from deadpool_plugin.config import Config, load
from deadpool_plugin.core.types import World
from deadpool_plugin.errors import ConfigError, PeerRefused, TransportError
from deadpool_plugin.host import files
from deadpool_plugin.launch import checks, job_files, running_job
from deadpool_plugin.launch.job_files import secret_of
from deadpool_plugin.transport.handshake import Credentials
from deadpool_plugin.transport.join_protocol import JobDescription, Reserve, Reserved
from deadpool_plugin.transport.mesh import ControlMesh
from deadpool_plugin.transport.rendezvous import Hello

SECRET = "a secret that is long enough"
MEMBERS_JOB = "0123456789abcdef"


def hello(node=0, **changes):
    made = Hello(node, f"host{node}", ("127.0.0.1", 1), (("127.0.0.1", 2),), 2, versions(), Config().digest())
    return msgspec.structs.replace(made, **changes)


def described(where, command=("s.py", "--local_rank=0", "--lr", "1"), **changes):
    made = JobDescription(
        0, list(command), str(where), "", {"NCCL_X": "job", "OMP_NUM_THREADS": "1"}, "m", 5, 2, (0, 1),
        [hello(0), hello(1)], MEMBERS_JOB,
    )  # fmt: skip
    return msgspec.structs.replace(made, **changes)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A working directory with a script, a home without a secret, and no torch version to disagree about."""
    (tmp_path / "s.py").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


# ---- the command


@pytest.mark.parametrize("words", [["jion"], ["join", "--to", "a:1", "--job", "x"], ["join", "--bogus"], ["watch"]])
def test_words_that_make_no_command_are_argparse_errors(words, capsys):
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 2 and "usage: deadpool" in capsys.readouterr().err


def test_without_a_command_it_lists_them(capsys):
    assert main([]) == 2
    said = capsys.readouterr()
    assert not said.out and all(f"  {name} " in said.err for name in COMMANDS)


def test_help_names_every_command(capsys):
    with pytest.raises(SystemExit):
        main(["--help"])
    said = capsys.readouterr().out
    assert all(f"{name} " in said and line in said for name, line in COMMANDS.items())


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--to", "host"], "HOST:PORT"),
        (["--to", "host:0"], "HOST:PORT"),
        (["--to", "host:x"], "HOST:PORT"),
        (["--deadpool-config", "absent.yaml"], "absent.yaml cannot be read"),
        (["--to", "127.0.0.1:1"], "there is no secret_file"),
        (["--job", "nowhere"], "nowhere/nodes"),
        ([], "deadpool-logs/nodes"),
        (["--", "--lr", "1"], "no script|where the script should be"),
    ],
)
def test_what_is_wrong_is_one_line_and_exit_code_78(folder, capsys, words, said):
    assert main(["join", *words]) == 78
    error = capsys.readouterr().err
    assert error.startswith("[deadpool] ") and error.count("\n") == 1
    assert any(part in error for part in said.split("|")), error
    assert not (folder / ".deadpool").exists()


def test_nobody_there_is_said(folder, capsys):
    secret = folder / "secret"
    secret.touch(mode=0o600)
    secret.write_text(SECRET)
    (folder / "d.yaml").write_text(f"secret_file: {secret}\n")
    assert main(["join", "--to", "127.0.0.1:1", "--deadpool-config", "d.yaml"]) == 1
    assert "nobody answers at 127.0.0.1:1" in capsys.readouterr().err


def test_of_a_job_that_has_ended_it_is_said_how_and_not_that_a_member_is_gone(folder, capsys):
    """Its agent was killed, so that its contact is left. The job is that of the configuration in the command."""
    secret, config = folder / "secret", folder / "d.yaml"
    secret.touch(mode=0o600)
    secret.write_text(SECRET)
    config.write_text(f"secret_file: {secret}\noutput_dir: logs\n")
    files.publish(folder / "logs", hello(1), (str(secret),), MEMBERS_JOB)
    words = ["join", "--", "s.py", "--deadpool-config", str(config)]
    assert main(words) == 1
    assert "nobody answers at 127.0.0.1:1" in capsys.readouterr().err
    told = [events.WorldFormed(node_of=(1,)), events.NodeJoined(), events.JobFinished(), events.NodeEnded(exit_code=0)]
    events.log_of(folder / "logs", 1).write_bytes(b"".join(map(events.encode, told)))
    assert main(words) == 78
    error = capsys.readouterr().err
    assert "ago: the job finished; exit code 0; lost hosts: none; expected a job that runs" in error, error


def test_addresses():
    assert address("host7:29") == ("host7", 29)
    assert address("[fe80::1]:29") == ("fe80::1", 29)


def test_the_command_says_its_version(capsys):
    with pytest.raises(SystemExit) as end:
        main(["--version"])
    assert end.value.code == 0 and __version__ in capsys.readouterr().out


def test_the_module_is_the_command_and_nothing_loads_torch():
    command = [sys.executable, "-m", "deadpool_plugin", "watch", "--help"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and "output_dir" in done.stdout
    code = "import sys, deadpool_plugin.cli.main; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


# ---- finding a member


def test_a_nodes_file_appears_and_goes_with_its_own_process_only(tmp_path):
    files.publish(tmp_path, hello(3), ("/job/secret",), "a job")
    (found,) = files.published(tmp_path)
    assert found == files.ContactFile(3, "host3", os.getpid(), ("127.0.0.1", 1), ("/job/secret",), "a job")
    assert [path.name for path in (tmp_path / "nodes").iterdir()] == ["3.json"]
    path = files.contact_file(tmp_path, 3)
    path.write_text(json.dumps({**json.loads(path.read_text()), "pid": os.getpid() + 1}))
    files.withdraw(tmp_path, 3)
    assert path.exists()
    files.publish(tmp_path, hello(3), (), "a job")
    files.withdraw(tmp_path, 3)
    files.withdraw(tmp_path, 3)
    assert not files.published(tmp_path)


def test_files_are_read_youngest_first_and_damaged_ones_left_out(tmp_path):
    for age, node in enumerate((5, 2, 9)):
        files.publish(tmp_path, hello(node), (), "a job")
        os.utime(files.contact_file(tmp_path, node), (1000 - age, 1000 - age))
    (tmp_path / "nodes" / "7.json").write_text("{")
    assert [contact.node for contact in files.published(tmp_path)] == [5, 2, 9]
    assert files.published(tmp_path / "absent") == []


class Member:
    """A member of a job on a thread of its own: what a command that blocks can ask."""

    def __init__(self, folder):
        self.command, self.folder = ["s.py", "--local_rank=0", "--lr", "1"], folder
        self.config = load(folder / "d.yaml")
        self._up, self._loop = threading.Event(), asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_until_complete, args=(self._serve(),))
        self._thread.start()
        assert self._up.wait(20)

    async def _serve(self):
        self._end = asyncio.Event()
        credentials = Credentials(SECRET.encode(), MEMBERS_JOB)
        node = local_node(node=4)
        node.job, node.credentials = Job(self.command, str(self.folder), self.config.told(), {}), credentials
        node.world = World(1, (4,))
        links = Links(node)
        mesh = ControlMesh(
            4, credentials, "127.0.0.1", None, lambda *_: None, lambda *_: None, 10.0, lambda _: None, links.answer,
        )  # fmt: skip
        self.hello = hello(4, control=await mesh.listen(), config_digest=self.config.digest())
        await mesh.connect({4: self.hello.control})
        links.know(self.hello)
        files.publish(self.folder / "logs", self.hello, (self.config.told_secret_file,), MEMBERS_JOB)
        self._up.set()
        await self._end.wait()
        await mesh.close()

    def close(self):
        if self._loop.is_closed():
            return
        self._loop.call_soon_threadsafe(self._end.set)
        self._thread.join(20)
        self._loop.close()


@pytest.fixture
def member(folder):
    secret = folder / "secret"
    secret.touch(mode=0o600)
    secret.write_text(SECRET)
    (folder / "d.yaml").write_text(f"secret_file: secret\noutput_dir: {folder / 'logs'}\npatience_s: 9\n")
    one = Member(folder)
    yield one
    one.close()


def test_a_job_is_found_by_its_output_dir_and_its_secret_where_its_members_have_it(member, folder, monkeypatch):
    dead = hello(1, control=("127.0.0.1", 1))
    files.publish(folder / "logs", dead, (str(folder / "elsewhere"), str(folder / "secret")), MEMBERS_JOB)
    monkeypatch.chdir("/")
    found = running_job.find(running_job.Wish(job=folder / "logs"))
    assert found.description.hellos == [member.hello] and found.description.members == (4,)
    assert found.config == "" and found.credentials.secret == SECRET.encode()
    assert asyncio.run(running_job.reserve(found)) == 5


def check_unused(config):
    running_job.check_unused(config, job_files.ensure_secret(config))


def test_a_second_job_may_not_write_to_the_folder_of_one_that_runs(member, folder):
    files.publish(folder / "logs", hello(1, control=("127.0.0.1", 1)), (), MEMBERS_JOB)  # a lost host's is left
    with pytest.raises(ConfigError, match=rf"logs is that of a job that runs on {member.hello.host}; .*`deadpool stop"):
        check_unused(load("d.yaml"))
    member.close()
    check_unused(load("d.yaml"))


def test_nor_if_it_has_another_secret(member, folder):
    """Another user's, or that of a home which hosts do not share; another job at its port is none of this folder."""
    (folder / "secret").write_text("another secret of that length")
    with pytest.raises(ConfigError, match=rf"logs is that of a job that runs on {member.hello.host}"):
        check_unused(load("d.yaml"))
    files.publish(folder / "logs", member.hello, (), "a job that has ended")
    check_unused(load("d.yaml"))


@pytest.mark.parametrize("said", ["to", "job"])
def test_a_host_takes_part_with_the_configuration_the_job_has(member, folder, said, monkeypatch):
    """However it was launched: no file of it need be on the host that joins but the secret."""
    default = folder / ".deadpool" / "secret"
    default.parent.mkdir()
    (folder / "secret").rename(default)
    if said == "job":
        files.publish(folder / "logs", member.hello, (str(folder / "gone"), str(default)), MEMBERS_JOB)
    monkeypatch.chdir("/")
    found = running_job.find(
        running_job.Wish(**{"to": {"to": member.hello.control}, "job": {"job": folder / "logs"}}[said])
    )
    with running_job.configured(found) as path:
        assert job_files.job_of(path) and not folder.samefile(os.path.dirname(path))
        ours = load(path)
        assert ours == member.config.model_copy(update={"secret_file": default})
        assert secret_of(ours, path) == SECRET.encode() and ours.told_secret_file == str(default)
        running_job.check(found.description, path, [])
        assert {os.stat(entry).st_mode & 0o777 for entry in os.scandir(os.path.dirname(path))} == {0o600}
    assert not os.path.exists(os.path.dirname(path))


def test_without_the_secret_it_is_said_where_it_was_looked_for(member, folder):
    (folder / "secret").unlink()
    with pytest.raises(ConfigError, match=rf"no secret_file {folder}/secret on .*in the job \(.*:{folder}/secret\)"):
        running_job.find(running_job.Wish(job=folder / "logs"))
    copying = "or from where it was launched: `mkdir -p .*; scp -p FROM .*/secret`"
    theirs = rf"in the job \(HOST:/dev/shm/deadpool-\*/secret\) {copying}.*--deadpool-config"
    with pytest.raises(ConfigError, match=rf"no secret_file {folder}/.deadpool/secret on .*{theirs}"):
        running_job.find(running_job.Wish(to=member.hello.control))
    member.close()
    files.publish(folder / "logs", member.hello, (str(folder / "secret"),), MEMBERS_JOB)  # as a killed one leaves it
    with pytest.raises(TransportError, match=r"no member of a running job was found: .* do not answer"):
        running_job.find(running_job.Wish(job=folder / "logs"))


@pytest.mark.parametrize("said", ["to", "job"])
def test_a_host_may_have_a_configuration_of_its_own(member, folder, said):
    where = {"to": {"to": member.hello.control}, "job": {"job": folder / "logs"}}[said]
    found = running_job.find(running_job.Wish(config="d.yaml", **where))
    with running_job.configured(found) as path:
        assert path == str(folder / "d.yaml")


@pytest.mark.parametrize(
    ("interface", "ours"),
    [
        ("10.1.0.7", None),
        ("fe80::7", None),
        ("10.1.0.0/16", "10.1.0.0/16"),
        ("ib0", "ib0"),
        ("ib0,ib1", "ib0,ib1"),
        ("ib0, 10.1.0.7", None),
        ("10.1.0.7,10.2.0.7", None),
    ],
)
def test_an_address_is_another_hosts(folder, interface, ours):
    told = Config(interface_address=interface, patience_s=2.5)
    found = running_job.FoundJob(described(folder, config=told.told()), "", Credentials(b""), folder / "secret")
    with running_job.configured(found) as path:
        mine = load(path)
    assert (mine.interface_address, mine.patience_s, mine.secret_file) == (ours, 2.5, folder / "secret")


def test_a_secret_in_a_folder_that_is_closed_to_us_is_not_on_this_host(member, folder, monkeypatch):
    closed, open_ = folder / "closed" / "secret", folder / "secret"
    files.publish(folder / "logs", member.hello, (str(closed), str(open_)), MEMBERS_JOB)
    stat = os.stat

    def refusing(path, *args, **options):
        if path == closed or path == str(closed):
            raise PermissionError(13, "Permission denied", str(path))
        return stat(path, *args, **options)

    monkeypatch.setattr(os, "stat", refusing)
    assert running_job.find(running_job.Wish(job=folder / "logs")).secret_file == open_
    with pytest.raises(ConfigError, match="there is no secret_file"):
        running_job.existing_secret(Config(secret_file=closed))


def test_a_job_is_found_by_the_address_of_a_member(member, folder):
    found = running_job.find(running_job.Wish(to=member.hello.control, config="d.yaml"))
    assert found.description.command == member.command


def test_another_job_at_the_address_of_a_member_that_is_gone_is_not_taken_for_it(member, folder):
    (folder / "logs" / "nodes" / "4.json").unlink()
    gone = hello(1, control=member.hello.control)
    files.publish(folder / "logs", gone, (str(folder / "secret"),), "another job's id")
    with pytest.raises(PeerRefused, match=f"it is of job {MEMBERS_JOB}, this is job another job's id"):
        running_job.find(running_job.Wish(job=folder / "logs"))


def test_a_node_id_is_not_asked_of_another_job(member, folder):
    found = running_job.find(running_job.Wish(to=member.hello.control, config="d.yaml"))
    assert found.description.job == MEMBERS_JOB
    other = found.credentials.of("another job's id")
    with pytest.raises(PeerRefused, match="it is of job"):
        asyncio.run(running_job.reserve(msgspec.structs.replace(found, credentials=other)))


def test_another_secret_is_said(member, folder):
    (folder / "secret").write_text("another secret of that length")
    with pytest.raises(PeerRefused, match="does not prove the job's secret"):
        running_job.find(running_job.Wish(to=member.hello.control, config="d.yaml"))


def test_the_whole_command_runs_the_jobs_command_for_every_slot(member, folder, capfd, monkeypatch):
    seen = folder / "seen"
    seen.mkdir()
    program = folder / "program.py"
    program.write_text(
        "import json, os, sys, pathlib\n"
        "told = {'argv': sys.argv[1:], 'env': dict(os.environ)}\n"
        f"pathlib.Path({str(seen)!r}, os.environ['RANK']).write_text(json.dumps(told))\n"
    )
    (folder / "elsewhere").mkdir()
    monkeypatch.chdir(folder / "elsewhere")
    wish = running_job.Wish(job=folder / "logs", command=["s.py", "--lr", "1"])
    assert running_job.join(wish, [sys.executable, str(program)]) == 0
    for rank, local_rank in ((10, 0), (11, 1)):
        told = json.loads((seen / str(rank)).read_text())
        assert told["argv"] == [f"--local_rank={local_rank}", "s.py", "--lr", "1"] + [
            "--deadpool-config", told["argv"][-1]
        ]  # fmt: skip
        assert job_files.job_of(told["argv"][-1])
        place = checks.place_of(told["env"])
        assert (place.node, place.local_size, place.master_addr, place.master_port) == (5, 2, "m", 5)
        assert job_from(told["env"], "", "", ()).invitation == Invitation(MEMBERS_JOB, (tuple(member.hello.control),))
    assert "is in, as node 5" in capfd.readouterr().out


def test_a_taken_node_id_is_tried_again_with_another(member, folder, capfd, monkeypatch):
    program = folder / "program.py"
    program.write_text("import os, sys; sys.exit(0 if os.environ['CROSS_RANK'] == '7' else 75)")
    (folder / "elsewhere").mkdir()
    monkeypatch.chdir(folder / "elsewhere")
    assert running_job.join(running_job.Wish(job=Path("../logs")), [sys.executable, str(program)]) == 0
    assert "as node 7" in capfd.readouterr().out


# ---- checks


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"directory": "/no/such/place"}, "there is no directory /no/such/place"),
        ({"command": ["other.py"]}, "there is no file other.py"),
        ({"hellos": [hello(0, versions={**versions(), "torch": "1.0"})]}, "torch is 1.0 on host0"),
        ({"hellos": [hello(0, config_digest="x")]}, "configuration of host"),
    ],
)
def test_a_host_that_does_not_fit_is_told_why(folder, change, said):
    with pytest.raises(ConfigError, match=said):
        running_job.check(described(folder, **change), "", [])


@pytest.mark.parametrize(
    ("given", "fits"),
    [
        ([], True),
        (["s.py", "--lr", "1"], True),
        (["--local_rank=1", "s.py", "--lr", "1", "--deadpool-config", "d.yaml"], True),
        (["s.py", "--lr", "2"], False),
        (["s.py"], False),
    ],
)
def test_a_command_that_is_given_must_be_the_jobs(folder, given, fits):
    if fits:
        running_job.check(described(folder), "", given)
    else:
        with pytest.raises(ConfigError, match="is not the job's, which is `s.py --lr 1`"):
            running_job.check(described(folder), "", given)


def test_a_module_needs_no_file(folder):
    running_job.check(described(folder, command=["-m", "pkg.train", "--local_rank=0"]), "", ["-m", "pkg.train"])


def test_commands_and_environment_of_a_slot(folder, monkeypatch):
    job = described(folder)
    assert running_job.supervisor_command(["run"], job, 1, "/d.yaml") == [
        "run", "--local_rank=1", "s.py", "--lr", "1", "--deadpool-config", "/d.yaml"
    ]  # fmt: skip
    without = described(folder, command=["s.py"])
    command = running_job.supervisor_command(["run"], without, 1, "/d.yaml")
    assert command == ["run", "s.py", "--deadpool-config", "/d.yaml"]
    for name, value in {"OMP_NUM_THREADS": "4", "RANK": "99", "PATH": "p"}.items():
        monkeypatch.setenv(name, value)
    env = running_job.environment(job, 6, 1)
    assert (env["NCCL_X"], env["OMP_NUM_THREADS"], env["PATH"], env["RANK"]) == ("job", "4", "p", "13")
    assert checks.place_of(env).node == 6


def test_what_the_job_exports_leaves_out_everything_else():
    job = job_from({"NCCL_DEBUG": "W", "AWS_SECRET": "x"}, "/here", "spares: 1", ("/secret",))
    assert job == Job([], "/here", "spares: 1", {"NCCL_DEBUG": "W"}, ("/secret",))


def test_what_deepspeed_is_told_to_export_is_exported_but_no_secret(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "nowhere"))
    (tmp_path / ".deepspeed_env").write_text("LD_LIBRARY_PATH=/opt\nMY_SWITCH=1\nMY_API_KEY=2\n\n")
    exported = {"TORCH_NCCL_BLOCKING_WAIT": "1", "HF_HOME": "/hf", "CUDA_HOME": "/c", "MY_SWITCH": "1"}
    others = {"HF_TOKEN": "x", "MY_API_KEY": "2", "CUDA_VISIBLE_DEVICES": "3", "TORCHELASTIC_RUN_ID": "4", "LANG": "C"}
    assert job_from({**exported, **others}, str(tmp_path), "", ()).environment == exported


def test_ids_are_above_all_that_ever_were():
    links = Links(local_node())
    for node in (0, 1, 7):
        links.know(hello(node))
    links.gone(7)
    assert [links.answer(Reserve()) for _ in range(2)] == [Reserved(8), Reserved(9)]


# ---- playing the launcher


def run_launcher(*programs, hangup="SIG_DFL"):
    """`play_launcher` in a process of its own, with one child per program; `hangup`: what SIGHUP does to it."""
    code = (
        "import asyncio, os, signal, sys; from deadpool_plugin.launch.running_job import play_launcher;"
        f"signal.signal(signal.SIGHUP, signal.{hangup});"  # the tests themselves may run under nohup
        "commands = [[sys.executable, '-c', text] for text in sys.argv[1:]];"
        "sys.exit(asyncio.run(play_launcher(commands, [dict(os.environ)] * len(commands), os.getcwd())))"
    )
    return subprocess.Popen([sys.executable, "-c", code, *programs], stdout=subprocess.PIPE, text=True)


def test_the_first_failure_ends_the_others_and_is_the_exit_code():
    waits = "import signal; signal.pause()"
    assert run_launcher("raise SystemExit(86)", waits, waits).wait(60) == 86
    assert run_launcher("pass", "pass").wait(60) == 0
    killed = "import os; os.kill(os.getpid(), 9)"
    assert run_launcher(killed).wait(60) == 128 + 9


WAITS = "import time\nwhile True: time.sleep(0.05)"
"""Not by signal.pause(): a signal may come just before that."""


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGHUP, 143)])
def test_signals_are_passed_on(number, code):
    child = (
        "import signal, sys\n"
        "for number in (15, 2): signal.signal(number, lambda number, _: sys.exit(128 + number))\n"
        "print('ready', flush=True)\n"
        f"{WAITS}"
    )
    launcher = run_launcher(child)
    assert launcher.stdout.readline() == "ready\n"
    launcher.send_signal(number)
    assert launcher.wait(60) == code


def test_under_nohup_the_end_of_the_terminal_ends_nothing():
    child = (
        "import signal, sys\n"
        "print(signal.getsignal(signal.SIGHUP) == signal.SIG_IGN, flush=True)\n"
        "signal.signal(15, lambda *_: sys.exit(7))\n"
        "print('ready', flush=True)\n"
        f"{WAITS}"
    )
    launcher = run_launcher(child, hangup="SIG_IGN")
    assert [launcher.stdout.readline() for _ in range(2)] == ["True\n", "ready\n"]
    launcher.send_signal(signal.SIGHUP)
    launcher.terminate()
    assert launcher.wait(60) == 7


def test_the_package_installs_the_command():
    text = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    assert 'deadpool = "deadpool_plugin.cli.main:main"' in text


def test_the_help_of_launch_has_an_example(capsys):
    with pytest.raises(SystemExit):
        main(["launch", "--help"])
    assert "deadpool launch --hostfile hosts.txt train.py" in capsys.readouterr().out
