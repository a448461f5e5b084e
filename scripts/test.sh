#!/usr/bin/env bash
# The tests of every part, without those that take long: scripts/test.sh .venv [--again]
# Two runs side by side: the tests of tests/unit compute, most of the others wait for something. With
# --again only what failed last; nothing to repeat is a failure, too.
set -euo pipefail
cd "$(dirname "$0")/.."
pytest=("${1:-.venv}/bin/python" -m pytest)
units=(-o cache_dir=.pytest_cache/unit tests/unit)
others=(--ignore=tests/unit)

failed() {  # whether the cache in this folder knows of a test that failed
  local file="$1/v/cache/lastfailed"
  [[ -f "$file" && "$(< "$file")" != "{}" ]]
}

if [[ "${2:-}" == --again ]]; then
  again=(--last-failed --last-failed-no-failures none)
  status=5
  if failed .pytest_cache/unit; then
    "${pytest[@]}" "${again[@]}" "${units[@]}" && status=0 || exit
  fi
  if failed .pytest_cache; then
    "${pytest[@]}" "${again[@]}" && status=0 || exit
  fi
  exit "$status"
fi

mkdir -p build
"${pytest[@]}" -m "not full" "${units[@]}" > build/unit_tests.log 2>&1 &
unit=$!
trap 'kill "$unit" 2> /dev/null || true' EXIT
status=0
"${pytest[@]}" -m "not full" "${others[@]}" || status=$?
wait "$unit" || status=$?
echo "== tests/unit"
cat build/unit_tests.log
exit "$status"
