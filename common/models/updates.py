"""An optimizer whose update takes as long as it would on the device that a model replays."""

from __future__ import annotations

from typing import Any

import torch

from common.models import pace


def paced(kind: type[torch.optim.Optimizer], memory_bytes_per_s: float) -> type[Any]:
    """`kind`, but what this CPU needs for an update beyond the device is made up for afterwards.

    The device needs the time to read and write once what an update touches: parameters (read and
    written), gradients (read), and the optimizer's state by element (read and written), as one
    fused kernel would. See `Pace.work`.

    Args:
        kind: one of torch's that update each element by itself.
        memory_bytes_per_s: of the device.
    """

    class Paced(kind):
        element_wise = True

        def step(self, closure: Any = None) -> Any:
            update = super().step
            return pace.current().work(
                lambda: update(closure), lambda: touched_bytes(self) / memory_bytes_per_s
            )

    Paced.__name__ = Paced.__qualname__ = kind.__name__
    return Paced


def touched_bytes(optimizer: torch.optim.Optimizer) -> int:
    """What an update of the parameters that have gradients reads and writes, on this rank."""
    total = 0
    for group in optimizer.param_groups:
        for param in group["params"]:
            if param.grad is None:
                continue
            state = optimizer.state.get(param, {}).values()
            kept = sum(_nbytes(one) for one in state if torch.is_tensor(one) and one.dim())
            total += 2 * _nbytes(param) + _nbytes(param.grad) + 2 * kept
    return total


def _nbytes(tensor: Any) -> int:
    local = getattr(tensor, "to_local", None)  # a sharded tensor counts what is here
    return tensor.nbytes if local is None else local().nbytes
