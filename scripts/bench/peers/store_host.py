"""Serves a torch TCPStore on each given port until it is killed: `python store_host.py PORT...`."""

from __future__ import annotations

import signal
import sys

from torch.distributed import TCPStore

if __name__ == "__main__":
    stores = [TCPStore("127.0.0.1", int(port), is_master=True, wait_for_workers=False) for port in sys.argv[1:]]
    print("serving", flush=True)
    signal.pause()
