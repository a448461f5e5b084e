#!/usr/bin/env bash
# Runs one trial with the variables and defaults of the reference suites, e.g.
#   cd dear && dnn=resnet50 bs=4 nworkers=2 ./horovod_mpi_cj.sh
# on the hosts of configs/cluster$nworkers: by mpirun where Open MPI is installed, else by ssh; on
# this machine alone as local processes. cluster=emulated: on virtual hosts; =predicted: computed.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
# shellcheck source=scripts/shared.sh
source "$root/scripts/shared.sh"
python=$(project_python "$root")
exec "$python" -c 'import sys
sys.path.insert(0, sys.argv.pop(1))
from common.harness.cli import run_variables
sys.exit(run_variables(sys.argv[1:]))' "$root" "$@"
