"""Break what a running job stands on, on emulated hosts, and write down what `deadpool launch` says, second by second.

    python scripts/broken_hosts.py pair reset standstill stopped full-disk --out OUT [--tree OLDER] [--seed 7]

Six hosts of one rank each, two of them spares, run train_gpt.py with 4 data-parallel ranks. After step `--after`, drawn
hosts that run ranks lose:
- pair: every packet between two of them;
- reset: the training connections between two of them, and those they make then as soon as they have;
- standstill: all processes of one but sshd stand still (SIGSTOP), for good; the job goes on to its end;
- stopped: the same, and `deadpool stop` is called 30 s later;
- full-disk: the room in output_dir, and then one host its power.
OUT/SCENARIO.txt has each line of the terminal with its second, and how the command ended. Ctrl-C is pressed if that
takes longer than `--patience`, and it is ended by force if that does not help. `--tree`: a checkout of this repository
whose plugin and script are used instead.

Rules of this file: it breaks and writes down, and judges nothing. Root, sshd, pdsh and iproute2 are needed.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import make_corpus
from clusters import netns, netns_host
from clusters.launched import REPOSITORY, commit_of, read_events
from netcluster import ENVIRONMENT, EXIT_UNAVAILABLE

HOSTS, SPARES = 6, 2
FULL_MIB = 16
START_S = 400.0
AGAIN_S = 0.2
STOP_AFTER_S = 30.0
INTERRUPTED_S = 90.0
STANDBY = "deadpool_plugin.launch.standby"
"""Module of the process from which ranks are forked."""
SYS_PIDFD_OPEN, SYS_PIDFD_GETFD = 434, 438
libc = ctypes.CDLL(None, use_errno=True)


class Transcript:
    """Lines with the second in which they came, on the terminal and in a file."""

    def __init__(self, path: Path) -> None:
        self._began, self._file = time.monotonic(), path.open("w")

    def say(self, text: str) -> None:
        line = f"{time.monotonic() - self._began:7.1f} s  {text}\n"
        self._file.write(line)
        self._file.flush()
        sys.stdout.write(line)
        sys.stdout.flush()


class Job:
    """One job under `deadpool launch`, and the means to break its hosts."""

    def __init__(self, network: netns.Network, folder: Path, args: argparse.Namespace, transcript: Transcript) -> None:
        self.network, self.folder, self.output, self.transcript = network, folder, folder / "output", transcript
        draw = random.Random(args.seed)
        running = sorted(network.hosts)[: HOSTS - SPARES]
        self.one, self.other = draw.sample(running[1:], 2)  # the launcher is on the first
        secret = network.folder / "h1" / "secret"
        secret.touch(mode=0o600)
        secret.write_text("the secret of a broken job")
        fields = {
            "spares": SPARES, "patience_s": 3.0, "stall_timeout_s": 60.0, "memory_headroom_gib": 0.1,
            "secret_file": str(secret), "output_dir": str(self.output),
        }  # fmt: skip
        self.config, hostfile = folder / "deadpool.yaml", folder / "hostfile"
        self.config.write_text("".join(f"{name}: {json.dumps(value)}\n" for name, value in fields.items()))
        hostfile.write_text("".join(f"{name} slots=1\n" for name in sorted(network.hosts)))
        script = [str(args.tree / "scripts/train_gpt.py"), "--data-path", str(args.out / "corpus")]
        script += ["--train-iters", str(args.steps), "--log-all-ranks"]  # which is printed by os.write, past Python
        words = ["launch", "--hostfile", str(hostfile), *script]
        self.process = subprocess.Popen(
            self._deadpool(*words, "--deadpool-config", str(self.config)),
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            start_new_session=True,
        )  # fmt: skip
        threading.Thread(target=self._copy, daemon=True).start()

    def _deadpool(self, *words: str) -> list[str]:
        command = "import sys; from deadpool_plugin.cli.main import main; sys.exit(main())"  # of older trees, too
        return self.network.command("h1", [sys.executable, "-c", command, *words])

    def _copy(self) -> None:
        assert self.process.stdout is not None
        with (self.folder / "terminal.txt").open("w", buffering=1) as terminal:
            for line in self.process.stdout:
                terminal.write(line)
                if "[deadpool]" in line:
                    self.transcript.say(line.rstrip()[:400])

    def stop(self) -> None:
        self.transcript.say("==== deadpool stop")
        words = self._deadpool("stop", "--deadpool-config", str(self.config))
        done = subprocess.run(words, capture_output=True, text=True, timeout=60)
        self.transcript.say(f"==== it says: {(done.stdout + done.stderr).strip()[-300:]} ({done.returncode})")

    def see_it_end(self, wait_s: float) -> None:
        """Or press Ctrl-C, and see what that does."""
        if not self._ends_in(wait_s):
            self.transcript.say("==== Ctrl-C")
            [command] = netns_host.children(self.process.pid)  # between it and us is nsenter
            os.kill(command, signal.SIGINT)
            self._ends_in(INTERRUPTED_S)

    def _ends_in(self, seconds: float) -> bool:
        try:
            said = f"ends with {self.process.wait(seconds)}"
        except subprocess.TimeoutExpired:
            said = f"does not end in {seconds:g} s, newest step {self.committed()}"
        self.transcript.say(f"==== deadpool launch {said}")
        return self.process.poll() is not None

    def committed(self) -> int:
        """The newest step that any event names."""
        return max((event.get("step", -1) for event in read_events(self.output)), default=-1)

    def wait_until_trained(self, steps: int) -> None:
        """Until that many steps are done and both spares are ready. Raises: RuntimeError."""
        deadline = time.monotonic() + START_S
        while True:
            ready = {event["spare"] for event in read_events(self.output) if event["event"] == "SpareReady"}
            if self.committed() >= steps and len(ready) == SPARES:
                return
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"the job does not train; see {self.folder}")
            time.sleep(0.1)

    def processes(self, host: str) -> Iterator[tuple[int, str]]:
        """Pid, as seen from outside, and command line of each process of `host`."""
        here = os.readlink(f"/proc/{self.network.hosts[host].pid}/ns/pid")
        for entry in os.listdir("/proc"):
            with contextlib.suppress(OSError):
                if entry.isdigit() and os.readlink(f"/proc/{entry}/ns/pid") == here:
                    yield int(entry), Path(f"/proc/{entry}/cmdline").read_bytes().replace(b"\0", b" ").decode()

    # ---- what breaks

    def cut_pair(self) -> None:
        self.network.cut_pair(self.one, self.other)
        self.transcript.say(f"==== nothing passes between {self.one} and {self.other} any more")

    def reset(self) -> None:
        for _ in range(2):
            deadline = time.monotonic() + START_S
            while not (ended := sum(map(self._shut_down, self._ranks()))) and time.monotonic() < deadline:
                time.sleep(AGAIN_S)
            said = f"{ended} training connections between {self.one} and {self.other} end"
            self.transcript.say(f"==== {said} (newest step {self.committed()})")

    def _ranks(self) -> list[int]:
        return [pid for pid, words in self.processes(self.one) if STANDBY in words]

    def _shut_down(self, pid: int) -> int:
        """Shut down the process's connections to the other host; their number."""
        there, ended = self.network.hosts[self.other].address, 0
        pidfd = libc.syscall(SYS_PIDFD_OPEN, pid, 0)
        for descriptor in os.listdir(f"/proc/{pid}/fd"):
            copy = libc.syscall(SYS_PIDFD_GETFD, pidfd, int(descriptor), 0)
            if copy < 0:
                continue
            with contextlib.suppress(OSError), socket.socket(fileno=copy) as connection:
                if connection.family in (socket.AF_INET, socket.AF_INET6) and there in connection.getpeername()[0]:
                    connection.shutdown(socket.SHUT_RDWR)
                    ended += 1
        os.close(pidfd)
        return ended

    def stand_still(self) -> None:
        stopped = [pid for pid, words in self.processes(self.one) if "sshd" not in words]
        for pid in stopped:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGSTOP)
        self.transcript.say(f"==== {len(stopped)} processes of {self.one} stand still; its sshd answers")

    def stand_still_and_stop(self) -> None:
        self.stand_still()
        time.sleep(STOP_AFTER_S)
        self.stop()

    def fill_disk(self) -> None:
        with contextlib.suppress(OSError), (self.output / "fills").open("wb", buffering=0) as file:
            while True:
                file.write(bytes(4096))
        left = os.statvfs(self.output).f_bavail * 4096
        self.transcript.say(f"==== output_dir is full ({left} bytes left), and {self.one} loses its power")
        self.network.kill(self.one)


SCENARIOS: dict[str, Callable[[Job], None]] = {
    "pair": Job.cut_pair,
    "reset": Job.reset,
    "standstill": Job.stand_still,
    "stopped": Job.stand_still_and_stop,
    "full-disk": Job.fill_disk,
}


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("scenarios", nargs="+", choices=SCENARIOS, metavar="SCENARIO", help=", ".join(SCENARIOS))
    parser.add_argument("--out", type=Path, required=True, help="folder for transcripts and jobs")
    parser.add_argument("--tree", type=Path, default=REPOSITORY, help="checkout to run (default: this one)")
    parser.add_argument("--seed", type=int, default=7, help="of the hosts that break")
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--after", type=int, default=20, metavar="STEP")
    parser.add_argument("--patience", type=float, default=180.0, metavar="SECONDS", help="from the fault on")
    args = parser.parse_args()
    args.out, args.tree = args.out.resolve(), args.tree.resolve()
    return args


def play(name: str, args: argparse.Namespace) -> None:
    folder = args.out / name
    output = folder / "output"
    shutil.rmtree(folder, ignore_errors=True)  # events of an earlier job would be taken for this one's
    output.mkdir(parents=True, exist_ok=True)
    if name == "full-disk":
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={FULL_MIB}m", "deadpool", str(output)], check=True)
    transcript = Transcript(args.out / f"{name}.txt")
    transcript.say(f"==== {name}, seed {args.seed}, commit {commit_of(args.tree)}, load {os.getloadavg()[0]:.0f}")
    try:
        with netns.Network(folder / "hosts", HOSTS, ENVIRONMENT) as network:
            job = Job(network, folder, args, transcript)
            job.wait_until_trained(args.after)
            SCENARIOS[name](job)
            job.see_it_end(args.patience)
    finally:
        if name == "full-disk":
            subprocess.run(["umount", "--lazy", str(output)], check=True)


def main() -> int:
    args = parse_args()
    if lacks := netns_host.missing():
        print(f"[broken_hosts] no hosts can be made here: {'; '.join(lacks)}", file=sys.stderr)
        return EXIT_UNAVAILABLE
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # hosts and mounts are taken away, too
    args.out.mkdir(parents=True, exist_ok=True)
    make_corpus.ensure(args.out / "corpus")
    os.chdir(args.tree)  # commands on hosts begin where we are, and Python finds the plugin there
    for name in args.scenarios:
        play(name, args)
    return 0


if __name__ == "__main__":
    sys.exit(main())
