"""Copies of a rank's parameters at the times when they are to be judged."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from dear.errors import UserError

MOST_BYTES = 1 << 30


class Snapshots:
    """Room for a copy per mark, in host memory; two marks that one step passes share a copy.

    Args:
        state: what is copied: all floating-point tensors of a state dict; may be empty.
        marks: their number.

    Raises:
        UserError: they would take more than `MOST_BYTES`.
    """

    def __init__(self, state: Mapping[str, torch.Tensor], marks: int) -> None:
        floating = _floating(state)
        size = sum(value.nbytes for value in floating.values())
        if size * marks > MOST_BYTES:
            raise UserError(
                f"learn.eval_every_s: {marks} copies of {size / 2**20:.0f} MiB per rank are more "
                f"than {MOST_BYTES >> 20} MiB; judge less often"
            )
        numel = sum(value.numel() for value in floating.values())
        dtype = next((value.dtype for value in floating.values()), torch.float32)
        # Written now: in the middle of training the kernel would still have to clear it.
        self._values = torch.zeros(marks, numel, dtype=dtype)
        self._taken: list[dict[str, Any] | None] = [None] * marks
        self._rows = 0

    def take(
        self,
        marks: Sequence[int],
        state: Mapping[str, torch.Tensor],
        seconds: float,
        steps: int,
        behind: Mapping[str, Sequence[float]],
    ) -> None:
        """One copy for all of `marks`, numbers of marks.

        Args:
            seconds, steps: of training so far.
            behind: kept with it: of each neighbour, uses and summed staleness so far.
        """
        row = self._values[self._rows]
        start = 0
        for value in _floating(state).values():
            row[start : start + value.numel()].view_as(value).copy_(value.detach())
            start += value.numel()
        for mark in marks:
            self._taken[mark] = {
                "row": self._rows,
                "seconds": seconds,
                "steps": steps,
                "behind": dict(behind),
            }
        self._rows += 1

    def save(self, path: Path, more: Mapping[str, Any]) -> None:
        """Writes copies and `more` (JSON) to a file, whole or not at all."""
        partial = path.with_suffix(".partial")
        values = self._values[: self._rows].clone()
        torch.save({"values": values, "taken": self._taken, **more}, partial)
        partial.replace(path)


def set_floating(model: torch.nn.Module, values: torch.Tensor) -> None:
    """Writes a copy's `values` into the floating-point tensors of the model's state."""
    start = 0
    for tensor in _floating(model.state_dict()).values():
        tensor.copy_(values[start : start + tensor.numel()].view_as(tensor))
        start += tensor.numel()


def _floating(state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: value for name, value in state.items() if value.is_floating_point()}
