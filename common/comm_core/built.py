"""Check of a built comm core: for this Python, this torch, these sources. Imports no torch."""

from __future__ import annotations

import hashlib
import json
import sys
import sysconfig
from pathlib import Path

FACTS = "_built_for.json"
_SOURCES = ("src", "torch", "../emulation/links/link_switch")
"""Folders of the sources of the extension and of the link switch, in a checkout."""


def sources(folder: Path) -> str | None:
    """Returns a digest of the sources; None if the package is installed and has none."""
    lists = folder / "CMakeLists.txt"
    if not lists.exists():
        return None
    digest = hashlib.sha256(lists.read_bytes())
    for part in _SOURCES:
        for path in sorted((folder / part).rglob("*")):
            if path.suffix in (".cc", ".h") or path.name == "CMakeLists.txt":
                digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def remedy(folder: Path) -> str:
    """Returns the instruction that builds the comm core for this Python."""
    if not (folder / "CMakeLists.txt").exists():
        return "install dear-bench again with pip"
    ours = folder.parents[1] / ".venv"
    if Path(sys.prefix).resolve() == ours.resolve():
        return "make core"
    return f"scripts/build.sh {sys.prefix}"


def problem(folder: Path, torch: str) -> str | None:
    """Returns why the extension in `folder` cannot be used with this version of torch, or None."""
    path, suffix = folder / FACTS, sysconfig.get_config_var("EXT_SUFFIX")
    built = json.loads(path.read_bytes()) if path.exists() else {"missing": "no build has run"}
    if "missing" in built:
        return f"the comm core is not built: {built['missing']}"
    if built["torch"] != torch:
        return f"the comm core was built for torch {built['torch']}, but this is torch {torch}"
    if built["python"] != suffix or not (folder / f"_core{suffix}").exists():
        return f"the comm core was built for another Python ({built['python']}, here {suffix})"
    now = sources(folder)
    if now is not None and built.get("sources") != now:
        return "the sources of the comm core have changed since it was built"
    return None
