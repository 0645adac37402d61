"""Undisturbed runs of a training script without the plugin, run once per configuration and kept.

Rules of this file: ranks are forks of the calling process (forked_node.preload); the plugin takes no part.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import platform
import re
import shutil
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

from run_plain import run_ranks

from clusters.launched import REPOSITORY, last_error

SCRIPTS = REPOSITORY / "scripts"
SCRIPT = SCRIPTS / "train_gpt.py"
DATA = REPOSITORY / ".cache" / "demo"
CORPUS = DATA / "corpus"
DEADLINE_S = 1800.0


def reference(
    cache: Path, training: list[str], world: int, script: Path = SCRIPT, slots: int = 0, deadline_s: float = DEADLINE_S
) -> Path:
    """Folder with the output of the undisturbed run. Raises: RuntimeError if that run fails, or hangs.

    `{folder}` in a word of `training` is the run's folder. `slots`, `deadline_s`: as of `run_ranks`.
    """
    folder = cache / key(training, world, script)
    with made_once(folder) as running:
        if running is not None:
            (running / "command.json").write_text(json.dumps([world, *training]))
            words = [word.replace("{folder}", str(running)) for word in training]
            if code := run_ranks(world, running, [str(script), *words], slots, deadline_s):
                raise RuntimeError(
                    f"the undisturbed run ended with {code} (-9: killed, after {deadline_s:g} s at most)"
                    f"{last_error(running)}; see {running}"
                )
    return folder


@contextlib.contextmanager
def made_once(folder: Path) -> Iterator[Path | None]:
    """Yield an empty folder that becomes `folder` at the end, unless that raises; None if `folder` is there.

    Another process that makes the same one is waited for. Not for two threads of one process.
    """
    if folder.exists():
        yield None
        return
    folder.parent.mkdir(parents=True, exist_ok=True)
    with open(folder.with_name(f"{folder.name}.lock"), "w") as lock:
        # lockf, not flock: forks of this process do not inherit it.
        try:
            fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(f"waiting: another demonstration makes this undisturbed run ({folder})", flush=True)
            fcntl.lockf(lock, fcntl.LOCK_EX)
        except OSError as error:  # some network file systems have no locks
            print(
                f"no lock in {folder.parent} ({error.strerror}): two side by side would disturb each other", flush=True
            )
        if folder.exists():
            yield None
            return
        running = folder.with_name(f"{folder.name}.running")
        shutil.rmtree(running, ignore_errors=True)
        running.mkdir(exist_ok=True)
        yield running
        running.rename(folder)


def arguments_with_data(words: list[str], script: str = SCRIPT.name) -> list[str]:
    """`words` with the demonstration's corpus, and with everything printed that is compared."""
    indices = ["--data-cache-path", str(DATA / "indices")] if script == SCRIPT.name else []
    return [*words, "--data-path", str(CORPUS), *indices, "--log-all-ranks", "--digest"]


def key(training: list[str], world: int, script: Path) -> str:
    """Names everything the numbers can depend on: configuration, code, corpus, library versions, processor."""
    gpt = sorted(path for path in (script.parent / "gpt").glob("*.py") if path.stem != "layouts")
    code = [*gpt, script, SCRIPTS / "make_corpus.py", *sorted((REPOSITORY / "patches/cpu").glob("*.py"))]
    processor = re.findall(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())[:1]
    framework = "deepspeed" if "deepspeed" in script.stem else "megatron-core"
    libraries = [version(name) for name in ("torch", framework, "numpy")]
    state = hashlib.sha256(json.dumps([training, world, libraries, platform.python_version(), processor]).encode())
    for path in code:
        state.update(path.read_bytes())
    return state.hexdigest()[:16]
