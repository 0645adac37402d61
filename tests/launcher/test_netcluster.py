"""Hosts made of namespaces: reachable by name over ssh, cut off in one direction or both, healed, killed, gone."""

import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import netcluster
import pytest
from clusters import netns, netns_host
from support import present
from support.stand_in import fake

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = [sys.executable, str(ROOT / "scripts" / "netcluster.py")]


def heed():
    """In a child: heed what ends it. A shell's background has SIGINT ignored, and `nohup` SIGHUP."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


@pytest.fixture
def network(tmp_path):
    if lacking := netns_host.missing():
        pytest.skip("; ".join(lacking))
    with netns.Network(tmp_path / "net", 2, {"SAID": "two words"}) as made:
        yield made


def on(network, host, words, **more):
    command = network.command(host, ["bash", "-c", words])
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, **more)


def reachable(network):
    return on(network, "h1", "ssh -o ConnectTimeout=2 h2 true").returncode == 0


def test_hosts_are_apart_and_within_reach(network):
    said = on(network, "h1", "ssh h2 'hostname; hostname -I; echo $SAID; echo ~'").stdout.split("\n")
    assert [word.strip() for word in said[:4]] == ["h2", "10.77.0.2", "two words", str(network.folder / "h2")]
    numbered = on(network, "h1", "PDSH_RCMD_TYPE=ssh pdsh -S -w h1,h2 'echo %n $(hostname)'").stdout
    assert sorted(numbered.splitlines()) == ["h1: 0 h1", "h2: 1 h2"]
    processes = on(network, "h2", "ls /proc").stdout.split()
    assert str(os.getpid()) not in processes and "1" in processes


@pytest.mark.parametrize("only", ["", "in", "out"])
def test_a_link_is_cut_and_healed(network, only):
    network.cut("h2", only)
    assert not reachable(network)
    network.heal("h2")
    assert reachable(network)


def test_a_pair_that_is_cut_is_heard_by_all_others_and_healed(tmp_path):
    if lacking := netns_host.missing():
        pytest.skip("; ".join(lacking))
    with netns.Network(tmp_path / "net", 3) as network:
        network.cut_pair("h1", "h2")
        assert not reachable(network)
        assert on(network, "h3", "ssh h1 true && ssh h2 true").returncode == 0
        for host in ("h1", "h2"):
            network.heal(host)
        assert reachable(network)


def test_a_killed_host_is_gone_and_so_is_everything_at_the_end(network):
    host = os.pidfd_open(network.hosts["h2"].pid)
    network.kill("h2")
    assert not reachable(network)
    others = [os.pidfd_open(pid) for pid in (network.switch, network.hosts["h1"].pid)]
    network.close()
    for gone in (host, *others):
        assert select.select([gone], [], [], 30)[0]


def test_ctrl_c_and_sigkill_take_the_hosts_away(tmp_path):
    if lacking := netns_host.missing():
        pytest.skip("; ".join(lacking))
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGKILL):
        folder = tmp_path / number.name
        words = [*SCRIPT, "--folder", str(folder), "up", "--hosts", "1"]
        process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True, preexec_fn=heed)
        assert "h1 are up" in present(process.stdout).readline()
        pid = netns.Network.attached(folder).hosts["h1"].pid
        second = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
        assert second.returncode == 1 and "h1 are up" in second.stderr
        waiting = os.pidfd_open(pid)
        process.send_signal(number)
        process.wait(timeout=30)
        assert select.select([waiting], [], [], 30)[0], f"the host outlives {number.name}"


def test_a_killed_host_is_powered_on_again_and_ends_with_the_others(tmp_path):
    if lacking := netns_host.missing():
        pytest.skip("; ".join(lacking))
    words = [*SCRIPT, "--folder", str(tmp_path / "net")]

    def say(*command):
        return subprocess.run([*words, *command], capture_output=True, text=True, timeout=60, check=False)

    with netns.Network(tmp_path / "net", 2) as network:
        assert "no host h2 was killed" in say("revive", "h2").stderr
        on(network, "h2", "touch ~/kept")
        say("kill", "h2")
        assert not reachable(network)
        for _ in range(2):  # and once more: what it is now is known
            assert say("revive", "h2").stdout == "[netcluster] revive h2: done\n"
            copy = ["run", "h1", "--", "scp", "h2:kept", str(tmp_path / "kept")]
            assert say(*copy).returncode == 0
            say("kill", "h2")
        assert say("revive", "h2").returncode == 0
        pid = netns.Network.attached(network.folder).hosts["h2"].pid
        revived = os.pidfd_open(pid)
    assert select.select([revived], [], [], 30)[0]


def test_a_closed_terminal_ends_a_command(network):
    words = [*SCRIPT, "--folder", str(network.folder), "run", "h1", "--", "sh", "-c", "echo runs; exec sleep 600"]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True, preexec_fn=heed)
    assert present(process.stdout).readline() == "runs\n"
    process.send_signal(signal.SIGHUP)
    assert process.wait(timeout=30) == 254  # of a command that SIGINT has ended


def test_ctrl_c_as_a_command_ends_keeps_its_exit_code(monkeypatch):
    class Ended(subprocess.Popen[bytes]):  # as subprocess does: its process ends in the time that Popen.wait gives it
        def wait(self, timeout=None):
            had = self.returncode
            code = super().wait(timeout)
            if had is None:
                signal.raise_signal(signal.SIGINT)
            return code

    monkeypatch.setattr(subprocess, "Popen", Ended)
    network = fake(command=lambda host, words: words)
    assert netcluster.run(network, "h1", ["sh", "-c", "exit 7"]) == 7


def test_what_is_missing_is_named(tmp_path):
    done = subprocess.run(
        [*SCRIPT, "--folder", str(tmp_path), "up"], env={"PATH": str(tmp_path)}, capture_output=True, text=True,
        timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 69
    for name in ("nsenter", "pdsh", "unshare"):
        assert f"`{name}` is not installed (package {netns_host.TOOLS[name]})" in done.stderr
