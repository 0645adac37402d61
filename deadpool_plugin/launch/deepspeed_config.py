"""`"deadpool": {"config": FILE}` in the DeepSpeed configuration that a script is given on its command line.

Rules of this file: no torch, no DeepSpeed. It says the same as `--deadpool-config FILE`; the two may not disagree. A
configuration that a script makes up itself is not seen here: such a job is given the flag.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..errors import ConfigError

SECTION = "deadpool"
OPTIONS = ("--deepspeed_config", "--deepspeed-config", "--deepspeed")
"""DeepSpeed's own argument, and the one of Hugging Face's TrainingArguments."""
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


def _section(path: str) -> str:
    try:
        if os.path.getsize(path) > LARGEST_BYTES:
            return ""  # it is data
        config: Any = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return ""  # DeepSpeed will say what is wrong with it
    section = config.get(SECTION) if isinstance(config, dict) else None
    if section is None:
        return ""
    named = section.get("config") if isinstance(section, dict) else None
    if not isinstance(named, str) or not named or set(section) != {"config"}:
        raise ConfigError(
            f'{path}: "{SECTION}" is {json.dumps(section)}', f'"{SECTION}": {{"config": FILE}}', "correct it"
        )
    return named
