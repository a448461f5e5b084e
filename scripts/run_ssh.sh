#!/usr/bin/env bash
# One ssh per host, no scheduler, e.g.  nworkers=8 scripts/run_ssh.sh configs/experiments/quick.yaml
# Hosts stand in configs/cluster8 (or hostfile=FILE); ssh must not ask for passwords.
set -euo pipefail
exec "$(dirname "$0")/run_with.sh" ssh "$@"
