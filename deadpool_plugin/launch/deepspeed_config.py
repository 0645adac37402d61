"""`"deadpool": {"config": FILE}` in the DeepSpeed configuration that a script is given on its command line.

Rules of this file: no torch, no DeepSpeed. It says the same as `--deadpool-config FILE`; the two may not disagree. A
configuration that a script makes up itself is not seen here: such a job is given the flag.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..errors import ConfigError

SECTION = "deadpool"
OPTIONS = ("--deepspeed_config", "--deepspeed-config", "--deepspeed")
"""DeepSpeed's own argument, and the one of Hugging Face's TrainingArguments."""
RESTORED = ("adam", "adamw")
"""Names of `optimizer.type`, in lower case, whose classes adapters/deepspeed/optimizer.py supports."""
LARGEST_BYTES = 1 << 20
"""No configuration is larger."""


def named_config(words: Sequence[str]) -> str:
    """The plugin's configuration file that the DeepSpeed configuration among `words` names; "" if there is none.

    Raises: ConfigError for a section that is not understood.
    """
    found = {name: path for path in files_named(words) if (name := _section(path))}
    if len(found) > 1:
        raise ConfigError(
            f"the DeepSpeed configurations {' and '.join(found.values())} name {' and '.join(found)}",
            "one file in their deadpool sections",
            "remove all but one",
        )
    return next(iter(found), "")


def agreed(flag: str, section: str) -> str:
    """The one file that the flag or the section names. Raises: ConfigError if they name two."""
    if flag and section and Path(flag).resolve() != Path(section).resolve():
        raise ConfigError(
            f"--deadpool-config names {flag}, the DeepSpeed configuration's deadpool section names {section}",
            "one file",
            "remove the flag or the section",
        )
    return flag or section


def files_named(words: Sequence[str]) -> list[str]:
    """List the DeepSpeed configurations among `words`, whether they are there or not.

    A script's own options and plain arguments may name one, too: those that end in `.json`, but for options that do not
    speak of a configuration. A plain argument behind a switch (`--bf16 ds.json`) passes for the switch's and is missed.
    `--deepspeed` is also a switch, which something else follows.
    """
    found = []
    for before, word in zip(["", *words], words, strict=False):
        option, equals, path = word.partition("=") if word.startswith("-") else (before, "=", word)
        if not (equals and path):
            continue
        speaks = not option.startswith("-") or "=" in option or "config" in option or "deepspeed" in option
        if (speaks and path.endswith(".json")) or (option in OPTIONS and Path(path).is_file()):
            found.append(path)
    return found


def missing(words: Sequence[str]) -> list[str]:
    """List the DeepSpeed configurations among `words` that are not here."""
    return [path for path in files_named(words) if not os.path.isfile(path)]


def doubts(words: Sequence[str]) -> list[str]:
    """Say what may end the job before it trains, as far as the DeepSpeed configurations among `words` tell."""
    said = [f"no file {path} here: the hosts must have it, or the script make it" for path in missing(words)]
    for path in files_named(words):
        optimizer = _read(path).get("optimizer")
        kind = optimizer.get("type") if isinstance(optimizer, dict) else None
        if isinstance(kind, str) and kind.lower() not in RESTORED:
            said.append(
                f"{path} has the optimizer {kind}, and only Adam and AdamW can be restored: unless the script brings "
                "one of these itself, the job will end before it trains"
            )
    return said


def _read(path: str) -> dict[str, Any]:
    """Read the configuration in `path`; what is wrong with it DeepSpeed will say."""
    with contextlib.suppress(OSError, ValueError):
        if os.path.getsize(path) <= LARGEST_BYTES:  # else it is data
            config = json.loads(Path(path).read_text(encoding="utf-8"))
            return config if isinstance(config, dict) else {}
    return {}


def _section(path: str) -> str:
    section = _read(path).get(SECTION)
    if section is None:
        return ""
    named = section.get("config") if isinstance(section, dict) else None
    if not isinstance(named, str) or not named or set(section) != {"config"}:
        raise ConfigError(
            f'{path}: "{SECTION}" is {json.dumps(section)}', f'"{SECTION}": {{"config": FILE}}', "correct it"
        )
    return named
