"""Runs a training script and kills the whole emulated node it is on, at a chosen place in a chosen step.

    python scripts/faults/inject.py --at 2@12:backward --marker kills.jsonl --observe DIR -- scripts/train_gpt.py ...

With `--plan FILE` other kinds of faults, too (plan.py), and at more places (hooks.py).

Rules of this file: the script and the plugin are not touched; megatron-core is hooked from outside, before the
script runs. A node is all processes whose environment has its `DEMO_NODE` and this job's `DEMO_JOB`; all of them get
SIGKILL, nobody is asked. Which step a process is in is read from the optimizer's own state, so it is right in
survivors that redo steps and in a process that has taken a rank over. A kill fires once per job: whoever creates
its file first, fires.

What the phases mean (step s is the s-th update):
  forward    inside GPTModel.forward of the second micro-batch of step s
  backward   half-way down the autograd graph of a backward_step of step s
  optimizer  this rank's inner torch optimizer has updated to s, MegatronOptimizer.step has not returned
  mirror     MegatronOptimizer.step has just returned from update s: its snapshot is on its way
  between    in the user's loop, after OptimizerParamScheduler.step
  startup    (step 0) the optimizer has been built, nothing has been trained
  before     MegatronOptimizer.step is about to look at the gradients of step s, nobody has updated anything
"""

from __future__ import annotations

import argparse
import faulthandler
import functools
import json
import os
import re
import runpy
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])  # started by path

from clusters import launched, processes

from faults import deepspeed_hooks, hooks, save_hooks
from faults.plan import Kill, Plan, fail_disk, is_rehearsal, strike

PHASES = ("forward", "backward", "optimizer", "mirror", "between")
AT = re.compile(rf"(\d+)@(\d+):({'|'.join(PHASES)})")


# Killing


def kill_node(job: str, node: int, before: Callable[[], None]) -> None:
    """SIGKILL every process of the node.

    All are stopped before the first is killed, as a host's are when it loses its power: else a launcher has time to
    see its child die and to leave with an exit code of its own. What was forked meanwhile is found by looking again.
    `before` is called once all stand still and none is dead: a scan of /proc takes its time on a busy machine.
    """
    if "DEMO_LEADER" in os.environ:  # forked nodes have no environment of their own in /proc
        leader = int(os.environ["DEMO_LEADER"])
        for pid in processes.living(leader) - {os.getpid()}:
            processes.send(pid, signal.SIGSTOP)
        before()
        processes.signal_node(leader, signal.SIGKILL)
    if os.fork():
        while True:  # a worker dies with its supervisor, so it cannot be the one who kills them all
            signal.pause()
    stopped: set[int] = set()
    while found := {pid for pid, its in launched.tagged_processes(job) if its == node} - stopped - {os.getpid()}:
        for pid in found:
            processes.send(pid, signal.SIGSTOP)
        stopped |= found
    before()
    for pid in stopped:
        processes.send(pid, signal.SIGKILL)
    os._exit(0)


class Injector:
    """The faults planned for this process's node.

    Args:
        samples_per_step: for optimizers that keep no `step` in their state (SGD): global batch size, from which
            the scheduler's position gives the step. Otherwise learned from the scheduler's first increment.
    """

    def __init__(
        self, kills: list[Kill], marker: Path | None, observe: Path | None, samples_per_step: int, holds: bool = False
    ) -> None:
        self.node, self.job = int(os.environ["DEMO_NODE"]), os.environ.get("DEMO_JOB", "")
        self.plan = Plan([kill for kill in kills if kill.node in (-1, self.node)], marker)
        self.observer = Observer(observe) if observe else None
        self.samples_per_step, self.holds = samples_per_step, holds
        self.model: list[Any] = []
        self.optimizer: Any = None
        self.scheduler: Any = None
        self.completed: Callable[[], int] = self._updates_of_optimizers
        """How many updates this process's state has seen."""
        self.forwards: tuple[int, int] = (0, 0)
        self.in_second_microbatch = False

    def reached(self, phase: str, step: int) -> None:
        """Called at each place where a fault can be; does not return if one is planned there that kills.

        A process that only rehearses a rank is at none of them but `rehearsal`.
        """
        if is_rehearsal() == (phase == "rehearsal"):
            rank = int(os.environ.get("RANK", "-1"))
            if self.plan.marker and self.plan.takes_poison(rank):
                fail_disk()
            self.strike_if_due(phase, step, rank, os.getpid())

    def strike_if_due(self, phase: str, step: int, rank: int, pid: int) -> None:
        kill = self.plan.due(phase, step, self.node, rank)
        if kill is not None:
            record = functools.partial(self.plan.record, kill, self.node, rank, step)
            strike(kill, self.plan, pid, lambda before: kill_node(self.job, self.node, before), record)

    def hold(self, step: int) -> None:
        """Say who runs the rank, and wait for whoever watches the job."""
        if self.holds and not is_rehearsal():
            self.plan.tell_pid(int(os.environ["RANK"]))
            self.plan.hold(step)

    @property
    def has_step_state(self) -> bool:
        return any(_steps(part) for part in self.torch_optimizers())

    def _updates_of_optimizers(self) -> int:
        steps = [step for part in self.torch_optimizers() for step in _steps(part)]
        if steps:
            return max(steps)
        if self.scheduler is None or not self.samples_per_step:
            return 0
        return int(self.scheduler.num_steps // self.samples_per_step)

    def torch_optimizers(self) -> list[Any]:
        if self.optimizer is None:
            return []
        return [part.optimizer for part in getattr(self.optimizer, "chained_optimizers", [self.optimizer])]


def _steps(optimizer: Any) -> list[int]:
    """The `step` counters of a torch optimizer: per parameter (torch), or per group (fused ones)."""
    if optimizer is None:
        return []
    per_group = [int(group["step"]) for group in optimizer.param_groups if group.get("step") is not None]
    first = next((state for state in optimizer.state.values() if "step" in state), None)
    return per_group + ([int(first["step"])] if first else [])


def tensors_of(optimizer: Any) -> list[Any]:
    """Main parameters and moments (not the counters, which frameworks replace as they like)."""
    found = []
    for param in (param for group in optimizer.param_groups for param in group["params"]):
        moments = [value for _, value in sorted(optimizer.state.get(param, {}).items()) if getattr(value, "ndim", 0)]
        found += [param, *moments]
    return found


# Proof of the demonstration that survivors kept their objects


class Observer:
    """One small file per process: its group objects and where its training state lives, first and last seen."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.first: dict[str, Any] | None = None
        self.kept: list[Any] = []

    def observe(self, step: int, owners: list[Any], storages: dict[str, list[Any]]) -> None:
        """`owners` have groups among their attributes; `storages`: lists of tensors by what they are for."""
        import torch.distributed as dist

        groups: dict[str, Any] = {}
        for number, owner in enumerate(owners):
            for name, value in vars(owner).items():
                members = value if isinstance(value, list) else [value]
                found = {f"{number}.{name}.{i}": v for i, v in enumerate(members) if isinstance(v, dist.ProcessGroup)}
                groups.update(found)
        seen = {
            "step": step,
            "groups": {name: id(group) for name, group in groups.items()},
            "storages": {name: [tensor.data_ptr() for tensor in tensors] for name, tensors in storages.items()},
        }
        if self.first is None:
            self.first = seen
            self.kept = list(groups.values())  # while these live, no other object can have their id
        line = {"rank": dist.get_rank(), "pid": os.getpid(), "first": self.first, "last": seen}
        path = self.folder / f"rank{dist.get_rank()}.{os.getpid()}.json"
        temporary = path.with_suffix(".tmp")
        temporary.write_text(json.dumps(line))
        temporary.replace(path)


# Hooks, each on the outside of one function of megatron-core


def install(injector: Injector) -> None:
    hook_optimizer(injector)
    hook_scheduler(injector)
    hook_forward(injector)
    hook_backward(injector)
    hooks.hook_worker(injector)
    save_hooks.install(injector)


def hook_optimizer(injector: Injector) -> None:
    from megatron.core.optimizer import get_megatron_optimizer as original
    from torch.optim.optimizer import register_optimizer_step_post_hook

    @functools.wraps(original)
    def get_megatron_optimizer(config: Any, model_chunks: list[Any], *args: Any, **kwargs: Any) -> Any:
        injector.model = model_chunks
        optimizer = injector.optimizer = original(config, model_chunks, *args, **kwargs)
        injector.reached("startup", 0)
        injector.reached("rehearsal", 0)
        step, prepare_grads = optimizer.step, optimizer.prepare_grads

        @functools.wraps(prepare_grads)
        def before_any_update() -> Any:
            injector.reached("before", injector.completed() + 1)
            return prepare_grads()

        @functools.wraps(step)
        def step_then_mirror() -> Any:
            result = step()
            injector.reached("mirror", injector.completed() + (not injector.has_step_state))
            return result

        optimizer.step, optimizer.prepare_grads = step_then_mirror, before_any_update
        return optimizer

    def updated(inner: Any, args: Any, kwargs: Any) -> None:
        if inner in injector.torch_optimizers():
            injector.reached("optimizer", injector.completed() + (not injector.has_step_state))

    for module in list(sys.modules.values()):  # whoever imported it by name has it by name
        if getattr(module, "__dict__", {}).get("get_megatron_optimizer") is original:
            module.__dict__["get_megatron_optimizer"] = get_megatron_optimizer
    register_optimizer_step_post_hook(updated)


def hook_scheduler(injector: Injector) -> None:
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    original = OptimizerParamScheduler.step

    @functools.wraps(original)
    def step(self: Any, increment: int) -> None:
        original(self, increment)
        if increment == 0:  # its own constructor's call
            return
        injector.scheduler = self
        injector.samples_per_step = injector.samples_per_step or increment
        completed = injector.completed()
        observe(injector, completed)
        injector.reached("between", completed)
        injector.hold(completed)

    OptimizerParamScheduler.step = step


def observe(injector: Injector, step: int) -> None:
    from megatron.core import parallel_state

    if injector.observer:
        parameters = [parameter for chunk in injector.model for parameter in chunk.parameters()]
        storages = {
            "parameters": parameters,
            "gradients": [parameter.main_grad for parameter in parameters],
            "optimizer": [tensor for optimizer in injector.torch_optimizers() for tensor in tensors_of(optimizer)],
        }
        injector.observer.observe(step, [parallel_state], storages)


def hook_forward(injector: Injector) -> None:
    from megatron.core.pipeline_parallel import schedules
    from megatron.core.transformer.transformer_block import TransformerBlock

    schedule_forward, block_forward = schedules.forward_step, TransformerBlock.forward

    @functools.wraps(schedule_forward)
    def forward_step(step_function: Any, data: Any, model: Any, microbatches: int, *args: Any, **kwargs: Any) -> Any:
        if model.training:
            step = injector.completed() + 1
            count = injector.forwards[1] + 1 if injector.forwards[0] == step else 1
            injector.forwards = (step, count)
            injector.in_second_microbatch = count >= min(2, microbatches)
        try:
            return schedule_forward(step_function, data, model, microbatches, *args, **kwargs)
        finally:
            injector.in_second_microbatch = False

    @functools.wraps(block_forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if injector.in_second_microbatch:
            injector.reached("forward", injector.completed() + 1)
        return block_forward(self, *args, **kwargs)

    schedules.forward_step = forward_step
    TransformerBlock.forward = forward


def hook_backward(injector: Injector) -> None:
    from megatron.core.pipeline_parallel import schedules

    original = schedules.backward_step

    @functools.wraps(original)
    def backward_step(input_tensor: Any, output_tensor: Any, *args: Any, **kwargs: Any) -> Any:
        step = injector.completed() + 1
        if any(kill.phase == "backward" and kill.step in (0, step) for kill in injector.plan.kills):
            output = output_tensor[0] if isinstance(output_tensor, list) else output_tensor
            handle = halfway_node(output).register_prehook(lambda grads: injector.reached("backward", step))
            try:
                return original(input_tensor, output_tensor, *args, **kwargs)
            finally:
                handle.remove()
        return original(input_tensor, output_tensor, *args, **kwargs)

    schedules.backward_step = backward_step


def halfway_node(output: Any) -> Any:
    """A node half-way between the output and the leaves of its autograd graph, along the longest first branch."""
    chain = [output.grad_fn]
    while following := [node for node, _ in chain[-1].next_functions if node is not None]:
        chain.append(following[0])
    return chain[len(chain) // 2]


def parse_args(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--at", action="append", default=[], metavar="NODE@STEP:PHASE", help="/".join(PHASES))
    parser.add_argument("--plan", type=Path, help="JSON file of faults (faults.plan.Kill), for every process the same")
    parser.add_argument("--marker", type=Path, help="file that gets one JSON line per kill, before it happens")
    parser.add_argument("--observe", type=Path, help="folder for one JSON file per process")
    parser.add_argument("--samples-per-step", type=int, default=0, help="global batch size; needed with SGD only")
    parser.add_argument("--framework", choices=("megatron", "deepspeed"), default="megatron", help="what to hook")
    parser.add_argument("--local_rank", "--local-rank", help="from the launcher, passed on")
    parser.add_argument("script", nargs=argparse.REMAINDER, help="-- SCRIPT ARGUMENTS")
    args = parser.parse_args(argv)
    script = args.script[1:] if args.script[:1] == ["--"] else args.script
    args.kills = Plan.load(args.plan, args.marker).kills if args.plan else []
    for text in args.at:
        match = AT.fullmatch(text)
        if not match:
            parser.error(f"--at {text}: expected NODE@STEP:PHASE with PHASE one of {' '.join(PHASES)}")
        args.kills.append(Kill(len(args.kills), int(match[1]), int(match[2]), match[3]))
    if not script or (args.kills and not args.marker):
        parser.error("expected [--at ... --marker FILE] -- SCRIPT ARGUMENTS")
    if args.local_rank is not None:
        script.append(f"--local_rank={args.local_rank}")
    return args, script


def main() -> None:
    args, script = parse_args(sys.argv[1:])
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    hook = install if args.framework == "megatron" else deepspeed_hooks.install
    hook(Injector(args.kills, args.marker, args.observe, args.samples_per_step, holds=args.plan is not None))
    sys.argv = script
    sys.path[0] = str(Path(script[0]).resolve().parent)
    runpy.run_path(script[0], run_name="__main__")


if __name__ == "__main__":
    main()
