"""train_restarted.py under nvidia-resiliency-ext's in-process restart: the function is called again after a fault.

Follows Megatron-LM's own integration (megatron/training/inprocess_restart.py): everything from process groups to the
last step is one wrapped function; a Tree of ranks with a RESERVE layer, here with nodes as its second layer; finalize
destroys the parallel state; the store of the process groups is made outside of the function and prefixed by the
iteration. What differs from it: no GPU, hence no CudaHealthCheck and no TransformerEngine.

BENCH_NVRX=defaults: Wrapper's own intervals and time-outs; torch's default group time-out; both stores on rank 0.

BENCH_NVRX=tuned, each setting and why:
  monitor_thread_interval, monitor_process_interval, progress_watchdog_interval 0.1 s (1): how soon a fault is seen
  heartbeat_interval 0.25 s (1), heartbeat_timeout 5 s (30): how soon a silent rank is one; as the plugin's tuned
      run. With 3 s, a restart on two loaded cores gave healthy ranks up
  last_call_wait 0.1 s (1): waiting for further faults is pure delay after a single one
  soft_timeout 10 s (60), hard_timeout 15 s (90): a step takes 0.2 s; a restart's imports and group set-up hold the
      interpreter for some seconds on a loaded machine, and a false hard time-out kills a healthy rank
  termination_grace_time 0.5 s (5): nothing of ours needs longer
  group time-out 10 s (30 min), from train_restarted.py: the only end of a gloo operation with a silent peer
  store_factory: both stores are served by a process outside of the nodes (`store_host.py`), as torchft's lighthouse is,
      so that losing the first node need not be the end
  CutConnections, an Abort (cut.py)
"""

# no postponed annotations: NVRx looks for the parameter whose annotation *is* CallWrapper
import logging
import os
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "error")

import torch.distributed as dist
from megatron.core import parallel_state, rerun_state_machine
from nvidia_resiliency_ext import inprocess
from nvidia_resiliency_ext.inprocess.rank_assignment import Layer, LayerFlag, Tree
from nvidia_resiliency_ext.inprocess.store import TCPStore

from bench.peers import train_restarted
from bench.peers.cut import CutConnections

TUNED = os.environ.get("BENCH_NVRX", "defaults") == "tuned"
ACTIVE, PER_NODE = int(os.environ["BENCH_ACTIVE"]), int(os.environ["BENCH_PER_NODE"])
PORTS = [int(port) for port in os.environ["BENCH_PORTS"].split(",")]
FOLDER = Path(os.environ["BENCH_FOLDER"])

SECONDS = {
    "monitor_thread_interval": 0.1,
    "monitor_process_interval": 0.1,
    "progress_watchdog_interval": 0.1,
    "heartbeat_interval": 0.25,
    "heartbeat_timeout": 5.0,
    "last_call_wait": 0.1,
    "soft_timeout": 10.0,
    "hard_timeout": 15.0,
    "termination_grace_time": 0.5,
    "barrier_timeout": 60.0,
    "completion_timeout": 60.0,
}


class StoreElsewhere(TCPStore):  # type: ignore[misc]
    """NVRx's own store, without rank 0 as its host."""

    TCP_STORE_HOST_RANK = -1

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(wait_for_workers=False, **kwargs)

    @property
    def critical_ranks(self) -> tuple[int, ...]:
        return ()


class DestroyState(inprocess.finalize.Finalize):
    """Finalize as Megatron-LM does what outlives the function's frame. In this thread: the threaded one wants CUDA."""

    def __call__(self, state: Any) -> Any:
        parallel_state.destroy_model_parallel()
        rerun_state_machine.destroy_rerun_state_machine()
        return state


def wrapper() -> inprocess.Wrapper:
    layers = [
        Layer(min_ranks=ACTIVE, max_ranks=ACTIVE, flag=LayerFlag.RESERVE),
        Layer(
            min_ranks=PER_NODE,
            max_ranks=PER_NODE,
            key_or_fn=lambda _: os.environ["DEMO_NODE"],
            flag=LayerFlag.RESERVE,
        ),
    ]
    abort: Any = inprocess.abort.AbortTorchDistributed()
    settings: dict[str, Any] = {"store_kwargs": {"port": PORTS[0], "timeout": timedelta(seconds=300)}}
    if TUNED:
        abort = inprocess.Compose(abort, CutConnections(set(PORTS)))  # runs from right to left
        settings |= {name: timedelta(seconds=value) for name, value in SECONDS.items()}
        settings["store_factory"] = StoreElsewhere
    return inprocess.Wrapper(
        initialize=inprocess.initialize.RetryController(min_world_size=ACTIVE),
        abort=abort,
        finalize=DestroyState(),
        rank_assignment=Tree(layers),
        monitor_process_logfile=str(FOLDER / "monitor{rank}.log"),
        **settings,
    )


def train(outer: dist.Store, call: inprocess.CallWrapper = None) -> None:  # type: ignore[assignment]
    train_restarted.run(call.iteration, dist.PrefixStore(str(call.iteration), outer))


def main() -> None:
    logging.basicConfig(level=logging.ERROR, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    hosts = not TUNED and os.environ["RANK"] == "0"
    address, world = os.environ["MASTER_ADDR"], int(os.environ["WORLD_SIZE"])
    timeout = timedelta(seconds=300)
    outer = dist.TCPStore(address, PORTS[1], world, hosts, timeout=timeout, wait_for_workers=not TUNED)
    wrapper()(train)(outer)


if __name__ == "__main__":
    main()
