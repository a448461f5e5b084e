"""Folders and commands of DeAR Bench, in a checkout and where pip has installed it.

In a checkout, `common`, `plots` and `configs` are at the top. The wheel has them in the package
`dear_bench`; results then go to the current folder.
"""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
"""Folder of `common`, `plots`, `configs` and `benchmarks.py`. Workers run in it."""
INSTALLED = (ROOT / "__init__.py").exists()
CONFIGS = ROOT / "configs"
EXPERIMENTS = CONFIGS / "experiments"
LOGS = (Path.cwd() if INSTALLED else ROOT) / "logs"
"""Default folder of results."""
COMMAND = "dear-bench" if INSTALLED else "python benchmarks.py"
"""Command of the harness, as messages show it."""
DRIVER = [sys.executable, str(ROOT / "benchmarks.py")]
"""The same command for a child process."""
MODULE = f"PYTHONPATH={ROOT} python -m" if INSTALLED else "python -m"
"""Start of a command that runs a module of `common` or `plots`."""
RECORDS = "records.jsonl"
"""File of the records in a sweep's folder."""
_CORE = (ROOT.parent if INSTALLED else ROOT / "common") / "comm_core"
# Not imported: the package's __init__ imports torch.
BUILD: str = runpy.run_path(str(_CORE / "built.py"))["remedy"](_CORE)
"""Remedy for a missing comm core or link switch, as messages show it."""


HOROVOD = f"in a checkout: scripts/horovod.sh {sys.prefix}" if INSTALLED else "make horovod"
"""Remedy for a missing Horovod."""


def short(text: str) -> str:
    """Returns a text with paths below the current folder made relative."""
    return text.replace(f"{Path.cwd()}{os.sep}", "")
