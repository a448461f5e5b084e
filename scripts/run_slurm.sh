#!/usr/bin/env bash
# Slurm: srun inside an allocation (sbatch, salloc), else a batch job per repeat, e.g.
#   nworkers=8 scripts/run_slurm.sh configs/experiments/quick.yaml --set launcher_options.tasks_per_node=4
set -euo pipefail
exec "$(dirname "$0")/run_with.sh" slurm "$@"
