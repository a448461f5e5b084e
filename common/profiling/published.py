"""Times of one GPU that others measured and published: configs/published/single_gpu.csv."""

from __future__ import annotations

import csv
import functools
from dataclasses import dataclass

from common.paths import CONFIGS

TABLE = CONFIGS / "published" / "single_gpu.csv"


@dataclass(frozen=True, kw_only=True)
class Published:
    """A row of the table; milliseconds of one batch."""

    model: str
    device: str
    """As in configs/gpus.yaml, with the precision behind it, or the maker's name."""
    framework: str
    batch_size: int
    side: int | None
    """Pixels of an image's side."""
    training_ms: float
    """Forward and backward pass."""
    inference_ms: float | None
    """Forward pass: without gradients, unless the source says that it was in training."""
    source: str


@functools.cache
def rows() -> tuple[Published, ...]:
    """The whole table, as the file has it."""
    with TABLE.open(newline="") as file:
        return tuple(
            Published(
                model=row["model"],
                device=row["device"],
                framework=row["framework"],
                batch_size=int(row["batch_size"]),
                side=int(row["side"]) if row["side"] else None,
                training_ms=float(row["training_ms"]),
                inference_ms=float(row["inference_ms"]) if row["inference_ms"] else None,
                source=row["source"],
            )
            for row in csv.DictReader(file)
        )


def find(model: str, device: str, batch_size: int) -> Published:
    """The only such row; raises `ValueError` where there is none, or several."""
    (row,) = [
        row
        for row in rows()
        if (row.model, row.device, row.batch_size) == (model, device, batch_size)
    ]
    return row
