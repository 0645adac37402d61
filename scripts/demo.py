"""Kill a node of a running job and look: the demonstration behind `scripts/demo.sh`.

A small GPT trains on emulated nodes of this machine under the real `deepspeed` launcher and the plugin; whole nodes
get SIGKILL; a spare takes over. Afterwards every rank's loss, gradient norm and final state is compared bitwise with
a run of the same script that never failed and knew no plugin. The last line printed is one JSON object; the exit
code is 0 only if everything promised holds.

Rules of this file: it observes the job and never steers it. Progress is shown with the plugin's own reader of event
logs; the verdict uses no code of the plugin. A terminal gets a bar below the lines, anything else lines only.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import IO, Any

import compare_runs
import make_corpus
from clusters import demo_report, references
from clusters.demo_jobs import CACHE, JOBS, SCRIPTS, parse_args
from clusters.demo_report import WHEN, host, listed, numbered
from clusters.launched import REPOSITORY, Cluster, configure, folder_size, last_error, read_events, read_json_lines
from rich.console import Console, RenderableType
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

sys.path.insert(0, str(REPOSITORY))

from deadpool_plugin import events as job_events
from deadpool_plugin.agent.reports import sentence
from deadpool_plugin.cli.jobview import Follower, JobView
from deadpool_plugin.cli.watch import STYLES

MADE_HERE = "launcher output observe stacks hostfile secret deadpool.yaml kills.jsonl* *.png events.jsonl summary.json"
MADE_HERE += " store resumed"
CONSOLE = Console(force_terminal=sys.stdout.isatty(), highlight=False, soft_wrap=True)
LOOK_S = 0.2
STARTING = "starting: imports torch"


class Failed(Exception):
    """The demonstration cannot go on; the message says why."""


# The two runs


def script_and_arguments(args: argparse.Namespace) -> list[str]:
    job = JOBS[args.framework]
    return [str(job.script), *job.arguments(args)]


def reference_run(args: argparse.Namespace) -> Path:
    """Folder of the same training without plugin and without faults; run now, unless it was run before."""
    job = JOBS[args.framework]
    folder = CACHE / "reference" / references.key(job.arguments(args), args.world, job.script)
    with references.made_once(folder) as running:
        if running is None:
            tell(f"undisturbed run: kept from an earlier demonstration ({folder.relative_to(REPOSITORY)})")
            return folder
        tell(f"undisturbed run: {args.world} ranks train for {args.steps} steps without the plugin; nothing is killed")
        cluster = Cluster(running, nodes=1, slots=args.world)
        try:
            run_plain = [str(SCRIPTS / "run_plain.py"), "--ranks", str(args.world), "--logs", str(running / "output")]
            run_plain += ["--preload", ",".join(job.plain_preload)]
            cluster.start(0, [sys.executable, *run_plain, "--", *script_and_arguments(args)])
            with Bar("undisturbed run", args.steps) as bar:
                watch(cluster, args, lambda: bar.show(*newest_step(running / "output")))
        finally:
            cluster.close()
        if cluster.exit_codes() != [0]:
            said = last_error(running)
            raise Failed(f"the undisturbed run ended with exit code {cluster.exit_codes()[0]}{said}; logs: {running}")
    return folder


def protected_run(args: argparse.Namespace, resume: Path | None = None) -> Cluster:
    """The run that is killed, or goes on from `resume`. Returns when it has ended; raises Failed if it hangs."""
    folder = args.out if resume is None else args.out / "resumed"
    cluster = Cluster(folder, args.nodes + args.spares, args.ranks_per_node)
    fields = {"spares": args.spares, "patience_s": args.patience, "preload": JOBS[args.framework].preload}
    if args.stop_at or args.store_every_s is not None:
        fields |= {"store_dir": str(args.out / "store"), "store_every_s": args.store_every_s}
    if resume is not None:
        fields |= {"resume": str(resume)}
    configure(folder / "deadpool.yaml", args.out / "output", **fields)
    faults = [word for node, step, phase in args.kills for word in ("--at", f"{node}@{step}:{phase}")]
    injector = [
        *faults,
        "--framework",
        args.framework,
        "--marker",
        str(args.out / "kills.jsonl"),
        "--observe",
        str(args.out / "observe"),
    ]
    command = ["deadpool_plugin.run", str(SCRIPTS / "faults" / "inject.py"), *injector]
    command += ["--", *script_and_arguments(args), "--startup-s", str(args.startup_s)]
    command += ["--deadpool-config", str(folder / "deadpool.yaml")]
    size = f"{args.nodes} hosts, {args.ranks_per_node} ranks a host; spare hosts: {args.spares}"
    if resume is None:
        tell(f"protected run: the same training with the plugin; {size}")
    else:
        tell(f"resumed run: the same command goes on from {resume.relative_to(args.out)}")
    to_end = ToEnd(cluster, args) if resume is None and (args.stop_at or args.kill_all) else None
    if to_end is not None:
        tell(f"  planned: every host gets {to_end.signal.name} in step {to_end.step}")
    for node, step, phase in args.kills:
        tell(f"  planned: {host(node)} is killed in step {step}, {WHEN[phase]}")
    if args.kills and any("random" in kill for kill in args.kill or ["random"]):
        tell(f"  drawn: --seed {args.seed} draws it again")
    try:
        cluster.launch(["--module", *command])
        with Bar("protected run" if resume is None else "resumed run", args.steps) as bar:
            story = Story(args, bar, to_end)
            if resume is not None:
                story.follower.poll()  # what the job before has said
            watch(cluster, args, story.look)
        left = cluster.close(grace_s=5.0)
    finally:
        cluster.close()
    if left:
        raise Failed(f"{len(left)} processes were still there after the job's end and had to be killed")
    return cluster


def ended_and_resumed_run(args: argparse.Namespace) -> tuple[Cluster, int]:
    """The run that is ended as a whole, and the one that goes on. Returns: the second one; the committed steps lost."""
    protected_run(args)
    events, left = read_events(args.out / "output"), [*(args.out / "store").glob("*")]
    if not left:
        raise Failed(f"no host has left its state in {args.out / 'store'}{last_error(args.out / 'launcher')}")
    cluster = protected_run(args, left[0])
    committed = max(event["step"] for event in events if event["event"] in ("StepCommitted", "StateWritten"))
    resumed = [event["step"] for event in read_events(args.out / "output") if event["event"] == "JobResumed"]
    return cluster, max(0, committed - resumed[-1]) if resumed else committed + 1


def watch(cluster: Cluster, args: argparse.Namespace, look: Callable[[], None]) -> None:
    """Wait for every launcher's end; `look` shows what happens meanwhile.

    Raises: Failed on a hang, with all stacks dumped.
    """
    size, changed = -1, time.monotonic()
    while None in cluster.exit_codes():
        time.sleep(LOOK_S)
        look()
        if (now_size := folder_size(cluster.folder)) != size:
            size, changed = now_size, time.monotonic()
        if time.monotonic() - changed > args.stall + args.startup_s:
            cluster.dump_stacks(cluster.folder / "stacks")
            raise Failed(
                f"nothing was written for {args.stall + args.startup_s:.0f} s "
                f"(a busy machine may need a longer --stall); stacks: {cluster.folder / 'stacks'}"
            )
    look()


# Progress


class Bar(Progress):
    """Progress of a run: on a terminal a bar with step and loss below all lines, elsewhere a line now and then."""

    def __init__(self, run: str, steps: int) -> None:
        self.steps, self.every, self.said, self.hosts = steps, max(1, steps // 6), 0, Text()
        columns = (
            TextColumn("{task.description}"),
            BarColumn(30),
            TextColumn("{task.fields[done]}"),
            TimeElapsedColumn(),
        )
        super().__init__(*columns, console=CONSOLE, refresh_per_second=4, disable=not is_live())
        self.run = self.add_task(run, total=steps, done=STARTING)
        if self.disable:
            tell(f"  {STARTING}")

    def get_renderables(self) -> Iterable[RenderableType]:
        yield from super().get_renderables()
        if self.hosts:
            yield self.hosts

    def show(self, step: int, loss: float | None) -> None:
        if step < 1:
            return
        done = f"step {step}/{self.steps}" + (f", loss {loss:.4f}" if loss is not None else "")
        self.update(self.run, completed=step, done=done)
        if self.disable and step > self.said and (step == self.steps or step // self.every > self.said // self.every):
            self.said = step
            tell(f"  {done}")


def hosts(numbers: str) -> str:
    """Write `0, 2` as `node0, node2`."""
    return listed(map(host, numbers.split(", ")))


def is_live() -> bool:
    return CONSOLE.is_terminal and not CONSOLE.is_dumb_terminal


def newest_step(output: Path) -> tuple[int, float | None]:
    """Read step and loss from the newest line of rank 0, wherever it runs; (0, None) before the first."""
    text = "".join(log.read_text(errors="replace") for log in output.glob("rank0000*.log"))
    lines = re.findall(r"^step +(\d+)/\d+ \| (?:loss (\S+))?", text, re.MULTILINE)
    step, loss = max(lines, key=lambda line: int(line[0]), default=(0, ""))
    return int(step), float(loss) if loss else None


class ToEnd:
    """A job all of whose processes get a signal at the same instant."""

    def __init__(self, cluster: Cluster, args: argparse.Namespace) -> None:
        self.cluster, self.step = cluster, args.stop_at or args.kill_all
        self.signal = signal.SIGTERM if args.stop_at else signal.SIGKILL
        self.is_over = False

    def look(self, step: int) -> None:
        if self.is_over or step < self.step - 1:
            return
        self.is_over = True
        for pid in self.cluster.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, self.signal)
        tell(f"  every process of every host got {self.signal.name} after step {step}")


class Story:
    """The story of the protected run: a line for each kill and event that a person wants to know of."""

    def __init__(self, args: argparse.Namespace, bar: Bar, to_end: ToEnd | None = None) -> None:
        self.to_end = to_end
        self.marker, self.world, self.bar = args.out / "kills.jsonl", args.world, bar
        self.follower, self.view = Follower(args.out / "output"), JobView()
        self.kills: list[dict[str, Any]] = []
        self.reached: dict[tuple[str, int], set[int]] = {}
        self.said: list[str] = []

    def look(self) -> None:
        """Tell what is new and bring the bar up to date."""
        kills = read_json_lines(self.marker)
        for kill in kills[len(self.kills) :]:
            tell(f"  {host(kill['node'])} is killed in step {kill['step']}, {WHEN[kill['phase']]} (SIGKILL)")
        self.kills = kills
        for event in self.follower.poll():
            for line in self.lines(event):
                if line not in self.said[-1:]:  # every host says that the job has ended
                    self.said.append(line)
                    tell(f"  {line}")
            self.view.apply(event)
        step, loss = newest_step(self.follower.folder)
        self.bar.show(step, loss)
        if self.to_end is not None:
            self.to_end.look(step)
        rows = ((f"{host(row.node)} {row.state}   ", STYLES[row.state]) for row in self.view.rows())
        self.bar.hosts = Text.assemble(*rows)

    def lines(self, event: job_events.Event) -> Iterator[str]:
        """Yield at most one line; `view` does not know the event yet."""
        match event:
            case job_events.WorldFormed(node_of=node_of, spares=spares):
                active, idle = listed(map(host, sorted(set(node_of)))), listed(map(host, spares)) or "none"
                yield f"hosts of the {len(node_of)} ranks: {active}; standing by: {idle}"
            case job_events.SpareReady(spare=spare, ranks=ranks) if self.view.world is not None:
                owners = sorted({self.view.world.node_of[rank] for rank in ranks})
                yield f"{host(spare)} has rehearsed {numbered(ranks)} of {listed(map(host, owners))}"
            case job_events.SwapPlanned(restore_step=step, takers=takers) if takers:
                for lost, taker in takers.items():
                    moved = numbered(self.view.world.ranks_of(int(lost)) if self.view.world is not None else ())
                    yield f"{host(str(taker))} takes over {moved} of {host(lost)}; all go back to step {step}"
            case job_events.StateRestored(step=step) if self.is_last(event):
                yield f"the state of step {step} is restored on all {self.world} ranks"
            case job_events.SwapDone(duration_s=duration):
                yield f"training goes on, {duration:.2f} s after the loss was noticed"
            case job_events.FirstStepDone(step=step) if self.is_last(event):
                yield f"step {step} is done by all {self.world} ranks"
            case job_events.Unprotected():
                pass
            case _:
                named = re.sub(r"\bnode (\d+(?:, \d+)*)", lambda them: hosts(them[1]), sentence(event))
                yield from filter(None, [named])

    def is_last(self, event: job_events.StateRestored | job_events.FirstStepDone) -> bool:
        """Tell whether the event's rank is the last of all in its generation."""
        ranks = self.reached.setdefault((type(event).__name__, event.generation), set())
        before = len(ranks)
        ranks.add(event.rank)
        return bool(before < len(ranks) == self.world)


STARTED = time.monotonic()


def tell(text: str) -> None:
    CONSOLE.print(f"[{time.monotonic() - STARTED:6.1f} s] {text}", markup=False)


# The verdict


def judge(args: argparse.Namespace, reference: Path, cluster: Cluster) -> tuple[dict[str, Any], list[str]]:
    """(the summary, everything that does not hold)"""
    kills, events = read_json_lines(args.out / "kills.jsonl"), read_events(args.out / "output")
    compared = compare_runs.compare(reference, args.out / "output")
    killed = {kill["node"] for kill in kills}
    ranks = range(args.ranks_per_node)
    staying = [node for node in range(args.nodes) if node not in killed] if cluster.folder == args.out else []
    survivors = [node * args.ranks_per_node + i for node in staying for i in ranks]
    summary = {
        "bit_exact": compared["bit_exact"],
        "steps": compared["steps"],
        "swaps": demo_report.swaps(kills, events),
    }
    summary |= demo_report.kept(args.out / "observe", survivors, args.steps)
    problems = [] if compared["bit_exact"] else [f"not bitwise equal: {compared['difference']}"]
    problems += [f"{compared['steps']} steps, {args.steps} expected"] if compared["steps"] != args.steps else []
    proofs = {"survivor_pids_kept": "processes", "handles_kept": "communicators", "storages_kept": "memory"}
    if gone := [what for name, what in proofs.items() if not summary[name]]:
        problems.append(f"the survivors did not keep their {listed(gone)} to the end")
    missed = [kill for kill in args.kills if kill not in fired(kills)]
    problems += [
        f"{host(node)} was not killed in step {step}, {WHEN[phase]}, as planned" for node, step, phase in missed
    ]
    for swap in summary["swaps"]:
        if unknown := [name for name, value in swap.items() if value is None]:
            problems.append(f"swap of {host(swap['node'])}: no event tells {listed(unknown)}")
    codes = {node: code for node, code in enumerate(cluster.exit_codes()) if node not in killed}
    alike: dict[tuple[int, str], list[Path]] = {}  # what several launchers say is one problem
    for node, code in codes.items():
        if code:
            log = cluster.folder / "launcher" / f"node{node}.txt"
            alike.setdefault((code, last_error(log).partition(": ")[2]), []).append(log)
    for (code, _), logs in alike.items():
        said, where = last_error(logs[0]), logs[0] if len(logs) == 1 else logs[0].parent
        problems.append(f"launcher of {listed([log.stem for log in logs])} ended with {code}{said}; log: {where}")
    summary["exit_code"] = next((code for code in codes.values() if code), 1 if problems else 0)
    return summary, problems


def fired(kills: list[dict[str, Any]]) -> set[tuple[int, int, str]]:
    return {(kill["node"], kill["step"], kill["phase"]) for kill in kills}


def report(args: argparse.Namespace, reference: Path, cluster: Cluster) -> dict[str, Any]:
    """Write everything into the output folder and tell it. Returns the summary."""
    tell("comparing every rank's losses, gradient norms and final state with the undisturbed run's")
    summary, problems = judge(args, reference, cluster)
    events, kills = read_events(args.out / "output"), read_json_lines(args.out / "kills.jsonl")
    (args.out / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    settings = {name: value for name, value in vars(args).items() if name not in ("kill", "out")}
    (args.out / "summary.json").write_text(json.dumps(summary | {"problems": problems, "settings": settings}, indent=1))
    try:
        expected, found = (compare_runs.read_run(folder).losses() for folder in (reference, args.out / "output"))
        demo_report.draw_losses(args.out / "loss.png", expected, found, kills, events)
    except compare_runs.Malformed as error:
        tell(f"no loss.png: {error}")
    if kills:
        nodes = args.nodes + args.spares
        demo_report.draw_timeline(args.out / "timeline.png", summary["swaps"], kills, events, nodes)
    say_summary(args, summary, problems, demo_report.moves(events))
    return summary


def say_summary(
    args: argparse.Namespace, summary: dict[str, Any], problems: list[str], moves: dict[int, demo_report.Move]
) -> None:
    """Print the result for people: a name and a value a line."""
    result = [f"FAILED: {problem}" for problem in problems] or [
        f"{summary['steps']} steps on {args.world} ranks equal those of the undisturbed run bit for bit:",
        "every loss, gradient norm and learning rate, the final parameters and optimizer state",
    ]
    said = [("result", line) for line in result]
    for swap in summary["swaps"]:
        said += [(host(swap["node"]), line) for line in demo_report.swap_in_words(swap, moves.get(swap["node"]))]
    if not problems and summary["swaps"]:
        said.append(("survivors", "kept their processes, process groups and memory, over new connections"))
    pictures = {"loss.png": "the loss of both runs", "timeline.png": "each host around the kill"}
    said += [("picture", f"{args.out / name}: {what}") for name, what in pictures.items() if (args.out / name).exists()]
    said.append(("logs", f"{args.out}: launcher/ (each host's terminal), output/ (ranks, events), summary.json"))
    before = ""
    CONSOLE.print()
    for name, line in said:
        CONSOLE.print(f"  {'' if name == before else name:10s} {line}", markup=False)
        before = name
    CONSOLE.print()


def prepare_folder(folder: Path) -> IO[str]:
    """Make it, and remove what an earlier demonstration left in it (nothing else).

    Returns the file whose lock keeps other demonstrations out. Raises: SystemExit if one is there.
    """
    folder.mkdir(parents=True, exist_ok=True)
    lock = open(folder / "lock", "w")  # noqa: SIM115 (held until the end)
    try:
        fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        sys.exit(f"demo.sh: another demonstration writes to {folder}; name another folder with --out DIR")
    except OSError:  # a file system without locks
        pass
    earlier = [path for pattern in MADE_HERE.split() for path in folder.glob(pattern)]
    if earlier:
        tell(f"removing what an earlier demonstration left in {folder} (next time --out DIR keeps both)")
    for path in earlier:
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    return lock


def main() -> int:
    args = parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    lock = prepare_folder(args.out)
    summary: dict[str, Any] = {"bit_exact": False, "steps": 0, "swaps": [], "survivor_pids_kept": False}
    summary |= {"handles_kept": False, "storages_kept": False, "exit_code": 1}
    try:
        make_corpus.ensure(CACHE / "corpus")
        reference = reference_run(args)
        if args.stop_at or args.kill_all:
            cluster, steps_lost = ended_and_resumed_run(args)
            summary = report(args, reference, cluster) | {"resumed": True, "steps_lost": steps_lost}
        else:
            summary = report(args, reference, protected_run(args))
    except (Failed, OSError, subprocess.CalledProcessError, KeyboardInterrupt) as problem:
        ended = isinstance(problem, KeyboardInterrupt)
        summary["exit_code"] = 130 if ended else 1
        said = "ended by Ctrl-C" if ended else str(problem)
        (args.out / "summary.json").write_text(json.dumps(summary | {"problems": [said]}, indent=1))
        say_summary(args, summary, [said], {})
    lock.close()
    print(json.dumps(summary), flush=True)
    return int(summary["exit_code"])


if __name__ == "__main__":
    sys.exit(main())
