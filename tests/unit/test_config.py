"""Configuration: documented, bounded, and wrong files give one readable line."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path

import pytest
import yaml

from deadpool_plugin.cli import patch
from deadpool_plugin.cli.main import main
from deadpool_plugin.config import Config, load
from deadpool_plugin.errors import ConfigError

ROOT = Path(__file__).resolve().parents[2]
CONFIGS = ROOT / "configs"


def write(tmp_path, text):
    path = tmp_path / "deadpool.yaml"
    path.write_text(text)
    return path


def test_defaults_and_derived_times():
    config = Config()
    assert config.spares == 1 and config.heartbeat_interval_s == 0.1 and config.tick_s == 0.025
    assert (config.patience_s, config.phase_timeout_s, config.decision_timeout_s) == (2.0, 20.0, 300.0)
    assert [Config(patience_s=patience_s).slow_after_s for patience_s in (0.5, 2, 5, 10, 20)] == [2.5, 10, 10, 10, 20]
    assert (config.saving_timeout_s, Config(patience_s=60).saving_timeout_s) == (300.0, 900.0)
    assert load(None) == load("") == load(Path("")) == config


def test_every_field_is_documented():
    for name, field in Config.model_fields.items():
        assert field.description and len(field.description) > 30, name


@pytest.mark.parametrize("name", ["minimal.yaml", "full.yaml", "cpu_demo.yaml", "deepspeed.yaml"])
def test_examples_load(name):
    load(CONFIGS / name)


def test_configurations_are_explained_and_none_is_forgotten():
    explained = (CONFIGS / "README.md").read_text()
    for path in CONFIGS.iterdir():
        assert path.name == "README.md" or f"| `{path.name}` |" in explained, path.name
    for path in CONFIGS.glob("*.json"):
        for name, section in json.loads(path.read_text()).items():
            for field in [name, *(section if name in ("zero_optimization", "pipeline") else ())]:
                assert f"{field}`" in explained or f"`{field}" in explained or f'"{field}"' in explained, field


def test_the_full_example_is_what_the_command_prints(capsys):
    assert main(["config"]) == 0
    assert capsys.readouterr().out == (CONFIGS / "full.yaml").read_text(), "deadpool config > configs/full.yaml"
    assert yaml.safe_load((CONFIGS / "full.yaml").read_text()).keys() == Config.model_fields.keys()
    assert load(CONFIGS / "full.yaml").model_dump() == Config().model_dump()


def test_the_examples_are_listed(capsys):
    assert main(["config", "--examples"]) == 0
    listed = [Path(line) for line in capsys.readouterr().out.splitlines()]
    assert {path.name for path in listed} == {path.name for path in CONFIGS.iterdir()}
    assert all(path.exists() for path in listed)


def carried():
    """The files that a wheel puts beside the package, each where it is in the repository."""
    table = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["data-files"]
    for folder, patterns in table.items():
        for path in (path for pattern in patterns for path in ROOT.glob(pattern)):
            assert Path("share/deadpool_plugin", path.relative_to(ROOT)).parent == Path(folder)
            yield path


def test_a_wheel_has_every_example_and_every_patch():
    files = [*CONFIGS.iterdir(), *(ROOT / "patches" / "megatron-lm").glob("*/*")]
    assert {path for path in carried() if path.relative_to(ROOT).parts[0] in ("configs", "patches")} == set(files)


def test_pages_of_a_wheel_lead_to_files_of_the_wheel():
    there, led_to = set(carried()), {CONFIGS / "README.md", *(ROOT / "scripts" / "results").glob("*.md")}
    for page in (path for path in there if path.suffix == ".md"):
        for target in re.findall(r"\]\(([^)#:]+)#?[^):]*\)", page.read_text()):
            led_to.add((page.parent / target).resolve())
    assert led_to <= there
    assert {path for path in there if path.is_relative_to(CONFIGS) or "patches" in path.parts} | led_to == there


def test_what_a_wheel_carries_is_found_where_pip_puts_it(tmp_path, monkeypatch):
    shares = [tmp_path / name / "share/deadpool_plugin" for name in ("target", "prefix")]
    monkeypatch.setattr(patch, "_PLACES", (tmp_path / "checkout", *shares))
    with pytest.raises(ConfigError, match="no configs/minimal.yaml in .*install deadpool_plugin again"):
        patch.shipped("configs/minimal.yaml")
    (shares[1] / "configs").mkdir(parents=True)
    (shares[1] / "configs/minimal.yaml").touch()
    assert patch.shipped("configs/minimal.yaml") == shares[1] / "configs/minimal.yaml"


def test_a_tilde_is_the_home_directory(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    found = load(write(tmp_path, "output_dir: ~/logs\nwitness: ~/witness\nsecret_file: ~/secret"))
    named = [found.output_dir, found.witness, found.secret_path]
    assert named == [Path("/home/me", name) for name in ("logs", "witness", "secret")]


def test_variables_are_what_the_environment_says(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("SLURM_JOB_ID", "4711")
    text = "output_dir: $HOME/logs/${SLURM_JOB_ID}\nsecret_file: ~/s-$SLURM_JOB_ID\nwitness: /w/a$"
    found = load(write(tmp_path, text))
    assert found.output_dir == tmp_path / "logs/4711" and str(found.witness) == "/w/a$"
    assert found.secret_path == tmp_path / "s-4711"


def test_an_empty_file_is_valid(tmp_path):
    assert load(write(tmp_path, "# nothing\n")) == Config()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("patiense_s: 3", "did you mean `patience_s`?"),
        ("zzz: 3", "unknown field `zzz`; known: spares, "),
        ("spares: -1", "must not be negative (found -1)"),
        ("spares: node3", "write [node3]"),
        ("spares: [a, a]", "names a host twice"),
        ("spares: true", "count or a list"),
        ("patience_s: 0.01", "greater than or equal to 0.2 (found 0.01)"),
        ("patience_s: soon", "found 'soon'"),
        ("restarts_window_s: 0", "greater than 0 (found 0)"),
        ("restarts_window_s: .inf", "finite number (found inf)"),
        ("port_range: [5000, 4000]", "must be ascending"),
        ("port_range: [5000, 5001]", "at least 4"),
        ("spare_command: sbatch job.sh", "`spare_command`: must be a list of the program and its arguments: write ["),
        ("spare_command: []", "`spare_command`: must be a list of the program and its arguments"),
        ("spare_command: [sbatch, null]", "`spare_command`: must be a list of the program and its arguments"),
        ("spare_command: ['']", "`spare_command`: has no program"),
        ("spare_command: [sbatch, '{job}']", "`spare_command`: {job} is not known; filled in are {output_dir}, {addr"),
        ("spare_command_limit_s: 0", "greater than or equal to 1 (found 0)"),
        ("on_no_spare: pray", "'stop' or 'wait' (found 'pray')"),
        ("racks: {a: [x, y], b: [y]}", "names y twice"),
        ("racks: {a: x}", "`racks`: must be a list of hosts for each rack: write {a: [node0, node1], b:"),
        ("port_range: 20000-20100", "`port_range`: must be the first and the last port: write [20000, 20099] (found"),
        ("output_dir: ~nobody-of-that-name/logs", "`output_dir`: names no user of "),
        ("secret_file: ~nobody-of-that-name/s", "`secret_file`: names no user of "),
        ("output_dir: /logs/$NOT_SET/x", "`output_dir`: $NOT_SET is not set in the environment of"),
        ("secret_file: ${NOT_SET}/s\nwitness: $NOR_THIS", "`witness`: $NOR_THIS is not set"),
        ("patience_s: 3\nspares: 1\npatience_s: 4", "`patience_s` is set on line 1 and again on line 3"),
        ("racks:\n  a: [x]\n  a: [y]", "`a` is set on line 2 and again on line 3"),
        ("- a\n- b", "holds a list"),
        ("a: [", "is not YAML"),
    ],
)
def test_wrong_files_give_one_line(tmp_path, text, said):
    with pytest.raises(ConfigError) as caught:
        load(write(tmp_path, text))
    assert said in str(caught.value) and "\n" not in str(caught.value) and "to do:" in str(caught.value)


def test_racks_may_name_hosts_by_index(tmp_path):
    assert load(write(tmp_path, "racks: {1: [0, 1], b: [node2]}")).racks == {"1": ["0", "1"], "b": ["node2"]}


def test_the_words_of_a_command_are_filled_in(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = "output_dir: logs\nspare_command: [sbatch, -N, 1, --wrap, 'join --to {address} or {output_dir} {a: 1} ${}']"
    config = load(write(tmp_path, text))
    words = ["sbatch", "-N", "1", "--wrap", f"join --to h1:7 or {tmp_path}/logs {{a: 1}} ${{}}"]
    assert config.spare_commands("h1:7", 2) == [words, words], "once for each host"
    counted = load(write(tmp_path, "spare_command: [sbatch, '--array=1-{count}']"))
    assert counted.spare_commands("h1:7", 2) == [["sbatch", "--array=1-2"]]
    assert (Config().spares_total, Config(spares=["a", "b"]).spares_total) == (1, 2)


def test_two_mistakes_are_named_at_once(tmp_path):
    with pytest.raises(ConfigError) as caught:
        load(write(tmp_path, "spare: 1\npatience_s: x"))
    assert "`spares`" in str(caught.value) and "`patience_s`" in str(caught.value)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ConfigError, match="nowhere.yaml cannot be read"):
        load(tmp_path / "nowhere.yaml")


def test_what_other_hosts_are_told(tmp_path, monkeypatch):
    """All that is set; an address, too, which they refuse if it is none of theirs."""
    monkeypatch.chdir(tmp_path)
    ours = Config(secret_file=Path("here/secret"), interface_address="10.1.0.7", patience_s=2.5, racks={"a": ["h0"]})
    (tmp_path / "told.yaml").write_text(ours.told())
    theirs = load(tmp_path / "told.yaml")
    assert (theirs.secret_file, theirs.interface_address) == (tmp_path / "here/secret", "10.1.0.7")
    assert theirs.digest() == ours.digest() and "copies" not in ours.told()


def test_the_digest_covers_what_nodes_must_agree_on():
    base = Config()
    assert base.digest() == Config(output_dir=Path("elsewhere"), interface_address="10.0.0.1").digest()
    assert base.digest() != Config(spare_command=["sbatch"]).digest()
    assert base.digest() != Config(patience_s=11).digest() != Config(spares=2).digest()
