"""`python -m deadpool_plugin COMMAND ...`: the same as `deadpool COMMAND ...`."""

import sys

from .cli.main import main

if __name__ == "__main__":
    sys.exit(main())
