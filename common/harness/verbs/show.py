"""Verb `show`: prints the table of a sweep that has run, its records, or details of its trials.

`show NAME.yaml` prints a network file: its links, and the costs that `calibrate` has measured.
"""

from __future__ import annotations

import argparse
import gc
import json
from pathlib import Path

from common.harness.verbs.run import TRACE
from dear.errors import UserError

HELP = "print a sweep's table again"


def add(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of the verb."""
    add_sweep(parser)
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--json", action="store_true", help="print the records as JSON on stdout")
    how.add_argument(
        "--breakdown",
        action="store_true",
        help="time per phase of a step, and the lower bound, in milliseconds",
    )
    how.add_argument("--latex", action="store_true", help="print the table for a paper on stdout")
    how.add_argument("--trace", type=Path, metavar="FOLDER", help=TRACE)
    how.add_argument(
        "--plan",
        action="store_true",
        help="buckets of gradients, their predicted times, and what tuners tried",
    )
    parser.add_argument(
        "--columns",
        type=lambda text: [title.strip() for title in text.split(",")],
        metavar="TITLE,...",
        help="columns of the table of --latex, in this order (default: all that have a value)",
    )


def add_sweep(parser: argparse.ArgumentParser) -> None:
    """Adds the argument that names a sweep."""
    parser.add_argument(
        "sweep",
        nargs="?",
        help="a sweep's folder, or its name below --logs (default: the newest sweep); for `show` "
        "also a network file (NAME.yaml)",
    )


def main(options: argparse.Namespace) -> int:
    """Prints the output that the flags choose; the exit status is 0."""
    if options.sweep is not None and options.sweep.endswith(".yaml"):
        return _show_network(options)
    from common.harness import output
    from common.results import store
    from common.results.report.overview import overview

    if options.columns and not options.latex:
        raise UserError("--columns needs --latex: it chooses the columns of that table")
    folder = output.find_sweep(options.sweep, options.logs)
    comparison = store.Comparison.load(folder)
    with store.no_collector():
        results = comparison.results(folder)
        gc.freeze()  # this process ends with the command
    if options.json:
        print(json.dumps([result.to_json() for result in results]))
    elif options.latex:
        print(overview(results, comparison.compare_to).table.latex(options.columns), end="")
    elif options.breakdown:
        output.show_breakdown(folder, results, comparison.compare_to)
    elif options.trace is not None:
        output.write_traces(folder, results, options.trace)
    elif options.plan:
        output.show_plans(folder, results)
    else:
        output.show(folder, results, comparison.compare_to)
    return 0


def _show_network(options: argparse.Namespace) -> int:
    from common.emulation.links.profile import network_file
    from common.profiling import calibration

    given = ("json", "breakdown", "latex", "trace", "plan", "columns")
    if flags := [f"--{name}" for name in given if getattr(options, name)]:
        raise UserError(f"{flags[0]} needs a sweep, not a network file")
    network = network_file(Path(options.sweep))
    print(f"{network.name}: {network.summary}")
    if network.costs is not None:
        print("\n".join(calibration.table(network.costs)))
    return 0
