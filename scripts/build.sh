#!/usr/bin/env bash
# Builds the comm core against the torch of a virtual environment, and the switch of emulated
# clusters: scripts/build.sh .venv [tests]
# Prints what was found and what was left out; with `tests`, builds the C++ tests too. Needs a C++20
# compiler; cmake and ninja come from the environment's packages. Where there is an MPI, mpi4py is
# installed into the environment, for the backend `mpi`.
set -euo pipefail
cd "$(dirname "$0")/.."
# shellcheck source=scripts/shared.sh
source scripts/shared.sh
venv=$(environment "${1:-}")
python="$venv/bin/python"
source_dir=common/comm_core
build_dir=build/comm_core
switch_source=common/emulation/links/link_switch
switch_dir=build/link_switch

command -v "${CXX:-c++}" > /dev/null \
  || mistake "no C++ compiler found (Debian: apt-get install g++)"
headers=$("$python" -c 'import sysconfig; print(sysconfig.get_path("include"))')
[[ -e "$headers/Python.h" ]] \
  || mistake "no Python.h in $headers (Debian: apt-get install python3-dev; Fedora: python3-devel)"
rm -rf "$build_dir/extensions"
mkdir -p "$build_dir"
facts=$("$python" scripts/build_facts.py)
with_tests=$([[ "${2:-}" == tests ]] && echo ON || echo OFF)
cmake_args=("-DCOMM_CORE_TESTS=$with_tests")
while IFS= read -r line; do cmake_args+=("-D$line"); done <<< "$facts"

log="$build_dir/build.log"
export PATH="$venv/bin:$PATH"
started=$SECONDS
echo "== building the comm core (45 s on 2 cores, 3 minutes with its tests; log: $log)"
{ cmake -S "$source_dir" -B "$build_dir" -G Ninja "${cmake_args[@]}" \
  && cmake --build "$build_dir" \
  && cmake -S "$switch_source" -B "$switch_dir" -G Ninja "-DLINK_SWITCH_TESTS=$with_tests" \
  && cmake --build "$switch_dir"; } > "$log" 2>&1 &
follow $! "$log" "comm core" \
  || mistake "the comm core was not built: $(cause "$log") (whole log: $log)"
# Renamed into place: a process that has the old file mapped keeps it whole, and there is one at
# any time.
extension=$(basename "$build_dir"/extensions/_core*.so)
cp "$build_dir/extensions/$extension" "$source_dir/.new"
mv "$source_dir/.new" "$source_dir/$extension"
cp "$switch_dir/link_switch" "$switch_source/.new"
mv "$switch_source/.new" "$switch_source/link_switch"
for old in "$source_dir"/_core*.so "$source_dir"/_mpi*.so; do
  [[ "$old" == "$source_dir/$extension" ]] || rm -f "$old"
done
echo "   compiler  $("${CXX:-c++}" --version | head -n 1)"
"$python" scripts/build_facts.py --identity > "$source_dir/_built_for.json"
"$python" scripts/build_facts.py --found
mpi="none found: no backend 'mpi' (Debian: apt-get install libopenmpi-dev)"
if command -v mpirun > /dev/null; then
  "$python" -c 'import mpi4py' 2> /dev/null \
    || "$python" -m pip install --disable-pip-version-check -q mpi4py || true
  mpi=$(PYTHONPATH=common "$python" -c 'from comm_core import mpi
print(mpi.unavailable() or mpi.library_version().split(",")[0])')
fi
echo "   MPI       $mpi"
echo "== comm core built in $((SECONDS - started)) s"
