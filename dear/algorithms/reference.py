"""Every algorithm in at most 20 lines, all ranks written out in one process.

A reference is a generator that makes one step at each `next`. `ranks.x` and `ranks.g` are the
trained parameters and their gradients of all ranks, one row for each; `ranks.update()` makes each
rank's optimizer step with its row of `ranks.g`, and `ranks.local_size` ranks share a host. When it
is asked for a step, `ranks.g` holds what each rank's backward pass gave. `tests/contract` holds the
algorithms to these, and a benchmark compares its trials with them; an algorithm that is not here
has its reference in its own file, by the name `reference`.

Averaging with weights `W[sender, receiver]` is `x <- W' x`, a product with the rows of all ranks.
Nobody waits in one-sided algorithms, so what a rank finds depends on who was when where: written
out here, all wait (`barrier`), or (`asyncddp`) ranks make their steps one after another.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Iterator
from itertools import count
from typing import Any

from dear.buckets.compressors import SPARSE
from dear.lazy import torch
from dear.topology import graph, matrix, splitting
from dear.topology.schedules import TopologyReg, one_peer_machines, schedule
from dear.training.algorithm import algorithm_class


def reference_of(name: str, options: Any) -> Callable[[Any, Any], Iterator[None]] | None:
    """The reference of algorithm `name` with these options; None: there is none.

    What replicas promise is one, too: those that say that they train as one process would are held
    to that. Elements that are chosen among many (`error_feedback`) depend on what travels together,
    which is tensors here; what some compressors send has no reference.
    """
    found = algorithm_class(name)
    own = sys.modules[found.__module__]
    if hasattr(own, "reference"):
        return own.reference
    compression = getattr(options, "compression", "none")
    if getattr(options, "density", 1.0) < 1 and compression in SPARSE:
        return error_feedback if compression == "eftopk" else None
    if compression in ("efsignum", "powersgd") or getattr(options, "adasum", False):
        return None  # an element depends on others of its tensor
    if compression == "signum":
        return majority
    promised = {"synchronous": average, "delayed": delayed}.get(found.capabilities.consistency)
    return globals().get(name.replace("-", "_"), promised)


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
wfbp = mgwfbp = bytescheduler = horovod = ddp = hierarchical = average
"""The same sums, sent earlier, in other portions or in another order."""
dear = average
"""In two halves, of which the second comes before the next forward pass."""
fsdp = average
"""Each rank updates the part that it keeps; elements do not know of each other."""
mgs = average
"""With density=1; otherwise `error_feedback`, of merged groups instead of tensors."""


def majority(ranks: Any, options: Any) -> Iterator[None]:
    """x_i <- x_i - update(what most of the g say, of 1 and -1)."""
    while True:
        ranks.g = torch.where(ranks.g >= 0, 1.0, -1.0).double().sum(0).sign()
        ranks.update()
        yield


def delayed(ranks: Any, options: Any) -> Iterator[None]:
    """x <- x - update(mean of the g of some steps before); `close` applies what is left."""
    held: deque[Any] = deque()
    try:
        while True:
            held.append(ranks.g.mean(0) if getattr(options, "average", True) else ranks.g.sum(0))
            if len(held) > options.staleness():
                ranks.g = held.popleft()
                ranks.update()
            yield
    finally:
        for ranks.g in held:
            ranks.update()


dadt = delayed


def neighbor(ranks: Any, options: Any) -> Iterator[None]:
    """awc: x <- W' x - update(g(x)); atc: x <- W' (x - update(g(x)))."""
    for step in count():
        due = step % options.every == options.every - 1
        weights = torch.eye(len(ranks.x)).double()
        if due:
            weights = _weights(options, ranks, step // options.every)
        if options.combine == "atc":
            ranks.update()
        ranks.x = weights.T @ ranks.x
        if options.combine == "awc":
            ranks.update()
        yield


def decentralized(ranks: Any, options: Any) -> Iterator[None]:
    """x <- (1 - a) x + a W' x - update(g(x)); everybody starts equal, so the first W is 1."""
    size, node = len(ranks.x), options.ranks_per_node or ranks.local_size
    made = TopologyReg.make(options.topology, world_size=size, rank=0, local_world_size=node)
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


def _weights(options: Any, ranks: Any, step: int) -> Any:
    """`W[sender, receiver]` of round `step` of `neighbor`."""
    size, local_size = len(ranks.x), options.local_size or ranks.local_size
    machines = size // local_size if options.hierarchical else size
    if machines == 1 or options.dynamic == "none":
        weights = torch.as_tensor(matrix(graph(options.topology, machines)))
    else:
        weights = torch.eye(machines).double()
        for rank in range(machines):
            peers = schedule(options.dynamic, machines, rank, local_size)
            if options.hierarchical:
                peers = one_peer_machines(machines, rank)
            sources = peers(step)[1]
            weights[[rank, *sources], rank] = 1 / (1 + len(sources))
    if options.hierarchical:  # the ranks of a machine are one
        inside = torch.full((local_size,) * 2, 1 / local_size).double()
        weights = torch.kron(weights, inside)
    return weights


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
