"""What collectives cost on this network: times by size, fits, and whether they still hold."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch

from common.results.records.trust import CostCheck, EngineCosts
from dear.comm.communicator import Communicator
from dear.cost.collectives import measure_collective
from dear.cost.fit import CollectiveCost
from dear.cost.foreign import Sender, measure_sender
from dear.cost.measurement import LARGE, OPERATIONS, Measurement

_SMALLEST, _LARGEST = 4 << 10, 64 << 20
_LEAST_SIZES = 3
BUDGET_S = 0.5
"""Of what the fabric stands for, for each operation: 2 s for all four."""
SENDER_BUDGET_S = 1.5
"""Emulated seconds for each line of an engine that sends in the communicator's place. It is longer,
because such an engine reports neither regimes nor a link rate: only large messages show beta."""


@dataclass(frozen=True, kw_only=True)
class CostSamples:
    """Measurements of all operations, at the begin and again at the end, in seconds of this
    machine."""

    time_scale: float
    first: list[Measurement]
    again: list[Measurement]

    @property
    def check(self) -> CostCheck:
        """How well one half of the samples foresees the other, and how far those of the end are off
        those of the begin."""
        worst = max((one.agreement() for one in self.first), key=lambda found: found.misfit)
        pairs = zip(self.first, self.again, strict=True)
        return CostCheck(
            residual=worst.error,
            noise=worst.noise,
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
    time_scale: float = 1.0,
) -> list[Measurement]:
    """Times all operations for messages up to about `nbytes`; all ranks call it.

    Args:
        nbytes: of the gradients of the model.
        first: measured before; again only the two largest sizes of each, which say what a byte
            costs.
        time_scale: seconds of this machine in one of what the fabric stands for.
    """
    sizes = sizes_up_to(nbytes, communicator.burst_bytes)
    return [
        measure_collective(
            communicator,
            operation,
            device,
            # On slow links it has stopped before the largest.
            sizes=sizes if first is None else first[place].nbytes[-2:],
            shared=True,
            warm=first is None,
            queues=first is None,
            budget_s=BUDGET_S * time_scale,
        )
        for place, operation in enumerate(OPERATIONS)
    ]


def time_sender(
    communicator: Communicator, sender: Sender, nbytes: int, time_scale: float
) -> list[Measurement]:
    """Times all-reduces of an engine that sends in place of the communicator; all ranks call it.

    It measures one tensor, and then two tensors that start together. Connections are warm.

    Args:
        nbytes, time_scale: as of `time_collectives`.
    """
    sizes = sizes_up_to(nbytes, communicator.burst_bytes)
    two = [size for size in sizes if size <= (sender.fusion_bytes or sizes[-1])]
    chosen = {1: sizes, 2: two if len(two) >= _LEAST_SIZES else []}
    return [
        measure_sender(
            communicator,
            sender,
            sizes=some,
            tensors=tensors,
            budget_s=SENDER_BUDGET_S * time_scale,
        )
        for tensors, some in chosen.items()
        if some
    ]


def engine_costs(sender: Sender, measured: list[Measurement], time_scale: float) -> EngineCosts:
    """What `time_sender` has measured, in seconds of what the fabric stands for."""
    worst = max((one.agreement() for one in measured), key=lambda found: found.misfit)
    alone, *two = (one.fit().divided(time_scale) for one in measured)
    return EngineCosts(
        engine=sender.name,
        all_reduce=alone,
        **({"fused" if sender.fusion_bytes else "pair": two[0]} if two else {}),
        error=worst.error,
        noise=worst.noise,
    )


def fits(measured: list[Measurement], time_scale: float) -> dict[str, CollectiveCost]:
    """The cost of each operation, in seconds of what the fabric stands for."""
    return {one.operation: one.fit().divided(time_scale) for one in measured}


def sizes_up_to(nbytes: int, burst_bytes: int = 0) -> list[int]:
    """Sizes of messages in bytes, each twice the one before; a few in any case.

    Two of them at least are large beside what links pass at once.
    """
    sizes = [_SMALLEST << power for power in range(_LEAST_SIZES)]
    while sizes[-2] < LARGE * 2 * burst_bytes or (2 * sizes[-1] < nbytes and sizes[-1] < _LARGEST):
        sizes.append(sizes[-1] << 1)
    return sizes


def _drift(first: Measurement, again: Measurement) -> float:
    """By how much longer the largest message of both takes at the end, as a share."""
    before = dict(zip(first.nbytes, first.typical_s, strict=True))
    after = dict(zip(again.nbytes, again.typical_s, strict=True))
    largest = max(before.keys() & after.keys())
    return after[largest] / before[largest] - 1
