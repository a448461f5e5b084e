"""Fields and columns that the rows of all tables have in common. None: there is no value.

A cell, or place, is the trials that are compared with each other.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from common.results.records import DeviceUse, Record
from common.results.tables.cells import PROVISIONAL, Cell, Column, Shown, number, numbers, texts

AXES = {
    "model": "model",
    "batch_size": "batch",
    "world_size": "workers",
    "network": "network",
    "fault": "fault",
}
"""Keys that are equal in trials that are compared, and the titles of their columns."""


@dataclass(frozen=True, kw_only=True)
class Identity:
    """Trial of a row."""

    model: str
    world_size: int
    algorithm: str
    """Label of the algorithm."""
    status: str
    """Status of the record; `provisional` for an interrupted trial with results."""
    network: str | None = None
    """Network of an emulated cluster."""
    fault: str | None = None
    """Fault that was injected into the emulated cluster."""

    @property
    def where(self) -> str:
        """Description of the trial's cell, for a sentence."""
        extra = "".join(f", {name}" for name in (self.network, self.fault) if name)
        return f"{self.what}, {self.world_size} workers{extra}"

    @property
    def what(self) -> str:
        """Description of what is trained, for a sentence."""
        return self.model

    @classmethod
    def of(cls, record: Record) -> Identity:
        """Returns the identity of a record's trial."""
        ended = record.ok or record.throughput is None
        return cls(
            model=record.trial["model"],
            world_size=record.trial["world_size"],
            algorithm=record.label,
            status=record.status if ended else PROVISIONAL,
            network=record.trial.get("network"),
            fault=record.fault,
        )


Named = TypeVar("Named", bound=Identity)


def with_lengths(rows: Sequence[Named], records: Sequence[Record]) -> list[Named]:
    """Returns the rows of the records; those of a model that occurs with sentences of several
    lengths have the length in the model's name, as other settings of a cell have columns."""
    lengths: dict[str, set[int | None]] = {}
    for record in records:
        lengths.setdefault(record.trial["model"], set()).add(record.trial.get("sentence_len"))
    return [
        dataclasses.replace(row, model=f"{row.model}, {record.trial['sentence_len']} tokens")
        if len(lengths[row.model]) > 1
        else row
        for row, record in zip(rows, records, strict=True)
    ]


@dataclass(frozen=True, kw_only=True)
class Compared(Identity):
    """Comparison of a trial with the baseline, and with the fastest trials of its cell."""

    compared_to: str | None = None
    """Label of the baseline, also if it is flagged; None for the baseline itself."""
    speedup: float | None = None
    """Time of the baseline divided by the time of this trial: of a step, or to the target accuracy.
    None if only one limit is known, `speedup_low` or `speedup_high`."""
    speedup_low: float | None = None
    """Ends of the 95 % interval."""
    speedup_high: float | None = None
    verdict: str | None = None
    detectable: float | None = None
    """Smallest relative difference that such a sweep detects with a probability of 80 %."""
    precision: float | None = None
    """Requested half width of the speed-up's interval, relative to the speed-up."""
    more_repeats: int | None = None
    """Number of further repeats that would probably give this half width; 0: it is reached. None:
    unknown, or very many."""
    leads: bool | None = None
    """True: the trial is the fastest of its cell, or not distinguishable from it."""

    @property
    def place(self) -> tuple[object, ...]:
        """Settings that compared rows have in common."""
        raise NotImplementedError

    @property
    def one_sided(self) -> bool:
        """True if only one end of the speed-up's interval is known: a run missed the target."""
        return (self.speedup_low is None) != (self.speedup_high is None)


@dataclass(frozen=True, kw_only=True)
class Validity:
    """Validity of a row's result."""

    flag: str | None = None
    """Reason why the result is flagged (not valid). A flagged result has no verdict."""
    reason: str | None = None
    """Reason why there is no result, or why it is flagged; then all other notes."""


@dataclass(frozen=True, kw_only=True)
class Use:
    """Tokens, memory and arithmetic of a trial. None: unknown, or the trial has none."""

    tokens_per_s: float | None = None
    """Tokens of all workers per second of elapsed time; for language models."""
    memory_bytes: int | None = None
    """Peak memory of the rank and repeat with the largest peak."""
    mfu: float | None = None
    """Model FLOPs utilization: operations per second of a worker / peak of its device."""

    @classmethod
    def of(cls, record: Record, samples_per_s: float) -> Use:
        """Returns the use of a trial with a result."""
        length = record.trial.get("sentence_len")
        uses = [result.use or DeviceUse() for result in record.results]
        peaks = [peak for use in uses for peak in use.memory_bytes or ()]
        flops, peak_flops = uses[0].flops, uses[0].peak_flops
        mfu = None
        if flops is not None and peak_flops is not None:
            samples = record.trial["batch_size"] * record.trial["world_size"]
            mfu = flops * samples_per_s / samples / peak_flops
        return cls(
            tokens_per_s=length and samples_per_s * length,
            memory_bytes=None if None in peaks else max(peaks, default=None),
            mfu=mfu,
        )


class Using(Shown, Protocol):
    """Row of a trial with its use."""

    @property
    def memory_bytes(self) -> int | None: ...


class Batched(Shown, Protocol):
    """Row of a trial with its batch size, or its batch sizes by rank."""

    @property
    def batch(self) -> int | str: ...


def _batch(row: Batched) -> Cell:
    text = str(row.batch)
    return Cell(text, int(text) if text.isdecimal() else None)


def _mebibytes(row: Using) -> Cell:
    size = row.memory_bytes
    return number(size and size / 2**20, "{:.0f}".format, flag=row.flag)


PLACE = (
    texts("model", weight=0, role="place"),
    Column(title="batch", cell=_batch, weight=0, role="place", phrase="batch {}"),
    Column(
        title="workers",
        cell=lambda row: number(row.world_size, str),
        weight=0,
        role="place",
        phrase="{} workers",
    ),
    texts("network", sparse=True, weight=0, role="place"),
    texts("fault", sparse=True, weight=0, role="place"),
    texts("algorithm", weight=0, role="name"),
)
"""First columns of every table; trials without a result have no others."""
USE = (
    numbers("tokens/s", "tokens_per_s", sparse=True, weight=8),
    Column(title="MiB per rank", cell=_mebibytes, sparse=True, weight=8),
    numbers("MFU", "mfu", "{:.1%}".format, sparse=True, weight=8),
)
"""Columns before the notes."""
NOTES = texts("notes", "reason", sparse=True, weight=9, role="notes")
"""Last column of a table."""
