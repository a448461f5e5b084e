#!/usr/bin/env bash
# Optional system packages on Debian: Open MPI (the mpirun launcher, Horovod over MPI) and the tools
# of the builds and checks; with --slurm also Slurm, whose launcher's tests need it, with --ssh a
# server of ssh, for a test of the emulated network (Debian starts it). Needs root; everything else
# works without them.
set -euo pipefail
command -v apt-get > /dev/null || {
  echo "error: this is no Debian; install a C++ compiler, Python's headers, cmake, make, git, iproute2" \
    "and Open MPI with its headers (Fedora: gcc-c++ python3-devel openmpi-devel)" >&2
  exit 2
}
packages=(g++ cmake make git openmpi-bin libopenmpi-dev iproute2 shellcheck)
# Another Python than the distribution's has both already.
[[ $(command -v python3) != /usr/bin/python3 ]] || packages+=(python3-venv python3-dev)
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
