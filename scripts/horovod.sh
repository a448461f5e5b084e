#!/usr/bin/env bash
# Builds Horovod 0.28.1 against the torch in a virtual environment: scripts/horovod.sh .venv
# For CUDA tensors, over NCCL, where torch has CUDA and there is an nvcc; else for CPU tensors alone.
# If that fails, says why in one line and succeeds: Horovod's trials are then `unsupported`.
# A wheel once built is kept in HOROVOD_WHEELS (default ~/.cache/dear-bench/horovod) and used again.
set -euo pipefail
cd "$(dirname "$0")/.."
# shellcheck source=scripts/shared.sh
source scripts/shared.sh
venv=$(environment "${1:-}")
version=0.28.1
python="$venv/bin/python"
note="$venv/horovod-build-failed.txt"
log="$venv/horovod-build.log"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

fail() {
  echo "$1" > "$note"
  echo "== Horovod not built: $1; its trials will be 'unsupported' (log: $log)"
  exit 0
}

mpi=$(command -v mpicxx > /dev/null && echo mpi || echo gloo)
key=$("$python" -c 'import sys, torch; print(f"cp{sys.version_info[0]}{sys.version_info[1]}-torch"
  + torch.__version__)')-$(uname -m)
gpus=""
if command -v nvcc > /dev/null && "$python" -c 'import torch; exit(torch.version.cuda is None)'; then
  export HOROVOD_GPU_OPERATIONS=NCCL
  # Kernels for this machine's GPUs alone; for all that nvcc knows, where there is none.
  capabilities=${HOROVOD_BUILD_CUDA_CC_LIST:-$("$python" -c 'import torch.cuda as c
print(*sorted({"%d%d" % c.get_device_capability(i) for i in range(c.device_count())}), sep=",")')}
  if [[ -n "$capabilities" ]]; then export HOROVOD_BUILD_CUDA_CC_LIST=$capabilities; fi
  gpus=-nccl${capabilities//,/_}
  # The NCCL that torch brings along, which has no file of the name that a linker looks for.
  nccl=$("$python" -c 'from importlib.util import find_spec as f; s = f("nvidia") and f("nvidia.nccl")
print(next(iter(s.submodule_search_locations)) if s else "")')
  if [[ -n "$nccl" && -z "${HOROVOD_NCCL_HOME:-}" ]]; then
    ln -s "$nccl/lib/libnccl.so.2" "$work/libnccl.so"
    export HOROVOD_NCCL_INCLUDE=$nccl/include HOROVOD_NCCL_LIB=$work HOROVOD_NCCL_LINK=SHARED
  fi
fi
wheels=${HOROVOD_WHEELS:-${XDG_CACHE_HOME:-$HOME/.cache}/dear-bench/horovod}/$key-$mpi$gpus

install_wheel() {
  local wheel
  wheel=$(find "$wheels" -name 'horovod-*.whl' 2> /dev/null | head -n 1)
  [[ -n "$wheel" ]] || return 1
  "$python" -m pip install --disable-pip-version-check -q --no-deps --force-reinstall "$wheel"
  "$python" -c 'import torch, horovod.torch as hvd; assert hvd.gloo_built()' 2>> "$log"
}

: > "$log"
rm -f "$note"
if install_wheel; then
  echo "== Horovod $version: wheel from an earlier build"
  exit 0
fi

command -v g++ > /dev/null || fail "no C++ compiler (g++) found"
"$python" -m pip install --disable-pip-version-check -q setuptools wheel >> "$log" 2>&1 \
  || fail "cannot install setuptools and wheel"
if ! command -v cmake > /dev/null; then
  "$python" -m pip install --disable-pip-version-check -q cmake >> "$log" 2>&1 \
    || fail "no cmake found, and none to be had from the package index"
  export HOROVOD_CMAKE="$venv/bin/cmake"
fi
"$python" -m pip download --disable-pip-version-check -q --no-deps --no-build-isolation \
  --no-binary :all: -d "$work" "horovod==$version" >> "$log" 2>&1 \
  || fail "cannot download its source from the package index"
tar -xzf "$work/horovod-$version.tar.gz" -C "$work"
source="$work/horovod-$version"
# Its CMake files ask for C++14 and, of nvcc, C++11; today's torch needs C++20, today's nvcc C++17.
sed -i 's/set(CMAKE_CXX_STANDARD 1[47])/set(CMAKE_CXX_STANDARD 20)/' \
  "$source/CMakeLists.txt" "$source/horovod/torch/CMakeLists.txt"
sed -i 's/set(CMAKE_CUDA_STANDARD 1[14])/set(CMAKE_CUDA_STANDARD 17)/' \
  "$source/horovod/common/ops/cuda/CMakeLists.txt"

echo "== building Horovod $version with $mpi$gpus (about 5 minutes on 2 cores; log: $log)"
export CMAKE_POLICY_VERSION_MINIMUM=3.5  # its Gloo asks for less than CMake 4 takes
export HOROVOD_WITH_PYTORCH=1 HOROVOD_WITHOUT_TENSORFLOW=1 HOROVOD_WITHOUT_MXNET=1
export HOROVOD_WITH_GLOO=1
if [[ "$mpi" == mpi ]]; then export HOROVOD_WITH_MPI=1; else export HOROVOD_WITHOUT_MPI=1; fi
MAKEFLAGS="-j$(nproc)"
export MAKEFLAGS
"$python" -m pip wheel --disable-pip-version-check -v --no-deps --no-build-isolation \
  -w "$wheels" "$source" >> "$log" 2>&1 &
follow $! "$log" Horovod || fail "$(cause "$log")"
install_wheel || fail "the built wheel does not import"
echo "== Horovod $version built"
