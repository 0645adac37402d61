#!/usr/bin/env bash
# Sets up a virtual environment of its own (once) and runs the checks and all tests that need no GPU.
# Arguments go to pytest: ./scripts/test.sh -k gate
set -euo pipefail
cd "$(dirname "$0")/.."
scripts/setup_env.sh
export PATH="$PWD/.venv/bin:$PATH"
export OMP_NUM_THREADS=1 DS_ACCELERATOR=cpu PYTHONWARNINGS=ignore
echo "[test] ruff"
ruff check .
ruff format --check --quiet .
echo "[test] mypy"
mypy
mypy --config-file scripts/mypy.ini
echo "[test] pytest"
exec python -m pytest "$@"
