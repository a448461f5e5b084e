"""The verb `report`: a sweep as one HTML file."""

from __future__ import annotations

import argparse
import os
import shlex
from pathlib import Path

from common.harness.commands import ROOT, sweep_folder
from common.harness.experiment import load
from common.results.report import page
from common.results.report.parts import Figures
from common.results.store import Comparison
from dear.errors import UserError


def report(options: argparse.Namespace, figures: Figures) -> int:
    """Writes the page of a sweep.

    Args:
        figures: draws the figures that fit the sweep in a folder.
    """
    folder = sweep_folder(options.sweep, options.logs, begun=True)
    out = options.out or folder / "report.html"
    commands = _commands(folder, options.logs)
    text = page.build(folder, commands=commands, figures=figures)
    try:
        # Renamed into place: who looks at an older one never sees half of a page.
        half = out.with_name(f".{out.name}.{os.getpid()}")
        half.write_text(text)
        half.replace(out)
    except OSError as error:
        raise UserError(f"cannot write {out}: {error.strerror}") from None
    here = Path.cwd()
    print(out.relative_to(here) if out.is_relative_to(here) else out)
    return 0


def _commands(folder: Path, logs: Path) -> page.Commands:
    own = folder.resolve()
    if own.parent == (ROOT / "logs").resolve():
        sweep = own.name
    elif own.is_relative_to(ROOT):
        sweep = str(own.relative_to(ROOT))
    else:  # where it is on this machine is nobody's business
        sweep = f"FOLDER/{own.name}"
    return page.Commands(sweep=shlex.quote(sweep), again=lambda: _again(folder))


def _again(folder: Path) -> tuple[str | None, str]:
    """What runs the experiment of that name, and whether it asks for the same trials today."""
    path = ROOT / "configs" / "experiments" / f"{folder.name}.yaml"
    if not path.exists():
        return None, "No experiment file that comes with the harness has this name."
    command = f"python benchmarks.py run {folder.name}"
    wanted = set(Comparison.load(folder).trials)
    try:
        today = {trial.hash for trial in load(path).trials()}
    except UserError as error:
        return command, f"Today this cannot be asked: {error}."
    if wanted == today:
        return command, "Today this asks for exactly these trials."
    same = len(wanted & today)
    return command, (
        f"Today this asks for {len(today)} trials, of which {same} are among the {len(wanted)} of "
        "this page: flags, another experiment file or a later version have made the others."
    )
