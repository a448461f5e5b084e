"""Samples that fit into memory: two tensors, and what a training set varies."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from dear.lazy import torch

Split = tuple["torch.Tensor", "torch.Tensor"]
"""Inputs and targets of a part, by sample."""


class Tensors:
    """Samples of a part, in memory.

    Args:
        inputs, targets: by sample.
        vary: makes of the inputs of a batch those that are trained on, and draws from a generator;
            None: they are trained on as they are.
        finish: makes of them what the model takes (numbers of pixels, say).
    """

    def __init__(
        self,
        inputs: torch.Tensor,
        targets: torch.Tensor,
        vary: Callable[[torch.Tensor, torch.Generator], torch.Tensor] | None = None,
        finish: Callable[[torch.Tensor], torch.Tensor] = lambda inputs: inputs,
    ) -> None:
        self.inputs, self.targets = inputs, targets
        self._vary, self._finish = vary, finish

    def __len__(self) -> int:
        return len(self.targets)

    def batch(
        self, places: Sequence[int], generator: torch.Generator | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        at = torch.as_tensor(places)
        inputs = self.inputs[at]
        if self._vary is not None and generator is not None:
            inputs = self._vary(inputs, generator)
        return self._finish(inputs), self.targets[at]


def split(inputs: torch.Tensor, targets: torch.Tensor) -> tuple[Split, Split]:
    """Nine in ten samples for training, always the same ones; the others to judge by."""
    order = torch.randperm(len(targets), generator=torch.Generator().manual_seed(0))
    train, test = order[len(order) // 10 :], order[: len(order) // 10]
    return (inputs[train], targets[train]), (inputs[test], targets[test])
