"""Readings by `deadpool launch` of deepspeed's command lines, read by the installed deepspeed."""

import json

import pytest

from deadpool_plugin.errors import ConfigError
from deadpool_plugin.launch import request

OURS = ["--module", "deadpool_plugin.run"]


@pytest.fixture
def read(tmp_path, monkeypatch):
    pytest.importorskip("deepspeed")
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "options").write_text("h1 slots=2\n-oProxyCommand=x slots=2\n")
    (tmp_path / "H").write_text("# three\nh1 slots=2\nh2 slots=2\nh3 slots=2\n")
    return lambda line: request.read(line.split())


@pytest.mark.parametrize(
    ("line", "options", "command", "config"),
    [
        ("s.py --lr 1", "--module", "s.py --lr 1", ""),
        ("s.py --lr 1 --deadpool-config c.yaml --hostfile H", "--module", "s.py --lr 1 --hostfile H", "c.yaml"),
        ("--hostfile H --master_port 5 s.py", "--hostfile H --master_port 5 --module", "s.py", ""),
        ("--module pkg.train --lr 1", "--module", "-m pkg.train --lr 1", ""),
        ("--module deadpool_plugin.run s.py --deadpool-config=c.yaml", "--module", "s.py", "c.yaml"),
        ("--module deadpool_plugin.run -m pkg.train", "--module", "-m pkg.train", ""),
    ],
)
def test_our_module_comes_in_front_of_the_script(read, line, options, command, config):
    found = read(line)
    assert (" ".join(found.options), " ".join(found.command), found.config) == (options, command, config)
    assert found.deepspeed("X.yaml") == [*options.split(), *OURS[1:], *command.split(), "--deadpool-config", "X.yaml"]


@pytest.mark.parametrize(
    ("line", "hosts"),
    [
        ("--hostfile H s.py", ["h1", "h2", "h3"]),
        ("--hostfile H --num_nodes 2 s.py", ["h1", "h2"]),
        ("--hostfile H --exclude h2 s.py", ["h1", "h3"]),
        ("--hostfile H --include h3@h1:0 s.py", ["h1", "h3"]),
        ("--hostfile H --include h2 s.py", []),
        ("--hostfile H --include h2 --force_multi s.py", ["h2"]),
        ("--hostfile H --no_ssh --node_rank 1 s.py", []),
        ("s.py --hostfile none", []),
    ],
)
def test_the_hosts_are_those_deepspeed_uses(read, line, hosts):
    assert read(line).hosts == hosts


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("--hostfile H --launcher slurm s.py", "configs/slurm.sbatch"),
        ("--hostfile H --launcher OpenMPI s.py", "use pdsh"),
        ("--no_python s.sh", "leave it out"),
        ("--autotuning run s.py", "--autotuning"),
        ("--hostfile options s.py", "-oProxyCommand=x; expected host names"),
        ("--hostfile H --include h9 s.py", "'h9' not found"),
        ("s.py --deadpool-config", "name the file"),
    ],
)
def test_what_cannot_work_is_refused_by_name(read, line, said):
    with pytest.raises(ConfigError, match=said):
        read(line)


@pytest.mark.parametrize("words", ["--hostfile none", "--hostfile=none", "-H none", "-Hnone", "-H none --no_ssh"])
def test_a_hostfile_that_is_not_there_is_refused_not_left_out(read, words):
    with pytest.raises(ConfigError, match="there is no hostfile none; expected"):
        read(f"{words} s.py")


@pytest.mark.parametrize(
    ("line", "slots"),
    [
        ("--hostfile H --include h3@h1:0 s.py", [("h1", 1), ("h3", 2)]),
        ("--hostfile H --num_gpus 1 --num_nodes 1 s.py", [("h1", 1)]),
        ("--hostfile H --no_ssh --node_rank 1 s.py", [("h1", 2), ("h2", 2), ("h3", 2)]),
        ("s.py", []),
    ],
)
def test_the_slots_are_those_deepspeed_uses(read, line, slots):
    assert read(line).slots == slots


@pytest.mark.parametrize("flag", ["--deadpool-config d.yaml", "--deadpool-config=d.yaml"])
def test_our_flag_may_stand_before_the_script(read, flag):
    found = read(f"--hostfile H {flag} s.py --lr 1")
    assert (found.config, found.command, found.options) == (
        "d.yaml",
        ["s.py", "--lr", "1"],
        ["--hostfile", "H", "--module"],
    )


def test_a_script_is_missed_although_our_flag_is_there(read, capfd):
    with pytest.raises(SystemExit):
        read("--hostfile H --deadpool-config d.yaml")
    assert "required: user_script" in capfd.readouterr().err


def test_a_mistake_is_told_in_the_name_of_the_command(capfd):
    with pytest.raises(SystemExit) as ended:
        request.understood(["--nosuchoption", "s.py"])
    said = capfd.readouterr().err
    assert ended.value.code == 2 and "deadpool launch: error: unrecognized arguments: --nosuchoption" in said


def test_it_is_one_line_of_json_whatever_deepspeed_says_meanwhile(read, capfd):
    assert request.main(["--hostfile", "H", "s.py"]) == 0
    assert json.loads(capfd.readouterr().out)["hosts"] == ["h1", "h2", "h3"]
    assert request.main(["--launcher", "slurm", "s.py"]) == 78
    assert capfd.readouterr().err.splitlines()[-1].startswith("[deadpool] --launcher is slurm; expected a launcher")
