"""One rank of a benchmark: `train_gpt.py` in turns, a block of steps whenever bench_mirror.py says so.

    (by bench_mirror.py)  mirror_job.py --turns SOCKET --job NAME --saves DIR -- <arguments of train_gpt.py>

Rules of this file: the training is train_gpt.py's own; its `log_step`, the last thing in a step, is where a rank waits
for its turn, so that several jobs can be alive and only one is at work. A sample is the time from the end of one
`log_step` to the beginning of the next. Nothing is measured that the plugin itself would have to tell: threads are
read from /proc, the plugin's part in a call at the seam it offers every adapter.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path[0] = str(Path(__file__).resolve().parents[1])

MESSAGE_BYTES_MAX = 1 << 20


class Calls:
    """Time of the main thread between a framework call's caller and the call itself, for outermost calls only.

    `wait_ns`: the part of the wall time in which an update waited for the snapshot before it.
    """

    def __init__(self) -> None:
        self.count = self.cpu_ns = self.wall_ns = self.wait_ns = 0
        self._inside = False

    def install(self) -> None:
        """Measure at `Adapter.install`: before the plugin installs, which is at init_process_group."""
        from deadpool_plugin.adapters.megatron.adapter import MegatronAdapter

        original = MegatronAdapter.install
        MegatronAdapter.install = lambda adapter, handler, saves: original(  # type: ignore
            adapter, functools.partial(self._call, handler), saves
        )

        from deadpool_plugin.worker.staging import Stager

        wait = Stager.wait

        def waited(stager: Any) -> None:
            began = time.perf_counter_ns()
            wait(stager)
            self.wait_ns += time.perf_counter_ns() - began

        Stager.wait = waited  # type: ignore

    def _call(self, handler: Any, call: Any) -> Any:
        if self._inside:
            return handler(call)
        self._inside, function = True, call.function
        spent = [0, 0]

        def measured(*args: Any, **kwargs: Any) -> Any:
            cpu, wall = time.thread_time_ns(), time.perf_counter_ns()
            try:
                return function(*args, **kwargs)
            finally:
                spent[0] += time.thread_time_ns() - cpu
                spent[1] += time.perf_counter_ns() - wall

        cpu, wall = time.thread_time_ns(), time.perf_counter_ns()
        try:
            call.function = measured
            return handler(call)
        finally:
            self._inside = False
            self.count += 1
            self.cpu_ns += time.thread_time_ns() - cpu - spent[0]
            self.wall_ns += time.perf_counter_ns() - wall - spent[1]

    def numbers(self) -> dict[str, int]:
        return {"count": self.count, "cpu_ns": self.cpu_ns, "wall_ns": self.wall_ns, "wait_ns": self.wait_ns}


class Saver:
    """`torch.distributed.checkpoint.async_save` of this rank's optimizer state, as its documentation recommends it.

    One gloo group of its own, one stager kept (its buffers are made once), plans cached, no fsync; staging runs in a
    thread and is awaited before the next update, the upload before the next save. `kind`: thread or process.
    """

    def __init__(self, kind: str, folder: Path, tensors: dict[str, Any]) -> None:
        import torch.distributed as dist
        from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

        self._kind, self._folder, self._tensors, self._count = kind, folder, tensors, 0
        self._group = dist.new_group(backend="gloo")
        options = StagingOptions(
            use_pinned_memory=False, use_shared_memory=kind == "process", use_async_staging=True,
            use_non_blocking_copy=False,
        )  # fmt: skip
        self._stager = DefaultStager(options)
        self._response: Any = None

    def save(self) -> None:
        """Begin saving. Blocks: until the save before is on disk."""
        from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemWriter
        from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, async_save

        self.wait()
        self._count += 1
        self._response = async_save(
            self._tensors,
            storage_writer=FileSystemWriter(self._folder / str(self._count % 2), sync_files=False),
            planner=DefaultSavePlanner(enable_plan_caching=True),
            process_group=self._group,
            async_checkpointer_type=AsyncCheckpointerType(self._kind),
            async_stager=self._stager,
        )

    def staged(self) -> None:
        """Block until the tensors may change."""
        if self._response is not None:
            self._response.staging_completion.result()

    def wait(self) -> None:
        if self._response is not None:
            self._response.upload_completion.result()
            self._response = None


class Guards:
    """The plugin's guards in this process, switched between turns: all ranks are at the end of the same step then."""

    def __init__(self) -> None:
        from deadpool_plugin.worker import proof

        self._proof, self._digest = proof, proof.digest

    def set(self, variant: str) -> None:
        """Count collectives (as after a swap) if it is `counted`; take no digests of batches if it is `undigested`."""
        import torch.distributed as dist

        from deadpool_plugin.transport.flight_recorder import FlightRecorder

        self._proof.digest = (lambda value: 1) if variant == "undigested" else self._digest
        groups = dist.group.WORLD._runtime.groups  # type: ignore[union-attr]
        groups.begin_counting()
        if variant != "counted":
            groups._flight_recorder = FlightRecorder(memoryview(b""), 0, ())
            for handle in groups.handles:
                handle.calls = None

    def counted(self) -> int:
        """The collectives since they are counted."""
        import torch.distributed as dist

        groups = dist.group.WORLD._runtime.groups  # type: ignore[union-attr]
        return sum(record.count for record in groups._flight_recorder.records)


class Turns:
    """This rank's line to the driver, and the block it is in."""

    def __init__(self, args: argparse.Namespace, calls: Calls, guards: Guards | None) -> None:
        self._args, self._calls, self._guards = args, calls, guards
        self._line = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._line.connect(args.turns)
        self._samples: list[int] = []
        self._left = self._began = 0
        self._called: dict[str, int] = {}
        self._saver: Saver | None = None
        self._savers: dict[str, Saver] = {}
        self.device_s = 0.0
        self.optimizer: Any = None
        self.tensors: dict[str, Any] = {}

    def hello(self, rank: int) -> None:
        sizes = [tensor.numel() * tensor.element_size() for tensor in self.tensors.values()]
        threads = {thread.name: thread.native_id for thread in threading.enumerate()}
        self._send(job=self._args.job, rank=rank, pid=os.getpid(), threads=threads, payload_bytes=sum(sizes))

    def _send(self, **fields: Any) -> None:
        self._line.send(json.dumps(fields).encode())

    def step_done(self) -> None:
        """The end of a step; returns when the next may begin."""
        if self._left:
            if self._saver is not None:
                self._saver.save()
            self._samples.append(time.perf_counter_ns() - self._began)
            self._left -= 1
        if not self._left:
            self._next_block()
        self._began = time.perf_counter_ns()

    def before_update(self) -> None:
        if self._saver is not None:
            self._saver.staged()

    def _next_block(self) -> None:
        if self._samples:
            self._report()
        order = json.loads(self._line.recv(MESSAGE_BYTES_MAX))
        self._left, self.device_s, self._samples = order["steps"], order["device_ms"] / 1000, []
        self._saver = self._saver_of(order["save"]) if order["save"] else None
        self._called = self._calls.numbers()
        if self._guards is not None:
            self._guards.set(order.get("guard", ""))

    def _saver_of(self, kind: str) -> Saver:
        if kind not in self._savers:
            self._savers[kind] = Saver(kind, Path(self._args.saves, kind), self.tensors)
        return self._savers[kind]

    def _report(self) -> None:
        if self._saver is not None:
            self._saver.wait()
        calls = {name: number - self._called[name] for name, number in self._calls.numbers().items()}
        counted = self._guards.counted() if self._guards is not None else 0
        self._send(samples_ns=self._samples, calls=calls, counted=counted)


def hook(train_gpt: Any, turns: Turns) -> None:
    """Put `turns` where the training script's own functions are."""
    train, forward_step, log_step = train_gpt.train, train_gpt.forward_step, train_gpt.log_step

    def trained(args: Any, model: Any, optimizer: Any, *rest: Any) -> None:
        turns.optimizer = optimizer
        optimizer.step = before(optimizer.step, turns.before_update)
        train(args, model, optimizer, *rest)

    def forward(*args: Any) -> Any:
        time.sleep(turns.device_s)
        return forward_step(*args)

    def logged(args: Any, step: int, duration_s: float, numbers: Any) -> None:
        log_step(args, step, duration_s, numbers)
        if not turns.tensors:
            rank = train_gpt.dist.get_rank()
            tensors = enumerate(train_gpt.optimizer_tensors(turns.optimizer))
            turns.tensors = {f"{rank}.{number}.{name}": tensor for number, (name, tensor) in tensors}
            turns.hello(rank)
        turns.step_done()

    train_gpt.train, train_gpt.forward_step, train_gpt.log_step = trained, forward, logged


def before(function: Callable[[], Any], first: Callable[[], None]) -> Callable[[], Any]:
    def both() -> Any:
        first()
        return function()

    return both


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--turns", required=True)
    parser.add_argument("--job", required=True)
    parser.add_argument("--saves", required=True)
    parser.add_argument("script", nargs=argparse.REMAINDER)
    args = parser.parse_args([word for word in sys.argv[1:] if not word.startswith("--local")])
    sys.argv = ["train_gpt.py", *(args.script[1:] if args.script[:1] == ["--"] else args.script)]
    calls, guards = Calls(), None
    if "deadpool_plugin" in sys.modules:
        calls.install()
        guards = Guards()
    import train_gpt

    hook(train_gpt, Turns(args, calls, guards))
    train_gpt.main()


if __name__ == "__main__":
    main()
