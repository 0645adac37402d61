"""Checks of the launcher's environment and of this host, before anything is started.

Which rank runs where is worked out in agent/world.py once all hosts are known.
"""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Mapping
from functools import partial

from ..agent.links import versions
from ..agent.world import Place, check_headroom, check_hosts
from ..config import Config
from ..errors import ConfigError, refusing
from ..host.machine import addresses_of
from ..transport import linux

OLDEST = {"torch": (2, 9), "megatron-core": (0, 14), "deepspeed": (0, 18)}  # that work; only torch must be there
_HOW = "start it by `deepspeed --hostfile HOSTS --module deadpool_plugin.run SCRIPT ...`"


def place_of(environ: Mapping[str, str] = os.environ) -> Place:
    """Read where the launcher has put this process. Raises: ConfigError."""
    if "TORCHELASTIC_RUN_ID" in environ:
        raise ConfigError(
            "this process was started by torchrun (`accelerate launch` uses it, too), which ends or restarts every "
            "worker when a host is lost",
            "a launcher that leaves the other hosts alone",
            f"{_HOW}, or by `deadpool launch --hostfile HOSTS SCRIPT ...`",
        )
    local_size = _number(environ, "LOCAL_SIZE", "LOCAL_WORLD_SIZE")
    world_size, rank, local_rank = (_number(environ, name) for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK"))
    if local_size < 1 or world_size % local_size:
        raise ConfigError(
            f"WORLD_SIZE={world_size} with LOCAL_SIZE={local_size} on {os.uname().nodename}",
            "the same number of slots on every host",
            "correct `slots` in the hostfile",
        )
    nodes_total, node = world_size // local_size, rank // local_size
    stated = int(environ.get("CROSS_SIZE") or nodes_total), int(environ.get("CROSS_RANK") or node)
    if stated != (nodes_total, node) or rank % local_size != local_rank:
        raise ConfigError(
            f"RANK={rank}, LOCAL_RANK={local_rank} of {local_size} slots, host {stated[1]} of {stated[0]}",
            "the same number of slots on every host, ranks numbered host by host",
            "correct `slots` in the hostfile",
        )
    if not (address := environ.get("MASTER_ADDR", "")):
        raise ConfigError("MASTER_ADDR is not set", "the launcher's environment", _HOW)
    return Place(node, nodes_total, local_size, address, _number(environ, "MASTER_PORT"), local_rank)


def _number(environ: Mapping[str, str], *names: str) -> int:
    name = next((name for name in names if name in environ), None)
    if name is None:
        raise ConfigError(f"{names[0]} is not set", "the environment the deepspeed launcher gives", _HOW)
    if not environ[name].isdigit():
        raise ConfigError(f"{name}={environ[name]}", "a number", _HOW)
    return int(environ[name])


def check_place(place: Place, config: Config) -> None:
    """Check what does not need the hosts' names. Raises: ConfigError."""
    check_hosts(place.nodes_total, config.spares, config.copies)
    first, last = config.port_range or (0, -1)
    if first <= place.master_port <= last:  # an agent may have taken it before the hosts meet
        raise ConfigError(
            f"port_range [{first}, {last}] holds MASTER_PORT={place.master_port}, where the hosts first meet",
            "a range without it",
            "name another one, or another --master_port",
        )


def check_host(config: Config) -> None:
    """Check this host's address, free memory and directories (made if they are absent). Raises: ConfigError."""
    if config.interface_address is not None:
        addresses_of(config.interface_address)
    check_headroom(config)
    used = {"output_dir": config.output_dir} | ({} if config.witness is None else {"witness": config.witness})
    for field, path in used.items():
        with refusing(
            f"{field} {path.absolute()} cannot be used on {os.uname().nodename}",
            "a directory that can be made and written to on every host",
            "name another one, or make it",
        ):
            path.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=path).close()


def check_versions(installed: Mapping[str, str] | None = None) -> None:
    """Raises: ConfigError for a package that is missing or too old, and a kernel that is."""
    host, here = os.uname(), versions() if installed is None else installed
    watch, share = partial(linux.pidfd_open, os.getpid()), partial(linux.memfd_create, "check", linux.MFD_CLOEXEC)
    for name, call in (("pidfd_open", watch), ("memfd_create", share)):  # what processes do to each other
        with refusing(
            f"the system call {name} fails on {host.nodename}, Linux {host.release}",
            "Linux 5.3 or newer, and a container that may use the call",
            "upgrade the kernel, or let the container's seccomp profile allow it",
        ):
            os.close(call())
    for package, oldest in OLDEST.items():
        wanted = f"{package} {oldest[0]}.{oldest[1]} or newer"
        if package not in here:
            if package == "torch":
                raise ConfigError(f"{package} is not installed on {host.nodename}", wanted, f"install {wanted}")
            continue
        numbers = re.match(r"(\d+)\.(\d+)", here[package])
        if numbers is None or (int(numbers[1]), int(numbers[2])) < oldest:
            found = f"{package} {here[package]} is installed on {host.nodename}"
            raise ConfigError(found, wanted, f"upgrade {package} on every host")
