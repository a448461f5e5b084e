#!/usr/bin/env bash
# Runs an experiment with one launcher; the scripts run_LAUNCHER.sh call it:
#   [nworkers=8] [hostfile=FILE] [rdma=0] run_with.sh LAUNCHER [EXPERIMENT.yaml] [FLAGS of `run`]
#   cluster=predicted [nworkers=64] run_with.sh LAUNCHER [EXPERIMENT.yaml] [FLAGS of `predict`]
# With nworkers, mpirun and ssh take their hosts from configs/cluster$nworkers unless told otherwise.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
# shellcheck source=scripts/shared.sh
source "$root/scripts/shared.sh"
words="this script reads nworkers, hostfile, rdma and cluster only; use --set, or dear/horovod_mpi_cj.sh"
refuse_others "$words" dnn bs senlen method ngpu_per_node nworker nnodes node_rank \
  master nstreams mgwfbp asc threshold compressor density exclude_parts autotune
(($#)) || mistake "usage: run_with.sh LAUNCHER [EXPERIMENT.yaml] [FLAGS of \`run\`]"
launcher=$1
shift
experiment="$root/configs/experiments/reference.yaml"
if [[ $# -gt 0 && "$1" != -* ]]; then
  experiment=$1
  shift
fi

python=$(project_python "$root")
if [[ -n "${cluster:-}" ]]; then
  [[ "$cluster" == predicted ]] || mistake "cluster=$cluster: must be predicted (or empty)"
  refuse_others "cluster=predicted has no hosts to start; see --network, --ranks-per-host" hostfile rdma
  [[ -z "${nworkers:-}" ]] || set -- --set "world_sizes=[$nworkers]" "$@"
  exec "$python" "$root/benchmarks.py" predict "$experiment" "$@"
fi

sets=(--set "launcher=$launcher")
hostfile=${hostfile:-}
if [[ -n "${nworkers:-}" ]]; then
  sets+=(--set "world_sizes=[$nworkers]")
  if [[ -z "$hostfile" && ("$launcher" == mpirun || "$launcher" == ssh) ]]; then
    hostfile="$root/configs/cluster$nworkers"
  fi
fi
[[ -z "$hostfile" ]] || sets+=(--set "hostfile=$hostfile")
[[ "${rdma:-0}" == 0 ]] || sets+=(--set "launcher_options.rdma=$rdma")

exec "$python" "$root/benchmarks.py" run "$experiment" "${sets[@]}" "$@"
