#!/usr/bin/env bash
# Builds the comm core as `make core` does; the reference suites name this command.
set -euo pipefail
exec make -C "$(dirname "$0")/../.." core
