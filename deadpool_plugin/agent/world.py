"""From the launcher's numbering to the job's: which hosts stand by, who runs which rank, what workers are told.

Rules of this file: pure functions of what the launcher, the configuration and the rendezvous say; every node comes to
the same answer. Ranks are numbered over the active hosts only, in the hostfile's order.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from ..config import EVERY_MAX, Config
from ..core.chain import AUTO
from ..core.placement import with_racks
from ..core.policy import Policy, Timing
from ..core.types import NodeId, Rank, World
from ..errors import ConfigError
from ..mirror.arena import check_memory
from ..transport.rendezvous import Hello
from ..transport.sockets import Address

COMMAND = "DEADPOOL_COMMAND"
INVITATION = "DEADPOOL_INVITATION"
_EXPORTED = (
    "NCCL_", "PYTHON", "UCX_", "GLOO_", "OMP_", "MKL_", "MV2", "MLFLOW", "CUBLAS_", "CUDA_", "TORCH_", "NVTE_", "HF_",
    "ACCELERATE_",
)  # fmt: skip
_HOSTS_OWN = "CUDA_VISIBLE_DEVICES"
# Answers to guests are not encrypted on their way: a joining host must have variables of such names itself.
_SECRETS = ("TOKEN", "KEY", "SECRET", "PASSWORD", "CREDENTIAL")


class Place(msgspec.Struct, frozen=True):
    """This node in the launcher's world, spares counted like any host: what every supervisor's environment says."""

    node: NodeId
    nodes_total: int
    local_size: int
    master_addr: str
    master_port: int
    local_rank: int = 0  # the supervisor's own


class Invitation(msgspec.Struct, frozen=True):
    """A running job's id, and control addresses of its members."""

    job: str
    members: tuple[Address, ...]


class Job(msgspec.Struct, frozen=True):
    """The start of this node's supervisors."""

    command: list[str]
    directory: str
    config: str  # as `Config.told`
    environment: dict[str, str]
    secret_files: tuple[str, ...] = ()  # where the secret may lie
    launch: str = ""  # the name of the `deadpool launch` that started it, "" for another launcher
    invitation: Invitation | None = None  # to the job this host shall join, None if it meets others at the rendezvous


def job_from(
    environ: Mapping[str, str], directory: str, config: str, secret_files: tuple[str, ...], launch: str = ""
) -> Job:
    """Read what the supervisor and `deadpool join` put into the environment; both are ours."""
    named = deepspeed_env(environ, directory)
    exported = {
        name: value
        for name, value in environ.items()
        if (name.startswith(_EXPORTED) or name in named)
        and name != _HOSTS_OWN
        and not any(word in name.upper() for word in _SECRETS)
    }
    command = msgspec.json.decode(environ.get(COMMAND, "[]"), type=list[str])
    invitation = msgspec.json.decode(environ.get(INVITATION, "null"), type=Invitation | None)
    return Job(command, directory, config, exported, secret_files, launch, invitation)


def deepspeed_env(environ: Mapping[str, str], directory: str) -> dict[str, str]:
    """Read `.deepspeed_env`, whose variables deepspeed exports to every host; values as they stand there."""
    file, found = environ.get("DS_ENV_FILE", ".deepspeed_env"), dict[str, str]()
    for folder in (os.path.expanduser("~"), directory):
        with contextlib.suppress(OSError, UnicodeDecodeError):
            for line in Path(folder, file).read_text().splitlines():
                name, is_one, value = line.partition("=")
                found |= {name.strip(): value} if is_one else {}
    return found


def spare_nodes(spares: int | Sequence[str], hosts: Sequence[str]) -> tuple[NodeId, ...]:
    """List the nodes that stand by, in the order in which they take over. Raises: ConfigError."""
    total = len(hosts)
    if isinstance(spares, int):
        chosen = tuple(range(total - spares, total))
    else:
        chosen = tuple(_node_named(name, hosts) for name in spares)
        if len(set(chosen)) != len(chosen):
            raise ConfigError(f"spares {list(spares)} name one host twice", "different hosts", "correct `spares`")
    if len(chosen) >= total:
        raise ConfigError(
            f"the job has {total} host(s), and `spares` asks for {len(chosen)}",
            f"at least {len(chosen) + 1} hosts, so that one is left to train on",
            "name all hosts in the hostfile (--hostfile), or lower `spares`",
        )
    return chosen


def check_hosts(hosts_total: int, spares: int | Sequence[str], copies: int) -> None:
    """Check what does not need the hosts' own names. Raises: ConfigError."""
    checked = spares if isinstance(spares, int) or all(name.isdigit() for name in spares) else len(spares)
    spare_nodes(checked, [f"host{node}" for node in range(hosts_total)])
    if copies > 1 and copies >= hosts_total:
        raise ConfigError(
            f"the job has {hosts_total} host(s), and `copies: {copies}` asks for {copies} others",
            f"at least {copies + 1} hosts, so that each snapshot is on {copies} others",
            "add hosts to the hostfile or lower `copies`",
        )


def check_slots(hosts: Sequence[tuple[str, int]]) -> None:
    """Args: hosts: name and slots. Raises: ConfigError unless all have the same number."""
    other = next((host for host in hosts if host[1] != hosts[0][1]), None)
    if other is not None:
        raise ConfigError(
            f"host {hosts[0][0]} has {hosts[0][1]} slots, host {other[0]} has {other[1]}",
            "the same number on every host (a spare must be able to take any host's ranks)",
            "correct `slots` in the hostfile",
        )


def _node_named(name: str, hosts: Sequence[str]) -> NodeId:
    if name.isdigit() and name not in hosts:
        if int(name) < len(hosts):
            return int(name)
    else:
        matches = [node for node, host in enumerate(hosts) if name in (host, host.partition(".")[0])]
        if len(matches) == 1:
            return matches[0]
        if len(matches) > 1:
            raise ConfigError(
                f"`spares` names {name}, which is the host name of nodes {matches}", "one node", "use node indices"
            )
    raise ConfigError(
        f"`spares` names {name}, but the hosts are {', '.join(f'{n}:{h}' for n, h in enumerate(hosts))}",
        "host names as `hostname` gives them there, or indices counted from 0",
        "correct `spares`",
    )


def rack_named(node: NodeId, host: str, racks: Mapping[str, Sequence[str]]) -> str:
    """Return the rack that names this node by host name, its part before the first dot, or index; "" if none does."""
    names = {str(node), host, host.partition(".")[0]}
    return next((rack for rack, members in racks.items() if not names.isdisjoint(members)), "")


def form_world(hellos: Sequence[Hello], config: Config) -> World:
    """Form generation 0 from what the nodes said of themselves. Raises: ConfigError if they do not fit together."""
    check_alike(hellos)
    standing_by = spare_nodes(config.spares, [hello.host for hello in hellos])
    active = [hello.node for hello in hellos if hello.node not in standing_by]
    world = World(0, tuple(node for node in active for _ in range(hellos[node].local_size)), standing_by)
    racks = {hello.node: rack_named(hello.node, hello.host, config.racks) for hello in hellos}
    return with_racks(world, racks, config.copies)


def check_alike(hellos: Sequence[Hello]) -> None:
    """Raises: ConfigError unless all nodes have the same slots, versions and configuration."""
    first = hellos[0]
    for other in hellos[1:]:
        check_slots([(first.host, first.local_size), (other.host, other.local_size)])
        if differs := first_difference(first.versions, other.versions):
            package, here, there = differs
            alike = first.host == other.host  # emulated nodes, or hosts without a name
            mine, its = (f"node {one.node}" if alike else one.host for one in (first, other))
            raise ConfigError(
                f"{package} is {here} on {mine} and {there} on {its}",
                "the same version on every host",
                f"install {package} alike on all hosts",
            )
        if other.config_digest != first.config_digest:
            raise ConfigError(
                f"the configuration of host {other.host} differs from that of {first.host}",
                "the same --deadpool-config content on every host",
                "copy the file to all hosts",
            )


def first_difference(here: Mapping[str, str], there: Mapping[str, str]) -> tuple[str, str, str] | None:
    """Return a package that is not the same, and what it is here and there."""
    found = {one: (here.get(one, "not installed"), there.get(one, "not installed")) for one in sorted({*here, *there})}
    return next(((package, *versions) for package, versions in found.items() if versions[0] != versions[1]), None)


def worker_env(place: Place, world: World, rank: Rank, local_rank: int, address: str) -> dict[str, str]:
    """Make the environment of the process of `rank`: the active world as any launcher would describe it."""
    env = {
        "RANK": rank,
        "WORLD_SIZE": len(world.node_of),
        **dict.fromkeys(("CROSS_RANK", "NODE_RANK", "GROUP_RANK"), world.active.index(world.node_of[rank])),
        "CROSS_SIZE": len(world.active),
        "LOCAL_RANK": local_rank,
        **dict.fromkeys(("LOCAL_SIZE", "LOCAL_WORLD_SIZE"), place.local_size),
        "MASTER_ADDR": place.master_addr,
        "MASTER_PORT": place.master_port,
        "DEADPOOL_ADDRESS": address,
    }
    return {name: str(value) for name, value in env.items()}


def described(world: World, hosts: Sequence[str]) -> list[str]:
    """Describe the mapping of hosts to ranks, one line each, for people."""
    lines, racks = [], dict(world.racks)
    for node in sorted(world.members):
        ranks = world.ranks_of(node)
        what = f"ranks {ranks[0]}-{ranks[-1]}" if len(ranks) > 1 else f"rank {ranks[0]}" if ranks else "spare"
        where = f", rack {racks[node]}" if node in racks else ""
        lines.append(f"node {node} {hosts[node]}: {what}{where}")
    return lines


def described_supply(config: Config) -> str:
    """Say when `spare_command` runs, for people."""
    if config.spares_total:
        return f"spare_command runs when fewer than {config.spares_total} spare(s) are left"
    if config.on_no_spare == "wait":
        return "spare_command runs when a host is lost; the job waits for the host that it brings (on_no_spare: wait)"
    return "spare_command never runs: the job ends with the first host that is lost (spares: 0, on_no_spare: stop)"


def timing_of(config: Config) -> Timing:
    stall_s = config.stall_timeout_s
    return Timing(
        heartbeat_interval_s=config.heartbeat_interval_s,
        silent_after_s=config.patience_s,
        slow_after_s=config.slow_after_s,
        phase_timeout_s=config.phase_timeout_s,
        decision_timeout_s=config.decision_timeout_s,
        start_timeout_s=config.start_timeout_s,
        stall_timeout_s=stall_s if isinstance(stall_s, float) else None if stall_s == "auto" else math.inf,
        saving_timeout_s=config.saving_timeout_s,
    )


def policy_of(config: Config) -> Policy:
    return Policy(
        copies=config.copies,
        restarts_max=config.restarts_max,
        wait_for_hosts=config.on_no_spare == "wait",
        witness=config.witness is not None,
        restarts_window_s=config.restarts_window_s,
        spares=config.spares_total,
        spare_command=config.spare_command is not None,
        spare_command_limit_s=config.spare_command_limit_s,
        mirror_every=AUTO if config.mirror_every == "auto" else config.mirror_every,
        mirror_every_max=EVERY_MAX,
        store_every_s=config.store_every_s if config.store_dir is not None else None,
    )


def check_headroom(config: Config) -> None:
    """Check before anything starts that this host has what `memory_headroom_gib` keeps free. Raises: MemoryShortage."""
    check_memory(0, config.memory_headroom_bytes)  # what snapshots need is not known before the models are built
