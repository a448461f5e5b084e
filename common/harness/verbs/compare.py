"""The verb `compare`: two sweeps, two algorithms of one, or reports of the reference suites."""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from common.harness.verbs import Status
from common.paths import RECORDS
from common.results.records import Record, fabric_words, is_learning
from common.results.store import Comparison
from common.results.tables.fields import AXES
from dear.errors import UserError, one_of, unknown

if TYPE_CHECKING:
    from common.results.timed.gate import Summary

HELP = "compare two sweeps, or two algorithms of one"
_STATUS = {
    "compared": Status.OK,
    "worse": Status.REGRESSION,
    "nothing compared": Status.NO_ANSWER,
}


def add(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of the verb."""
    text = "a folder of records, SWEEP@LABEL or SWEEP@key=value for a part of it, a reports.json, "
    text += "or a folder with the logs of a reference suite"
    parser.add_argument("first", help=text)
    parser.add_argument("second", help="the same; ratios are second / first")
    parser.add_argument("more", nargs="*", help="further reports.json files or folders")
    parser.add_argument("--force", action="store_true", help="compare different machines, too")
    parser.add_argument(
        "--across",
        metavar="KEY[,KEY]",
        help=f"compare trials that differ in these keys ({', '.join(AXES)}); the same as "
        "first@KEY=A second@KEY=B",
    )
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--markdown", action="store_true", help="print Markdown, for a pull request")
    how.add_argument("--json", action="store_true", help="print JSON on stdout")
    gate = parser.add_argument_group("for continuous integration (docs/ci.md)")
    gate.add_argument(
        "--fail-on",
        metavar="regression:N%",
        help="exit with status 3 if a trial is SLOWER by more than N percent, or is valid in the "
        "first sweep and failed, wrong, flagged or missing in the second",
    )
    gate.add_argument(
        "--junit",
        type=Path,
        metavar="FILE",
        help="write the result of --fail-on as JUnit's XML",
    )
    gate.add_argument(
        "--summary", type=Path, metavar="FILE", help="write what --json prints to a file"
    )


def main(options: argparse.Namespace) -> int:
    """Prints the comparison; the exit status is 0, `REGRESSION` or `NO_ANSWER`."""
    operands = [options.first, options.second, *options.more]
    from common.results.exports.reference_reports import is_reports

    if any(map(is_reports, operands)):
        return _compare_reports(operands, options)
    if options.more:
        raise UserError("compare: needs two sweeps; only reports and logs can be more than two")
    if options.junit and not options.fail_on:
        raise UserError("compare: --junit needs --fail-on, which says what counts as a failure")
    from common.harness.output import write_whole
    from common.results.exports import junit
    from common.results.timed import compare as comparing
    from common.results.timed import gate

    share, across = _regression(options.fail_on), _across(options)
    before = _operand(options.first, options.logs)
    # With --fail-on, a second sweep without records is no error here but a failure.
    after = _operand(options.second, options.logs, required=share is None)
    if after and not options.force:
        comparing.refuse_mixed(before, after)
    summary = gate.summarize(
        (options.first, options.second),
        before,
        after,
        across=across,
        fail_on=options.fail_on,
        share=share,
        other_labels=share is None or all(_split(text, options.logs)[1] for text in operands),
    )
    data = json.dumps(dataclasses.asdict(summary))
    if options.summary:
        write_whole(options.summary, f"{data}\n")
    if options.junit:
        write_whole(options.junit, junit.text(summary))
    if options.json:
        print(data)
        for line in summary.lines:
            print(line, file=sys.stderr)
    else:
        shown = [pair for pair in summary.pairs if pair.status != "missing"]
        table = comparing.table(shown, across)
        if shown and options.markdown:
            print(table.markdown())
        elif shown:
            table.print(f"{options.first} -> {options.second}: {fabric_words([*before, *after])}")
        for line in _lines(summary):
            print("- " * options.markdown + line)
    return _STATUS[summary.outcome]


def _lines(summary: Summary) -> list[str]:
    lines = [f"environment: {line}" for line in summary.environment]
    if summary.geometric_mean is not None:
        trials = "1 trial" if summary.compared == 1 else f"{summary.compared} trials"
        lines.insert(0, f"geometric mean of {trials}: {summary.geometric_mean:.3f}x")
    missing = sum(pair.status == "missing" for pair in summary.pairs) if not summary.fail_on else 0
    for count, sweep in ((missing, "first"), (summary.unmatched, "second")):
        if count and summary.unmatched_reason is None:
            lines.append(f"trials of the {sweep} sweep without a counterpart: {count}")
    return lines + summary.lines


def _across(options: argparse.Namespace) -> list[str]:
    """Returns the keys of `--across`, and the keys that both operands give (`SWEEP@key=value`)."""
    keys = options.across.split(",") if options.across else []
    for key in keys:
        one_of("key of --across", key, AXES)
    operands = (options.first, options.second)
    parts = [_split(text, options.logs)[1].partition("=") for text in operands]
    (first, _, value), (second, _, other) = parts
    if first == second and first in AXES and value != other:
        keys.append(first)
    return [key for key in AXES if key in keys]


def _compare_reports(operands: Sequence[str], options: argparse.Namespace) -> int:
    from common.results.exports.reference_reports import (
        is_reports,
        load_reports,
        reports,
        side_by_side,
    )

    for flag in ("fail_on", "junit", "summary", "across"):
        if getattr(options, flag):
            text = f"compare: --{flag.replace('_', '-')} needs the steps of two sweeps"
            raise UserError(f"{text}; reports have only mean rates")
    table = side_by_side(
        {
            name: load_reports(Path(name))
            if is_reports(name)
            else reports(_operand(name, options.logs), _worlds(name, options.logs))
            for name in operands
        }
    )
    if options.json:
        print(json.dumps([vars(row) for row in table.rows]))
    elif options.markdown:
        print(table.markdown(), end="")
    else:
        table.print("samples/s of all workers: means, because reports contain no intervals")
    return 0


def _worlds(text: str, logs: Path) -> tuple[int, ...]:
    folder = _folder(_split(text, logs)[0], logs)
    return Comparison.load(folder).worlds if folder else ()


def _folder(name: str, logs: Path) -> Path | None:
    return next((path for path in (Path(name), logs / name) if (path / RECORDS).exists()), None)


def _split(text: str, logs: Path) -> tuple[str, str]:
    """Returns the sweep of an operand, and what follows the @ behind it. The name of a sweep may
    have an @, too."""
    ends = [len(text), *(i for i in range(len(text) - 1, -1, -1) if text[i] == "@")]
    end = next((i for i in ends if _folder(text[:i], logs)), ends[-1])
    if end == len(text) - 1:
        raise UserError(f"compare: {text}: needs a label or key=value after the @")
    return text[:end], text[end + 1 :]


def _regression(text: str | None) -> float | None:
    if text is None:
        return None
    match = re.fullmatch(r"regression:(\d{1,2}(\.\d+)?)%", text)
    if match is None:
        raise UserError(f"--fail-on {text}: must be regression:N%, such as regression:5%")
    return float(match[1]) / 100


def _operand(text: str, logs: Path, *, required: bool = True) -> list[Record]:
    """Returns the records of `SWEEP`, or of `SWEEP@TEXT` with that label or `key=value`.

    Args:
        required: True if it is an error that there are no records.
    """
    name, chosen = _split(text, logs)
    folder = _folder(name, logs)
    if folder is None:
        problem = f"compare: no records in {name}, nor in {logs / name}"
        if required:
            raise UserError(problem)
        print(problem, file=sys.stderr)
    records = Comparison.load(folder).results(folder) if folder else []
    if is_learning(records):
        raise UserError(
            f"compare: {name} is a training sweep and has no step times; compare needs timed trials"
        )
    kept = [record for record in records if not chosen or _matches(record, chosen)]
    key, equals, _ = chosen.partition("=")
    keys = {key for record in records for key in record.trial}
    if records and not kept and equals and key.isidentifier() and key not in keys:
        raise unknown(f"key of {name}", key, keys)
    if not kept and required:
        if equals and key in keys:
            known = ", ".join(dict.fromkeys(record.setting(key) for record in records))
        else:
            known = ", ".join(dict.fromkeys(record.label for record in records)) or "none"
        raise UserError(f"compare: {text}: no trial matches; there are {known}")
    return kept


def _matches(record: Record, wanted: str) -> bool:
    key, equals, value = wanted.partition("=")
    known = bool(equals) and key in record.trial
    values = (record.setting(key), str(record.trial[key])) if known else ()
    return wanted == record.label or value in values
