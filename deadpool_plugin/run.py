"""`python -m deadpool_plugin.run SCRIPT ARGUMENTS... [--deadpool-config FILE]`: what the deepspeed launcher starts.

Checks everything that can be checked before anything runs, then becomes the supervisor of one local rank. A mistake in
configuration, hosts or versions is one line on standard error and exit code 78.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import NoReturn

from .config import load
from .errors import ConfigError
from .host.output import say
from .launch import checks
from .launch.argv import check_script, parse
from .launch.job_files import secret_of
from .launch.supervisor import Supervisor

_YIELD_S = 2.0


def main() -> NoReturn:
    try:
        line = parse(sys.argv[1:])
        config, place = load(line.config), checks.place_of()
        checks.check_place(place, config)
        checks.check_versions()
        checks.check_host(config)
        secret_of(config, line.config)
        check_script(line.command, Path.cwd())
    except ConfigError as error:
        if os.environ.get("LOCAL_RANK", "0") != "0":
            time.sleep(_YIELD_S)  # local rank 0 says it, once: as soon as that ends, the launcher ends the others
        say(str(error), to=sys.stderr)
        sys.exit(error.exit_code)
    path, storing_s = str(Path(line.config).resolve()) if line.config else "", config.storing_s
    Supervisor(place, line.command, path, storing_s=storing_s).run()


if __name__ == "__main__":
    main()
