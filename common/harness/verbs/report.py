"""Verb `report`: writes a sweep as one HTML file."""

from __future__ import annotations

import argparse
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from common.harness.verbs import Status
from common.harness.verbs.show import add_sweep
from common.paths import COMMAND, EXPERIMENTS, LOGS, ROOT
from dear.errors import UserError

if TYPE_CHECKING:
    from common.results.report import page

HELP = "write a sweep as one HTML file"


def add(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of the verb."""
    add_sweep(parser)
    parser.add_argument(
        "--out",
        type=Path,
        metavar="FILE",
        help="HTML file to write (default: report.html in the sweep's folder)",
    )


def main(options: argparse.Namespace) -> int:
    """Writes the page of a sweep and prints its path; the exit status is 0, or `NO_ANSWER`."""
    from common.harness.output import find_sweep, write_whole
    from common.results.report import page
    from common.results.report.overview import has_valid, no_answer
    from common.results.store import Comparison
    from plots import embedded

    folder = find_sweep(options.sweep, options.logs, begun=True)
    out = options.out or folder / "report.html"
    text = page.build(folder, commands=_commands(folder), figures=embedded.figures)
    write_whole(out, text)
    here = Path.cwd()
    print(out.relative_to(here) if out.is_relative_to(here) else out)
    records = Comparison.load(folder).results(folder)
    if not records or has_valid(records):
        return Status.OK
    print(no_answer(records), file=sys.stderr)
    return Status.NO_ANSWER


def _commands(folder: Path) -> page.Commands:
    from common.results.report import page

    path = folder.resolve()
    if path.parent == LOGS.resolve():
        sweep = path.name
    elif path.is_relative_to(ROOT):
        sweep = str(path.relative_to(ROOT))
    else:  # the page may go to others: it must not show this machine's folders
        sweep = f"FOLDER/{path.name}"
    return page.Commands(sweep=shlex.quote(sweep), again=lambda: _again(folder))


def _again(folder: Path) -> tuple[str | None, str]:
    """Returns a command that runs the experiment of the folder's name, and a sentence.

    The sentence says whether the command would run the same trials. Without such an experiment, the
    command is None.
    """
    from common.harness.experiment_file import load
    from common.results.store import Comparison

    path = EXPERIMENTS / f"{folder.name}.yaml"
    if not path.exists():
        return None, "No experiment file that comes with the harness has this name."
    command = f"{COMMAND} run {folder.name}"
    wanted = set(Comparison.load(folder).trials)
    try:
        today = {trial.hash for trial in load(path).trials()}
    except UserError as error:
        return command, f"With this version, the command fails: {error}."
    if wanted == today:
        return command, "With this version, the command runs exactly these trials."
    same = len(wanted & today)
    return command, (
        f"With this version, the command runs {len(today)} trials; {same} of them are among the "
        f"{len(wanted)} of this page. The others come from flags, another file or another version."
    )
