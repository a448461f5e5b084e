"""Decentralized training, all ranks written out in one process; what `ranks` is: see `synchronous`.

Averaging with weights `W[sender, receiver]` is `x <- W' x`, a product with the rows of all ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from typing import Any

from dear.lazy import torch
from dear.topology import graph, matrix, splitting
from dear.topology.schedules import TopologyReg, one_peer_machines, schedule


def neighbor(ranks: Any, options: Any) -> Iterator[None]:
    """awc: x <- W' x - update(g(x)); atc: x <- W' (x - update(g(x)))."""
    for step in count():
        due = step % options.every == options.every - 1
        weights = _weights(options, len(ranks.x), step) if due else torch.eye(len(ranks.x)).double()
        if options.combine == "atc":
            ranks.update()
        ranks.x = weights.T @ ranks.x
        if options.combine == "awc":
            ranks.update()
        yield


def decentralized(ranks: Any, options: Any) -> Iterator[None]:
    """x <- (1 - a) x + a W' x - update(g(x)); everybody starts equal, so the first W is 1."""
    size = len(ranks.x)
    made = TopologyReg.make(
        options.topology, world_size=size, rank=0, local_world_size=options.ranks_per_node or 1
    )
    for step in count():
        weights = torch.eye(size).double()
        for edge in made.edges_at(step) if step else ():
            for rank in edge.ranks:
                weights[edge.ranks, rank] = (1 - edge.weight) / max(len(edge.ranks) - 1, 1)
                weights[rank, rank] = edge.weight
        ranks.x += options.adaptive_factor * (weights.T @ ranks.x - ranks.x)
        ranks.update()
        yield


def gradient_tracking(ranks: Any, options: Any) -> Iterator[None]:
    """y <- W' y + g - last g;  x <- W' x - update(y)."""
    weights = torch.as_tensor(matrix(graph(options.topology, len(ranks.x))))
    y = last = torch.zeros_like(ranks.x)
    while True:
        y, last = weights.T @ y + ranks.g - last, ranks.g
        ranks.x = weights.T @ ranks.x
        ranks.g = y
        ranks.update()
        yield


def exact_diffusion(ranks: Any, options: Any) -> Iterator[None]:
    """psi = x - update(g);  x <- (W + 1)' / 2 (psi + x - last psi)."""
    weights = torch.as_tensor(matrix(graph(options.topology, len(ranks.x))))
    weights = (weights + torch.eye(len(ranks.x))) / 2
    last = ranks.x
    while True:
        x = ranks.x
        ranks.update()
        psi = ranks.x
        ranks.x = weights.T @ (psi + x - last)
        last = psi
        yield


def push_diging(ranks: Any, options: Any) -> Iterator[None]:
    """u <- C (u - update(y)); v <- C v; x = u / v; y <- C y + g - last g: C shares a rank out."""
    size = len(ranks.x)
    shares = torch.as_tensor(matrix(splitting(graph(options.topology, size)))).T
    u, v = ranks.x, torch.ones(size, 1).double()
    y = last = torch.zeros_like(u)
    while True:
        y, last, x = y + ranks.g - last, ranks.g, ranks.x
        ranks.g = y
        ranks.update()
        u, v, y = shares @ (u + ranks.x - x), shares @ v, shares @ y
        ranks.x = u / v
        yield


def _weights(options: Any, size: int, step: int) -> Any:
    """`W[sender, receiver]` of a step of `neighbor`."""
    machines = size // options.local_size if options.hierarchical else size
    if machines == 1 or options.dynamic == "none":
        weights = torch.as_tensor(matrix(graph(options.topology, machines)))
    else:
        weights = torch.eye(machines).double()
        for rank in range(machines):
            peers = schedule(options.dynamic, machines, rank, options.local_size or 1)
            if options.hierarchical:
                peers = one_peer_machines(machines, rank)
            sources = peers(step)[1]
            weights[[rank, *sources], rank] = 1 / (1 + len(sources))
    if options.hierarchical:  # the ranks of a machine are one
        inside = torch.full((options.local_size,) * 2, 1 / options.local_size).double()
        weights = torch.kron(weights, inside)
    return weights
