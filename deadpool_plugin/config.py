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
import os
import re
import textwrap
from collections import Counter
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, field_validator

from .errors import ConfigError

MIB = 1024 * 1024
_VARIABLE = re.compile(r"\$(?:(\w+)|\{(\w+)\})", re.ASCII)
_PLACEHOLDER = re.compile(r"\{(\w+)\}", re.ASCII)
PLACEHOLDERS = ("output_dir", "address", "count")
"""Names in braces that are filled in where they stand in `spare_command`."""
EVERY_MAX = 16
"""Steps between two snapshots at most, with `mirror_every: auto`."""
EVERY_LIMIT = 1024
STORING_S = 600.0
"""How long a host may write its state when the job has ended."""
OF_A_HOST = ("secret_file", "output_dir", "interface_address", "memory_headroom_gib", "preload", "store_dir", "resume")
"""Fields that may differ from host to host."""


class Config(BaseModel):
    """The configuration that a user may set. Every field has a default: an empty file is a valid configuration."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)

    spares: int | list[str] = 1
    """How many hosts stand by: the last ones of the hostfile. Or which ones, by host name or index: [node7, node8] or
    ["0"]. Hazard: 0 means that any loss of a node ends the job."""

    patience_s: float = Field(default=2.0, ge=0.2, le=3600.0)
    """Seconds. A host that gives no sign of life for this long is lost. One whose kernel answers while its agent says
    nothing is slow: it has five times as long, at most 10 s where this is not more itself. All other time-outs but the
    next two follow from that. Killed processes and reset connections are noticed in milliseconds whatever this says.
    After some 0.65 of it without contact a host's processes stand still until it has contact again, or is replaced.
    Hazard: a network or a virtual machine that stands still for longer costs a swap and a spare."""

    start_timeout_s: float = Field(default=1800.0, ge=1.0, allow_inf_nan=True)
    """Seconds. If no further rank reaches training for this long, after the start of the job or after a swap, the job
    ends (86) and names the ranks that are missing. A process that is on its way through past steps counts as long as it
    gets on. Hazard: a script that builds indices or loads a checkpoint for longer needs more."""

    stall_timeout_s: Literal["auto"] | float | None = "auto"
    """Seconds, auto or null. If in training no step is committed and no process comes to its next call or collective
    for this long, that is a hang (a driver, a file system, a network). The log says who never arrived, and where. Then
    all are interrupted and go on from the last step; if it comes back the process is replaced, then its host. auto: 30
    s or 8 times the longest of the last 32 steps; first steps, evaluations, saves and compilations have more
    (deadpool_plugin/core/README.md). A number of at least 5: for all of them. null: never. It stands in for NCCL's own
    time-out. Hazard: a number below what a save or an evaluation takes interrupts it again and again."""

    secret_file: Path = Path("~/.deadpool/secret")
    """File (mode 0600, the same content on every host) with the job's secret; who cannot prove it is refused. Jobs may
    share one: once its hosts have met, a job is closed to the others. The default file is made when it is absent. `~`
    and `$NAME` as in output_dir.
    Hazard: without a shared home directory each host would make a different one: copy it."""

    output_dir: Path = Path("deadpool-logs")
    """Folder for each rank's output and the event logs (events.<node>.jsonl), best on storage that all hosts see; made
    if it is absent. Relative to the working directory; `~` is the home directory, `$NAME` what the environment says
    (logs/$SLURM_JOB_ID). Hazard: files are appended to, and two jobs at once must not share a folder."""

    interface_address: str | None = None
    """The network to use, where hosts have several: a network (10.1.0.0/16), the name of an interface that every
    host has (ib0), or this host's address. null: the address that reaches the first host. Several networks, separated
    by commas (ib0,ib1): the ranks' snapshots are spread over them, all else goes over the first. The chosen addresses
    are printed at the start. The frameworks' own connections (gloo, NCCL) follow GLOO_SOCKET_IFNAME and
    NCCL_SOCKET_IFNAME. Hazard: an address is one host's; in a file that all hosts share only a network or a name makes
    sense. Of several interfaces in one network a host sends over one only."""

    port_range: tuple[int, int] | None = None
    """First and last port (at least 4) for connections between the hosts' agents, e.g. [20000, 20099], for firewalls.
    The launcher's MASTER_PORT, for the first meeting, is not among them. null: the system chooses. Hazard: training's
    own connections (groups and the store they are built over) are at ports the system chooses."""

    memory_headroom_gib: float = Field(default=1.0, ge=0.0)
    """GiB of host memory that must stay free once the snapshots' memory is reserved (checked before training). Hazard:
    too little, and the kernel kills a worker in mid-training; page cache, loaders and call records grow after the
    check."""

    header_kib: int = Field(default=256, ge=4, le=1024 * 1024)
    """KiB per snapshot for its scalars (random states, schedules, positions in the data). Raise it when an error says
    so."""

    recording_limit_mib: int = Field(default=1, ge=0, le=1024)
    """MiB. Start-up collectives with larger results are not recorded for rehearsals (parameters, which a restore
    overwrites); indices (int64, bool) and gathered objects are, up to 64 MiB in all. Nor are files of the checkpoint
    that was loaded, if all but their large tensors takes more (compressed): such a checkpoint must stay until the job
    has ended. Hazard: other large tables of numbers that ranks exchange at the start are not there on a host that
    takes over; raise it then."""

    history_limit_mib: int = Field(default=256, ge=1)
    """MiB per rank for the call records of committed steps, from which a spare is brought to the current step. They are
    held compressed: a million steps of Megatron-LM, DeepSpeed or Hugging Face's Trainer take 30 to 100 MiB. Raise it
    for loops whose calls return much. Hazard: once it is full the oldest are dropped (never the newest 2 k +
    1 steps', see mirror_every: 33 under auto), and only spares that have followed so far can take over: no host that
    joins, no process that begins anew. It is said at 80 % and then."""

    park_memory_gib: float | None = Field(default=None, ge=0.0)
    """GiB of a spare's memory, in all, for processes that have rehearsed a host and wait. A spare rehearses one host
    after another while they fit; the loss of a host that it has rehearsed costs no start-up of the script. null: half
    of the memory that is free. 0: each spare rehearses one host only."""

    park_at_home: bool | None = None
    """Beside each rank, a process on the same host that has rehearsed the rank and waits, so that a process that dies
    is replaced without a start-up of the script. It takes host memory as parked ones do, and once the CPU time of a
    start-up. null: where training runs on CPUs. Hazard: it keeps a second copy of the rank's model and
    optimizer on its device."""

    copies: int = Field(default=1, ge=1, le=8)
    """On how many other hosts each snapshot is kept: so many hosts may be lost at the same moment, if as many spares
    are left. Hazard: each copy is as much host memory and network traffic again."""

    mirror_every: Literal["auto"] | int = "auto"
    """How many steps snapshots are apart, or auto. 1: every step is mirrored, and training waits if that takes longer
    than a step. k: every k-th step is. auto: 1 as long as mirroring keeps up, else as many steps as it takes, up to 16;
    changes are said. Hazard: after a loss up to 2 k steps are done again, exactly; each rank keeps what the calls of so
    many steps were given (batches), under auto in no more than a quarter of the memory that is free. A loader that uses
    a buffer above 1 MiB again within 2 k steps is refused, under auto perhaps in the middle of the job, once k has
    risen: with a ring of two or more such buffers, set 1."""

    racks: dict[str, list[str]] = Field(default_factory=dict)
    """Hosts that may fail together, by rack (or power feed, or zone): {a: [node0, node1], b: [node2, node3]}, by host
    name or index. The copies of a snapshot go to different racks while others have room. A host that is named nowhere
    stands alone; one that joins later is known by its host name. Hazard: a misspelt name counts as a host that may join
    later; the mapping is printed at the start."""

    restarts_max: int = Field(default=3, ge=0)
    """How often within restarts_window_s a crashed process is replaced on its own host; with one more crash the whole
    host counts as lost, and a spare takes over. Crashes within 10 s (five patience_s, if that is less) of one that
    counts do not count. 0: a crash always costs the host."""

    restarts_window_s: float = Field(default=3600.0, gt=0.0)
    """Seconds. A crash longer ago than this does not count any more. Hazard: a process that crashes again and again,
    but seldom enough for this, is replaced for ever."""

    on_no_spare: Literal["stop", "wait"] = "stop"
    """When a host is lost and no spare is left. stop: the job ends with exit code 86 and says what was lost. wait: all
    others keep their state in memory until a host joins (`deadpool join`). Hazard: they wait, and hold their hosts, for
    ever."""

    spare_command: list[str] | None = None
    """The program and arguments that bring a host when the job has fewer than at its start: [sbatch, ..., --wrap,
    "deadpool join --job {output_dir}"]. {output_dir}, {address} (HOST:PORT for `deadpool join --to`) and {count} (the
    missing hosts) are filled in; no shell reads the words. The first living host runs it once for each missing host, or
    once for all if {count} is among its words. It has to return when the host is on its way. If it fails, or no host
    joins, it is run again after pauses that double up to 10 minutes, at most 10 times a day until a host has joined.
    null: hosts join by hand. Hazard: with `spares: 0` and `on_no_spare: stop` a loss ends the job before it is run."""

    spare_command_limit_s: float = Field(default=1800.0, ge=1.0)
    """Seconds after which spare_command is ended if it still runs; and seconds from its end in which its host may join
    before it is run again. Hazard: where a batch system's queue takes longer, more hosts come than are missing."""

    on_launcher_loss: Literal["continue", "stop"] = "continue"
    """When the command that launched the job, or its host, is gone. continue: the job goes on; what it prints is still
    in output_dir. stop: every host that finds it gone leaves the job, which ends it; one host that alone has lost its
    connection is replaced. `deadpool launch` is missed as a slow host is (patience_s). Hazard: plain `deepspeed` only
    once its ssh connections are seen to be closed; those of a host that vanishes are not."""

    store_dir: Path | None = None
    """Folder in which every host leaves its part of the newest state when the job ends before its scripts have: a loss
    that cannot be repaired, Ctrl-C, `deadpool stop`, SIGTERM. Best a local disk, or storage that all hosts share. Each
    host needs room for two snapshots of each rank that it runs and mirrors. `resume` begins there. null: the state is
    lost with the job, and only checkpoints are left. Relative paths, `~` and `$NAME` as in output_dir.
    Hazard: what a job leaves there is never removed."""

    store_every_s: float | None = Field(default=None, ge=0.0)
    """Seconds between two steps that all hosts write to store_dir while the job runs, for the loss of all hosts at once
    (power); 0: as often as writing allows. It goes beside training, and a step that cannot be written as fast as it is
    replaced in memory is left out, which is said. null: the state is written only when the job ends. Hazard: each time
    a host writes a snapshot of each rank that it runs or mirrors, and the call records; page cache holds them for a
    while."""

    store_keep: int = Field(default=2, ge=1)
    """How many of the steps that all hosts have written stay in store_dir while the job runs."""

    resume: Path | None = None
    """Folder of an earlier job in its store_dir, as its last lines name it (STORE_DIR/JOB): this job goes on from its
    newest step, bit for bit, with the same script, arguments and number of ranks. Spares, time-outs and the order of
    the hosts may differ. A host whose files are gone is covered by its buddy's. Hazard: a job that is resumed twice
    trains twice."""

    witness: Path | None = None
    """Folder on storage that all hosts share and that can link files (NFS can): of a job that falls into two halves the
    one goes on whose plan is there first. null: the half with the first active host does, so that of two hosts the
    second alone cannot go on. Hazard: while the storage does not answer a half cannot go on."""

    preload: list[str] | None = None
    """Modules a spare imports before it rehearses. null: torch, and then whatever its first rehearsal turned out to
    import. []: none, for scripts that must set variables before torch is imported."""

    # ---- derived

    @property
    def heartbeat_interval_s(self) -> float:
        return self.patience_s / 20

    @property
    def slow_after_s(self) -> float:
        """The time-out of an agent whose host still answers, and of all that only seems to stand still."""
        return max(self.patience_s, min(5 * self.patience_s, 10.0))

    @property
    def phase_timeout_s(self) -> float:
        return 2 * self.slow_after_s

    @property
    def decision_timeout_s(self) -> float:
        return 30 * self.slow_after_s

    @property
    def saving_timeout_s(self) -> float:
        """The time-out of a process that a swap finds in a save. Its replacement then needs time, too."""
        return max(self.phase_timeout_s, min(self.decision_timeout_s, self.start_timeout_s / 2))

    @property
    def ending_timeout_s(self) -> float:
        """How long a host that was told to end may take: with a `store_dir` it first writes what it holds."""
        return self.phase_timeout_s + self.storing_s

    @property
    def storing_s(self) -> float:
        """How long a host may write what it holds to disk when the job has ended."""
        return STORING_S if self.store_dir is not None else 0.0

    @property
    def tick_s(self) -> float:
        return self.heartbeat_interval_s / 4

    @property
    def history_limit_bytes(self) -> int:
        return self.history_limit_mib * MIB

    @property
    def every_is_fixed(self) -> bool:
        """Whether snapshots stay as far apart as they are at first."""
        return self.mirror_every != "auto"

    @property
    def begins_every(self) -> int:
        """How many steps the first snapshots of a job are apart."""
        return 1 if self.mirror_every == "auto" else self.mirror_every

    @property
    def history_kept(self) -> int:
        """How many of the newest steps' call records stay in any case: what a swap may go back by, and one more."""
        return 2 * (EVERY_MAX if self.mirror_every == "auto" else self.mirror_every) + 1

    @property
    def memory_headroom_bytes(self) -> int:
        return int(self.memory_headroom_gib * 1024 * MIB)

    @property
    def park_memory_bytes(self) -> float | None:
        return None if self.park_memory_gib is None else self.park_memory_gib * 1024 * MIB

    @property
    def spares_total(self) -> int:
        return self.spares if isinstance(self.spares, int) else len(self.spares)

    @property
    def secret_path(self) -> Path:
        return self.secret_file.expanduser()

    @property
    def told_secret_file(self) -> str:
        """The file in which another host of the job looks for the secret: as here, or the default in its own home."""
        return os.path.abspath(self.secret_path) if "secret_file" in self.model_fields_set else str(self.secret_file)

    def spare_commands(self, address: str, hosts: int) -> list[list[str]]:
        """Fill in `spare_command` for so many hosts: once for each, or once for all where its words have {count}."""
        words = self.spare_command or []
        values = {"output_dir": str(self.output_dir.absolute()), "address": address, "count": str(hosts)}
        filled = [_PLACEHOLDER.sub(lambda found: values[found[1]], word) for word in words]
        return [filled] * (1 if any("{count}" in word for word in words) else hosts)

    def told(self) -> str:
        """Write the fields that are set as a file for another host of the job."""
        fields = self.model_dump(mode="json", exclude_unset=True)
        if "secret_file" in fields:
            fields["secret_file"] = self.told_secret_file
        return str(yaml.safe_dump(fields))

    def digest(self) -> str:
        """Hash what all nodes of a job must agree on: not paths, addresses or local limits."""
        shared = self.model_dump(mode="json", exclude=set(OF_A_HOST)) | {"resumes": self.resume is not None}
        return hashlib.sha256(json.dumps(shared, sort_keys=True).encode()).hexdigest()[:16]

    # ---- validation

    @field_validator("output_dir", "witness", "secret_file", "store_dir", "resume")
    @classmethod
    def _expanded(cls, path: Path | None, info: ValidationInfo) -> Path | None:
        """Expand `~`, `$NAME` and `${NAME}` as a shell would; refuse by name what is not set."""
        if path is None:
            return None
        named = {plain or braced for plain, braced in _VARIABLE.findall(str(path))}
        if unset := ", ".join(f"${name}" for name in sorted(named) if not os.environ.get(name)):
            raise ValueError(f"{unset} is not set in the environment of {os.uname().nodename}: set it, or write it out")
        found = Path(os.path.expandvars(path))
        try:
            at_home = found.expanduser()
        except RuntimeError as error:
            raise ValueError(f"names no user of {os.uname().nodename}") from error
        return found if info.field_name == "secret_file" else at_home  # of each host's own user

    @field_validator("store_every_s")
    @classmethod
    def _has_a_store_dir(cls, value: float | None, info: ValidationInfo) -> float | None:
        if value is not None and info.data.get("store_dir") is None:
            raise ValueError("needs a store_dir to write to")
        return value

    @field_validator("stall_timeout_s", mode="before")
    @classmethod
    def _stall_timeout(cls, value: Any) -> Any:
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not (value in (None, "auto") or (is_number and value >= 5)):
            raise ValueError("must be auto, a number of seconds of at least 5, or null")
        return value

    @field_validator("mirror_every", mode="before")
    @classmethod
    def _mirror_every(cls, value: Any) -> Any:
        if not (value == "auto" or (type(value) is int and 1 <= value <= EVERY_LIMIT)):
            raise ValueError(f"must be auto, or a number of steps from 1 to {EVERY_LIMIT}")
        return value

    @field_validator("spares", mode="before")
    @classmethod
    def _spares(cls, value: Any) -> Any:
        if isinstance(value, bool) or value is None:
            raise ValueError("must be a count or a list of hosts")
        if isinstance(value, str):
            raise ValueError(f"must be a count such as 1, or a list of hosts: write [{value}] if that is one")
        if isinstance(value, int) and value < 0:
            raise ValueError("must not be negative")
        if isinstance(value, list):
            value = [str(host) for host in value]  # indices are numbers
            if len(set(value)) < len(value):
                raise ValueError("names a host twice")
        return value

    @field_validator("port_range", mode="before")
    @classmethod
    def _port_range(cls, value: Any) -> Any:
        if value is None:
            return None
        if not isinstance(value, (list, tuple)) or len(value) != 2:
            raise ValueError("must be the first and the last port: write [20000, 20099]")
        if all(isinstance(port, int) for port in value):  # else pydantic says what is wrong
            first, last = value
            if not 1024 <= first <= last <= 65535:
                raise ValueError("must be ascending and within 1024..65535")
            if last - first + 1 < 4:
                raise ValueError(f"has {last - first + 1} ports, at least 4 are needed")
        return value

    @field_validator("spare_command", mode="before")
    @classmethod
    def _spare_command(cls, value: Any) -> Any:
        if value is None:
            return None
        if not isinstance(value, list) or not value or not all(type(word) in (str, int, float) for word in value):
            raise ValueError("must be a list of the program and its arguments: write [sbatch, --nodes=1, job.sh]")
        words = [str(word) for word in value]  # numbers are words, too
        if not words[0]:
            raise ValueError("has no program: its first word is empty")
        if unknown := sorted({name for word in words for name in _PLACEHOLDER.findall(word)} - {*PLACEHOLDERS}):
            known = ", ".join(f"{{{name}}}" for name in PLACEHOLDERS)
            raise ValueError(f"{{{unknown[0]}}} is not known; filled in are {known}")
        return words

    @field_validator("racks", mode="before")
    @classmethod
    def _racks(cls, value: Any) -> Any:
        if not isinstance(value, dict) or not all(isinstance(hosts, list) for hosts in value.values()):
            raise ValueError("must be a list of hosts for each rack: write {a: [node0, node1], b: [node2, node3]}")
        racks = {str(rack): [str(host) for host in hosts] for rack, hosts in value.items()}  # indices are numbers
        named = Counter(name for hosts in racks.values() for name in hosts)
        if twice := sorted(name for name, times in named.items() if times > 1):
            raise ValueError(f"names {', '.join(twice)} twice")
        if "" in racks:
            raise ValueError("has a rack without a name")
        return racks


def explained() -> str:
    """Write a file of all fields with their defaults, each below what it means, as in its docstring."""
    said = [
        "# Every field with its default and what it means. One that is left out has that; an unknown one is refused.",
        f"# All hosts of a job must agree, but for {', '.join(OF_A_HOST)}.",
    ]
    for name, value in Config().model_dump(mode="json").items():
        what = " ".join((Config.model_fields[name].description or "").split())
        said += ["", *textwrap.wrap(what, 120, initial_indent="# ", subsequent_indent="# ", break_on_hyphens=False)]
        said.append(yaml.safe_dump({name: value}).strip())
    return "\n".join(said) + "\n"


def load(path: str | Path | None) -> Config:
    """Load the configuration in `path` (YAML); the defaults for None or an empty file.

    Raises: ConfigError naming file and field.
    """
    if path is None or str(path) in ("", "."):
        return Config()
    path = Path(path)
    lines = "lines of the form `field: value`"
    try:
        data = yaml.load(path.read_text(encoding="utf-8"), _Loader)
        if data is not None and not isinstance(data, dict):
            found = f"{path} holds {'a list' if isinstance(data, list) else 'one value'}"
            raise ConfigError(found, lines, "name the YAML file of the plugin; `deadpool config --examples` lists some")
        return Config.model_validate(data or {})
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"configuration file {path} cannot be read ({error.__class__.__name__}: {error})",
            "a readable YAML file",
            "correct the path; with plain `deepspeed` the file must be there on every host",
        ) from error
    except yaml.YAMLError as error:
        reason = " ".join(str(error).split())
        raise ConfigError(f"{path} is not YAML ({reason})", lines, "correct the line that is named") from error
    except ValidationError as error:
        remedy = "correct the file (`deadpool config` explains all fields)"
        raise ConfigError(f"{path}: {_describe(error)}", remedy=remedy) from error


class _Loader(yaml.SafeLoader):  # type: ignore[misc]
    """YAML in which a key that comes twice is a mistake: the last one would win without a word."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        lines: dict[str, int] = {}
        for key, _ in node.value:
            name, line = str(key.value), key.start_mark.line + 1
            if name in lines and name != "<<":
                raise yaml.YAMLError(f"`{name}` is set on line {lines[name]} and again on line {line}: remove one")
            lines[name] = line
        found: dict[Any, Any] = super().construct_mapping(node, deep)
        return found


def _describe(error: ValidationError) -> str:
    """Describe pydantic's findings in one line, each with its field, the value found and the nearest known name."""
    findings: dict[str, str] = {}
    for item in error.errors():
        name, message = str(item["loc"][0]), item["msg"].removeprefix("Value error, ")
        if item["type"] == "extra_forbidden":
            near = difflib.get_close_matches(name, Config.model_fields, n=1, cutoff=0.5)
            hint = f"did you mean `{near[0]}`?" if near else "known: " + ", ".join(Config.model_fields)
            findings.setdefault(name, f"unknown field `{name}`; {hint}")
        else:
            findings.setdefault(name, f"`{name}`: {message} (found {item['input']!r})")
    return " | ".join(findings.values())
