"""Synchronous training, all ranks written out in one process.

A reference is a generator that makes one step at each `next`. `ranks.x` and `ranks.g` are the
trained parameters and their gradients of all ranks, one row for each; `ranks.update()` makes each
rank's optimizer step with its row of `ranks.g`. When it is asked for a step, `ranks.g` holds what
each rank's backward pass gave. `tests/contract` holds the algorithms to these.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from dear.lazy import torch


def average(ranks: Any, options: Any) -> Iterator[None]:
    """x_i <- x_i - update(mean of all g): equal replicas stay equal."""
    while True:
        ranks.g = ranks.g.mean(0)
        ranks.update()
        yield


def error_feedback(ranks: Any, options: Any) -> Iterator[None]:
    """Of each tensor the largest elements travel; the rest is added to the next gradient."""
    rest = torch.zeros_like(ranks.g)
    while True:
        rest += ranks.g
        sent = torch.zeros_like(rest)
        for tensor in ranks.tensors:
            count = max(int(rest[:, tensor].shape[1] * options.density), 1)
            chosen = rest[:, tensor].abs().topk(count).indices
            sent[:, tensor].scatter_(1, chosen, rest[:, tensor].gather(1, chosen))
        rest -= sent
        ranks.g = sent.mean(0)
        ranks.update()
        yield


allreduce = average
wfbp = mgwfbp = bytescheduler = horovod = ddp = average
"""The same sums, sent earlier, in other portions or in another order."""
dear = average
"""In two halves, of which the second comes before the next forward pass."""
fsdp = average
"""Each rank updates the part that it keeps; elements do not know of each other."""
mgs = average
"""With density=1; otherwise `error_feedback`, of merged groups instead of tensors."""
