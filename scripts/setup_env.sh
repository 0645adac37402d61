#!/usr/bin/env bash
# Makes (or brings up to date) the virtual environment .venv of this repository from scripts/requirements-cpu.txt.
# Does nothing if it is up to date. Uses pip as it is configured on this machine. PYTHON=... chooses the interpreter.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

venv=.venv
requirements=scripts/requirements-cpu.txt
stamp="$venv/requirements.sha256"
wanted=$(sha256sum "$requirements" | cut -d' ' -f1)

if [[ -x $venv/bin/python && -f $stamp && $(<"$stamp") == "$wanted" ]]; then
    exit 0
fi

find_python() {
    local candidate
    for candidate in ${PYTHON:-} python3.11 python3.12 python3.13 python3; do
        if "$candidate" -c 'import sys, venv; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 14))' 2>/dev/null; then
            echo "$candidate"
            return
        fi
    done
    echo "setup: found no Python 3.11, 3.12 or 3.13 with the venv module; install one or set PYTHON" >&2
    return 1
}

python=$(find_python)
echo "setup: virtual environment $venv with $("$python" --version), packages from $requirements (takes some minutes)" >&2
[[ -x $venv/bin/python ]] || "$python" -m venv "$venv"
rm -f "$stamp"
pip=("$venv/bin/python" -m pip --disable-pip-version-check install --quiet)

echo "setup: 1/2 torch" >&2
"${pip[@]}" setuptools wheel "$(grep '^torch==' "$requirements")" 'numpy' >&2
echo "setup: 2/2 everything else" >&2
"${pip[@]}" --no-build-isolation -r "$requirements" >&2
echo "$wanted" >"$stamp"
echo "setup: done" >&2
