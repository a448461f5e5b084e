#!/usr/bin/env bash
# Tries everything that needs a GPU, within 12 minutes: scripts/gpu_check.sh [.venv] [--out DIR]
# [--budget SECONDS]. Uses the torch of PYTHON (python3) if it is 2.11 or newer; needs no network,
# and no package but torch. What cannot run is skipped and listed in DIR/summary.md
# (default: $OUT, else logs/gpu-check). Exit status: 1 if a step failed, 2 without a GPU.
set -euo pipefail
cd "$(dirname "$0")/.."
# shellcheck source=scripts/shared.sh
source scripts/shared.sh
PYTHON=${PYTHON:-python3}
program PYTHON
"$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 10))' \
  || mistake "gpu-check needs Python 3.10 or newer (make PYTHON=/path/to/python3 gpu-check)"
exec "$PYTHON" -m common.gpu_check.check "$@"
