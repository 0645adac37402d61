"""Facts of start-up: a rehearsal finds what the rank itself found when the job began, whatever is there by now."""

import os
import sys

import pytest
from support.stand_in import fake

from deadpool_plugin.adapters.megatron import adapter
from deadpool_plugin.comm.groups import Groups
from deadpool_plugin.comm.record import Recorder
from deadpool_plugin.errors import Divergence
from deadpool_plugin.worker.calls import CallKind
from deadpool_plugin.worker.follow import Follow
from deadpool_plugin.worker.starting import Starting


@pytest.mark.parametrize("at_start", [False, True])
def test_a_rehearsal_loads_a_checkpoint_only_if_the_job_began_with_one(tmp_path, monkeypatch, at_start):
    monkeypatch.setattr(os.path, "isfile", os.path.isfile)
    groups = Groups()
    groups._recorder = Recorder(0)
    modes: list[Starting | Follow] = [Starting(fake(groups=groups), 0, 0)]
    adapter.install_facts(lambda call: modes[-1].call(call))
    tracker, other = tmp_path / adapter.TRACKER, tmp_path / "script.py"
    if at_start:
        tracker.touch()
    assert os.path.isfile(str(tracker)) == at_start
    with groups.unrecorded():  # in a save, which a rehearsal skips
        os.path.isfile(tracker)
    recording = groups.stop_recording()

    tracker.unlink() if at_start else tracker.touch()
    other.touch()
    alone = Groups()
    alone.rehearse(recording)
    modes.append(Follow(fake(groups=alone), 0, "", fake(), fake(gone=()), fake(finish=lambda restored: None)))
    assert os.path.isfile(str(tracker)) == at_start
    assert os.path.isfile(other)
    with pytest.raises(Divergence, match=f"asked isfile .*{adapter.TRACKER} at .*expected what the rank itself asked"):
        os.path.isfile(tracker)


def test_a_checkpoint_that_is_looked_for_past_os_path_is_asked_for_once(tmp_path, monkeypatch):
    """Megatron-LM asks multi-storage-client, where that is installed, which asks the kernel itself."""
    monkeypatch.setattr(os.path, "isfile", os.path.isfile)
    asked, tracker = [], tmp_path / adapter.TRACKER
    saving = fake(isfile=lambda path: path.exists() or os.path.isfile(path))
    monkeypatch.setitem(sys.modules, "megatron.training.checkpointing", saving)
    adapter.install_facts(lambda call: asked.append(call.name) or call())
    assert not saving.isfile(tracker) and not os.path.isfile(tracker)
    assert asked == [f"isfile {tracker}"] * 2, "each of them once"


def test_a_rehearsal_compares_no_parameters_with_those_of_others(monkeypatch, train_gpt):
    hashes = []
    monkeypatch.setattr(os.path, "isfile", os.path.isfile)
    loop = fake(**{adapter.HASHES: lambda model, cross_check=False: hashes.append(model) or True})
    monkeypatch.setitem(sys.modules, "megatron.training.training", loop)
    monkeypatch.setattr(sys.modules["megatron.core.utils"], adapter.HASHES, None)
    groups = Groups()
    groups._recorder = Recorder(0)
    modes: list[Starting | Follow] = [Starting(fake(groups=groups), 0, 0)]
    adapter.install_facts(lambda call: modes[-1].call(call))
    assert loop.check_param_hashes_across_dp_replicas(["model"], cross_check=True)
    alone = Groups()
    alone.rehearse(groups.stop_recording())
    modes.append(Follow(fake(groups=alone), 0, "", fake(), fake(gone=()), fake(finish=lambda restored: None)))
    assert loop.check_param_hashes_across_dp_replicas(["another"], cross_check=True) and hashes == [["model"]]


def test_what_is_exchanged_for_a_fact_is_not_recorded():
    groups = Groups()
    groups._recorder = recorder = Recorder(0)
    assert groups.fact("how many", lambda: 3 if groups._recorder is None else 4) == 3
    assert groups._recorder is recorder


def test_in_the_loop_a_fact_is_a_call(tmp_path, monkeypatch):
    monkeypatch.setattr(os.path, "isfile", os.path.isfile)
    made = []
    adapter.install_facts(lambda call: made.append((call.name, call.kind)) or call())
    assert not os.path.isfile(tmp_path / adapter.TRACKER)
    assert made == [(f"isfile {tmp_path / adapter.TRACKER}", CallKind.FACT)]
