"""One-sided training, all ranks written out in one process; what `ranks` is: see `synchronous`.

Nobody waits in these, so what a rank finds depends on who was when where. Written out here: all
wait (`barrier`), or (`asyncddp`) ranks make their steps one after another.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from typing import Any

from dear.lazy import torch
from dear.topology import graph, matrix, splitting


def win_put(ranks: Any, options: Any) -> Iterator[None]:
    """x <- W' x - update(g(x)), with what each neighbour has put last."""
    weights = torch.as_tensor(matrix(graph(options.topology, len(ranks.x))))
    for step in count():
        if step % options.every == options.every - 1:
            ranks.x = weights.T @ ranks.x
        ranks.update()
        yield


pull_get = win_put
"""With what each neighbour shows."""


def push_sum(ranks: Any, options: Any) -> Iterator[None]:
    """u <- C (u - update(g)); p <- C p; x = u / p: C shares a rank out among its targets."""
    size = len(ranks.x)
    shares = torch.as_tensor(matrix(splitting(graph(options.topology, size)))).T
    p = torch.ones(size, 1).double()
    for step in count():
        u = p * ranks.x - ranks.x
        ranks.update()
        u += ranks.x
        if step % options.every == options.every - 1:
            u, p = shares @ u, shares @ p
            ranks.x = u / p
        yield


def asyncddp(ranks: Any, options: Any) -> Iterator[None]:
    """x_i <- w_i x_i + sum of w_j (what j put last) - update(g_i): ranks in turn."""
    weights = torch.as_tensor(matrix(graph(options.topology, len(ranks.x))))
    while True:
        for rank in range(len(ranks.x)):
            x = ranks.x
            x[rank] = weights[:, rank] @ x
            ranks.x = x
            ranks.update(rank)
        yield
