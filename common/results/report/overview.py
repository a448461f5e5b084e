"""A sweep in short: its rows, their table, the answer, and what is to be kept in mind of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from common.results.learning import summary, tables
from common.results.records import Record, is_learning
from common.results.tables.table import Table
from common.results.timed import answers, explanations, rows


@dataclass(frozen=True, kw_only=True)
class Overview:
    """What is told of a sweep wherever it is told."""

    kind: type
    """Of the rows: `Row`, or `LearnRow` of trials that train for a time."""
    rows: Sequence[Any]
    """One per record, in their order."""
    table: Table
    answers: list[str]
    """Who is fastest, a sentence for each place; none where too little is believed."""
    remarks: list[str]

    @property
    def lines(self) -> list[str]:
        """What is said below the table."""
        return [*self.answers, *self.remarks]


def overview(records: Sequence[Record], compare_to: str) -> Overview:
    """Of these records, compared to that label.

    Raises:
        UserError: `compare_to` is no label, and names several variants of an algorithm.
    """
    if is_learning(records):
        learned = summary.make_rows(records, compare_to)
        return Overview(
            kind=summary.LearnRow,
            rows=learned,
            table=tables.table(learned, compare_to),
            answers=tables.summary(learned),
            remarks=[*tables.remarks(records), *answers.of_any(learned, records)],
        )
    found = rows.make_rows(records, compare_to)
    return Overview(
        kind=rows.Row,
        rows=found,
        table=rows.comparison(found, compare_to),
        answers=answers.summary(found, compare_to),
        remarks=[*explanations.sentences(found, records), *answers.remarks(found, records)],
    )
