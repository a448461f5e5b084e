"""Folders of sweeps and files of experiments: how the command line names them."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from common.emulation import sandbox
from common.emulation.links.switched import PROGRAM
from common.paths import BUILD, EXPERIMENTS
from dear.errors import UserError, one_of

RECORDS = "records.jsonl"


def find_experiment(given: str | Path) -> Path:
    """Returns a file, or the one of configs/experiments with that name, with or without `.yaml`.

    Raises:
        UserError: there is neither.
    """
    path = Path(given)
    if path.exists() or path.parent != Path():
        return path
    known = {path.stem: path for path in EXPERIMENTS.glob("*.yaml")}
    return one_of("experiment", path.name.removesuffix(".yaml"), known)


def default_experiment() -> Path:
    """Returns the sweep of a command without a verb: emulated where that is possible."""
    reason = None if sandbox.inside() else unable_to_emulate()
    if reason:
        print(f"no virtual hosts here ({reason}): quick.yaml instead", file=sys.stderr)
    return EXPERIMENTS / ("quick.yaml" if reason else "emulated-quick.yaml")


def unable_to_emulate() -> str | None:
    """Returns why the default sweep cannot run on virtual hosts here, or None if it can."""
    return sandbox.unable() if PROGRAM.exists() else f"the link switch is not built: {BUILD}"


def find_sweep(name: str | None, logs: Path, *, begun: bool = False) -> Path:
    """Returns the folder of a sweep.

    Args:
        name: a path, or the name of a folder in `logs`; None: the newest one there.
        begun: whether a sweep without any record counts.

    Raises:
        UserError: there is none.
    """
    files = (RECORDS, "experiment.json") if begun else (RECORDS,)
    paths = [path for file in files for path in logs.glob(f"*/{file}")]
    paths.sort(key=lambda path: path.stat().st_mtime)
    if name is None and not paths:
        raise UserError(f"no records in {logs}: nothing has run yet")
    if name is None:
        return paths[-1].parent
    for folder in (logs / name, Path(name)):
        if any((folder / file).exists() for file in files):
            return folder
    known = dict.fromkeys(sorted(path.parent.name for path in paths))
    raise UserError(f"no records in {logs / name}; sweeps there: {', '.join(known) or 'none'}")


def short(text: str) -> str:
    """Returns a text without the path of the current folder."""
    return text.replace(f"{Path.cwd()}{os.sep}", "")
