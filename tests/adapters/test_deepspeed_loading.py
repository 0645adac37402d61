"""Which checkpoint is the newest when a job begins: a process that rehearses a rank later loads no other."""

import pytest
from support.stand_in import fake

from deadpool_plugin.adapters.deepspeed import checkpoints
from deadpool_plugin.comm.groups import Groups
from deadpool_plugin.comm.record import Recorder
from deadpool_plugin.worker.follow import Follow
from deadpool_plugin.worker.starting import Starting


@pytest.mark.parametrize("at_start", ["", "global_step5"])
def test_a_rehearsal_loads_what_the_job_began_with(tmp_path, at_start):
    loaded = []

    class Engine:
        def load_universal_checkpoint(self):
            return False

        def load_checkpoint(self, load_dir, tag=None, load_module_strict=True):
            loaded.append((tag, load_module_strict))
            return ("path", {}) if tag else (None, None)

    groups = Groups()
    groups._recorder = Recorder(0)
    modes: list[Starting | Follow] = [Starting(fake(groups=groups), 0, 0)]
    calls = fake(busy=False, is_training=False, handler=lambda call: modes[-1].call(call))
    checkpoints.install_loading(calls, Engine)
    newest = tmp_path / "latest"
    if at_start:
        newest.write_text(f"{at_start}\n")
    found = Engine().load_checkpoint(tmp_path, load_module_strict=False)
    assert loaded == [(at_start or None, False)]
    recording = groups.stop_recording()

    newest.write_text("global_step10")
    alone = Groups()
    alone.rehearse(recording)
    modes.append(Follow(fake(groups=alone), 0, "", fake(), fake(gone=()), fake(finish=lambda restored: None)))
    assert Engine().load_checkpoint(str(tmp_path), None, False) == found
    assert loaded[1:] == ([(at_start, False)] if at_start else [])
    assert Engine().load_checkpoint(tmp_path, "global_step10") == ("path", {}), "whoever names one is not asked"
