"""Logs of a rehearsing process to TensorBoard and W&B: dropped until it takes over; then nothing comes twice."""

import importlib
import struct
import sys

import pytest
from support.stand_in import fake

from deadpool_plugin.worker import trackers
from deadpool_plugin.worker.patching import when_imported

# TensorBoard, in miniature: an event is a step and its tags, a file one record per event


def event(step, *tags):
    return fake(step=step, summary=fake(value=[fake(tag=tag) for tag in tags]))


def record(data):
    return struct.pack("<QI", len(data), 0) + data + bytes(4)


class Writer:
    def __init__(self, logdir):
        self._logdir, self.path = logdir, logdir / f"events.out.tfevents.{len(list(logdir.iterdir()))}"
        self.path.touch()

    def get_logdir(self):
        return self._logdir

    def add_event(self, one):
        with open(self.path, "ab") as file:
            file.write(record(" ".join([str(one.step), *(value.tag for value in one.summary.value)]).encode()))

    def flush(self):
        pass

    def close(self):
        pass


@pytest.fixture
def ours(monkeypatch):
    """The trackers of a rehearsal; real packages are left alone."""
    monkeypatch.setattr(trackers, "when_imported", lambda name, act: None)
    return trackers.Trackers()


@pytest.fixture
def tensorboard():
    """A module like tensorboard's, with classes of its own."""

    class Event:
        @staticmethod
        def FromString(data):
            step, *tags = data.decode().split()
            return event(int(step), *tags)

    return fake(
        __name__="event_file_writer",
        EventFileWriter=type("EventFileWriter", (Writer,), dict(vars(Writer))),
        event_pb2=fake(Event=Event),
    )


def logged(folder):
    return [data.decode() for path in sorted(folder.iterdir()) for data in trackers.last_records(path)]


def test_a_rehearsals_events_are_nobodys_and_a_newcomers_come_once(tmp_path, tensorboard, ours):
    lost = Writer(tmp_path)  # the rank's own, before it is lost in the middle of a record
    lost.add_event(event(4, "loss", "lr"))
    lost.add_event(event(5, "loss"))
    with open(lost.path, "ab") as file:
        file.write(record(b"5 lr")[:-3])
    ours.hold_event_files(tensorboard)
    rehearsing, closed = tensorboard.EventFileWriter(tmp_path), tensorboard.EventFileWriter(tmp_path)
    rehearsing.add_event(event(4, "loss", "lr"))
    rehearsing.flush()
    closed.close()
    assert len(list(tmp_path.iterdir())) == 1
    ours.resume()
    for one in (event(5, "loss", "lr"), event(5, "loss"), event(6, "loss"), event(6)):
        rehearsing.add_event(one)
    assert logged(tmp_path) == ["4 loss lr", "5 loss", "5 lr", "6 loss", "6"]
    assert len(list(tmp_path.iterdir())) == 2
    tensorboard.EventFileWriter(tmp_path).add_event(event(7, "loss"))
    assert logged(tmp_path)[-1] == "7 loss"


def test_a_tracker_that_cannot_continue_is_said_and_stays_silent(tmp_path, tensorboard, ours, capsys):
    ours.hold_event_files(tensorboard)

    def refuse(file):
        raise OSError("stale")

    tensorboard.EventFileWriter.get_logdir = refuse
    file = tensorboard.EventFileWriter(tmp_path)
    ours.resume()
    assert "[deadpool] TensorBoard cannot continue its log: OSError('stale')" in capsys.readouterr().err
    file.add_event(event(1, "loss"))
    file.close()
    assert list(tmp_path.iterdir()) == []


def test_only_the_last_records_of_a_long_file_are_read(tmp_path, monkeypatch):
    monkeypatch.setattr(trackers, "RECORDS_MAX", 3)
    path = tmp_path / "events.out.tfevents.1"
    path.write_bytes(b"".join(record(b"%d loss" % step) for step in range(9)))
    assert list(trackers.last_records(path)) == [b"6 loss", b"7 loss", b"8 loss"]
    path.write_bytes(b"")
    assert list(trackers.last_records(path)) == []


# DeepSpeed's CSV files


def test_a_newcomer_goes_on_with_a_csv_file_at_its_first_new_line(tmp_path, ours):
    class CsvMonitor:
        """As deepspeed.monitor.csv_monitor.csvMonitor."""

        def __init__(self):
            self.log_dir, self.filenames = str(tmp_path), []

        def write_events(self, events):
            for name, value, step in events:
                with open(tmp_path / f"{name.replace('/', '_')}.csv", "a") as file:
                    if (key := name.replace("/", "_")) not in self.filenames:
                        self.filenames.append(key)
                        file.write("step,lr\n")
                    file.write(f"{step},{value}\n")

    lost = CsvMonitor()
    for step in (8, 16, 24):
        lost.write_events([("Train/lr", 0.5, step)])
    path = tmp_path / "Train_lr.csv"
    path.write_bytes(path.read_bytes() + b"32,0")  # it was killed there
    ours.hold_csv_files(fake(csvMonitor=CsvMonitor))
    newcomer = CsvMonitor()
    newcomer.write_events([("Train/lr", 0.5, 16)])
    assert path.read_text().endswith("\n32,0")
    ours.resume()
    for step in (24, 32, 40):
        newcomer.write_events([("Train/lr", 0.5, step), ("Train/loss", 1.5, step)])
    assert path.read_text().split() == ["step,lr", "8,0.5", "16,0.5", "24,0.5", "32,0.5", "40,0.5"]
    assert (tmp_path / "Train_loss.csv").read_text().split() == ["step,lr", "24,1.5", "32,1.5", "40,1.5"]


# W&B


def test_a_run_is_resumed_by_the_process_that_takes_over(tmp_path, ours):
    begun = []

    def init(**kwargs):
        begun.append(kwargs)
        return fake(log=lambda *_, **__: kwargs["mode"], mode=kwargs.get("mode", "offline"))

    module = fake(init=init)
    ours.hold_runs(module)
    run = module.init(dir=str(tmp_path), project="p")
    assert begun == [{"dir": str(tmp_path), "project": "p", "mode": "disabled"}] and run.mode == "disabled"
    folder = tmp_path / "wandb"
    folder.mkdir()
    (folder / "latest-run").symlink_to("offline-run-20261121_075012-a1-b2c3")
    ours.resume()
    assert begun[1:] == [{"dir": str(tmp_path), "project": "p", "id": "a1-b2c3", "resume": "allow"}]
    assert run.mode == "offline"
    module.init(project="another")
    assert begun[2:] == [{"project": "another"}]


def test_without_a_run_to_be_found_a_new_one_begins(tmp_path):
    assert trackers.latest_run(tmp_path) == ""
    (tmp_path / "wandb").mkdir()
    (tmp_path / "wandb" / "latest-run").symlink_to("run-20261121_075012-xyz")
    assert trackers.latest_run(tmp_path) == "xyz"


@pytest.mark.parametrize("imported", [False, True])
def test_a_folder_of_old_runs_is_not_taken_for_the_package(tmp_path, monkeypatch, imported, ours):
    """Without the package, `import wandb` finds the folder that runs were kept in."""
    (tmp_path / "wandb_of_a_test" / "run-20261121_075012-xyz").mkdir(parents=True)
    monkeypatch.syspath_prepend(str(tmp_path))
    if imported:
        importlib.import_module("wandb_of_a_test")
    when_imported("wandb_of_a_test", ours.hold_runs)
    assert importlib.import_module("wandb_of_a_test").__file__ is None
    del sys.modules["wandb_of_a_test"]
