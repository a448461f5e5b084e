#!/usr/bin/env python3
"""Compares data-parallel training algorithms: which is fastest here, by how much, and why?

python benchmarks.py                      the default sweep
python benchmarks.py run X                an experiment: a file, or a name from `list`
python benchmarks.py predict X            its step times on a cluster that you do not have
python benchmarks.py advise --model X     the fastest algorithm for a model, and why
python benchmarks.py list                 algorithms, models, experiments
python benchmarks.py show [SWEEP]         a finished sweep's table
python benchmarks.py report [SWEEP]       it as one HTML file
python benchmarks.py compare A B          two of them: faster, slower, the same, or unsure
python benchmarks.py merge A B --into C   one sweep of its shards
python benchmarks.py validate SWEEP...    predictions beside measured steps
python benchmarks.py calibrate            what do collectives cost here, or by logs of nccl-tests?
python benchmarks.py doctor               can it run here, and what would mend what cannot?

Whatever Python starts it, it runs in the project's own environment, .venv, if there is one.
"""

import importlib.util
import os
import sys
from pathlib import Path

OWN = Path(__file__).resolve().parent / ".venv"
TRIED = "BENCHMARKS_OWN_ENVIRONMENT"
HELP = "`make bench` sets up .venv; or `pip install -r requirements.txt` for this Python"


def use_own_environment() -> None:
    """Goes on in .venv; returns if there is none, or this is it."""
    python = OWN / "bin" / "python"
    tried = os.environ.pop(TRIED, None)  # a .venv that is somebody's wrapper must not loop
    if tried or not python.exists():
        return
    if Path(sys.prefix).resolve() != OWN.resolve():
        os.execve(python, [python, *sys.argv], {**os.environ, TRIED: "1"})


def check() -> None:
    """Exits with a line where this Python lacks what the harness imports."""
    needed = ("torch", "numpy", "yaml", "psutil")
    missing = [name for name in needed if not importlib.util.find_spec(name)]
    if missing:
        print(f"error: {sys.executable} has no {' and no '.join(missing)}: {HELP}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    use_own_environment()
    check()
    from dear_bench import interruptible

    with interruptible():
        from common.harness.cli import main

        sys.exit(main(sys.argv[1:]))
