#!/usr/bin/env bash
# What only an NVIDIA card can prove, in one command of at most nine minutes; `--help` lists its parts.
# PYTHON names an interpreter whose torch has CUDA and that has the packages of pyproject.toml and megatron-core; what
# is missing is said before anything is run.
set -euo pipefail
scripts=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
exec "${PYTHON:-python3}" "$scripts/gpu/evidence.py" "$@"
