"""Costs of collectives on this network: times by size, fits, and checks of the fits."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch

from common.results.records.trust import CostCheck, EngineCosts
from dear.comm.communicator import Communicator
from dear.cost.collectives import barrier_s, is_distant, measure_collective
from dear.cost.fit import CollectiveCost
from dear.cost.foreign import Sender, measure_sender
from dear.cost.measurement import LARGE, OPERATIONS, Measurement

_SMALLEST, _LARGEST = 4 << 10, 64 << 20
_LEAST_SIZES = 3
BUDGET_S, MOST_BUDGET_S = 0.5, 10.0
"""Least and largest budget for each of the four operations, in seconds of the modelled cluster."""
BARRIERS = 150
"""Barriers whose time is the budget between distant ranks. The least budget would end before
messages are large enough to show the cost of a byte."""
DISTANT_GROWTH, FINE_FROM = 4, 1 << 20
"""Growth of the sizes between distant ranks up to `FINE_FROM` bytes, where the bytes cost little
beside the latencies. Larger sizes double."""
SENDER_BUDGET_S = 1.5
"""Budget for each kind of message of a library that sends messages itself. It is longer: such a
library does not report at which size its algorithm changes, so beta needs large messages."""


def time_collectives(
    communicator: Communicator,
    device: torch.device,
    nbytes: int,
    first: Sequence[Measurement] | None = None,
) -> list[Measurement]:
    """Times all operations for messages up to about `nbytes`. All ranks must call this together.

    Args:
        nbytes: size of the model's gradients.
        first: earlier measurements. If they are given, only their two largest sizes are timed
            again. On slow links, these are smaller than `nbytes`.
    """
    sizes, budget_s = _sizes_and_budget(communicator, nbytes, BUDGET_S)
    return [
        measure_collective(
            communicator,
            operation,
            device,
            sizes=sizes if first is None else first[place].nbytes[-2:],
            shared=True,
            warm=first is None,
            queues=first is None,
            budget_s=budget_s,
        )
        for place, operation in enumerate(OPERATIONS)
    ]


def check(first: Sequence[Measurement], again: Sequence[Measurement]) -> CostCheck:
    """Returns the quality of measurements: from their two halves, and from later measurements."""
    worst = max((each.agreement() for each in first), key=lambda agreement: agreement.misfit)
    drifts = map(_drift, first, again)
    return CostCheck(residual=worst.error, noise=worst.noise, drift=max(drifts, key=abs))


def time_sender(communicator: Communicator, sender: Sender, nbytes: int) -> list[Measurement]:
    """Times all-reduces by a library that sends messages itself (Horovod).

    The first measurement is of one tensor, the second of two tensors that start together. All ranks
    must call this together, after some earlier messages.
    """
    sizes, budget_s = _sizes_and_budget(communicator, nbytes, SENDER_BUDGET_S)
    two = [size for size in sizes if size <= (sender.fusion_bytes or sizes[-1])]
    chosen = {1: sizes, 2: two if len(two) >= _LEAST_SIZES else []}
    return [
        measure_sender(
            communicator,
            sender,
            sizes=some,
            tensors=tensors,
            budget_s=budget_s,
        )
        for tensors, some in chosen.items()
        if some
    ]


def engine_costs(sender: Sender, measured: Sequence[Measurement], time_scale: float) -> EngineCosts:
    """Returns the costs that `time_sender` measured, in seconds of the modelled cluster."""
    worst = max((each.agreement() for each in measured), key=lambda agreement: agreement.misfit)
    alone, *two = (each.fit().divided(time_scale) for each in measured)
    return EngineCosts(
        engine=sender.name,
        all_reduce=alone,
        **({"fused" if sender.fusion_bytes else "pair": two[0]} if two else {}),
        error=worst.error,
        noise=worst.noise,
    )


def fits(measured: Sequence[Measurement], time_scale: float) -> dict[str, CollectiveCost]:
    """Returns the cost of each operation, in seconds of the modelled cluster."""
    return {each.operation: each.fit().divided(time_scale) for each in measured}


def to_json(
    measured: Sequence[Measurement], time_scale: float, **more: str
) -> list[dict[str, Any]]:
    """Returns the measurements in real seconds, with the residuals of their fits."""
    return [
        {**dataclasses.asdict(each), **more, "time_scale": time_scale}
        | {"residuals": each.residuals()}
        for each in measured
    ]


def sizes_up_to(nbytes: int, burst_bytes: int = 0, growth: int = 2) -> list[int]:
    """Returns sizes of messages in bytes: they grow by `growth`, and by 2 from `FINE_FROM` on.

    There are at least three sizes. Two of them are much larger than `burst_bytes`, the bytes that
    links pass without delay.
    """
    sizes = [_SMALLEST * growth**power for power in range(_LEAST_SIZES)]
    while sizes[-2] < LARGE * 2 * burst_bytes or (2 * sizes[-1] < nbytes and sizes[-1] < _LARGEST):
        sizes.append(sizes[-1] * (growth if sizes[-1] < FINE_FROM else 2))
    return sizes


def _sizes_and_budget(
    communicator: Communicator, nbytes: int, least_s: float
) -> tuple[list[int], float]:
    """Returns the sizes of messages in bytes, and the budget of one operation in seconds of the
    modelled cluster; both are the same on all ranks."""
    if not is_distant(communicator):
        return sizes_up_to(nbytes, communicator.burst_bytes), least_s
    sizes = sizes_up_to(nbytes, communicator.burst_bytes, DISTANT_GROWTH)
    return sizes, min(max(least_s, BARRIERS * barrier_s(communicator)), MOST_BUDGET_S)


def _drift(first: Measurement, again: Measurement) -> float:
    before = dict(zip(first.nbytes, first.typical_s, strict=True))
    after = dict(zip(again.nbytes, again.typical_s, strict=True))
    largest = max(before.keys() & after.keys())
    return after[largest] / before[largest] - 1
