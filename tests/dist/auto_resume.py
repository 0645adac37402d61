"""train_deepspeed.py with the block by which Hugging Face's examples look for their newest checkpoint.

Not a test: a script of test_deepspeed.py, run with and without the plugin. It saves as the Trainer does.
"""

import json
import os
import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))

import torch
import torch.distributed as dist
import train_deepspeed as script


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


def save(args, engine):
    if args.save_interval and engine.global_steps % args.save_interval == 0:
        folder = args.save / f"checkpoint-{engine.global_steps}"
        engine.save_checkpoint(str(folder))
        if dist.get_rank() == 0:
            (folder / "trainer_state.json").write_text(json.dumps({"step": engine.global_steps}))
            torch.save({"step": engine.global_steps}, args.save / "last.pt")


script.save = save
refuse_what_is_there(script.parse_args().save)
script.main()
