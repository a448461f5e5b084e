"""Summary of a sweep: its rows, their table, the answers and the remarks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from common.results.learning import summary as learning
from common.results.learning import tables
from common.results.learning.summary import LearnRow
from common.results.records import Record, is_learning
from common.results.tables.table import Table
from common.results.timed import answers, explanations, rows
from common.results.timed.rows import Row
from common.results.validity import flag, flag_text


@dataclass(frozen=True, kw_only=True)
class Overview:
    """Summary of a sweep, for all outputs."""

    kind: type[Row] | type[LearnRow]
    """Type of the rows."""
    rows: Sequence[Row] | Sequence[LearnRow]
    """One row per record, in their order."""
    table: Table[Row] | Table[LearnRow]
    answers: list[str]
    """Sentence about the fastest trial of each cell; empty without enough valid trials."""
    remarks: list[str]
    learned: Table[LearnRow] | None = None
    """Same as `table` if these are training trials; else None."""

    @property
    def lines(self) -> list[str]:
        """Sentences below the table."""
        return [*self.answers, *self.remarks]


def overview(records: Sequence[Record], compare_to: str) -> Overview:
    """Summarizes records; speed-ups are relative to the trial with the label `compare_to`. Raises
    `UserError` if `compare_to` is no label, but an algorithm with several variants."""
    if is_learning(records):
        learned = learning.make_rows(records, compare_to)
        table = tables.table(learned, compare_to)
        return Overview(
            kind=LearnRow,
            rows=learned,
            table=table,
            learned=table,
            answers=tables.summary(learned),
            remarks=[*tables.remarks(records), *answers.general_remarks(learned, records)],
        )
    timed = rows.make_rows(records, compare_to)
    return Overview(
        kind=Row,
        rows=timed,
        table=rows.comparison(timed, compare_to),
        answers=answers.summary(timed, compare_to),
        remarks=[*explanations.sentences(timed, records), *answers.remarks(timed, records)],
    )


def has_valid(records: Sequence[Record]) -> bool:
    """Returns True if at least one trial has a valid result."""
    return any(flag(record) is None for record in records)


def no_answer(records: Sequence[Record]) -> str:
    """Returns a sentence that says why no algorithm is called the fastest."""
    if not records:
        return "No answer yet: no trial has ended."
    if has_valid(records):
        return "No answer: no cell has two algorithms with valid results."
    kinds = Counter(flag(record).kind if record.ok else record.status for record in records)
    counts = ", ".join(f"{count} {kind}" for kind, count in kinds.items())
    text = f"no trial has a valid result ({counts}), for example {records[0].label}"
    return f"No answer: {text}: {' '.join(str(flag_text(records[0])).split())}"
