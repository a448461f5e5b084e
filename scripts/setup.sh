#!/usr/bin/env bash
# Makes a virtual environment with everything in requirements.txt: scripts/setup.sh .venv
set -euo pipefail
cd "$(dirname "$0")/.."
venv=${1:-.venv}
python=${PYTHON:-python3}

"$python" - <<'EOF' || exit 2
import sys
if sys.version_info < (3, 10):
    sys.exit(f"error: Python {sys.version.split()[0]} is too old, 3.10 or newer is needed "
             "(make PYTHON=/path/to/python3.11 ...)")
EOF

# A GPU machine usually brings a torch that fits its driver: use that one.
own_torch() {
  "$python" - <<'EOF' 2>/dev/null
import importlib.metadata as metadata
major, minor = map(int, metadata.version("torch").split(".")[:2])
metadata.version("torchvision")
raise SystemExit((major, minor) < (2, 11))
EOF
}

wanted=$(mktemp)
trap 'rm -f "$wanted"' EXIT
grep -v '^#' requirements.txt > "$wanted"
options=()
if own_torch; then
  echo "== using the torch of $python"
  options=(--system-site-packages)
  sed -i '/^torch/d' "$wanted"
fi

if [[ ! -x "$venv/bin/python" ]]; then
  echo "== creating $venv"
  "$python" -m venv "${options[@]}" "$venv"
fi
echo "== installing requirements (torch is the large one; a few minutes on a slow line)"
"$venv/bin/python" -m pip install --disable-pip-version-check --progress-bar off -r "$wanted" \
  | { grep -v '^Requirement already satisfied' || true; }
echo "== installing dear (editable)"
"$venv/bin/python" -m pip install --disable-pip-version-check -q --no-deps \
  --no-build-isolation -e .
echo "== ready: $("$venv/bin/python" -c 'import torch; print("torch", torch.__version__)')"
