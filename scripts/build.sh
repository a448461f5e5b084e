#!/usr/bin/env bash
# Builds the comm core against the torch of a virtual environment: scripts/build.sh .venv
# Prints what was found and what was left out. Needs a C++20 compiler; cmake and ninja come from
# the environment's packages.
set -euo pipefail
cd "$(dirname "$0")/.."
venv=$(cd "${1:-.venv}" && pwd)
python="$venv/bin/python"
source_dir=common/comm_core
build_dir=build/comm_core

if ! command -v "${CXX:-c++}" > /dev/null; then
  echo "error: no C++ compiler found (Debian: apt-get install g++)" >&2
  exit 2
fi
rm -rf "$build_dir/extensions"
mkdir -p "$build_dir"
facts=$("$python" "$source_dir/build_facts.py")
cmake_args=()
while IFS= read -r line; do cmake_args+=("-D$line"); done <<< "$facts"

log="$build_dir/build.log"
export PATH="$venv/bin:$PATH"
started=$SECONDS
echo "== building the comm core (about 2 minutes on 2 cores; log: $log)"
if ! { cmake -S "$source_dir" -B "$build_dir" -G Ninja "${cmake_args[@]}" \
    && cmake --build "$build_dir"; } > "$log" 2>&1; then
  grep -m 5 -E 'error|Error' "$log" >&2 || tail -n 5 "$log" >&2
  echo "error: the comm core was not built; the whole log is in $log" >&2
  exit 2
fi
# Renamed into place: a process that has the old file mapped keeps it whole, and there is one at
# any time.
for extension in "$build_dir"/extensions/*.so; do
  cp "$extension" "$source_dir/.new"
  mv "$source_dir/.new" "$source_dir/$(basename "$extension")"
done
for old in "$source_dir"/_core*.so "$source_dir"/_mpi*.so; do
  [ -e "$build_dir/extensions/$(basename "$old")" ] || rm -f "$old"
done
"$python" "$source_dir/build_facts.py" --record
mpi=$(grep -oE 'comm_core: (no MPI|MPI .*)' "$log" | tail -n 1 || true)
echo "   compiler  $("${CXX:-c++}" --version | head -n 1)"
echo "   torch     $("$python" -c 'import torch; print(torch.__version__)')"
echo "   CUDA      $("$python" -c 'import torch; v = torch.version.cuda
print(f"{v}: CUDA tensors are staged through pinned memory" if v else "none in this torch")')"
echo "   NCCL      $("$python" -c 'import torch.distributed as d
print("torch brings it" if d.is_nccl_available() else "none in this torch")')"
if [[ "$mpi" == *"no MPI"* ]]; then
  echo "   MPI       none found: no backend 'mpi' (Debian: apt-get install libopenmpi-dev)"
else
  echo "   MPI       ${mpi#comm_core: MPI }: backend 'mpi'"
fi
echo "== comm core built in $((SECONDS - started)) s"
