#!/usr/bin/env bash
# Trains the MNIST example on this machine, e.g.  nworkers=2 method=dear ./mnist.sh --epochs 3
# Without --data-dir FOLDER (MNIST's IDX files) it trains on scikit-learn's digits, and says so.
set -euo pipefail
root=$(cd "$(dirname "$0")" && pwd)
# shellcheck source=scripts/shared.sh
source "$root/scripts/shared.sh"
refuse_others "this script reads nworkers and method; \`./mnist.sh --help\` shows its flags" \
  bs dnn rdma gpuids nworker cluster
nworkers=${nworkers:-4} method=${method:-dear}
whole_number nworkers
python=$(project_python "$root")
train=("$root/examples/mnist/train.py" --algorithm "$method" "$@")
# A mistake is told by one process that trains nothing, not by all of them.
"$python" "${train[@]}" --epochs 0 > /dev/null || exit
cores=$(nproc)
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((cores > nworkers ? cores / nworkers : 1))}
exec "$python" -m torch.distributed.run --standalone --nproc-per-node "$nworkers" "${train[@]}"
