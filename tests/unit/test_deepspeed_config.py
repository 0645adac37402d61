"""The plugin's configuration named in a DeepSpeed configuration file instead of by the flag."""

import json
from pathlib import Path

import pytest

from deadpool_plugin.config import load
from deadpool_plugin.errors import ConfigError
from deadpool_plugin.launch import job_files
from deadpool_plugin.launch.argv import LARGEST_BYTES, deepspeed_configs, doubts, named_config, parse

CONFIGS = Path(__file__).resolve().parents[2] / "configs"


@pytest.fixture
def configuration(tmp_path):
    """Writes a DeepSpeed configuration with this section; its path."""

    def write(section, name="ds.json"):
        path = tmp_path / name
        path.write_text(json.dumps({"zero_optimization": {"stage": 1}, **section}))
        return str(path)

    return write


@pytest.mark.parametrize("option", ["--deepspeed_config {}", "--deepspeed_config={}", "--deepspeed {}"])
def test_the_section_names_the_file(configuration, option):
    words = option.format(configuration({"deadpool": {"config": "job.yaml"}})).split()
    line = parse(["train.py", *words])
    assert line.config == "job.yaml"
    assert line.command == ["train.py", *words]


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.json")), ids=lambda path: path.name)
def test_the_examples_name_the_plugins_example(path, monkeypatch):
    monkeypatch.chdir(CONFIGS.parent)
    line = parse(["train.py", "--deepspeed_config", str(path)])
    assert line.config == "configs/deepspeed.yaml" and load(line.config).spares == 1


def test_without_a_section_there_is_none(configuration):
    assert parse(["train.py", "--deepspeed_config", configuration({})]).config == ""
    assert parse(["train.py", "--deepspeed_config", "absent.json"]).config == ""
    assert parse(["train.py", "--deepspeed"]).config == ""


@pytest.mark.parametrize(
    "words",
    [
        "--deepspeed_config absent.json",
        "--deepspeed=absent.json",
        "absent.json",
        "--lr 1 absent.json -v",
        "--lr=1 absent.json",
        "--own-config=absent.json",
    ],
)
def test_a_configuration_is_found_whether_it_is_there_or_not(words):
    assert deepspeed_configs(["train.py", *words.split()]) == ["absent.json"]
    assert deepspeed_configs(["train.py", "--deepspeed", "--lr", "0.1"]) == []
    assert deepspeed_configs(["train.py", "--metrics", "written.json", "--out=written.json", "train.py"]) == []


def test_data_among_the_arguments_is_not_read(tmp_path, monkeypatch):
    data = tmp_path / "data.json"
    data.write_text(json.dumps({"deadpool": "not ours", "text": "x" * LARGEST_BYTES}))
    assert named_config(["train.py", str(data)]) == ""


def test_flag_and_section_may_say_the_same(configuration):
    words = ["train.py", "--deepspeed_config", configuration({"deadpool": {"config": "job.yaml"}})]
    assert parse([*words, "--deadpool-config", "./job.yaml"]).config == "./job.yaml"


def test_flag_and_section_may_not_disagree(configuration):
    words = ["train.py", "--deepspeed_config", configuration({"deadpool": {"config": "job.yaml"}})]
    with pytest.raises(ConfigError, match="job.yaml"):
        parse([*words, "--deadpool-config", "other.yaml"])


def test_a_host_that_was_given_the_configuration_has_it_under_another_name(configuration):
    """It was agreed on where the job was launched."""
    words = ["--deepspeed_config", configuration({"deadpool": {"config": "job.yaml"}})]
    put_in_place = str(job_files.folder_of("0123") / job_files.CONFIG)
    assert parse(["train.py", *words, "--deadpool-config", put_in_place]).config == put_in_place


def test_two_configurations_may_not_disagree(configuration):
    paths = [configuration({"deadpool": {"config": f"{name}.yaml"}}, f"{name}.json") for name in ("one", "two")]
    with pytest.raises(ConfigError, match="one.yaml"):
        named_config(["--deepspeed_config", paths[0], "--deepspeed", paths[1]])


@pytest.mark.parametrize("section", ["job.yaml", {}, {"config": 3}, {"config": "a.yaml", "spares": 2}])
def test_a_section_that_is_not_understood_is_said(configuration, section):
    with pytest.raises(ConfigError, match="deadpool"):
        named_config(["--deepspeed_config", configuration({"deadpool": section})])


@pytest.mark.parametrize("optimizer", [{"type": "AdamW"}, {"type": "adam", "params": {}}, None, "x"])
def test_an_optimizer_that_can_be_restored_is_not_doubted(tmp_path, optimizer):
    path = tmp_path / "ds.json"
    path.write_text(json.dumps({"optimizer": optimizer}))
    assert doubts(["train.py", "--deepspeed_config", str(path)]) == []


def test_one_that_cannot_is_doubted_before_anything_starts(tmp_path):
    path = tmp_path / "ds.json"
    path.write_text(json.dumps({"optimizer": {"type": "SGD"}}))
    (said,) = doubts(["train.py", "--deepspeed_config", str(path)])
    assert said.startswith(f"{path} has the optimizer SGD, and only Adam and AdamW can be restored")


def test_a_configuration_that_is_not_there_is_doubted(tmp_path):
    assert doubts(["train.py", "--deepspeed_config=nowhere/ds.json"]) == [
        "no file nowhere/ds.json here: the hosts must have it, or the script make it"
    ]
