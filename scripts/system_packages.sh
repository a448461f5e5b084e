#!/usr/bin/env bash
# Optional system packages on Debian: Open MPI (the mpirun launcher, Horovod over MPI) and the tools
# of the builds and checks; with --slurm also Slurm, whose launcher's tests need it, with --ssh a
# server of ssh, for a test of the emulated network (Debian starts it). Needs root; everything else
# works without them.
set -euo pipefail
packages=(g++ cmake make git openmpi-bin libopenmpi-dev iproute2 shellcheck)
for option in "$@"; do
  case "$option" in
    --slurm) packages+=(slurm-wlm munge) ;;
    --ssh) packages+=(openssh-client openssh-server) ;;
    *)
      echo "usage: system_packages.sh [--slurm] [--ssh]" >&2
      exit 2
      ;;
  esac
done
if [[ $EUID -ne 0 ]]; then
  echo "run as root: apt-get install -y --no-install-recommends ${packages[*]}" >&2
  exit 2
fi
missing=()
for package in "${packages[@]}"; do
  dpkg -s "$package" > /dev/null 2>&1 || missing+=("$package")
done
[[ ${#missing[@]} -gt 0 ]] || exit 0
apt-get update -q
DEBIAN_FRONTEND=noninteractive apt-get install -y -q --no-install-recommends "${missing[@]}"
