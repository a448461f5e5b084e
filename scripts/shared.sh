# shellcheck shell=bash
# Sourced by the other scripts: checks of what a user gives; the progress and the errors of a build.

mistake() {  # WORDS: one line; exit status 2
  echo "error: $*" >&2
  exit 2
}

whole_number() {  # NAME: its value must be one
  [[ "${!1}" =~ ^[1-9][0-9]{0,4}$ ]] || mistake "$1=${!1}: must be a whole number from 1 to 99999"
}

refuse_others() {  # WORDS NAME...: variables of the reference suites that a script does not read
  local name
  for name in "${@:2}"; do
    [[ -z "${!name:-}" ]] || mistake "variable $name: $1"
  done
}

environment() {  # [FOLDER]: prints the path of a virtual environment
  local folder=${1:-.venv}
  [[ -x "$folder/bin/python" ]] || mistake "$folder: no virtual environment (\`make core\` makes .venv)"
  (cd "$folder" && pwd)
}

program() {  # NAME of a variable that holds one
  command -v "${!1}" > /dev/null || mistake "$1=${!1}: no such program"
}

project_python() {  # FOLDER of the project: prints its Python, which has what the harness needs
  local python=python3
  [[ -x "$1/.venv/bin/python" ]] && python="$1/.venv/bin/python"
  "$python" -c 'import sys; sys.path.insert(0, sys.argv[1]); import benchmarks as b; b.check()' "$1" \
    || exit 2
  echo "$python"
}

# `follow PID LOG WHAT` says how far a build is until it ends, by the last "[12/87]" or "[ 12%]" in
# its log: on one line of a terminal, or a line per quarter where output is kept. Its status is that
# of the build.
follow() {
  local pid=$1 log=$2 what=$3 percent shown="" quarter=-1 started=$SECONDS
  while kill -0 "$pid" 2> /dev/null; do
    sleep 1
    percent=$(tail -n 3 "$log" 2> /dev/null \
      | sed -nE 's#^ *\[ *([0-9]+)/([0-9]+)\].*#\1 \2#p; s#^ *\[ *([0-9]+)%\].*#\1 100#p' \
      | awk 'END { if ($2) printf "%d", 100 * $1 / $2 }')
    [[ -n "$percent" ]] || continue
    if [[ -t 1 ]]; then
      shown="   $what: $percent % after $((SECONDS - started)) s"
      printf '\r%s\033[K' "$shown"
    elif ((percent / 25 > quarter)); then
      quarter=$((percent / 25))
      echo "   $what: $percent % after $((SECONDS - started)) s"
    fi
  done
  if [[ -n "$shown" ]]; then printf '\r\033[K'; fi
  wait "$pid"
}

# `cause LOG` prints the first error in the log of a build, and the two lines after it. Messages of
# pip that only say that a program failed are passed over.
cause() {
  awk '/subprocess-exited-with-error|metadata-generation-failed/ { next }
    !lines && !/(error: |CMake Error|[a-z]Error: )/ { next }
    lines++ < 3 { text = text " " $0 }
    END { gsub(/[ \t]+/, " ", text); print lines ? substr(text, 2, 300) : "no error in " FILENAME }' "$1"
}
