#!/usr/bin/env bash
# Processes of this machine, e.g.  nworkers=2 scripts/run_local.sh configs/experiments/quick.yaml
set -euo pipefail
exec "$(dirname "$0")/run_with.sh" local "$@"
