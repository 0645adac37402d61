#!/usr/bin/env bash
# Runs all that needs an NVIDIA card on stand-ins for CUDA and NCCL: no card is needed (tests/fakecuda/README.md).
#   ./scripts/test_cuda.sh                     everything; 15 minutes at most, once the environment is made
#   ./scripts/test_cuda.sh stand-in            one part; --help lists them
# Makes an environment of its own first (scripts/versions.py, the newest row; 8 GB, some minutes), and keeps it. Needs
# g++ and Python 3.12. The last line is "N passed, N failed, N skipped"; each skip and failure is named above it.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=$(scripts/setup_env.sh --which)
exec "$python" tests/fakecuda/run.py "$@"
