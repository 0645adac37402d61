"""The command line `run SCRIPT ARGUMENTS...`: our one flag is taken out, the launcher's own is put behind the script.

The DeepSpeed configuration that a script is given on its command line may say the same as `--deadpool-config FILE` in
its section `"deadpool": {"config": FILE}`; the two may not disagree. A configuration that a script makes up itself is
not seen here.
Rules of this file: no argparse, because everything that is not ours belongs to the user's script and may look like
anything; no torch, no DeepSpeed, no imports that cost.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ..errors import ConfigError

RUN = "deadpool_plugin.run"  # the module that the launcher starts
FLAG = "--deadpool-config"
SECTION = "deadpool"
DEEPSPEED_OPTIONS = ("--deepspeed_config", "--deepspeed-config", "--deepspeed")  # the last one is Hugging Face's
RESTORED = ("adam", "adamw")
"""Names of `optimizer.type`, in lower case, whose classes adapters/deepspeed/optimizer.py supports."""
LARGEST_BYTES = 1 << 20  # no configuration is larger


class CommandLine(NamedTuple):
    """`command`: what the worker runs, SCRIPT ARGUMENTS... (or -m MODULE ARGUMENTS...); `config`: the file, or ""."""

    command: list[str]
    config: str


def activate() -> None:
    """Become, in a plain process whose command line names our configuration, the supervisor that runs it again."""
    words = sys.argv[1:]
    if "DEADPOOL_SOCKET" in os.environ:  # a worker
        return
    with contextlib.suppress(ConfigError):  # `run` says what is wrong
        if len(take_flag(words)[0]) == len(words) and not named_config(words):
            return
    python, script = sys.orig_argv[: -len(sys.argv)], sys.orig_argv[-len(sys.argv) :]
    if python[-1] == "-m":
        python, script = python[:-1], ["-m", *script]
    os.execv(sys.executable, [*python, "-m", RUN, *script])


def parse(arguments: Sequence[str]) -> CommandLine:
    """Split the arguments after the program's name. Raises: ConfigError."""
    from .job_files import job_of  # which loads more than `activate` may

    words, config = take_flag(arguments)
    launchers = launchers_words(words)
    rest = words[len(launchers) :]
    head = head_of(rest)
    if len(rest) < head or rest[head - 1].startswith("-"):
        found = f"{rest[0]} where the script should be" if rest else "no script on the command line"
        usage = f"`deepspeed --hostfile HOSTS --module {RUN} SCRIPT ARGUMENTS... {FLAG} FILE`"
        raise ConfigError(found, usage, "name the training script")
    if not job_of(config):  # else it was agreed on where the job began
        section = named_config(rest[head:])
        if config and section and Path(config).resolve() != Path(section).resolve():
            found = f"{FLAG} names {config}, the DeepSpeed configuration's {SECTION} section names {section}"
            raise ConfigError(found, "one file", "remove the flag or the section")
        config = config or section
    return CommandLine(rest[:head] + launchers + rest[head:], config)  # the launcher's where scripts expect them


def head_of(command: Sequence[str]) -> int:
    """Count the words that name the script: SCRIPT, or -m MODULE."""
    return 2 if command[:1] == ["-m"] else 1


def launchers_words(words: Sequence[str]) -> list[str]:
    return list(itertools.takewhile(lambda word: word.startswith(("--local_rank=", "--local-rank=")), words))


def without_launchers_words(command: Sequence[str]) -> list[str]:
    """Return `command` without the `--local_rank=N` that launch.py puts behind the script."""
    head = head_of(command)
    return [*command[:head], *command[head + len(launchers_words(command[head:])) :]]


def check_script(command: Sequence[str], directory: Path) -> None:
    """Raises: ConfigError if the script is not on this host, and is no module."""
    if command[0] != "-m" and not (directory / command[0]).is_file():
        missing = f"there is no file {command[0]} in {directory} on {os.uname().nodename}"
        raise ConfigError(missing, "the training script, on every host", "copy it there")


def take_flag(words: Sequence[str]) -> tuple[list[str], str]:
    """Return the other words, and the file that `--deadpool-config` names, or "". Raises: ConfigError."""
    rest, config, coming = list[str](), list[str](), iter(words)
    for word in coming:
        name, equals, file = word.partition("=")
        if name == FLAG:
            files = [file] if equals else [*itertools.islice(coming, 1)]
            if not files:
                raise ConfigError(f"{FLAG} is the last word", f"`{FLAG} FILE`", "name the file")
            config += files
        elif word.startswith(("--deadpool", "-deadpool")) or (word.startswith("--de") and _is_like(name)):
            # Meant for us: a script that takes unknown options would train with the defaults.
            raise ConfigError(f"the option {word}", f"`{FLAG} FILE`", "correct its name")
        else:
            rest.append(word)
    if len(config) > 1:
        raise ConfigError(f"{FLAG} is given {len(config)} times", "once at most", "remove all but one")
    return rest, config[0] if config else ""


def _is_like(name: str) -> bool:
    from difflib import get_close_matches

    return bool(get_close_matches(name.replace("_", "-"), [FLAG], cutoff=0.9))  # --deepspeed-config: 0.69


def named_config(words: Sequence[str]) -> str:
    """Find our file that the DeepSpeed configuration among `words` names, or "". Raises: ConfigError."""
    found: dict[str, str] = {}
    for path in deepspeed_configs(words):
        match _read(path).get(SECTION):
            case None:
                pass
            case {"config": str(named), **others} if named and not others:
                found[named] = path
            case section:
                expected = f'"{SECTION}": {{"config": FILE}}'
                raise ConfigError(f'{path}: "{SECTION}" is {json.dumps(section)}', expected, "correct it")
    if len(found) > 1:
        several = f"the DeepSpeed configurations {' and '.join(found.values())} name {' and '.join(found)}"
        raise ConfigError(several, "one file in their deadpool sections", "remove all but one")
    return next(iter(found), "")


def deepspeed_configs(words: Sequence[str]) -> list[str]:
    """List the DeepSpeed configurations among `words`, whether they are there or not.

    A script's own options and plain arguments may name one, too: those that end in `.json`, but for options that do not
    speak of a configuration. A plain argument behind a switch (`--bf16 ds.json`) passes for the switch's and is missed.
    """
    found = []
    for before, word in zip(["", *words], words, strict=False):
        option, _, path = word.partition("=") if word.startswith("-") else (before, "=", word)
        speaks = not option.startswith("-") or "=" in option or "config" in option or "deepspeed" in option
        # `--deepspeed` is also a switch, which something else follows.
        if (speaks and path.endswith(".json")) or (option in DEEPSPEED_OPTIONS and Path(path).is_file()):
            found.append(path)
    return found


def doubts(words: Sequence[str]) -> list[str]:
    """Say what may end the job before it trains, as far as the DeepSpeed configurations among `words` tell."""
    paths, otherwise = deepspeed_configs(words), "the hosts must have it, or the script make it"
    said = [f"no file {path} here: {otherwise}" for path in paths if not os.path.isfile(path)]
    for path in paths:
        match _read(path):
            case {"optimizer": {"type": str(kind)}} if kind.lower() not in RESTORED:
                remedy = "unless the script brings one of these itself, the job will end before it trains"
                said.append(f"{path} has the optimizer {kind}, and only Adam and AdamW can be restored: {remedy}")
    return said


def _read(path: str) -> dict[str, Any]:
    """Read the configuration in `path`; what is wrong with it DeepSpeed will say."""
    with contextlib.suppress(OSError, ValueError):
        if os.path.getsize(path) <= LARGEST_BYTES:  # else it is data
            config = json.loads(Path(path).read_text(encoding="utf-8"))
            return config if isinstance(config, dict) else {}
    return {}
