"""train_deepspeed.py with ways of scripts to find and to name checkpoint folders: `checkpoint_folders.py MODE ...`

resume   looks for its newest checkpoint as Hugging Face's examples do, and saves as the Trainer does
clock    names its folder, and each checkpoint in it, by the time at which the process began
apart    names a folder for every rank
Not a test: the script of test_checkpoint_folders.py.
"""

import json
import os
import re
import sys
from pathlib import Path

MODE = sys.argv.pop(1)
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import train_deepspeed as script  # noqa: E402

import deadpool_plugin  # noqa: E402


def newest(folder):
    """As transformers.trainer_utils.get_last_checkpoint."""
    names = [name for name in os.listdir(folder) if re.fullmatch(r"checkpoint-\d+", name)]
    return max((os.path.join(folder, name) for name in names if os.path.isdir(os.path.join(folder, name))), default="")


def refuse_what_is_there(folder):
    if os.path.isdir(folder):
        found = newest(folder)
        if not found and len(os.listdir(folder)) > 0:
            raise ValueError(f"output directory ({folder}) already exists and is not empty")
        if found:
            raise ValueError(f"resumes from {found}")
    if list(folder.glob("**/*.json")) or (folder / "last.pt").exists():
        raise ValueError("there is a state to resume from")


def save_as_trainer(args, engine):
    if args.save_interval and engine.global_steps % args.save_interval == 0:
        folder = args.save / f"checkpoint-{engine.global_steps}"
        engine.save_checkpoint(str(folder))
        if dist.get_rank() == 0:
            (folder / "trainer_state.json").write_text(json.dumps({"step": engine.global_steps}))
            torch.save({"step": engine.global_steps}, args.save / "last.pt")


BEGAN = "later" if deadpool_plugin.is_rehearsal() else "first"  # what a clock would say
NAMES = {"clock": lambda: f"run.{BEGAN}", "apart": lambda: f"run.{dist.get_rank()}"}


def save_by_name(args, engine):
    if args.save_interval and engine.global_steps % args.save_interval == 0:
        folder = args.save / NAMES[MODE]()
        engine.save_checkpoint(str(folder), tag=f"{BEGAN}-{engine.global_steps}")
        torch.save({"step": engine.global_steps}, folder / f"rank{dist.get_rank()}.pt")


if MODE == "resume":
    refuse_what_is_there(script.parse_args().save)
script.save = save_as_trainer if MODE == "resume" else save_by_name
script.main()
