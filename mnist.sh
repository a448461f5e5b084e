#!/usr/bin/env bash
# Trains the MNIST example on this machine, e.g.  nworkers=2 method=dear ./mnist.sh --epochs 3
# Without --data-dir FOLDER (MNIST's IDX files) it trains on scikit-learn's digits, and says so.
set -euo pipefail
root=$(cd "$(dirname "$0")" && pwd)
nworkers=${nworkers:-4} method=${method:-dear}
python=python3
[[ -x "$root/.venv/bin/python" ]] && python="$root/.venv/bin/python"
cores=$(nproc)
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((cores > nworkers ? cores / nworkers : 1))}
exec "$python" -m torch.distributed.run --standalone --nproc-per-node "$nworkers" \
  "$root/examples/mnist/train.py" --algorithm "$method" "$@"
