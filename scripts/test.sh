#!/usr/bin/env bash
# Runs the tests of every part, without those that take long: scripts/test.sh .venv [--again]
# Four runs are side by side. Those of tests/unit and tests/system take longest, so the others have a
# lower priority. With --again, repeats only the tests that failed last, and prints their names; it
# fails if there are none.
set -euo pipefail
cd "$(dirname "$0")/.."
# shellcheck source=scripts/shared.sh
source scripts/shared.sh
venv=$(environment "${1:-}")
pytest=("$venv/bin/python" -m pytest)
unset PYTHONDONTWRITEBYTECODE  # or each of hundreds of processes compiles the same files
parts=(unit comm system)  # and the others

arguments() {  # of pytest, for a part: one a line
  printf '%s\n' -o "cache_dir=.pytest_cache/$1"
  case "$1" in
    others) printf -- '--ignore=tests/%s\n' "${parts[@]}" contract/loops ;;
    comm) printf 'tests/%s\n' comm contract/loops ;;
    *) echo "tests/$1" ;;
  esac
}

run() {  # the tests of a part, with more of pytest's options
  local words
  mapfile -t words < <(arguments "$1")
  "${pytest[@]}" "${words[@]}" "${@:2}"
}

failed() {  # whether a test of the part did, as far as its cache knows
  local file=".pytest_cache/$1/v/cache/lastfailed"
  [[ -f "$file" && "$(< "$file")" != "{}" ]]
}

stopped() {  # whether the part ended in another way than by its tests
  [[ ! "$(cat "build/${1}_status" 2> /dev/null || echo 0)" =~ ^[015]$ ]]
}

names() {  # the tests of a part that failed last
  "${pytest[0]}" -c 'import json, sys; print(*json.load(open(sys.argv[1])), sep="\n")' \
    ".pytest_cache/$1/v/cache/lastfailed"
}

status=0
if [[ "${2:-}" == --again ]]; then
  status=5
  for part in "${parts[@]}" others; do
    if stopped "$part"; then
      echo "== tests/$part: stopped, so all of them again"
      status=0
      run "$part" -m "not full" || exit
      echo 0 > "build/${part}_status"
    elif failed "$part"; then
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
for part in "${parts[@]}"; do
  mapfile -t words < <(arguments "$part")
  # Not by `run`: its process would be the shell, not pytest.
  [[ "$part" == comm ]] && level=4 || level=0
  nice -n "$level" "${pytest[@]}" -m "not full" "${words[@]}" > "build/${part}_tests.log" 2>&1 &
  pids+=("$!")
done
mapfile -t words < <(arguments others)
nice -n 4 "${pytest[@]}" "${words[@]}" -m "not full" || status=$?
echo "$status" > build/others_status
for number in "${!parts[@]}"; do
  code=0
  wait "${pids[number]}" || code=$?
  echo "$code" > "build/${parts[number]}_status"
  [[ "$code" == 0 ]] || status=$code
  echo "== tests/${parts[number]}"
  cat "build/${parts[number]}_tests.log"
done
exit "$status"
