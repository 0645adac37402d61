"""A long campaign that is ended and gone on with comes to the same as one that is not."""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec
import pytest

from deadpool_plugin.errors import ConfigError
from simulator import record
from simulator.campaign import campaign
from simulator.schedule import Ranges

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))
import simulate

SMALL = Ranges(nodes=(5, 6), steps=6)


def test_a_campaign_in_pieces_is_the_campaign(tmp_path):
    path, told = tmp_path / "campaign.json", []
    for last in (5, 5, 13):
        begun = record.opened(path, 0, SMALL, {}, jobs=1)
        ended = record.go_on(path, begun, last, 4, lambda summary: told.append(summary.seeds))
    assert told == [4, 5, 9, 13], "what had been run was not run again"
    assert ended.summary == campaign(range(13), SMALL)
    assert record.opened(path, 0, SMALL, {}, jobs=1) == ended


@pytest.mark.parametrize(
    ("field", "other"), [("first", 1), ("ranges", Ranges()), ("fixed", {"spares": 2}), ("code", "older"), ("jobs", 2)]
)
def test_another_campaign_is_not_gone_on_with(tmp_path, field, other):
    path = tmp_path / "campaign.json"
    ended = record.go_on(path, record.opened(path, 0, SMALL, {}, jobs=1), 1, 1, lambda summary: None)
    path.write_bytes(msgspec.json.encode(msgspec.structs.replace(ended, **{field: other})))
    with pytest.raises(ConfigError, match=f"recorded with {field} "):
        record.opened(path, 0, SMALL, {}, jobs=1)


def test_what_is_no_record_is_refused(tmp_path):
    path = tmp_path / "campaign.json"
    path.write_text('{"seeds": 5}')
    with pytest.raises(ConfigError, match="name another file"):
        record.opened(path, 0, SMALL, {}, jobs=1)


def test_the_command_goes_on(tmp_path, capsys):
    for last in (2, 3):
        command = ["--seeds", f"0:{last}", "--nodes", "5:6", "--steps", "6", "--jobs", "1"]
        assert simulate.main([*command, "--out", str(tmp_path / "campaign.json")]) == 0
        assert f"seeds      {last} in " in capsys.readouterr().out
