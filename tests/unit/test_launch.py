"""The command line, the launcher's environment, versions, the secret: checked before anything starts."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys

import pytest

from deadpool_plugin import run
from deadpool_plugin.config import Config
from deadpool_plugin.errors import ConfigError
from deadpool_plugin.launch import checks
from deadpool_plugin.launch.argv import activate, parse
from deadpool_plugin.launch.job_files import ensure_secret, secret_of
from deadpool_plugin.launch.worker import _in_a_line, spell_local_rank


def environment(rank=3, local_size=2, world=8, **more):
    base = {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank % local_size),
        "WORLD_SIZE": str(world),
        "LOCAL_SIZE": str(local_size),
        "CROSS_RANK": str(rank // local_size),
        "CROSS_SIZE": str(world // local_size),
        "MASTER_ADDR": "10.0.0.1",
        "MASTER_PORT": "29500",
    }
    return {**base, **more}


# ---- command line


@pytest.mark.parametrize(
    ("words", "command", "config"),
    [
        (["s.py", "--lr", "1"], ["s.py", "--lr", "1"], ""),
        (["--local_rank=1", "s.py", "--lr", "1"], ["s.py", "--local_rank=1", "--lr", "1"], ""),
        (["s.py", "--lr", "1", "--deadpool-config", "d.yaml"], ["s.py", "--lr", "1"], "d.yaml"),
        (["s.py", "--deadpool-config=d.yaml", "x"], ["s.py", "x"], "d.yaml"),
        (["--local_rank=0", "--deadpool-config", "d.yaml", "s.py"], ["s.py", "--local_rank=0"], "d.yaml"),
        (["--local_rank=0", "-m", "pkg.train", "x"], ["-m", "pkg.train", "--local_rank=0", "x"], ""),
    ],
)
def test_command_lines(words, command, config):
    line = parse(words)
    assert (line.command, line.config) == (command, config)


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["--local_rank=0"],
        ["--lr", "1"],
        ["s.py", "--deadpool-config"],
        ["s.py", "--deadpool-config", "a", "--deadpool-config", "b"],
        ["s.py", "--deadpool_config", "a"],
        ["s.py", "--deadpool-confg=a"],
        ["s.py", "--deadpol-config", "a"],
        ["s.py", "--dedpool_config=a"],
    ],
)
def test_wrong_command_lines(words):
    with pytest.raises(ConfigError):
        parse(words)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (["py", "-u", "s.py"], ["py", "-u", "-m", "deadpool_plugin.run", "s.py"]),
        (["py", "s.py"], ["py", "-m", "deadpool_plugin.run", "s.py"]),
        (["py", "-u", "-m", "pkg"], ["py", "-u", "-m", "deadpool_plugin.run", "-m", "pkg"]),
    ],
)
def test_activate_runs_the_same_command_again(monkeypatch, before, after):
    flag, ran = ["--deadpool-config", "d.yaml"], []
    monkeypatch.setattr(sys, "orig_argv", [*before, *flag])
    monkeypatch.setattr(sys, "argv", [before[-1], *flag])
    monkeypatch.setattr(os, "execv", lambda program, words: ran.append((program, words)))
    activate()
    assert ran == [(sys.executable, [*after, *flag])]


def test_activate_costs_a_script_next_to_nothing():
    code = (
        "import sys, deadpool_plugin; deadpool_plugin.activate();"
        "assert not {'asyncio', 'msgspec', 'pydantic', 'yaml', 'torch', 'numpy'} & set(sys.modules), sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


# ---- environment


def test_the_launchers_environment():
    place = checks.place_of(environment(rank=5))
    assert (place.node, place.nodes_total, place.local_size, place.local_rank) == (2, 4, 2, 1)
    assert (place.master_addr, place.master_port) == ("10.0.0.1", 29500)


@pytest.mark.parametrize("name", ["RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_SIZE", "MASTER_ADDR", "MASTER_PORT"])
def test_a_missing_variable_is_named(name):
    environ = environment()
    del environ[name]
    with pytest.raises(ConfigError, match=name):
        checks.place_of(environ)


@pytest.mark.parametrize(
    ("change", "says"),
    [({"WORLD_SIZE": "7"}, "WORLD_SIZE=7"), ({"CROSS_SIZE": "3"}, "host 1 of 3"),
     ({"LOCAL_RANK": "0"}, "LOCAL_RANK=0 of 2 slots"), ({"RANK": "x"}, "RANK=x")],
)  # fmt: skip
def test_an_environment_that_contradicts_itself_is_refused(change, says):
    with pytest.raises(ConfigError, match=says):
        checks.place_of({**environment(), **change})


def test_torchrun_is_refused_by_name():
    with pytest.raises(ConfigError, match="torchrun .*ends or restarts every worker.*deepspeed --hostfile"):
        checks.place_of({**environment(), "TORCHELASTIC_RUN_ID": "none"})


@pytest.mark.parametrize(
    ("spares", "says"),
    [
        (4, "at least"),
        (9, "at least"),
        (["0", "1", "2", "3"], "at least"),
        (["7"], "7"),
        (["a", "b", "c", "d"], "at least"),
    ],
)
def test_too_many_spares(spares, says):
    place = checks.place_of(environment())
    with pytest.raises(ConfigError, match=says):
        checks.check_place(place, Config(spares=spares))


def test_spares_that_leave_a_host_are_accepted():
    place = checks.place_of(environment())
    for spares in (0, 3, ["0"], ["host-a", "host-b"]):
        checks.check_place(place, Config(spares=spares))


# ---- versions


def test_versions():
    checks.check_versions({"torch": "2.9.0+cpu"})
    checks.check_versions({"torch": "2.9.0a0+145a3a7bda.nv25.10"})
    checks.check_versions({"torch": "3.0", "deepspeed": "0.18.1"})
    for wrong in ({}, {"torch": "2.8.1"}, {"torch": "2.9", "deepspeed": "0.17.9"}, {"torch": "weird"}):
        with pytest.raises(ConfigError):
            checks.check_versions(wrong)
    with pytest.raises(ConfigError, match="megatron-core 0.13.1"):
        checks.check_versions({"torch": "2.13.0", "megatron-core": "0.13.1"})


# ---- secret


def test_only_the_default_secret_is_made(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    made = ensure_secret(Config())
    path = tmp_path / ".deadpool" / "secret"
    assert path.stat().st_mode & 0o777 == 0o600 and len(made) >= 32
    assert ensure_secret(Config()) == made
    assert os.listdir(path.parent) == ["secret"]
    with pytest.raises(ConfigError, match="cannot be read"):
        ensure_secret(Config(secret_file=tmp_path / "other"))


def test_a_host_that_makes_a_secret_of_its_own_says_so_once(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("HOME", str(tmp_path))
    made = secret_of(Config(), "d.yaml")
    new = f"{os.uname().nodename} had no secret_file: {tmp_path}/.deadpool/secret is new."
    assert capsys.readouterr().out == f"[deadpool] {new} All hosts of a job need the same one\n"
    assert secret_of(Config(), "d.yaml") == made and not capsys.readouterr().out


def test_a_job_without_a_configuration_has_the_default_secret(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert secret_of(Config(), "") == ensure_secret(Config())


def test_a_home_without_room_for_the_secret_is_said(tmp_path, monkeypatch):
    (tmp_path / ".deadpool").touch()
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(ConfigError, match=rf"\.deadpool/secret cannot be read on {os.uname().nodename}"):
        ensure_secret(Config())


def test_unsafe_secrets_are_refused(tmp_path):
    path = tmp_path / "secret"
    path.write_text("0123456789abcdef0123")
    path.chmod(0o640)
    with pytest.raises(ConfigError, match="mode 0640"):
        ensure_secret(Config(secret_file=path))
    path.chmod(0o600)
    assert ensure_secret(Config(secret_file=path)) == b"0123456789abcdef0123"
    path.write_text("short")
    with pytest.raises(ConfigError, match="5 bytes"):
        ensure_secret(Config(secret_file=path))


# ---- the entry point


@pytest.mark.parametrize(
    ("text", "more", "said"),
    [
        ("spare: 2", {}, "did you mean `spares`?"),
        ("spares: 4", {}, "the job has 4 host(s), and `spares` asks for 4"),
        ("spares: 1", {"WORLD_SIZE": "7"}, "WORLD_SIZE=7"),
        ("port_range: [29000, 29999]", {}, "port_range [29000, 29999] holds MASTER_PORT=29500"),
        ("output_dir: ~/d.yaml/logs", {}, f"d.yaml/logs cannot be used on {os.uname().nodename} (Not a directory)"),
        ("memory_headroom_gib: 1.0e+6", {}, "memory_headroom_gib keeps 1000000.00 GiB free, but only"),
        ("output_dir: ~/logs\nwitness: ~/d.yaml", {}, "witness /"),
    ],
)
def test_mistakes_are_one_line_and_exit_code_78(tmp_path, text, more, said):
    config = tmp_path / "d.yaml"
    config.write_text(text)
    script = tmp_path / "s.py"
    script.write_text("raise SystemExit('must not run')")
    command = [
        sys.executable,
        "-m",
        "deadpool_plugin.run",
        "--local_rank=0",
        str(script),
        "--deadpool-config",
        str(config),
    ]
    env = {**os.environ, **environment(rank=0), "HOME": str(tmp_path), **more}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 78
    assert done.stderr.startswith("[deadpool] ") and said in done.stderr and done.stderr.count("\n") == 1


def test_a_mistake_that_local_rank_0_does_not_share_is_said_too(monkeypatch, capsys):
    """A process that is still there after a moment was not preceded by local rank 0."""
    monkeypatch.setattr(run, "_YIELD_S", 0.0)
    monkeypatch.setattr(sys, "argv", ["run.py", "s.py"])
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with pytest.raises(SystemExit, match="78"):
        run.main()
    said = capsys.readouterr().err
    assert said.startswith("[deadpool] ") and said.count("\n") == 1


def test_the_supervisor_and_the_agent_load_no_torch():
    code = (
        "import sys, deadpool_plugin.run, deadpool_plugin.launch.agent, deadpool_plugin.agent.process;"
        "import deadpool_plugin.host.machine;"
        "assert not {'torch', 'numpy', 'deepspeed'} & set(sys.modules), sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.parametrize(
    ("options", "found"),
    [
        (["--local-rank"], {"local_rank": 3}),
        (["--local_rank"], {"local_rank": 3}),
        (["--local-rank", "--local_rank"], {"local_rank": 3}),
    ],
    ids=str,
)
def test_the_launchers_word_is_spelled_as_the_parser_knows_it(monkeypatch, options, found):
    monkeypatch.setattr(argparse.ArgumentParser, "parse_known_args", argparse.ArgumentParser.parse_known_args)
    monkeypatch.setattr(sys, "argv", ["pretrain_gpt.py", "--local_rank=3", "--lr", "1"])
    spell_local_rank()
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument(*options, type=int)
    parser.add_argument("--lr")
    assert vars(parser.parse_args()) == {**found, "lr": "1"}
    assert vars(parser.parse_args(["--local_rank=2"])) == {"local_rank": 2, "lr": None}
    assert sys.argv[1] == "--local_rank=3"


def test_a_parser_that_knows_neither_complains_as_ever(monkeypatch, capsys):
    monkeypatch.setattr(argparse.ArgumentParser, "parse_known_args", argparse.ArgumentParser.parse_known_args)
    spell_local_rank()
    with pytest.raises(SystemExit):
        argparse.ArgumentParser().parse_args(["--local_rank=2"])
    assert "unrecognized arguments: --local_rank=2" in capsys.readouterr().err


def test_an_error_of_several_lines_is_told_in_one_with_what_its_later_lines_say():
    pydantic = "1 validation error for DeepSpeedZeroConfig\nstage\n  Input should be 0, 1, 2 or 3"
    said = "ValueError: 1 validation error for DeepSpeedZeroConfig stage Input should be 0, 1, 2 or 3"
    assert _in_a_line(ValueError(pydantic)) == said
    long = "x " * 150
    assert _in_a_line(ValueError(long + "end")) == f"ValueError: {long}end"  # a line by itself is told whole
    assert len(_in_a_line(ValueError("once\n" + long))) <= 200
