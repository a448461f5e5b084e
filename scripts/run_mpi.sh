#!/usr/bin/env bash
# Open MPI's mpirun, e.g.  nworkers=8 rdma=1 scripts/run_mpi.sh configs/experiments/reference.yaml
# Hosts stand in configs/cluster8 (or hostfile=FILE), interfaces in configs/envs.conf.
set -euo pipefail
exec "$(dirname "$0")/run_with.sh" mpirun "$@"
