#!/usr/bin/env bash
# Runs one trial with the variables and defaults of the reference suites, e.g.
#   cd dear && dnn=resnet50 bs=4 nworkers=2 ./horovod_mpi_cj.sh
# through mpirun and configs/cluster$nworkers where Open MPI is installed, else local processes.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
root=$(dirname "$here")

nworkers=${nworkers:-8} bs=${bs:-64} dnn=${dnn:-resnet50} senlen=${senlen:-64} rdma=${rdma:-0}
nstreams=${nstreams:-1} threshold=${threshold:-0} compressor=${compressor:-none}
exclude_parts=${exclude_parts:-} method=${method:-dear}

refuse() {
  echo "error: $1" >&2
  exit 2
}
# What a variable would mean is not built yet: better no number than one for another setting.
[[ "$nstreams" == 1 ]] || refuse "nstreams=$nstreams: only nstreams=1 is supported"
[[ "$compressor" == none ]] || refuse "compressor=$compressor: only compressor=none is supported"
[[ -z "$exclude_parts" ]] || refuse "exclude_parts=$exclude_parts: not supported, leave it empty"
for name in mgwfbp asc; do
  [[ "${!name:-0}" == 0 ]] || refuse "$name=${!name}: method $method has no such switch"
done
for name in nworkers bs senlen threshold; do
  [[ "${!name}" =~ ^[0-9]+$ ]] || refuse "$name=${!name}: must be a whole number"
done

sets=(--set "name=reference" --set "algorithms.0.name=$method" --set "models.0.name=$dnn"
  --set "models.0.batch_size=$bs" --set "world_sizes=[$nworkers]")
[[ "$dnn" == bert* ]] && sets+=(--set "models.0.sentence_len=$senlen")
if [[ "$threshold" != 0 ]]; then
  # The references count 4-byte elements; 0 is their default and means the method's own.
  [[ "$method" == dear ]] || refuse "threshold=$threshold: method $method has no fusion threshold"
  sets+=(--set "algorithms.0.options.threshold_mb=$(
    awk -v n="$threshold" 'BEGIN { printf "%.17g", n * 4 / 1048576 }'
  )")
fi

if command -v mpirun > /dev/null; then
  hostfile="$root/configs/cluster$nworkers"
  echo "launcher: mpirun with $hostfile" >&2
  sets+=(--set launcher=mpirun --set "hostfile=$hostfile")
  # 0 TCP over Ethernet, 1 InfiniBand, 2 TCP over InfiniBand; the interfaces are in configs/envs.conf
  [[ "$rdma" == 0 ]] || sets+=(--set "launcher_options.rdma=$rdma")
else
  [[ "$rdma" == 0 ]] || refuse "rdma=$rdma: needs mpirun, and there is none"
  echo "launcher: local processes (no mpirun found)" >&2
fi

python=python3
[[ -x "$root/.venv/bin/python" ]] && python="$root/.venv/bin/python"
exec "$python" "$root/benchmarks.py" run "$root/configs/experiments/reference.yaml" \
  "${sets[@]}" --rerun all --stream --no-plot "$@"
