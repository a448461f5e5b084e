"""Samples that fit into memory: two tensors, with optional random augmentation."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from dear.lazy import torch

Split = tuple["torch.Tensor", "torch.Tensor"]
"""Inputs and targets; the first dimension is the sample."""


class Tensors:
    """Samples of the training set or of the test set, in memory.

    Args:
        inputs, targets: tensors with one sample per index of the first dimension.
        vary: augments the inputs of a training batch at random; None: no augmentation.
        finish: converts the inputs for the model (for example bytes to normalized floats).
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
        self, indices: Sequence[int], generator: torch.Generator | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        index = torch.as_tensor(indices)
        inputs = self.inputs[index]
        if self._vary is not None and generator is not None:
            inputs = self._vary(inputs, generator)
        return self._finish(inputs), self.targets[index]


def split(inputs: torch.Tensor, targets: torch.Tensor) -> tuple[Split, Split]:
    """Splits samples into training set (9 in 10) and test set, always in the same way."""
    order = torch.randperm(len(targets), generator=torch.Generator().manual_seed(0))
    train, test = order[len(order) // 10 :], order[: len(order) // 10]
    return (inputs[train], targets[train]), (inputs[test], targets[test])
