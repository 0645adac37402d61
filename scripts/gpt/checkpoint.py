"""Checkpoints of the small GPT in the three formats people use, and the way back from one.

Rules of this file: plain Megatron and torch. A checkpoint is a folder `iter_0000010`; the newest complete one is named
in `latest_checkpointed_iteration.txt`, written last. A run that loads one goes on exactly as if it had not stopped.

  torch_dist  megatron.core.dist_checkpointing; asynchronous through AsyncCallsQueue
  torch_dcp   torch.distributed.checkpoint; asynchronous through async_save
  torch       torch.save, one file a rank; never asynchronous
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from megatron.core import dist_checkpointing, tensor_parallel
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue
from torch.distributed.checkpoint import DefaultLoadPlanner
from torch.distributed.checkpoint.planner import ReadItem

LATEST = "latest_checkpointed_iteration.txt"
OPTIMIZER_FORMAT = {"distrib_optim_sharding_type": "dp_reshardable"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--save", type=Path, help="folder for checkpoints; one is saved at the end, too")
    parser.add_argument("--save-interval", type=int, default=0, help="steps between checkpoints; 0: only at the end")
    parser.add_argument("--load", type=Path, help="folder whose latest checkpoint training goes on from, if it has one")
    parser.add_argument("--ckpt-format", choices=("torch_dist", "torch_dcp", "torch"), default="torch_dist")
    parser.add_argument("--load-s", type=float, default=0.0, help="seconds that reading the tensors takes; not `torch`")
    parser.add_argument("--exit-interval", type=int, default=0, help="end, with a checkpoint, after this many steps")
    parser.add_argument("--async-save", action="store_true", help="write behind the next steps' back")


def latest(folder: Path | None) -> int:
    """The iteration of the newest complete checkpoint in `folder`; 0 if there is none."""
    tracker = folder / LATEST if folder else None
    return int(tracker.read_text()) if tracker and tracker.exists() else 0


class Checkpoints:
    """Saves and loads the whole training state. Collective: all ranks call every method in the same order."""

    def __init__(self, args: argparse.Namespace, model: list[Any], optimizer: Any, scheduler: Any) -> None:
        self.args, self.model, self.optimizer, self.scheduler = args, model, optimizer, scheduler
        self.parts: list[Any] = getattr(optimizer, "chained_optimizers", [optimizer])
        self.queue = AsyncCallsQueue()
        self.pending: tuple[int, Future[Any]] | None = None
        self.group = dist.new_group(backend="gloo") if args.save and args.async_save else None
        self.saved = latest(args.load)

    # ---- saving

    def after_step(self, step: int) -> bool:
        """Finish what was written meanwhile; save if it is time to, and at the end. Return whether this is the end."""
        last = step == self.args.train_iters or bool(self.args.exit_interval and step % self.args.exit_interval == 0)
        if not self.args.save:
            return last
        if self.args.async_save:
            self.finish(wait=False)
        if last or (self.args.save_interval and step % self.args.save_interval == 0):
            self.finish(wait=True)
            self.save(step)
        if last:
            self.finish(wait=True)
        return last

    def save(self, step: int) -> None:
        folder = self.args.save / f"iter_{step:07d}"
        folder.mkdir(parents=True, exist_ok=True)
        save = {"torch_dist": self.save_torch_dist, "torch_dcp": self.save_torch_dcp, "torch": self.save_torch}
        save[self.args.ckpt_format](folder, step)

    def save_torch_dist(self, folder: Path, step: int) -> None:
        dist.barrier()  # the folder is there for all
        state = self.sharded_state(step)
        if not self.args.async_save:
            dist_checkpointing.save(state, str(folder), validate_access_integrity=False)
            self.write_latest(step)
            return
        request = dist_checkpointing.save(state, str(folder), validate_access_integrity=False, async_sharded_save=True)
        request.add_finalize_fn(lambda: self.write_latest(step))
        self.queue.schedule_async_request(request)

    def save_torch_dcp(self, folder: Path, step: int) -> None:
        state = {f"rank{dist.get_rank()}": self.rank_state(step)}
        if self.args.async_save:
            saving = dcp.async_save(state, checkpoint_id=str(folder), process_group=self.group)
            assert isinstance(saving, Future)
            self.pending = step, saving
        else:
            dcp.save(state, checkpoint_id=str(folder))
            self.write_latest(step)

    def save_torch(self, folder: Path, step: int) -> None:
        torch.save(self.rank_state(step), folder / f"rank{dist.get_rank():04d}.pt")
        dist.barrier()
        self.write_latest(step)

    def finish(self, wait: bool) -> None:
        """Complete what was saved asynchronously, if it is written."""
        self.queue.maybe_finalize_async_calls(blocking=wait)
        if self.pending and (wait or self.pending[1].done()):
            (step, future), self.pending = self.pending, None
            error = future.exception()
            if error is None:
                self.write_latest(step)
            elif dist.get_rank() == 0:
                print(f"the checkpoint of step {step} failed: {error}", flush=True)

    def write_latest(self, step: int) -> None:
        if dist.get_rank() == 0:
            with open(self.args.save / LATEST, "w") as tracker:
                tracker.write(str(step))

    # ---- loading

    def load(self) -> int:
        """Restore the latest checkpoint of --load; the number of steps it holds, 0 without one."""
        step = self.saved
        if not step:
            return 0
        folder = self.args.load / f"iter_{step:07d}"
        self.make_states()
        if self.args.load_s:
            read_slowly(self.args.load_s / sum(tensor.nbytes for _, tensor in self.live_tensors()))
        if self.args.ckpt_format == "torch_dist":
            wanted = self.sharded_state(0, loading=True)
            state = dist_checkpointing.load(wanted, str(folder), validate_access_integrity=False)
            for chunk, content in zip(self.model, state["model"], strict=True):
                chunk.module.load_state_dict(content)
            self.optimizer.load_state_dict(state["optimizer"])
            for one in self.states():
                one["step"] = torch.tensor(float(step))  # this format keeps none for torch's Adam
            self.scheduler.load_state_dict(state["scheduler"])
            restore_random_states(state["random"])
            return step
        state = self.rank_state(0)
        if self.args.ckpt_format == "torch_dcp":
            dcp.load({f"rank{dist.get_rank()}": state}, checkpoint_id=str(folder))
        else:
            saved = torch.load(folder / f"rank{dist.get_rank():04d}.pt", weights_only=False)
            for name, tensor in state["tensors"].items():
                tensor.copy_(saved["tensors"][name])
            state = saved
        for group, numbers in zip(self.groups(), state["groups"], strict=True):
            group.update(numbers)
        self.scheduler.load_state_dict(state["scheduler"])
        restore_random_states(state["random"])
        return step

    # ---- state

    def sharded_state(self, step: int, loading: bool = False) -> dict[str, Any]:
        models = [chunk.module.sharded_state_dict() for chunk in self.model]
        model = models[0] if len(models) == 1 else {f"model{i}": one for i, one in enumerate(models)}
        rank, size = dist.get_rank(), dist.get_world_size()
        return {
            "iteration": step,
            "model": models,
            "optimizer": self.optimizer.sharded_state_dict(model, is_loading=loading, metadata=OPTIMIZER_FORMAT),
            "scheduler": self.scheduler.state_dict(),
            "random": ShardedObject("random", random_states(), (size,), (rank,)),
        }

    def states(self) -> list[dict[str, Any]]:
        """List what the inner optimizers keep of each parameter."""
        return [state for part in self.parts for state in part.optimizer.state.values()]

    def make_states(self) -> None:
        """Do as the first step would: there must be something to load into."""
        for part in self.parts:
            part.init_state_fn(part.optimizer, part.config)
        for state in self.states():
            state.setdefault("step", torch.zeros(()))

    @torch.no_grad()
    def rank_state(self, step: int) -> dict[str, Any]:
        """Everything of this rank as a plain dict; the tensors are the live ones."""
        numbers = [{k: v for k, v in group.items() if k != "params"} for group in self.groups()]
        return {
            "iteration": step,
            "tensors": dict(self.live_tensors()),
            "groups": numbers,
            "scheduler": self.scheduler.state_dict(),
            "random": random_states(),
        }

    def live_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        for number, chunk in enumerate(self.model):
            yield from ((f"model{number}.{name}", value.detach()) for name, value in chunk.module.named_parameters())
        for number, part in enumerate(self.parts):
            parameters = [param for group in part.optimizer.param_groups for param in group["params"]]
            for index, param in enumerate(parameters):
                yield f"optimizer{number}.{index}.parameter", param.detach()
                for name, value in sorted(part.optimizer.state[param].items()):
                    yield f"optimizer{number}.{index}.{name}", value

    def groups(self) -> list[dict[str, Any]]:
        return [group for part in self.parts for group in part.optimizer.param_groups]


def read_slowly(byte_s: float) -> None:
    """Make torch.distributed.checkpoint take `byte_s` seconds for each byte of a tensor that it reads from now on.

    A small checkpoint then loads like one of many GB from storage that all ranks share. Metadata and plain objects come
    at once, as they would there. A tensor that is not read takes no time.
    """

    def commit_tensor(self: DefaultLoadPlanner, read_item: ReadItem, tensor: torch.Tensor) -> None:
        time.sleep(byte_s * tensor.nbytes)

    DefaultLoadPlanner.commit_tensor = commit_tensor  # type: ignore[method-assign]


def random_states() -> dict[str, Any]:
    return {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "torch": torch.get_rng_state(),
        "device": torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
        "tracker": tensor_parallel.get_cuda_rng_tracker().get_states(),
    }


def restore_random_states(state: dict[str, Any]) -> None:
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    if state["device"] is not None:
        torch.cuda.set_rng_state(state["device"])
    tensor_parallel.get_cuda_rng_tracker().set_states(state["tracker"])
