#!/usr/bin/env bash
# torchrun on this machine, or one torchrun on every host of a hostfile (reached by ssh), e.g.
#   nworkers=8 hostfile=configs/cluster8 scripts/run_torchrun.sh configs/experiments/reference.yaml
set -euo pipefail
exec "$(dirname "$0")/run_with.sh" torchrun "$@"
