#!/usr/bin/env bash
# Kills a node of a running training job and shows what the plugin makes of it. `scripts/demo.sh --help` lists all.
# The first run sets up .venv (some minutes). It shows how far it is, and ends with a summary for people and one line of
# JSON. Exit code 0: everything promised holds.
set -euo pipefail
scripts=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
# Options are checked before the minutes of a setup; what that prints is the answer to --help.
python=$("$scripts/setup_env.sh" --which)
help=$("$python" "$scripts/clusters/demo_jobs.py" "$@")
if [[ -n $help ]]; then
    echo "$help"
    exit
fi
"$scripts/setup_env.sh"
exec "$scripts/../.venv/bin/python" "$scripts/demo.py" "$@"
