# shellcheck shell=bash
# Sourced: `follow PID LOG WHAT` says how far a build is until it ends, by the last "[12/87]" or
# "[ 12%]" in its log: on one line of a terminal, or a line per quarter where output is kept.
# Its status is that of the build.
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
