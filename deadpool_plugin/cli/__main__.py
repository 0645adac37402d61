"""`python -m deadpool_plugin.cli COMMAND ...`: the same as `deadpool COMMAND ...`."""

import sys

from .main import main

if __name__ == "__main__":
    sys.exit(main())
