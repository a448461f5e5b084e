"""What the GPU check must know of this Python: its torch, its GPUs, and what is not installed.

Prints one JSON object: `python -m common.harness.gpu_probe`.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
# Programs that a machine may have without the package of that name.
_PROGRAMS = ("cmake", "ninja")


def probe() -> dict[str, Any]:
    """Facts as JSON values; `torch` is None where there is none."""
    found: dict[str, Any] = {
        "torch": None,
        "cuda": None,
        "nccl": None,
        "gpus": [],
        "missing": missing((ROOT / "requirements.txt").read_text()),
    }
    try:
        import torch
    except ImportError:
        return found
    found["torch"] = torch.__version__
    found["cuda"] = torch.version.cuda
    if torch.cuda.is_available():
        found["gpus"] = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
        if torch.distributed.is_nccl_available():
            found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    return found


def missing(requirements: str) -> dict[str, str]:
    """Names in `requirements` that are not installed, and the compiler, each with how to get it."""
    lacking = {}
    for line in requirements.splitlines():
        requirement = line.partition("#")[0].strip()
        if requirement:
            name = re.split(r"[<>=!~ ]", requirement, maxsplit=1)[0]
            if not _installed(name) and not (name in _PROGRAMS and shutil.which(name)):
                lacking[name] = f"pip install '{requirement}'"
    if not shutil.which(os.environ.get("CXX", "c++")):
        lacking["c++"] = "no C++ compiler"
    return lacking


def _installed(name: str) -> bool:
    try:
        importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


if __name__ == "__main__":
    print(json.dumps(probe()))
