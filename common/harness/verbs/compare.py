"""The verb `compare`: two sweeps, two algorithms of one, or reports of the reference suites."""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from common.harness.verbs import Status
from common.paths import RECORDS
from common.results.records import Record, fabric_words, is_learning
from common.results.store import Comparison
from dear.errors import UserError

HELP = "compare two sweeps, or two algorithms of one"


def add(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of the verb."""
    text = "a folder of records, SWEEP@LABEL or SWEEP@key=value for a part of it, or a reports.json"
    parser.add_argument("first", help=text)
    parser.add_argument("second", help="the same; ratios are those of the second to the first")
    parser.add_argument("more", nargs="*", help="further reports.json files or folders")
    parser.add_argument("--force", action="store_true", help="compare different machines, too")
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--markdown", action="store_true", help="print Markdown, for a pull request")
    how.add_argument("--json", action="store_true", help="print JSON on stdout")
    parser.add_argument(
        "--fail-on",
        metavar="regression:N%",
        help="exit with status 3 if a trial is SLOWER by more than N percent",
    )


def main(options: argparse.Namespace) -> int:
    """Prints the comparison; the exit status is 0, or `REGRESSION`."""
    operands = [options.first, options.second, *options.more]
    if any(operand.endswith(".json") for operand in operands):
        return _compare_reports(operands, options)
    if options.more:
        raise UserError("compare: two sweeps; only reports.json of several stand side by side")
    from common.results.timed import compare as comparing

    limit = _regression(options.fail_on)
    before, after = (_operand(text, options.logs) for text in (options.first, options.second))
    if not options.force:
        comparing.refuse_mixed(before, after)
    rows = comparing.rows(comparing.pairs(before, after))
    table, differs = comparing.table(rows), comparing.environment(before, after)
    if options.json:
        print(json.dumps({"pairs": [vars(row) for row in rows], "environment": differs}))
    elif options.markdown:
        print(table.markdown(), end="")
    else:
        table.print(f"{options.first} -> {options.second}: {fabric_words([*before, *after])}")
    if not options.json:
        lines = [f"environment: {line}" for line in differs]
        mean = comparing.geometric_mean(rows)
        if mean is not None:
            lines.insert(0, f"geometric mean of {mean[1]} trials: {mean[0]:.3f}x")
        unmatched = len(before) + len(after) - 2 * len(rows)
        if unmatched:
            lines.append(f"{unmatched} trials have no counterpart")
        print("\n".join([""] * options.markdown + lines))
    slower = comparing.regressions(rows, limit) if limit is not None else []
    for row in slower:
        print(f"regression: {row.model} {row.algorithm}: {row.ratio:.3f}x", file=sys.stderr)
    return Status.REGRESSION if slower else Status.OK


def _compare_reports(operands: Sequence[str], options: argparse.Namespace) -> int:
    """Prints reports of the reference suites and sweeps side by side, as mean rates."""
    from common.results.exports.reference_reports import load_reports, reports, side_by_side

    if options.fail_on:
        raise UserError("compare: --fail-on needs the steps of two sweeps; reports have only means")
    table = side_by_side(
        {
            name: load_reports(Path(name))
            if name.endswith(".json")
            else reports(_operand(name, options.logs))
            for name in operands
        }
    )
    if options.json:
        print(json.dumps([vars(row) for row in table.rows]))
    elif options.markdown:
        print(table.markdown(), end="")
    else:
        table.print("samples/s of all workers, as reports tell them: means without an interval")
    return 0


def _regression(text: str | None) -> float | None:
    """Returns the share in `regression:5%`; None for None."""
    if text is None:
        return None
    match = re.fullmatch(r"regression:([0-9.]+)%", text)
    if match is None:
        raise UserError(f"--fail-on {text}: must be regression:N%, such as regression:5%")
    return float(match[1]) / 100


def _operand(text: str, logs: Path) -> list[Record]:
    """Returns the records of `SWEEP`, or of `SWEEP@TEXT` with that label or `key=value`."""
    name, at, chosen = text.partition("@")
    if at and not chosen:
        raise UserError(f"compare: {text}: needs a label or key=value after the @")
    folder = next((path for path in (Path(name), logs / name) if (path / RECORDS).exists()), None)
    if folder is None:
        raise UserError(f"compare: no records in {name}, nor in {logs / name}")
    records = Comparison.load(folder).results(folder)
    if is_learning(records):
        raise UserError(
            f"compare: {name} is a training sweep and has no step times; compare needs timed trials"
        )
    kept = [record for record in records if not chosen or _matches(record, chosen)]
    if not kept:
        known = ", ".join(dict.fromkeys(record.label for record in records))
        raise UserError(f"compare: {text}: no trial is of that kind; there are {known}")
    return kept


def _matches(record: Record, wanted: str) -> bool:
    key, equals, value = wanted.partition("=")
    if equals:
        return str(record.trial.get(key)) == value
    return wanted == record.label
