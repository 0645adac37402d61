"""The small GPT of train_gpt.py under torchft: one replica of the whole model per process, data parallel.

torchft takes the place of Megatron's DistributedDataParallel and optimizer: its DistributedDataParallel around the
same GPTModel, its Optimizer around Adam with the same learning rate; a quorum per step, commit or discard.

BENCH_TORCHFT=defaults: Manager's and ProcessGroupGloo's own time-outs (60 s), the lighthouse's (heartbeat 5 s).

BENCH_TORCHFT=tuned, each setting and why:
  ProcessGroupGloo(timeout=1.5 s): a collective with a dead or silent replica ends then, and not before: it is most of
      what a swap takes. Ten steps' time; shorter ones end healthy steps on a busy machine
  Manager(timeout=10 s): commit votes and healing; quorum_timeout 30 s and connect_timeout 10 s: shorter ones make
      healthy replicas give up while a newcomer heals
  lighthouse: heartbeat_timeout 1.5 s (5): a dead replica leaves the quorum; Manager's heartbeats are every 0.1 s
  lighthouse: join_timeout 10 s (60): how long a quorum waits for a replica that heartbeats but does not ask
  init_sync=False: all weights are initialised alike, as its documentation advises then
BENCH_TORCHFT=spare: tuned, and one replica more with WorldSizeMode.FIXED_WITH_SPARES: the spare trains along, its
  gradients counting as zero, and takes a lost replica's place. min_replica_size is the number of active replicas.
"""

from __future__ import annotations

import contextlib
import os
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "error")

import torch
import train_gpt
from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo
from torchft.manager import WorldSizeMode

from bench.peers.marks import mark

MODE = os.environ.get("BENCH_TORCHFT", "defaults")
REPLICA, LIFE = int(os.environ["BENCH_REPLICA"]), int(os.environ.get("BENCH_LIFE", "0"))
REPLICAS = int(os.environ["BENCH_ACTIVE"])
TUNED = {"timeout": 10.0, "quorum_timeout": 30.0, "connect_timeout": 10.0}


def manager(load_state: Any, state: Any) -> Manager:
    settings: dict[str, Any] = {"min_replica_size": 1}
    group = ProcessGroupGloo()
    if MODE != "defaults":
        group = ProcessGroupGloo(timeout=timedelta(seconds=1.5))
        settings |= {name: timedelta(seconds=value) for name, value in TUNED.items()}
        settings["init_sync"] = False
    if MODE == "spare":
        settings |= {"min_replica_size": REPLICAS, "world_size_mode": WorldSizeMode.FIXED_WITH_SPARES}
    settings |= {"replica_id": f"gpt_{REPLICA}", "hostname": "localhost"}
    return Manager(pg=group, load_state_dict=load_state, state_dict=state, **settings)


class OwnSampler(train_gpt.PretrainingSampler):
    """This replica's share of the samples; torchft itself leaves a lost replica's share untrained."""

    def __init__(self, total_samples: int, consumed_samples: int, micro_batch_size: int) -> None:
        super().__init__(total_samples, consumed_samples, micro_batch_size)
        self.rank, self.stride = REPLICA, micro_batch_size * 8


def main() -> None:
    args = train_gpt.parse_args()
    train_gpt.initialize(args)  # a world of one: also serves the store that Manager wants
    config = train_gpt.model_config(args)
    model = train_gpt.build_model(args, config, train_gpt.ByteTokenizer.vocab_size)[0].module
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)

    def load_state(state: dict[str, Any]) -> None:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])

    def state() -> dict[str, Any]:
        return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}

    ours = manager(load_state, state)
    train_gpt.PretrainingSampler = OwnSampler
    _, data, _ = train_gpt.build_data_iterators(args)
    mark("training", REPLICA, 0, life=LIFE)
    train(args, ours, DistributedDataParallel(ours, model), Optimizer(ours, optimizer), data[0])


def train(args: Any, ours: Manager, model: Any, optimizer: Any, data: Any) -> None:
    while ours.current_step() < args.train_iters:
        optimizer.zero_grad()
        loss = torch.zeros(())
        for left in reversed(range(args.num_microbatches)):
            with model.no_sync() if left else contextlib.nullcontext():
                batch = train_gpt.get_batch(data)
                output = model(batch["tokens"], batch["position_ids"], None, labels=batch["labels"])
                loss, _ = train_gpt.loss_func(batch["loss_mask"], output)
                (loss / args.num_microbatches).backward()
        before = ours.current_step()
        optimizer.step()
        kind = "step" if ours.current_step() > before else "discarded"
        counts = {"replicas": ours.num_participants(), "participates": ours.is_participating()}
        mark(kind, REPLICA, ours.current_step(), life=LIFE, loss=loss.item(), **counts)


if __name__ == "__main__":
    main()
