"""What collectives cost on the fabric of a sweep: measured by one trial, known to the others."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common.harness.trial import Trial
from dear.cost.collectives import OPERATIONS, AlphaBeta, measure_collective

if TYPE_CHECKING:
    import torch

    from dear.comm.communicator import Communicator

Costs = Mapping[str, AlphaBeta]
"""By operation, in seconds of what the fabric stands for."""

_FILE = "costs.json"
_SMALLEST, _LARGEST = 4 << 10, 64 << 20
_LEAST_SIZES = 3
_REPEATS = 3


def measure(
    communicator: Communicator, device: torch.device, nbytes: int, time_scale: float
) -> Costs:
    """The fits for messages up to about `nbytes`, the gradients of the model; all ranks call it."""
    sizes = sizes_up_to(nbytes)
    found = {}
    for operation in OPERATIONS:
        timed = measure_collective(
            communicator, operation, device, sizes=sizes, repeats=_REPEATS, shared=True
        )
        fit = timed.fit()
        found[operation] = AlphaBeta(
            alpha_s=fit.alpha_s / time_scale, beta_s_per_byte=fit.beta_s_per_byte / time_scale
        )
    return found


def sizes_up_to(nbytes: int) -> list[int]:
    """Sizes of messages in bytes, each four times the one before; a few in any case."""
    sizes = [_SMALLEST << 2 * power for power in range(_LEAST_SIZES)]
    while 2 * sizes[-1] < nbytes and sizes[-1] < _LARGEST:
        sizes.append(sizes[-1] << 2)
    return sizes


def to_json(costs: Costs) -> dict[str, dict[str, float]]:
    """As it stands in results and records."""
    return {operation: dict(vars(fit)) for operation, fit in costs.items()}


def from_json(values: Mapping[str, Mapping[str, float]]) -> Costs:
    """What `to_json` gave."""
    return {operation: AlphaBeta(**fit) for operation, fit in values.items()}


def load(folder: Path) -> Costs | None:
    """What an earlier trial has measured, from the trial's folder; None if none has."""
    path = folder / _FILE
    return from_json(json.loads(path.read_text())) if path.exists() else None


class KnownCosts:
    """What the trials of a sweep have measured so far."""

    def __init__(self) -> None:
        self._found: dict[tuple[Any, ...], Any] = {}

    def hand_over(self, trial: Trial, time_scale: float, folder: Path) -> None:
        """Writes what is known into the folder of a trial that is about to start."""
        known = self._found.get(_place(trial, time_scale))
        if known is not None:
            (folder / _FILE).write_text(json.dumps(known))

    def keep(self, trial: Trial, time_scale: float, result: Mapping[str, Any]) -> None:
        """Takes from a worker's result what it has measured, or was handed over."""
        if result.get("costs"):
            self._found[_place(trial, time_scale)] = result["costs"]


def _place(trial: Trial, time_scale: float) -> tuple[Any, ...]:
    """What the costs depend on; of the model, how large messages are."""
    return (
        trial.model,
        trial.dtype,
        trial.world_size,
        trial.ranks_per_host,
        trial.network,
        time_scale,
        trial.launcher,
        trial.backend,
        trial.device,
    )
