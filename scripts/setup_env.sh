#!/usr/bin/env bash
# Makes (or brings up to date) the virtual environment .venv of this repository from scripts/requirements-cpu.txt.
# With --tests, also from scripts/requirements-test.txt: packages that scripts of users bring, and the tests use.
# With --which, only prints the path of the interpreter that it would use.
# Does nothing if it is up to date. Uses pip as it is configured on this machine. PYTHON=... chooses the interpreter.
set -euo pipefail
here=$PWD
cd "$(dirname "${BASH_SOURCE[0]}")/.."

venv=.venv
requirements=scripts/requirements-cpu.txt
for_tests=scripts/requirements-test.txt
log="$venv/setup.log"

stamp_of() { echo "$venv/$(basename "$1" .txt).sha256"; }

is_current() { [[ -x $venv/bin/python ]] && sha256sum --check --status "$(stamp_of "$1")" 2>/dev/null; }

find_python() {
    local candidate
    for candidate in ${PYTHON:+"$PYTHON"} python3.11 python3.12 python3.13 python3; do
        if [[ $candidate == */* && $candidate != /* ]]; then candidate=$here/$candidate; fi
        if "$candidate" -c 'import sys, venv; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 14))' 2>/dev/null; then
            type -P "$candidate"
            return
        fi
    done
    echo "setup: found no Python 3.11, 3.12 or 3.13 with the venv module; install one or set PYTHON" >&2
    return 1
}

if [[ ${1:-} == --which ]]; then
    find_python
    exit
fi

tests=0
if [[ ${1:-} == --tests ]]; then tests=1; fi
if is_current "$requirements" && { ((!tests)) || is_current "$for_tests"; }; then
    exit 0
fi

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

mkdir -p "$venv"
rm -rf "$venv/tmp"
mkdir "$venv/tmp"
: >"$log"
if ! is_current "$requirements"; then
    rm -f "$(stamp_of "$requirements")" "$(stamp_of "$for_tests")"
    python=$(find_python)
    echo "setup: virtual environment $venv with $("$python" --version), packages from $requirements (1.4 GB, some minutes)" >&2
    [[ -x $venv/bin/python ]] || "$python" -m venv "$venv"
    install "1/2 torch" setuptools wheel "$(grep '^torch==' "$requirements")" 'numpy'
    install "2/2 everything else" --no-build-isolation -r "$requirements"
    sha256sum "$requirements" >"$(stamp_of "$requirements")"
fi
if ((tests)) && ! is_current "$for_tests"; then
    rm -f "$(stamp_of "$for_tests")"
    install "packages of the tests" --no-deps -r "$for_tests" # all that they need is listed
    sha256sum "$for_tests" >"$(stamp_of "$for_tests")"
fi
rm -rf "$venv/tmp"
echo "setup: done" >&2
