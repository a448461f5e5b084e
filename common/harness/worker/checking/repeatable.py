"""Repeatable passes: equal inputs give equal gradients on a GPU, as they do on a CPU."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator

import torch


@contextlib.contextmanager
def repeatable(device: torch.device) -> Iterator[None]:
    """Lets the GPU compute the same sums in the same order each time; no effect on a CPU.

    Many kernels, such as those of a convolution's gradients, add in the order in which their
    threads end. Networks magnify that rounding: without this, two plain trainings of ResNet-18
    from the same start may differ by 2 % of the distance that a tensor moves in three steps.
    Repeatable kernels may be slower, so nothing is timed in this block.

    Operations without a repeatable kernel run as always.
    """
    if device.type != "cuda":
        yield
        return
    enabled = torch.are_deterministic_algorithms_enabled()
    only_warns = torch.is_deterministic_algorithms_warn_only_enabled()
    fills = torch.utils.deterministic.fill_uninitialized_memory
    with warnings.catch_warnings():
        # torch says which operations have no such kernel; the check finds out if it matters.
        warnings.filterwarnings("ignore", message="(?s).*determinis")
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.utils.deterministic.fill_uninitialized_memory = False
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(enabled, warn_only=only_warns)
            torch.utils.deterministic.fill_uninitialized_memory = fills
