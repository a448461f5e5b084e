"""Verb `merge`: combines the shards of a sweep, which ran on several machines."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

HELP = "combine the shards of a sweep"


def add(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of the verb."""
    parser.add_argument("parts", nargs="+", type=Path, help="folders with records")
    parser.add_argument("--into", type=Path, required=True, help="a new folder for all records")


def main(options: argparse.Namespace) -> int:
    """Merges the shards into a new folder; the exit status is 0."""
    from common.harness import output
    from common.results import store

    folders = [part if part.exists() else options.logs / part for part in options.parts]
    comparison = store.merge(folders, options.into)
    results = comparison.results(options.into)
    missing = len(comparison.trials) - len(results)
    if missing:
        number = f"{missing} of {len(comparison.trials)} trials of the experiment"
        print(f"{number}: no record in any part", file=sys.stderr)
    output.write(options.into, results, comparison.compare_to)
    output.show(options.into, results, comparison.compare_to)
    return 0
