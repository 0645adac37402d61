"""The configuration file: one frozen object, every field documented, every error readable.

Rules of this file: `load` is the only way in; a wrong file never gives a traceback, always a ConfigError that names
the field, what was found, what was expected and what to do. Time-outs are derived from `patience_s`, but for the two
that the script itself decides.
May import errors only.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import math
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from .errors import ConfigError

MIB = 1024 * 1024


class Config(BaseModel):
    """What a user may set. Every field has a default: an empty file is a valid configuration."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    spares: int | list[str] = 1
    """How many hosts stand by (a count: the *last* hosts of the hostfile), or which ones (host names, or node
    indices counted from 0). Hazard: 0 means that any loss of a node ends the job."""

    patience_s: float = Field(default=10.0, ge=0.2, le=3600.0)
    """Seconds: a peer that is silent for this long is lost. All other time-outs but the next two follow from it.
    Hazard: below about 2 s a loaded host can be mistaken for a dead one; a false loss costs a swap and a spare.
    A killed process or a reset connection is noticed in milliseconds whatever this says. After some 0.7 of it without
    contact a host's processes stand still until it has contact again, or is replaced."""

    start_timeout_s: float = Field(default=1800.0, ge=1.0)
    """Seconds: if no further rank reaches training for this long, after the start of the job or after a swap, the job
    ends (86) and names the ranks that are missing. A process that is on its way through past steps counts as long as
    it gets on. Hazard: a script that builds indices or loads a checkpoint for longer needs more."""

    stall_timeout_s: float | None = Field(default=1800.0, ge=5.0)
    """Seconds: if in training no step is mirrored and no process comes to its next collective for this long, all are
    interrupted and go on from the last step; a process that does not let go is killed and replaced. If the same happens
    again before another step, the job ends (86). It stands in for NCCL's own time-out, whose watchdog would end the
    process. None: never. Hazard: a save or an evaluation in which nothing is communicated for longer needs more."""

    secret_file: Path = Path("~/.deadpool/secret")
    """File (mode 0600, same content on every host) that holds the job's secret; peers that cannot prove it are
    refused. Jobs may share one: once its hosts have met, a job is closed to the others. The default file is made when
    it is absent. Hazard: without a shared home directory, each host would make a different one: copy it."""

    output_dir: Path = Path("deadpool-logs")
    """Directory for each rank's output, the event logs and what rehearsals write; made if it is absent. Relative to the
    working directory; `~` is the home directory."""

    interface_address: str | None = None
    """What to bind sockets to, where hosts have several networks: the network (10.1.0.0/16), the name of an interface
    that every host has (ib0), or this host's IP address. None: the address that reaches the first host. The frameworks'
    own connections (gloo, NCCL) follow GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME.
    Hazard: an address is one host's; in a file that all hosts share only a network or a name makes sense. The addresses
    chosen are printed at the start."""

    port_range: tuple[int, int] | None = None
    """First and last port (inclusive) for connections between the hosts' agents, for firewalls. None: the system
    chooses. At least 4 ports; the launcher's MASTER_PORT, which is used for the first meeting, is not among them.
    Hazard: training's own connections (groups and the store they are built over) are at ports the system chooses."""

    memory_headroom_gib: float = Field(default=1.0, ge=0.0)
    """GiB of host memory that must stay free after the snapshots' memory is reserved. Hazard: too little and the
    kernel's out-of-memory killer picks a worker in the middle of training."""

    header_kib: int = Field(default=256, ge=4, le=1024 * 1024)
    """KiB per snapshot for its scalars: random states, schedules, positions in the data. Raise it when told so (an
    error names this field)."""

    recording_limit_mib: int = Field(default=1, ge=0, le=1024)
    """MiB: start-up collectives whose result is larger are not recorded for rehearsals (parameters; a restore
    overwrites them), but for indices (int64, bool), up to 64 MiB in all. Hazard: other large tables of numbers that
    ranks exchange at the start are not there on a host that takes over."""

    history_limit_mib: int = Field(default=256, ge=1)
    """MiB per rank for the call records of committed steps, from which a spare is brought to the current step.
    Hazard: once it is full the oldest are dropped (never the newest three steps') and a spare that has not followed can
    no longer take over; it is said at 80 % and then."""

    copies: int = Field(default=1, ge=1, le=8)
    """On how many other hosts each snapshot is kept: so many hosts may be lost at the same moment (if as many spares
    are left). Hazard: host memory and network traffic grow with it."""

    racks: dict[str, list[str]] = Field(default_factory=dict)
    """Which hosts may fail together: a name for each rack (or power feed, or zone) and its hosts, as in `spares`. The
    copies of a snapshot go to different racks while others have room. A host that is named nowhere stands alone; one
    that joins later is known by its host name. Hazard: a misspelt name is a host that may join later; the mapping is
    printed at the start."""

    restarts_max: int = Field(default=3, ge=0)
    """How often within restarts_window_s the process of a rank is replaced on its own host when it crashes there; with
    one more crash the whole host counts as lost and a spare takes over. 0: a crash always costs the host."""

    restarts_window_s: float = Field(default=3600.0, gt=0.0, allow_inf_nan=False)
    """Seconds: a crash longer ago than this does not count any more. Hazard: a process that always crashes, but seldom
    enough for this, is replaced for ever."""

    on_no_spare: Literal["stop", "wait"] = "stop"
    """What to do when a host is lost and no spare is left. stop: end the job with exit code 86 and name what was lost.
    wait: all others keep their state in memory until a host joins (`deadpool join`). Hazard: they wait for ever."""

    on_launcher_loss: Literal["continue", "stop"] = "continue"
    """What to do when the command that launched the job (`deepspeed`, `deadpool launch`), or its host, is gone.
    continue: the job goes on; what it prints is still in output_dir. stop: every host that finds it gone leaves the
    job, which ends it; one host that alone has lost its connection is replaced. Hazard: plain `deepspeed` is only
    missed once its ssh connections are seen to be closed; those of a host that vanishes are not."""

    witness: Path | None = None
    """Directory on storage that all hosts share and that can link files (NFS can): of a job that falls into two halves
    the one goes on whose plan is there first. None: the half with the first active host does, so that of two hosts the
    second alone cannot go on. Hazard: while the storage does not answer a half cannot go on."""

    preload: list[str] | None = None
    """Modules a spare imports before it rehearses. None: torch, and then whatever its first rehearsal
    turned out to import."""

    # ---- derived

    @property
    def heartbeat_interval_s(self) -> float:
        return self.patience_s / 20

    @property
    def silent_after_s(self) -> float:
        return self.patience_s

    @property
    def phase_timeout_s(self) -> float:
        return 2 * self.patience_s

    @property
    def decision_timeout_s(self) -> float:
        return 30 * self.patience_s

    @property
    def saving_timeout_s(self) -> float:
        """Of a process that a swap finds in a save. Whoever replaces it then needs time before the job gives up."""
        return max(self.phase_timeout_s, min(self.decision_timeout_s, self.start_timeout_s / 2))

    @property
    def tick_s(self) -> float:
        return self.heartbeat_interval_s / 4

    @property
    def header_bytes(self) -> int:
        return self.header_kib * 1024

    @property
    def recording_limit_bytes(self) -> int:
        return self.recording_limit_mib * MIB

    @property
    def history_limit_bytes(self) -> int:
        return self.history_limit_mib * MIB

    @property
    def memory_headroom_bytes(self) -> int:
        return int(self.memory_headroom_gib * 1024 * MIB)

    @property
    def secret_path(self) -> Path:
        return self.secret_file.expanduser()

    def digest(self) -> str:
        """Equal on all nodes of a job: covers what nodes must agree on, not paths, addresses or local limits."""
        shared = self.model_dump(
            mode="json", exclude={"secret_file", "output_dir", "interface_address", "memory_headroom_gib", "preload"}
        )
        return hashlib.sha256(json.dumps(shared, sort_keys=True).encode()).hexdigest()[:16]

    # ---- validation

    @field_validator("output_dir", "witness")
    @classmethod
    def _at_home(cls, path: Path | None) -> Path | None:
        try:
            return path.expanduser() if path is not None else None
        except RuntimeError as error:
            raise ValueError(str(error)) from error

    @field_validator("spares", mode="before")
    @classmethod
    def _spares(cls, value: Any) -> Any:
        if isinstance(value, bool) or value is None:
            raise ValueError("must be a count or a list of hosts")
        if isinstance(value, str):
            raise ValueError(f"must be a count or a list of hosts: write [{value}]")
        if isinstance(value, list):
            names = [str(item) for item in value]
            if len(set(names)) != len(names):
                raise ValueError("names a host twice")
            return names
        if isinstance(value, int) and value < 0:
            raise ValueError("must not be negative")
        return value

    @field_validator("port_range", mode="before")
    @classmethod
    def _port_range(cls, value: Any) -> Any:
        if value is not None and not (isinstance(value, (list, tuple)) and len(value) == 2):
            raise ValueError("must be the first and the last port: write [20000, 20099]")
        return value

    @field_validator("racks", mode="before")
    @classmethod
    def _hosts_of_racks(cls, value: Any) -> Any:
        """Indices are numbers in YAML."""
        if not isinstance(value, dict) or not all(isinstance(hosts, list) for hosts in value.values()):
            raise ValueError("must be a list of hosts for each rack: write {a: [node0, node1], b: [node2, node3]}")
        return {str(rack): [str(host) for host in hosts] for rack, hosts in value.items()}

    @field_validator("racks")
    @classmethod
    def _racks(cls, racks: dict[str, list[str]]) -> dict[str, list[str]]:
        named = [name for hosts in racks.values() for name in hosts]
        twice = sorted({name for name in named if named.count(name) > 1})
        if twice or "" in racks:
            raise ValueError(f"names {', '.join(twice)} twice" if twice else "has a rack without a name")
        return racks

    @model_validator(mode="after")
    def _relations(self) -> Config:
        if self.port_range is not None:
            first, last = self.port_range
            if not 1024 <= first <= last <= 65535:
                raise ValueError(f"port_range: [{first}, {last}] must be ascending and within 1024..65535")
            if last - first + 1 < 4:
                raise ValueError(f"port_range: [{first}, {last}] has {last - first + 1} ports, at least 4 are needed")
        if not math.isfinite(self.memory_headroom_gib):
            raise ValueError("memory_headroom_gib: must be finite")
        return self


def load(path: str | Path | None) -> Config:
    """The configuration in `path` (YAML); the defaults for None or an empty file.

    Raises: ConfigError naming file and field.
    """
    if path is None or str(path) in ("", "."):
        return Config()
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"configuration file {path} cannot be read ({error.__class__.__name__}: {error})",
            "a readable YAML file",
            "check the path after --deadpool-config; it must exist on every host",
        ) from error
    try:
        data = yaml.safe_load(text)
    except yaml.YAMLError as error:
        reason = " ".join(str(error).split())
        raise ConfigError(f"{path} is not YAML ({reason})", "lines of the form `field: value`", "correct it") from error
    if data is None:
        data = {}
    if not isinstance(data, dict):
        raise ConfigError(f"{path} holds a {type(data).__name__}", "lines of the form `field: value`", "correct it")
    try:
        return Config.model_validate(data)
    except ValidationError as error:
        raise ConfigError(
            f"{path}: {_describe(error)}", remedy="correct the file (configs/full.yaml shows all)"
        ) from error


def _describe(error: ValidationError) -> str:
    """pydantic's findings as one line, each with its field, the value found and the nearest known name."""
    findings: dict[str, str] = {}
    for item in error.errors():
        location = [str(part) for part in item["loc"]]
        name = location[0] if location else ""
        if item["type"] == "extra_forbidden":
            near = difflib.get_close_matches(name, Config.model_fields, n=1, cutoff=0.5)
            hint = f"did you mean `{near[0]}`?" if near else "known: " + ", ".join(Config.model_fields)
            findings.setdefault(name, f"unknown field `{name}`; {hint}")
            continue
        message = item["msg"].removeprefix("Value error, ")
        if name:
            findings.setdefault(name, f"`{name}`: {message} (found {item['input']!r})")
        else:
            findings.setdefault(message, message)
    return " | ".join(findings.values())
