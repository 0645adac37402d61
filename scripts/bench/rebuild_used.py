"""Groups that a training step really uses: a training script's rank over the plugin's groups, every operation counted.

    python scripts/run_plain.py --ranks 8 --logs DIR -- scripts/bench/rebuild_used.py OUT scripts/train_gpt.py ...

Each rank leaves OUT/rank<k>.json: operations by group and name.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
from collections import Counter
from pathlib import Path
from typing import Any

sys.path.insert(1, str(Path(__file__).resolve().parents[2]))

from torch._C._distributed_c10d import TCPStore

from deadpool_plugin.comm import patches
from deadpool_plugin.comm.collective import Operation
from deadpool_plugin.comm.groups import Groups
from deadpool_plugin.comm.handle import Handle


def main() -> None:
    out, script = Path(sys.argv[1]), sys.argv[2:]
    rank, port = os.environ["RANK"], int(os.environ["MASTER_PORT"])
    server = TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False) if rank == "0" else None
    used = Counter[tuple[str, str]]()
    groups = Groups()

    def counted(handle: Handle, operation: Operation) -> Any:
        used[handle.group_desc, operation.name] += 1
        return groups.issue(handle, operation)

    groups.collective = counted  # type: ignore[method-assign]
    patches.install(groups)
    groups.start(0, f"127.0.0.1:{port}")
    sys.argv, sys.path[0] = script, str(Path(script[0]).resolve().parent)
    runpy.run_path(script[0], run_name="__main__")
    (out / f"rank{rank}.json").write_text(json.dumps([[*what, count] for what, count in used.items()]))
    del server


if __name__ == "__main__":
    main()
