"""What collectives cost on this network: times by size, fits, and whether they still hold."""

from __future__ import annotations

import dataclasses
import statistics
from dataclasses import dataclass
from typing import Any

import torch

from common.results.records.trust import CostCheck
from dear.comm.communicator import Communicator
from dear.cost.collectives import LARGE, OPERATIONS, AlphaBeta, Measurement, measure_collective

_SMALLEST, _LARGEST = 4 << 10, 64 << 20
_LEAST_SIZES = 3
_REPEATS = 3


@dataclass(frozen=True, kw_only=True)
class CostSamples:
    """Measurements of all operations, at the begin and again at the end, in seconds of this
    machine."""

    time_scale: float
    first: list[Measurement]
    again: list[Measurement]

    @property
    def check(self) -> CostCheck:
        """How far measurements are off their fits, and those of the end off those of the begin."""
        pairs = list(zip(self.first, self.again, strict=True))
        return CostCheck(
            residual=max(statistics.median(map(abs, one.residuals())) for one in self.first),
            drift=max((_drift(*pair) for pair in pairs), key=abs),
        )

    def to_json(self) -> list[dict[str, Any]]:
        """All that was measured, and how far it is off the fit."""
        both = [("begin", one) for one in self.first] + [("end", one) for one in self.again]
        return [
            {**dataclasses.asdict(one), "when": when, "time_scale": self.time_scale}
            | {"residuals": one.residuals()}
            for when, one in both
        ]


def time_collectives(
    communicator: Communicator,
    device: torch.device,
    nbytes: int,
    first: list[Measurement] | None = None,
) -> list[Measurement]:
    """Times all operations for messages up to about `nbytes`; all ranks call it.

    Args:
        nbytes: of the gradients of the model.
        first: measured before; again only the two largest sizes of each, which say what a byte
            costs.
    """
    sizes = sizes_up_to(nbytes, communicator.burst_bytes)
    return [
        measure_collective(
            communicator,
            operation,
            device,
            # On slow links it has stopped before the largest.
            sizes=sizes if first is None else first[place].nbytes[-2:],
            repeats=_REPEATS,
            shared=True,
        )
        for place, operation in enumerate(OPERATIONS)
    ]


def fits(measured: list[Measurement], time_scale: float) -> dict[str, AlphaBeta]:
    """Alpha and beta of each operation, in seconds of what the fabric stands for."""
    found = {one.operation: one.fit() for one in measured}
    return {
        operation: AlphaBeta(
            alpha_s=fit.alpha_s / time_scale, beta_s_per_byte=fit.beta_s_per_byte / time_scale
        )
        for operation, fit in found.items()
    }


def sizes_up_to(nbytes: int, burst_bytes: int = 0) -> list[int]:
    """Sizes of messages in bytes, each four times the one before; a few in any case.

    Two of them at least are large beside what links pass at once.
    """
    sizes = [_SMALLEST << 2 * power for power in range(_LEAST_SIZES)]
    while sizes[-2] < LARGE * 2 * burst_bytes or (2 * sizes[-1] < nbytes and sizes[-1] < _LARGEST):
        sizes.append(sizes[-1] << 2)
    return sizes


def _drift(first: Measurement, again: Measurement) -> float:
    """By how much longer the largest message of both takes at the end, as a share."""
    before = dict(zip(first.nbytes, first.medians_s, strict=True))
    after = dict(zip(again.nbytes, again.medians_s, strict=True))
    largest = max(before.keys() & after.keys())
    return after[largest] / before[largest] - 1
