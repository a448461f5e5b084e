"""Published step times of single GPUs, from configs/published/single_gpu.csv."""

from __future__ import annotations

import csv
import functools
from dataclasses import dataclass

from common.paths import CONFIGS

TABLE = CONFIGS / "published" / "single_gpu.csv"


@dataclass(frozen=True, kw_only=True)
class Published:
    """Row of the table; times in milliseconds per batch."""

    model: str
    device: str
    """Name as in configs/gpus.yaml with the precision, or the manufacturer's name."""
    framework: str
    batch_size: int
    side: int | None
    """Side of an image in pixels."""
    training_ms: float
    """Time of forward and backward pass."""
    inference_ms: float | None
    """Time of the forward pass, without gradients unless the source states otherwise."""
    source: str


@functools.cache
def rows() -> tuple[Published, ...]:
    """Returns the whole table, in the order of the file."""
    with TABLE.open(newline="", encoding="utf-8") as file:
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
    """Returns the matching row; raises `ValueError` unless there is exactly one."""
    (row,) = [
        row
        for row in rows()
        if (row.model, row.device, row.batch_size) == (model, device, batch_size)
    ]
    return row
