#!/usr/bin/env bash
# Makes (or brings up to date) the virtual environment .venv of this repository from scripts/requirements-cpu.txt.
# Does nothing if it is up to date. Uses pip as it is configured on this machine. PYTHON=... chooses the interpreter.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

venv=.venv
requirements=scripts/requirements-cpu.txt
stamp="$venv/requirements.sha256"
log="$venv/setup.log"
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

# Says every so often what pip does: on a terminal in one line that changes, elsewhere a line every 20 seconds.
# Measured is the size of .venv, where pip's downloads are, too: pip has no bar where its output goes to a file.
show() {
    local part=$1 began=$SECONDS line every=20 width
    set +e # files vanish while du looks
    if [[ -t 2 ]]; then every=2; fi
    while sleep "$every" >/dev/null 2>&1; do
        line="setup: $part: $((SECONDS - began)) s, $(du -sm "$venv" 2>/dev/null | cut -f1) MB; $(tail -n 1 "$log")"
        if [[ -t 2 ]]; then
            width=$(stty size <&2 2>/dev/null | cut -d' ' -f2)
            printf '\r\033[K%.*s' "$((${width:-0} > 0 ? width - 1 : 79))" "$line" >&2
        else
            printf '%.120s\n' "$line" >&2
        fi
    done
}

# Usage: install PART PIP'S WORDS...
install() {
    local part=$1 began=$SECONDS failed=0
    shift
    echo "setup: $part" >&2
    show "$part" &
    shown=$!
    TMPDIR="$PWD/$venv/tmp" "$venv/bin/python" -m pip --disable-pip-version-check install "$@" >>"$log" 2>&1 || failed=$?
    stop_showing
    if ((failed)); then
        tail -n 15 "$log" >&2
        echo "setup: FAILED: $part: pip ended with exit code $failed; all it said is in $PWD/$log" >&2
        exit 1
    fi
    echo "setup: $part: done after $((SECONDS - began)) s" >&2
}

stop_showing() {
    [[ -n ${shown:-} ]] || return 0
    kill "$shown" 2>/dev/null || true
    wait "$shown" 2>/dev/null || true
    shown=""
    if [[ -t 2 ]]; then printf '\r\033[K' >&2; fi
}
trap stop_showing EXIT

python=$(find_python)
echo "setup: virtual environment $venv with $("$python" --version), packages from $requirements (1.4 GB, some minutes)" >&2
[[ -x $venv/bin/python ]] || "$python" -m venv "$venv"
rm -rf "$stamp" "$venv/tmp"
mkdir "$venv/tmp"
: >"$log"

install "1/2 torch" setuptools wheel "$(grep '^torch==' "$requirements")" 'numpy'
install "2/2 everything else" --no-build-isolation -r "$requirements"
rm -rf "$venv/tmp"
echo "$wanted" >"$stamp"
echo "setup: done" >&2
