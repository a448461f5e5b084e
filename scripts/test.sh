#!/usr/bin/env bash
# Runs the tests of every part, without those that take long: scripts/test.sh .venv [--again]
# Four runs are side by side: the tests of tests/unit compute, most of the others wait. With --again,
# repeats only the tests that failed last, and prints their names; it fails if there are none.
set -euo pipefail
cd "$(dirname "$0")/.."
# shellcheck source=scripts/shared.sh
source scripts/shared.sh
venv=$(environment "${1:-}")
pytest=("$venv/bin/python" -m pytest)
parts=(unit comm system others)

run() {  # the tests of a part, with pytest's options
  local cache=(-o "cache_dir=.pytest_cache/$1")
  case "$1" in
    others) "${pytest[@]}" "${cache[@]}" "${@:2}" --ignore=tests/{unit,comm,system} ;;
    *) "${pytest[@]}" "${cache[@]}" "${@:2}" "tests/$1" ;;
  esac
}

failed() {  # whether a test of the part did, as far as its cache knows
  local file=".pytest_cache/$1/v/cache/lastfailed"
  [[ -f "$file" && "$(< "$file")" != "{}" ]]
}

names() {  # the tests of a part that failed last
  "${pytest[0]}" -c 'import json, sys; print(*json.load(open(sys.argv[1])), sep="\n")' \
    ".pytest_cache/$1/v/cache/lastfailed"
}

status=0
if [[ "${2:-}" == --again ]]; then
  status=5
  for part in "${parts[@]}"; do
    if failed "$part"; then
      echo "== repeated once, since they failed:"
      names "$part"
      status=0
      run "$part" --last-failed --last-failed-no-failures none || exit
    fi
  done
  exit "$status"
fi

mkdir -p build
pids=()
trap 'kill "${pids[@]}" 2> /dev/null || true' EXIT
for part in unit comm system; do
  # Not in a function: its process would be the shell, not pytest.
  "${pytest[@]}" -m "not full" -o "cache_dir=.pytest_cache/$part" "tests/$part" > "build/${part}_tests.log" 2>&1 &
  pids+=("$!")
done
run others -m "not full" || status=$?
for number in 0 1 2; do
  wait "${pids[number]}" || status=$?
  echo "== tests/${parts[number]}"
  cat "build/${parts[number]}_tests.log"
done
exit "$status"
