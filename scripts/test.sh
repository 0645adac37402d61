#!/usr/bin/env bash
# Sets up a virtual environment of its own (once) and runs lint, types and the tests that need no GPU, on two cores.
#   ./scripts/test.sh          the quick run: leaves out the tests marked slow, and lists their files at its end
#   ./scripts/test.sh --all    with those tests
# Other arguments go to pytest: ./scripts/test.sh -k gate
set -euo pipefail
cd "$(dirname "$0")/.."
scripts/setup_env.sh --tests
export PATH="$PWD/.venv/bin:$PATH"
export OMP_NUM_THREADS=1 DS_ACCELERATOR=cpu PYTHONWARNINGS=ignore

which=--quick
arguments=()
for argument in "$@"; do
    if [[ $argument == "--all" ]]; then which=; else arguments+=("$argument"); fi
done

echo "[test] ruff"
ruff check .
ruff format --check --quiet .

# The types are checked beside the tests, which leave a core idle at times.
types=$(mktemp)
set -m  # a process group of its own, to be ended as a whole
mypy >"$types" 2>&1 &
checker=$!
set +m
trap 'kill -- "-$checker" 2>/dev/null || true; rm -f "$types"' EXIT
trap 'exit 130' INT TERM

echo "[test] pytest, and mypy beside it"
# A file's tests share a process. One that died (see faulthandler_timeout) is not started again: nobody knows its state.
tests=0
python -m pytest -n 2 --dist loadfile --no-loadscope-reorder --max-worker-restart 0 $which "${arguments[@]}" || tests=$?
checked=0
wait "$checker" || checked=$?
echo "[test] mypy"
cat "$types"
exit $((tests ? tests : checked))
