"""Emulated hosts that have everything a host has but a kernel: address, host name, process table, home, sshd.

A host is a set of namespaces (network, PID, mount, UTS) whose process 1 is its sshd; a bridge in a namespace of its own
joins them. Nothing has a name outside: when the process that made them ends, however it ends, the kernel takes all of
it away. The file system is shared but for home, /run and /dev/shm, as on most clusters.

Rules of this file: standard library and the system's tools only; used from the main thread (parent-death signals fire
when a thread ends).
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from clusters.netns_host import Host, boot_script, children, write_home

BRIDGE = "bridge0"
START_S = 30.0
NO_TRAFFIC = ["tbf", "rate", "8bit", "burst", "1", "limit", "1"]
"""A queue no packet is small enough for."""
RELAY = Path(__file__).with_name("netns_relay.py")
NOWHERE = "02:00:00:00:00:99"
"""A link address that no host has."""


class Network:
    """Hosts h1, h2, ... on one bridge. A context manager: what it made is gone at its end.

    Args:
        folder: gets keys, each host's home and sshd's output, and `network.json` for other processes.
        environment: what every login on a host finds set, HOME and PATH aside.
        logins: whether each host has an sshd; without one its namespaces are there to be entered (`Host.pid`).
    """

    def __init__(
        self, folder: Path, size: int, environment: Mapping[str, str] | None = None, logins: bool = True
    ) -> None:
        self.folder, self._size, self._logins = folder.resolve(), size, logins
        self.environment = {"PATH": os.environ["PATH"], **(environment or {})}
        self.hosts: dict[str, Host] = {}
        self.down: dict[str, Host] = {}
        """Hosts that were killed before we attached."""
        self._processes: list[subprocess.Popen[bytes]] = []
        self._relays: dict[str, subprocess.Popen[bytes]] = {}
        self._plain: set[str] = set()
        """Hosts that send one packet at a time, as a relay needs it."""

    def __enter__(self) -> Network:
        try:
            self._make()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---- making

    def _make(self) -> None:
        self._own_folder()
        for name in ("key", "host_key") if self._logins else ():
            (self.folder / name).unlink(missing_ok=True)
            words = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(self.folder / name)]
            subprocess.run(words, check=True)
        names = {f"h{number}": f"10.77.0.{number}" for number in range(1, self._size + 1)}
        lines = ["127.0.0.1 localhost", *(f"{address} {name}" for name, address in names.items())]
        (self.folder / "hosts").write_text("\n".join(lines) + "\n")
        self.switch = self._namespace(["--net"], ["sleep", "infinity"], subprocess.DEVNULL)
        self._on_switch("ip", "link", "add", BRIDGE, "type", "bridge")
        self._on_switch("ip", "link", "set", BRIDGE, "up")
        for name, address in names.items():
            self.hosts[name] = self._boot(name, address)
        self._save()
        if self._logins:
            self._wait_for_ssh(self.hosts)

    def _own_folder(self) -> None:
        """Nobody else may decide what is in it: its processes are entered as root. Raises: RuntimeError."""
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = self.folder.lstat()
        if status.st_uid != os.geteuid() or status.st_mode & 0o022:
            raise RuntimeError(f"{self.folder} can be written by others: name another folder")

    def _boot(self, name: str, address: str) -> Host:
        home = self.folder / name
        write_home(home, self.folder, self.environment)
        with (home / "sshd.txt").open("wb") as output:
            kinds = ["--net", "--uts", "--pid", "--mount", "--mount-proc", "--propagation=private"]
            script = boot_script(name, home, self.folder, self._logins)
            pid = self._namespace(kinds, ["sh", "-euc", script], output)
        host = Host(name, address, pid)
        inside = ["nsenter", f"--target={pid}", "--net", "ip"]
        self._on_switch("ip", "link", "add", host.port, "type", "veth", "peer", "name", "eth0", "netns", str(pid))
        self._on_switch("ip", "link", "set", host.port, "master", BRIDGE, "up")
        hardware = f"02:00:00:00:01:{int(address.rpartition('.')[2]):02x}"  # others remember it when it is revived
        for words in (
            ["address", "add", f"{address}/24", "dev", "eth0"],
            ["link", "set", "eth0", "address", hardware, "up"],
        ):
            subprocess.run([*inside, *words], check=True)
        return host

    def _namespace(self, kinds: Sequence[str], words: Sequence[str], output: Any) -> int:
        """A process in new namespaces that lives no longer than we do; its pid."""
        start = ["setpriv", "--pdeathsig=KILL", "unshare", *kinds, "--fork", "--kill-child=KILL", *words]
        outside = subprocess.Popen(start, stdin=subprocess.DEVNULL, stdout=output, stderr=output)
        self._processes.append(outside)
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline and outside.poll() is None:
            if found := children(outside.pid):
                return found[0]
            time.sleep(0.01)
        raise RuntimeError(f"`{shlex.join(start)}` did not start; see {self.folder}")

    def _wait_for_ssh(self, names: Iterable[str]) -> None:
        deadline = time.monotonic() + START_S
        first = next(iter(self.hosts.values()))
        for name in names:
            words = self.command(first.name, ["ssh", "-o", "ConnectTimeout=2", name, "true"])
            while subprocess.run(words, capture_output=True).returncode:
                if time.monotonic() > deadline:
                    raise RuntimeError(f"no ssh on {name}: see {self.folder / name / 'sshd.txt'}")
                time.sleep(0.1)

    def _save(self) -> None:
        hosts = {host.name: [host.address, host.pid] for host in (*self.hosts.values(), *self.down.values())}
        state = {"switch": self.switch, "hosts": hosts, "environment": self.environment}
        (self.folder / "network.json").write_text(json.dumps(state, indent=1) + "\n")

    @classmethod
    def attached(cls, folder: Path) -> Network:
        """A network that another process has made and keeps. Raises: FileNotFoundError, RuntimeError."""
        if folder.exists() and folder.lstat().st_uid != os.geteuid():
            raise RuntimeError(f"{folder} is somebody else's: name another folder")
        state = json.loads((folder / "network.json").read_text())
        network = cls(folder, len(state["hosts"]), state["environment"])
        network.switch = state["switch"]
        hosts = [Host(name, address, pid) for name, (address, pid) in state["hosts"].items()]
        network.hosts = {host.name: host for host in hosts if network._is_up(host)}
        network.down = {host.name: host for host in hosts if host.name not in network.hosts}
        return network

    def _is_up(self, host: Host) -> bool:
        """Its process 1 is our sshd, and not whatever process has got its number since."""
        try:
            return str(self.folder / host.name).encode() in Path(f"/proc/{host.pid}/cmdline").read_bytes()
        except OSError:
            return False

    # ---- using

    @property
    def makers(self) -> set[int]:
        """The processes that keep it up, without what they have started."""
        return {process.pid for process in (*self._processes, *self._relays.values())}

    def command(self, host: str, words: Sequence[str]) -> list[str]:
        """Return the command that, executed out here, runs `words` on `host`, as after a login there."""
        return self.hosts[host].inside(words, self._login(self.hosts[host]))

    def _login(self, host: Host) -> dict[str, str]:
        return {**self.environment, "HOME": str(self.folder / host.name)}

    # ---- breaking

    def kill(self, host: str) -> None:
        """Power failure: nothing leaves the host any more, then all of its processes are gone."""
        self.cut(host)
        os.kill(self.hosts[host].pid, signal.SIGKILL)

    def cut(self, host: str, only: str = "") -> None:
        """Pull the cable; `only`: "out": what it sends is lost, "in": what is sent to it."""
        if only == "out":
            self._queue(host, "out", NO_TRAFFIC)
        elif only == "in":
            self._queue(host, "in", NO_TRAFFIC)
        else:
            self._on_switch("ip", "link", "set", self.hosts[host].port, "down")

    def cut_pair(self, one: str, other: str) -> None:
        """Lose all that two hosts send each other; all others hear both of them."""
        for here, there in ((one, other), (other, one)):
            words = ["replace", self.hosts[there].address, "lladdr", NOWHERE, "dev", "eth0", "nud", "permanent"]
            self._neighbours(here, *words)

    def degrade(self, host: str, loss_percent: float, delay_ms: float) -> None:
        """Lose and delay packets in both directions; through a relay if this kernel has no netem.

        Raises: RuntimeError if it has none and another process has made the hosts.
        """
        try:
            for direction in ("out", "in"):
                self._queue(host, direction, ["netem", "loss", f"{loss_percent}%", "delay", f"{delay_ms}ms"])
        except RuntimeError:
            if not self._processes:  # attached: a relay would end with this process
                raise
            self._relay(host, loss_percent / 100, delay_ms / 1000)

    def _relay(self, host: str, loss: float, delay_s: float) -> None:
        """Put a process into the way of all of the host's packets."""
        self._end_relay(host)
        for other in self.hosts.keys() - self._plain:
            words = ["nsenter", f"--target={self.hosts[other].pid}", "--net", sys.executable, str(RELAY), "plain"]
            subprocess.run([*words, "eth0"], check=True)
            self._plain.add(other)
        port, far = self.hosts[host].port, f"far-{host}"
        self._on_switch("ip", "link", "add", far, "type", "veth", "peer", "name", f"near-{host}")
        self._on_switch("ip", "link", "set", f"near-{host}", "up", "promisc", "on")
        self._on_switch("ip", "link", "set", port, "promisc", "on")
        words = [sys.executable, str(RELAY), "relay", port, f"near-{host}", str(loss), str(delay_s), "0"]
        start = ["setpriv", "--pdeathsig=KILL", "nsenter", f"--target={self.switch}", "--net", *words]
        relay = self._relays[host] = subprocess.Popen(start, stdout=subprocess.PIPE)
        assert relay.stdout is not None
        relay.stdout.readline()  # it is ready: nothing is lost while it starts
        self._on_switch("ip", "link", "set", port, "nomaster")
        self._on_switch("ip", "link", "set", far, "master", BRIDGE, "up")

    def _end_relay(self, host: str) -> None:
        if (relay := self._relays.pop(host, None)) is not None:
            self._on_switch("ip", "link", "set", self.hosts[host].port, "master", BRIDGE)
            relay.kill()
            relay.wait()
            self._on_switch("ip", "link", "del", f"far-{host}")

    def revive(self, name: str) -> None:
        """Power a killed host on again, with the home that it had; it is ours, and gone when this process ends."""
        old = self.down[name]
        self._on_switch("ip", "link", "del", old.port, check=False)  # the kernel may have done it
        self.hosts[name] = self._boot(name, old.address)
        del self.down[name]
        self._save()
        self._wait_for_ssh([name])

    def wait(self, name: str) -> None:
        """Wait for the end of a host of ours, or of the network."""
        with contextlib.ExitStack() as open_files:
            ends = [os.pidfd_open(pid) for pid in (self.hosts[name].pid, self.switch)]
            for end in ends:
                open_files.callback(os.close, end)
            select.select(ends, [], [])

    def heal(self, host: str) -> None:
        """Make it as new; of a pair that is cut, both are to be healed."""
        self._neighbours(host, "flush", "dev", "eth0", "nud", "permanent")
        self._end_relay(host)
        for direction in ("out", "in"):
            subprocess.run(self._tc(host, direction, "del"), capture_output=True)  # there may be none
        self._on_switch("ip", "link", "set", self.hosts[host].port, "up")

    def _queue(self, host: str, direction: str, discipline: Sequence[str]) -> None:
        done = subprocess.run([*self._tc(host, direction, "replace"), *discipline], capture_output=True, text=True)
        if done.returncode:
            lack = "this kernel lacks it (sch_netem)" if discipline[0] == "netem" else "tc failed"
            raise RuntimeError(f"{discipline[0]} on {host}: {lack}: {done.stderr.strip()}")

    def _tc(self, host: str, direction: str, verb: str) -> list[str]:
        """A host's outgoing queue is at its own end of the link, the incoming one at the bridge's."""
        pid, device = (self.hosts[host].pid, "eth0") if direction == "out" else (self.switch, self.hosts[host].port)
        return ["nsenter", f"--target={pid}", "--net", "tc", "qdisc", verb, "dev", device, "root"]

    def _neighbours(self, host: str, *words: str) -> None:
        """Change which link addresses the host sends to."""
        inside = ["nsenter", f"--target={self.hosts[host].pid}", "--net", "ip", "neigh"]
        subprocess.run([*inside, *words], check=True)

    def _on_switch(self, *words: str, check: bool = True) -> None:
        subprocess.run(["nsenter", f"--target={self.switch}", "--net", *words], check=check, capture_output=not check)

    # ---- the end

    def close(self) -> None:
        """Kill all hosts and the bridge; the kernel removes their links with them."""
        for process in (*self._relays.values(), *self._processes):
            process.kill()
        for process in (*self._relays.values(), *self._processes):
            process.wait()
        self._relays.clear()
        self._processes.clear()
        (self.folder / "network.json").unlink(missing_ok=True)
