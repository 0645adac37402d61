"""A scenario, which is what happens to one simulated job, as plain data: its layout, its pace, and its faults.

Rules of this file: a scenario is a function of its seed and of the ranges asked for; whatever strikes whom when is
written in it, so that it can be shown, saved, edited, run again and made smaller.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import yaml

from deadpool_plugin.core.placement import with_racks
from deadpool_plugin.core.types import NodeId, World
from deadpool_plugin.errors import ConfigError

KINDS = {
    "crash": "a host loses its power: silence",
    "kill": "all processes of a host are killed: its kernel resets every connection",
    "rack": "a rack loses its power, or several hosts where racks are not known",
    "process": "a rank's process is killed; its host is well",
    "error": "a rank's script raises",
    "poison": "the processes of a host raise an error of its device, `count` in all, each in its next step",
    "cursed": "a rank's script raises in its next steps while it runs on its host, `count` times",
    "broken": "a rank's script raises in its next steps wherever it runs, `count` times",
    "storm": "all processes of the job are killed within `seconds`, of every host or of every second",
    "stuck": "a rank's process stands still and is killed by its agent",
    "hang": "a rank's process hangs in a training call, before the collective that the others wait in",
    "skip": "a rank's process does not join a collective, and goes on to the next step's gate",
    "script": "a rank's process is held up in the script's own code, longer than a step may take",
    "slow": "a rank's process needs longer for a training call than a step may take, and gets on",
    "give_up": "a node's launcher ends it",
    "pause": "a host stands still and wakes up later with everything in hand",
    "load": "a host is so loaded that its agent gets to run now and then",
    "disk": "the storage of a host does not answer",
    "partition": "a host and the others hear nothing of each other",
    "oneway": "the others hear nothing of a host, which hears them",
    "part": "a host and some of the others hear nothing of each other",
    "rift": "the agents of two hosts hear nothing of each other any more, for good (once a job)",
    "pair": "two hosts hear nothing of each other any more, agents and training alike, for good (once a job)",
    "deaf": "a host hears nothing of another one any more, agents and training alike, for good (once a job)",
    "reset": "the training connections between two hosts are reset, and made again when groups are",
    "break": "the connection between two hosts is reset",
    "thin": "snapshots from and to a host take `strength` hundred times as long",
    "loss": "segments from and to a host are lost",
    "delay": "messages from and to a host are late",
    "duplicate": "messages from a host arrive twice",
    "flip": "bytes on the way to and from a host are changed",
    "corrupt": "a snapshot in a host's memory is changed",
    "mispair": "a process that takes a rank over issues a collective that its peers do not",
    "join": "a host joins the job",
    "stop": "a person ends the job",
}
COMMANDS = {
    "one": "brings a host",
    "two": "brings two hosts",
    "late": "fails, and brings a host the next time",
    "slow": "takes nearly as long as it may, and brings a host",
    "nobody": "ends well, and brings no host",
    "fails": "fails",
    "hangs": "is ended for its time-out",
}
"""What becomes of each run of the job's `spare_command`."""
WITH_COMMAND = 0.3
"""Share of jobs that have one."""
EARLY = 0.2
"""Share of jobs whose hosts are struck while they meet."""
DRIFT_MAX = 0.04
"""Clocks run faster or slower by so much at most: what the protocol assumes."""
SLOW = {"script", "slow"}
LASTING = {"pause", "load", "disk", "thin", "partition", "oneway", "part", "loss", "delay", "duplicate", "flip"}
MOMENTS = (
    "Send NodeFailed", "Send Prepare", "Send Promise", "Send Propose", "Send Accepted", "Send Decided", "Send Report",
    "Send Status", "Send Rehearse", "Send RankFailed", "Send JoinRequest", "Send Verdict", "AbortWorkers",
    "Reconfigure", "StartRehearsal", "Commit", "Emit NodeLost", "Emit SwapPlanned", "Emit SwapDone", "Emit Mirrored",
    "Emit Unprotected", "Emit WaitingForHost", "Got WorkerRestored", "Got SnapshotHeld", "Got StoreOffered",
    "Got SpareRehearsed", "Got WorkerLost", "Got LinkLost", "Send Compare", "Send Calls", "Send Replace",
)  # fmt: skip
"""Where in the protocol a fault may strike: an action a node has just carried out, or an input it has just had."""
WHO = ("actor", "leader", "active", "spare", "any", "buddy")


class Fault(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One fault.

    It is armed when some rank has made `at_step` steps (0: from the start), and strikes then, or at the `nth` `moment`
    after that, `delay_s` later. `who` is struck: `actor` is the node the moment belongs to; `pick` chooses among
    several. `count`: hosts at once (rack), processes of a rank one after the other (mispair). For so many `seconds`
    (what lasts); with what `strength` (a probability, or the seconds of a delay).
    """

    kind: str
    at_step: int = 0
    moment: str = ""
    nth: int = 1
    delay_s: float = 0.0
    who: str = "any"
    pick: int = 0
    count: int = 1
    seconds: float = 0.0
    strength: float = 0.3

    def __post_init__(self) -> None:
        for what, found, known in (
            ("kind", self.kind, KINDS), ("who", self.who, WHO), ("moment", self.moment, ("", *MOMENTS))
        ):  # fmt: skip
            if found not in known:
                raise ValueError(f"`{what}: {found}` is unknown; known: {', '.join(filter(None, known))}")


class Scenario(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One job. `shards`: how many different payloads its ranks have (fewer than ranks: data-parallel replicas).

    `early`: faults of step 0 strike while the hosts meet and link up; else once the first of them has done so.
    `command`: one of COMMANDS, "" if the job has none. `mirror_every`: 0 for `auto`. `transfer`: how long a snapshot is
    on its way, in steps. `save_every`: after how many steps rank 0 saves, or all do (`all_save`); 0: nobody.
    """

    seed: int
    active: int
    spares: int
    slots: int
    racks: int
    shards: int
    steps: int
    copies: int
    restarts_max: int
    wait_for_hosts: bool
    witness: bool
    latency_s: float
    compute_s: float
    drift: float
    restarts_window_s: float
    faults: tuple[Fault, ...]
    early: bool = False
    command: str = ""
    mirror_every: int = 1
    transfer: float = 0.5
    save_every: int = 0
    all_save: bool = False

    def __post_init__(self) -> None:
        if self.command not in ("", *COMMANDS):
            raise ValueError(f"`command: {self.command}` is unknown; known: {', '.join(COMMANDS)}")

    @property
    def ranks(self) -> int:
        return self.active * self.slots

    @property
    def world(self) -> World:
        node_of = tuple(node for node in range(self.active) for _ in range(self.slots))
        world = World(0, node_of, tuple(range(self.active, self.active + self.spares)))
        return with_racks(world, {node: self.rack_of(node) for node in world.members}, self.copies)

    @property
    def rack_names(self) -> list[str]:
        return [f"r{number}" for number in range(self.racks)]

    def rack_of(self, node: NodeId) -> str:
        """Hosts stand in `racks` racks by turns (0: nobody knows)."""
        return f"r{node % self.racks}" if self.racks else ""


class Ranges(msgspec.Struct, frozen=True):
    """Ranges that a campaign draws from; ends included."""

    nodes: tuple[int, int] = (5, 32)
    spares: tuple[int, int] = (1, 3)
    steps: int = 20
    faults: tuple[int, int] = (4, 7)


def scenario(seed: int, ranges: Ranges = Ranges(), fixed: Mapping[str, Any] | None = None) -> Scenario:
    """The scenario of `seed`, with the fields in `fixed` as they are there instead of drawn."""
    rng = random.Random(f"deadpool {seed}")
    low, high = ranges.nodes
    nodes = min(high, low + int(rng.expovariate(1 / 3.5))) if high > low else low
    spares = min(rng.randint(*ranges.spares), nodes - 1)
    active = nodes - spares
    slots = 1 if nodes > 12 else rng.choice((1, 1, 2))
    ranks = active * slots
    drawn = tuple(draw_fault(rng, ranges.steps) for _ in range(rng.randint(*ranges.faults)))
    found = Scenario(
        seed=seed,
        active=active,
        spares=spares,
        slots=slots,
        racks=rng.choice((0, 0, 3, 4)),
        shards=ranks if ranks < 2 or rng.random() < 0.75 else -(-ranks // 2),
        steps=ranges.steps,
        copies=rng.choice((1, 1, 1, 2)),
        restarts_max=rng.choice((1, 3)),
        wait_for_hosts=rng.random() < 0.2,
        witness=rng.random() < 0.2,
        latency_s=rng.choice((0.002, 0.02, 0.3)),
        compute_s=rng.choice((0.1, 0.4)),
        drift=rng.choice((0.0, 0.01, DRIFT_MAX)),
        restarts_window_s=rng.choice((30.0, 3600.0)),
        faults=drawn,
        early=rng.random() < EARLY,
        command=rng.choice(tuple(COMMANDS)) if rng.random() < WITH_COMMAND else "",
    )
    found = _with_mirrors(found, random.Random(f"mirrors {seed}"), ranges.steps)
    if not fixed:
        return found
    plain = {"early": False, "command": "", "mirror_every": 1, "transfer": 0.5, "save_every": 0, "all_save": False}
    found = msgspec.structs.replace(found, **{**plain, **fixed})
    return found if "shards" in fixed else msgspec.structs.replace(found, shards=found.ranks)


def _with_mirrors(found: Scenario, rng: random.Random, steps: int) -> Scenario:
    """Draw which steps are mirrored, how slowly, and what waits for it. It has a generator of its own."""
    thin = Fault(
        "thin",
        at_step=rng.randint(0, steps - 1),
        who=rng.choice(WHO[1:]),
        pick=rng.randrange(1000),
        seconds=rng.choice((1.0, 5.0, 20.0)),
        strength=rng.choice((0.05, 0.2)),
    )
    return msgspec.structs.replace(
        found,
        mirror_every=rng.choice((1, 1, 1, 0, 0, 0, 2, 3, 5)),
        transfer=rng.choice((0.5, 0.5, 2.0, 8.0)),
        save_every=rng.choice((0, 3, 4)),
        all_save=rng.random() < 0.5,
        faults=(*found.faults, thin) if rng.random() < 0.4 else found.faults,
    )


def fixed_fields(data: object) -> dict[str, Any]:
    """Return what a file says of a scenario (some of its fields, or all), checked. Raises: ValueError."""
    if not isinstance(data, dict):
        raise ValueError(f"a mapping of the fields of a scenario was expected, not {data!r}")
    data = {key: value for key, value in data.items() if key != "seed"}
    whole = msgspec.to_builtins(scenario(0)) | data
    try:
        checked = msgspec.convert(whole, Scenario)
    except msgspec.ValidationError as error:
        raise ValueError(str(error)) from error
    return {key: getattr(checked, key) for key in data}


def read_faults(path: Path | None) -> dict[str, Any]:
    """The fields `path` fixes; {} for None. Raises: ConfigError."""
    if path is None:
        return {}
    try:
        return fixed_fields(yaml.safe_load(path.read_text(encoding="utf-8")))
    except (OSError, UnicodeDecodeError, yaml.YAMLError, ValueError) as error:
        raise ConfigError(
            f"{path}: {error}", "a YAML file like those in tests/simulator/scenarios", "correct it"
        ) from error


def as_file(found: Scenario) -> dict[str, Any]:
    """`found` as plain data that `fixed_fields` reads."""
    return {key: value for key, value in msgspec.to_builtins(found).items() if key != "seed"}


_WEIGHTS = {
    "crash": 3, "kill": 4, "rack": 1, "process": 4, "error": 1, "poison": 0.7, "cursed": 0.7, "broken": 0.5,
    "storm": 0.5, "stuck": 1, "hang": 0.5, "skip": 0.3, "script": 0.3, "slow": 0.3, "give_up": 1, "pause": 3, "load": 1,
    "disk": 0.5,
    "partition": 2, "oneway": 1, "part": 0, "rift": 0.5, "pair": 0.5, "deaf": 0.5, "reset": 1, "break": 2, "loss": 2,
    "delay": 3, "duplicate": 2, "flip": 1, "corrupt": 1, "mispair": 1.5, "join": 2, "stop": 0.2, "thin": 0,
}  # fmt: skip
"""`part` is in scenarios only: who hears too few of the others leaves, though most of them are there, and the checkers
count that as a wrong verdict."""


_COUNTS = {"rack": (2, 3), "mispair": (1, 1, 2), "poison": (1, 2, 5), "cursed": (2, 2, 3), "broken": (1, 2, 3)}


def _seconds(rng: random.Random, kind: str) -> float:
    if kind in SLOW:
        return 20.0 + 80.0 * rng.random()
    return rng.choice((0.3, 3.0, 12.0, 45.0)) * (0.5 + rng.random()) if kind in LASTING else 0.0


def draw_fault(rng: random.Random, steps: int) -> Fault:
    kind = rng.choices(tuple(_WEIGHTS), tuple(_WEIGHTS.values()))[0]
    moment = rng.choice(MOMENTS) if rng.random() < 0.6 else ""
    return Fault(
        kind=kind,
        at_step=rng.randint(0, steps - 1),
        moment=moment,
        nth=1 + int(rng.expovariate(0.4)) if moment else 1,
        delay_s=rng.choice((0.0, 0.0, 0.01, 0.5, 5.0)) * rng.random(),
        who=rng.choice(WHO if moment else WHO[1:]),
        pick=rng.randrange(1000),
        count=rng.choice(_COUNTS.get(kind, (1,))),
        seconds=_seconds(rng, kind),
        strength=rng.choice((0.1, 0.5, 2.0)) if kind == "delay" else rng.choice((0.05, 0.3, 0.6)),
    )
