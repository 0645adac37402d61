"""The parts of an emulated host of netns.py: requirements on the machine, files, and how it boots.

Rules of this file: standard library and the system's tools only; nothing is made here but files.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

TOOLS = {
    "ip": "iproute2", "tc": "iproute2", "unshare": "util-linux", "nsenter": "util-linux", "setpriv": "util-linux",
    "mount": "mount", "ssh": "openssh-client", "ssh-keygen": "openssh-client", "sshd": "openssh-server", "pdsh": "pdsh",
}  # fmt: skip
"""Required command -> the Debian package that has it."""


def tool(name: str) -> str | None:
    """sshd must be called by its whole path, and is not on everybody's PATH."""
    return shutil.which(name, path=f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/sbin")


def missing() -> list[str]:
    """List what this machine lacks, one sentence each; empty if hosts can be made."""
    found = [f"`{name}` is not installed (package {package})" for name, package in TOOLS.items() if not tool(name)]
    if os.geteuid() != 0:
        found.append("not root (mounts and network interfaces are made)")
    elif tool("unshare"):
        words = ["unshare", "--net", "--pid", "--mount", "--uts", "--fork", "--mount-proc", "true"]
        tried = subprocess.run(words, capture_output=True, text=True)
        if tried.returncode:
            found.append(f"namespaces are not permitted here ({tried.stderr.strip()})")
    return found


def children(pid: int) -> list[int]:
    """List the children of a process with one thread, in the order of their birth."""
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


class Host:
    """One emulated host; `pid` is its process 1 as seen from outside."""

    def __init__(self, name: str, address: str, pid: int) -> None:
        self.name, self.address, self.pid = name, address, pid

    @property
    def port(self) -> str:
        """The bridge's end of its link."""
        return f"port-{self.name}"

    def inside(self, words: Sequence[str], environment: Mapping[str, str]) -> list[str]:
        """The command that runs `words` on this host, in the present directory."""
        enter = ["nsenter", f"--target={self.pid}", "--net", "--uts", "--mount", "--pid", f"--wdns={os.getcwd()}"]
        return [*enter, "--", "env", *(f"{name}={value}" for name, value in environment.items()), *words]


def write_home(home: Path, folder: Path, environment: Mapping[str, str]) -> None:
    """A host's own files: home, user database, ssh's two configurations."""
    (home / ".ssh").mkdir(parents=True, exist_ok=True)
    client = ["Host *", f"IdentityFile {folder}/key", "StrictHostKeyChecking no", "UserKnownHostsFile /dev/null"]
    (home / ".ssh" / "config").write_text("\n".join([*client, "LogLevel ERROR"]) + "\n")
    (home / ".ssh" / "config").chmod(0o600)
    words = " ".join(f'"{name}={value}"' for name, value in environment.items())
    server = [
        f"HostKey {folder}/host_key", f"AuthorizedKeysFile {folder}/key.pub", "StrictModes no", "UsePAM no",
        "PasswordAuthentication no", "PermitRootLogin prohibit-password", "PidFile none", "MaxStartups 1000",
        "MaxSessions 1000", "Subsystem sftp internal-sftp", f"SetEnv {words}",
    ]  # fmt: skip
    (home / "sshd_config").write_text("\n".join(server) + "\n")
    users = [f"root:x:0:0:root:{home}:/bin/bash", "nobody:x:65534:65534:nobody:/nonexistent:/bin/false"]
    (home / "passwd").write_text("\n".join([*users, "sshd:x:100:65534::/run/sshd:/bin/false"]) + "\n")


def boot_script(name: str, home: Path, folder: Path, logins: bool = True) -> str:
    """Do the work of a host's process 1 before it becomes sshd, or waits for the end without `logins`."""
    last = [str(tool("sshd")), "-D", "-e", "-f", str(home / "sshd_config")] if logins else ["sleep", "infinity"]
    steps = [
        ["hostname", name],
        ["mount", "--bind", str(home / "passwd"), "/etc/passwd"],
        ["mount", "--bind", str(folder / "hosts"), "/etc/hosts"],
        ["mount", "-t", "tmpfs", "tmpfs", "/run"],
        ["mount", "-t", "tmpfs", "tmpfs", "/dev/shm"],
        ["mkdir", "-p", "/run/sshd"],
        ["ip", "link", "set", "lo", "up"],
        ["exec", *last],
    ]
    return "\n".join(shlex.join(step) for step in steps)
