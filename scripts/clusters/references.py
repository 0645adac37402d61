"""Undisturbed runs of a training script without the plugin, run once per configuration and kept.

Rules of this file: ranks are forks of the calling process (forked_node.preload); the plugin takes no part.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import shutil
from importlib.metadata import version
from pathlib import Path

from run_plain import become_rank, wait

from clusters.launched import REPOSITORY, free_port

SCRIPT = REPOSITORY / "scripts" / "train_gpt.py"


def reference(cache: Path, training: list[str], world: int, script: Path = SCRIPT, slots: int = 0) -> Path:
    """Folder with the output of the undisturbed run. Raises: RuntimeError if that run fails.

    `{folder}` in a word of `training` is the run's folder. `slots`: as of `become_rank`.
    """
    folder = cache / key(training, world, script)
    if folder.exists():
        return folder
    running = folder.with_name(f"{folder.name}.running")
    shutil.rmtree(running, ignore_errors=True)
    running.mkdir(parents=True)
    (running / "command.json").write_text(json.dumps([world, *training]))
    words = [word.replace("{folder}", str(running)) for word in training]
    port, pids = free_port(), set()
    for rank in range(world):
        pid = os.fork()
        if pid == 0:
            become_rank(rank, world, port, running, [str(script), *words], slots)
        pids.add(pid)
    if wait(pids):
        raise RuntimeError(f"the undisturbed run failed; its output is in {running}")
    running.rename(folder)
    return folder


def arguments_with_data(words: list[str], script: str = SCRIPT.name) -> list[str]:
    """`words` with the demonstration's corpus, and with everything printed that is compared."""
    data = REPOSITORY / ".cache" / "demo"
    indices = ["--data-cache-path", str(data / "indices")] if script == SCRIPT.name else []
    return [*words, "--data-path", str(data / "corpus"), *indices, "--log-all-ranks", "--digest"]


def key(training: list[str], world: int, script: Path) -> str:
    """Names everything the numbers can depend on: configuration, code, library versions, processor."""
    gpt = sorted(path for path in (script.parent / "gpt").glob("*.py") if path.stem != "layouts")
    code = [*gpt, script, *sorted((REPOSITORY / "patches/cpu").glob("*.py"))]
    processor = re.findall(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())[:1]
    framework = "deepspeed" if "deepspeed" in script.stem else "megatron-core"
    libraries = [version(name) for name in ("torch", framework, "numpy")]
    state = hashlib.sha256(json.dumps([training, world, libraries, platform.python_version(), processor]).encode())
    for path in code:
        state.update(path.read_bytes())
    return state.hexdigest()[:16]
