"""Several hosts on one machine, for the real `deepspeed --hostfile` and `deadpool launch` over pdsh and ssh.

`netcluster.py up --hosts 5 -- COMMAND` runs COMMAND on host h1, in the present directory, and takes the hosts away
when it ends or Ctrl-C is pressed (without COMMAND: until Ctrl-C). Meanwhile, from another terminal:

    netcluster.py run h1 -- COMMAND      on another host, or once more
    netcluster.py kill h2                power failure
    netcluster.py revive h2              power it on again, with the home it had
    netcluster.py cut h2 [--only in|out] pull its cable, or lose one direction
    netcluster.py degrade h2 --loss 5 --delay-ms 20
    netcluster.py heal h2

Rules of this file: arguments only; hosts are made and broken in clusters/netns.py. Exit code 69 (EX_UNAVAILABLE) where
this machine lacks something, which is named; else COMMAND's.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from clusters import netns, netns_host

EXIT_UNAVAILABLE = 69
FOLDER = Path(tempfile.gettempdir()) / f"netcluster-{os.geteuid()}"
ENVIRONMENT = {"DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
"""Hosts of one machine compute on the CPU also where there is a GPU: all their ranks would share it."""


def parse(words: list[str]) -> argparse.Namespace:
    said = __doc__.partition("\n\nRules of this file")[0]
    parser = argparse.ArgumentParser(description=said, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=FOLDER, help=f"where the hosts' files are (default {FOLDER})")
    commands = parser.add_subparsers(dest="do", required=True, metavar="COMMAND")
    up = commands.add_parser("up", help="make hosts; they are gone when this ends")
    up.add_argument("--hosts", type=int, default=5, metavar="N")
    up.add_argument("--slots", type=int, default=1, metavar="N", help="slots per host in FOLDER/hostfile")
    up.add_argument("command", nargs="*", metavar="-- COMMAND", help="what to run on h1")
    for name, line in {
        "run": "run a command on a host", "kill": "power failure", "revive": "power a killed host on",
        "cut": "pull the cable",
        "degrade": "lose and delay packets", "heal": "undo cut and degrade",
    }.items():  # fmt: skip
        commands.add_parser(name, help=line).add_argument("host", metavar="HOST")
    commands.add_parser("keep").add_argument("host")  # what `revive` leaves behind: the host's parent
    commands.choices["run"].add_argument("command", nargs="+", metavar="-- COMMAND")
    commands.choices["cut"].add_argument("--only", choices=["in", "out"], default="", help="lose one direction only")
    commands.choices["degrade"].add_argument("--loss", type=float, default=0.0, metavar="PERCENT")
    commands.choices["degrade"].add_argument("--delay-ms", type=float, default=0.0)
    return parser.parse_args(words)


def up(folder: Path, size: int, slots: int, command: list[str]) -> int:
    """Make the hosts, run `command` on the first, or wait for a signal; the exit code."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    if hosts := already_up(folder):
        said = f"{', '.join(hosts)} are up in {folder}: end them, or name another --folder"
        print(f"[netcluster] {said}", file=sys.stderr)
        return 1
    with netns.Network(folder, size, ENVIRONMENT) as network:
        hostfile = network.folder / "hostfile"
        hostfile.write_text("".join(f"{name} slots={slots}\n" for name in network.hosts))
        print(f"[netcluster] {', '.join(network.hosts)} are up; hostfile: {hostfile}", flush=True)
        try:
            if command:
                code = run(network, next(iter(network.hosts)), command)
                print(f"[netcluster] the command has ended ({code}): taking the hosts away", flush=True)
                return code
            while True:
                signal.pause()
        except KeyboardInterrupt:
            return 130


def already_up(folder: Path) -> list[str]:
    """List the hosts that another process keeps there."""
    try:
        return list(netns.Network.attached(folder).hosts)
    except FileNotFoundError:
        return []


def run(network: netns.Network, host: str, command: list[str]) -> int:
    """Run `command` on `host` and return its exit code.

    Ctrl-C, SIGTERM and a closed terminal reach it as SIGINT: nsenter, between us, would end.
    """
    process: subprocess.Popen[bytes] | None = None
    told = False

    def pass_on(*_: object) -> None:
        nonlocal told
        told = True
        if process is not None:
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has ended meanwhile
                for pid in netns_host.children(process.pid) or [process.pid]:
                    os.kill(pid, signal.SIGINT)

    numbers = [n for n in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP) if signal.getsignal(n) is not signal.SIG_IGN]
    before = [signal.signal(number, pass_on) for number in numbers]
    try:
        process = subprocess.Popen(network.command(host, command), start_new_session=True)
        if told:  # as it was being started
            pass_on()
        return process.wait()
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


def revive(folder: Path, host: str) -> int:
    """Power `host` on; it has a process of its own for its parent, which ends with it or with the hosts."""
    words = [sys.executable, __file__, "--folder", str(folder), "keep", host]
    keeper = subprocess.Popen(
        words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        start_new_session=True,
    )  # fmt: skip
    assert keeper.stdout is not None
    done = keeper.stdout.readline()
    print(done, end="")
    return 0 if done.endswith(": done\n") else keeper.wait()


def keep(network: netns.Network, host: str) -> int:
    network.revive(host)
    print(f"[netcluster] revive {host}: done", flush=True)
    network.wait(host)
    return 0


def main() -> int:
    args = parse(sys.argv[1:])
    if lacking := netns_host.missing():
        print("[netcluster] no hosts can be made on this machine: " + "; ".join(lacking), file=sys.stderr)
        return EXIT_UNAVAILABLE
    try:
        return up(args.folder, args.hosts, args.slots, args.command) if args.do == "up" else act(args)
    except FileNotFoundError:
        print(f"[netcluster] no hosts are up in {args.folder}: `netcluster.py up` makes them", file=sys.stderr)
    except (RuntimeError, ProcessLookupError, subprocess.CalledProcessError) as error:
        print(f"[netcluster] {error}", file=sys.stderr)
    return 1


def act(args: argparse.Namespace) -> int:
    network = netns.Network.attached(args.folder)
    there, said = (network.down, "was killed") if args.do in ("revive", "keep") else (network.hosts, "is up")
    if args.host not in there:
        print(f"[netcluster] no host {args.host} {said}; there are: {', '.join(there) or 'none'}", file=sys.stderr)
        return 2
    if args.do == "revive":
        return revive(args.folder, args.host)
    if args.do == "keep":
        return keep(network, args.host)
    if args.do == "run":
        return run(network, args.host, args.command)
    if args.do == "kill":
        network.kill(args.host)
    elif args.do == "cut":
        network.cut(args.host, args.only)
    elif args.do == "degrade":
        network.degrade(args.host, args.loss, args.delay_ms)
    else:
        network.heal(args.host)
    print(f"[netcluster] {args.do} {args.host}: done")
    return 0


if __name__ == "__main__":
    sys.exit(main())
