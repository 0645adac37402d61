"""Facts of the kernel about processes: CPU time to the nanosecond, and memory with shared pages told apart.

Rules of this file: reads only. An agent's memory: `private` are the pages nobody else has; what it shares with the
process all are forked from (interpreter and modules) counts in full for `alone`, what one agent on a host of its own
has resident, and by its share for `pss`. Sockets' buffers are the kernel's and in none of them.
"""

from __future__ import annotations

import platform
import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

MIB = 1 << 20


def cpu_ns(pid: int) -> int:
    """CPU time of all threads of `pid`, also of those that have ended. Source: clock_getcpuclockid(3) of Linux."""
    return time.clock_gettime_ns((~pid << 3) | 2)


def memory_of(rollup: str, agents: int) -> dict[str, float]:
    """MiB per agent from a process's /proc/PID/smaps_rollup, `agents` of which live in it."""
    kib = {name: int(value) for name, value in re.findall(r"^(\w+): +(\d+) kB", rollup, re.MULTILINE)}
    private = (kib["Private_Clean"] + kib["Private_Dirty"]) / 1024
    rss, pss = kib["Rss"] / 1024, kib["Pss"] / 1024
    return {"private": private / agents, "pss": pss / agents, "alone": rss - private + private / agents}


def memory(pid: int, agents: int) -> dict[str, float]:
    return memory_of(Path(f"/proc/{pid}/smaps_rollup").read_text(), agents)


def meminfo() -> Mapping[str, int]:
    """Bytes, by the names in /proc/meminfo."""
    found = re.findall(r"^(\w+): +(\d+) kB", Path("/proc/meminfo").read_text(), re.MULTILINE)
    return {name: int(value) * 1024 for name, value in found}


def machine() -> dict[str, Any]:
    info = Path("/proc/cpuinfo").read_text()
    processor = re.findall(r"model name\s*: (.*)", info)[:1] or [platform.machine()]
    return {
        "processor": processor[0],
        "cpus": info.count("processor\t:"),
        "memory_gib": round(meminfo()["MemTotal"] / (1 << 30), 1),
        "kernel": platform.release(),
        "python": platform.python_version(),
    }
