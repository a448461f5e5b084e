#!/usr/bin/env bash
# Makes a virtual environment with everything in requirements.txt: scripts/setup.sh .venv
# With --what-can-be after it, also where nothing can be downloaded: what is missing is left out.
set -euo pipefail
cd "$(dirname "$0")/.."
venv=${1:-.venv}
lenient=${2:-}
# shellcheck source=scripts/shared.sh
source scripts/shared.sh
PYTHON=${PYTHON:-python3}
[[ $(uname) == Linux ]] || mistake "DeAR Bench needs Linux, and this is $(uname)"
program PYTHON
if [[ -n "$lenient" && -e "$venv/ready" ]]; then
  echo "$venv is set up already"
  exit
fi

"$PYTHON" - <<'EOF' || exit 2
import sys
if sys.version_info < (3, 10):
    sys.exit(f"error: Python {sys.version.split()[0]} is too old, 3.10 or newer is needed "
             "(make PYTHON=/path/to/python3.11 ...)")
EOF

# A GPU machine usually brings a torch that fits its driver: use that one.
own_torch() {  # prints its version
  "$PYTHON" - <<'EOF' 2>/dev/null
import importlib.metadata as metadata
version = metadata.version("torch")
major, minor = map(int, version.split(".")[:2])
print(version)
raise SystemExit((major, minor) < (2, 11))
EOF
}

site='import sysconfig; print(sysconfig.get_path("purelib"))'
wanted=$(mktemp)
trap 'rm -f "$wanted"' EXIT
grep -v '^#' requirements.txt > "$wanted"
options=()
if version=$(own_torch); then
  echo "== using torch $version of $PYTHON"
  options=(--system-site-packages)
  sed -i '/^torch/d' "$wanted"
  echo "torch==$version" >> "$wanted"  # as it is: no package may bring another one
  [[ -n "$lenient" ]] || echo torchvision >> "$wanted"
elif [[ -n "$version" ]]; then
  echo "== not using torch $version of $PYTHON: 2.11 or newer is needed"
fi

# An interrupted set-up leaves an environment that has no pip. Another Python needs another one.
by=$("$PYTHON" -c 'import sys; print(sys.base_prefix, sys.version.split()[0])')
made_by="$by ${options[*]:-}"
clear=()
if [[ -e "$venv/bin" ]]; then
  before=$made_by
  [[ ! -e "$venv/made_by" ]] || before=$(< "$venv/made_by")
  # What has been downloaded is kept where nothing can be downloaded.
  if [[ "${before%% *}" != "${by%% *}" ]] || [[ -z "$lenient" && "$before" != "$made_by" ]] \
    || { [[ -z "$lenient" ]] && ! "$venv/bin/python" -m pip --version > /dev/null 2>&1; }; then
    echo "== $venv is incomplete, or of another Python or torch: making it anew"
    clear=(--clear)
  fi
fi
if [[ ! -x "$venv/bin/python" || ${#clear[@]} -gt 0 ]]; then
  echo "== creating $venv"
  # Debian's Python has no ensurepip without its package python3-venv; a pip it has serves as well.
  if [[ ${#options[@]} -gt 0 ]] && "$PYTHON" -m pip --version > /dev/null 2>&1; then
    options+=(--without-pip)
  fi
  "$PYTHON" -m venv "${clear[@]}" "${options[@]}" "$venv" || exit 2
  echo "$made_by" > "$venv/made_by"
  if [[ ${#options[@]} -gt 0 ]]; then
    # If this Python is a virtual environment's itself, what it has installed is not among the
    # "system's" packages, so name its folders.
    "$PYTHON" - > "$("$venv/bin/python" -c "$site")/machine.pth" <<'EOF'
import sys, sysconfig
if sys.prefix != sys.base_prefix:
    print(*{sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}, sep="\n")
EOF
  fi
fi
echo "== installing requirements (about 1 minute; torch is the large one, longer on a slow line)"
started=$SECONDS
# Not compiled: most of the files are never imported, and those that are are compiled then.
install=("$venv/bin/python" -m pip install --disable-pip-version-check --no-compile -r "$wanted")
requirements() {
  if [[ -t 1 ]]; then "${install[@]}"; return; fi  # with its bars
  "${install[@]}" --progress-bar off | { grep -v '^Requirement already satisfied' || true; }
}
requirements || {
  [[ -n "$lenient" ]] || exit 1
  echo "== the requirements were not all installed (no network?): going on with what is there"
}
# Its dependencies are for traces of GPUs; `predict --chakra` needs only protobuf.
[[ -n "$lenient" ]] ||
  "$venv/bin/python" -m pip install --disable-pip-version-check -q --no-deps 'mlc-chakra==1.0.0' ||
  echo "== mlc-chakra was not installed: predict --chakra will not work, and its tests are skipped"
echo "== installing dear (editable)"
"$venv/bin/python" -m pip install --disable-pip-version-check -q --no-deps --no-build-isolation \
  ${lenient:+--no-index} -e . || {
  [[ -n "$lenient" ]] || exit 1
  echo "== dear was not installed by pip: linking it"
  folder=$("$venv/bin/python" -c "$site")
  pwd > "$folder/dear-bench.pth"
  ln -sfn "$PWD/common/comm_core" "$folder/comm_core"
}
cd "$venv"
torch=$(bin/python -c 'import dear, torch; print("torch", torch.__version__)')
echo "== ready after $((SECONDS - started)) s: $torch"
