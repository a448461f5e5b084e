"""Serial references: every algorithm in at most 20 lines, all ranks in one process.

A reference is a generator that makes one step at each `next`. `ranks.x` and `ranks.g` hold the
trained parameters and their gradients, one row per rank. Before a step, `ranks.g` holds the
gradients of each rank's backward pass: zeros where a rank has no gradient, and there
`ranks.present` is False. `ranks.update()` steps each rank's optimizer with its row of `ranks.g`.
`ranks.local_size` ranks share a host. `tests/contract` compares the algorithms with these
references, and a benchmark compares its trials with them. An algorithm without a reference here may
define one in its own file, by the name `reference`.

In formulas, x are a rank's parameters, g its gradients, and W the weights: `W[sender, receiver]`.
Averaging is `x <- W' x` with the transposed W, a product with the rows of all ranks. Results of
one-sided algorithms depend on timing, since no rank waits. Their references assume that all ranks
wait (`barrier`), or (`asyncddp`) that ranks step one after another.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import count
from typing import TYPE_CHECKING, Any, Protocol

from dear.buckets.compressors import SPARSE, CompressedOptions
from dear.lazy import torch
from dear.options import Options
from dear.topology import graph, matrix, splitting
from dear.topology.schedules import TopologyReg, one_peer_machines, schedule
from dear.training.algorithm import algorithm_class

if TYPE_CHECKING:
    from dear.algorithms.decentralized.decentralized import Decentralized
    from dear.algorithms.decentralized.neighbor import Neighbor
    from dear.training.parameters.options import GraphOptions
    from dear.training.parameters.windows import WindowOptions


class Ranks(Protocol):
    """Parameters, gradients and optimizers of all ranks."""

    x: torch.Tensor
    g: torch.Tensor
    local_size: int

    @property
    def present(self) -> torch.Tensor:
        """True for the elements for which a rank has a gradient, `[ranks, elements]`."""
        ...

    @property
    def tensors(self) -> Sequence[slice]:
        """Columns of each tensor."""
        ...

    def update(self, rank: int | None = None) -> None:
        """Steps the optimizer of one rank; None: of every rank."""
        ...


Reference = Callable[[Ranks, Any], Iterator[None]]
"""Reference: a function of the ranks and the algorithm's options."""


def reference_of(name: str, options: Options) -> Reference | None:
    """Returns the reference of algorithm `name` with these options; None if there is none.

    Without a function of its name here, an algorithm gets the one of its consistency: `average` if
    it is synchronous, `delayed` if it is delayed. Which elements `error_feedback` chooses depends
    on the tensors that travel together; here each tensor travels alone. Some compressors have no
    reference.
    """
    algorithm = algorithm_class(name)
    module = sys.modules[algorithm.__module__]
    if hasattr(module, "reference"):
        reference: Reference = module.reference
        return reference
    compression = getattr(options, "compression", "none")
    if getattr(options, "density", 1.0) < 1 and compression in SPARSE:
        return error_feedback if compression == "eftopk" else None
    if compression in ("efsignum", "powersgd") or getattr(options, "adasum", False):
        return None  # each element depends on other elements of its tensor
    if compression == "signum":
        return majority
    fallback = {"synchronous": average, "delayed": delayed}.get(algorithm.capabilities.consistency)
    return globals().get(name.replace("-", "_"), fallback)


def average(ranks: Ranks, options: object) -> Iterator[None]:
    """Update: x <- x - update(mean of g over all ranks); equal replicas stay equal."""
    while True:
        ranks.g = ranks.g.mean(0)
        ranks.update()
        yield


def error_feedback(ranks: Ranks, options: CompressedOptions) -> Iterator[None]:
    """Sends the largest elements of each tensor; adds the rest to the next gradient."""
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
"""Same sums as `average`, but gradients travel earlier, in other portions or in another order."""
dear = average
"""Same as `average`, in two halves; the second ends before the next forward pass needs it."""
fsdp = average
"""Same as `average`: each rank updates its own part, but elements are updated independently."""
mgs = average
"""Same as `average` with density=1; else like `error_feedback`, for merged groups of tensors."""


def majority(ranks: Ranks, options: object) -> Iterator[None]:
    """Update: x <- x - update(sign that most of the ranks with a g have: 1 or -1; 0 in a tie)."""
    while True:
        votes = torch.where(ranks.g >= 0, 1.0, -1.0) * ranks.present
        ranks.g = votes.double().sum(0).sign()
        ranks.update()
        yield


def delayed(ranks: Ranks, options: Options) -> Iterator[None]:
    """Update: x <- x - update(mean of g some steps ago); `close` applies the last gradients."""
    held: deque[torch.Tensor] = deque()
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


def neighbor(ranks: Ranks, options: Neighbor.Options) -> Iterator[None]:
    """Averages and updates. awc (combine, then adapt): x <- W' x - update(g(x)).

    atc (adapt, then combine): x <- W' (x - update(g(x))).
    """
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


def decentralized(ranks: Ranks, options: Decentralized.Options) -> Iterator[None]:
    """Update: x <- (1 - a) x + a W' x - update(g(x)), a: `adaptive_factor`; at first without W."""
    size, node = len(ranks.x), options.ranks_per_node or (lambda: ranks.local_size)
    topology = TopologyReg.make(options.topology, world_size=size, rank=0, local_world_size=node)
    for step in count():
        weights = torch.eye(size).double()
        for edge in topology.edges_at(step) if step else ():
            for rank in edge.ranks:
                weights[edge.ranks, rank] = (1 - edge.weight) / max(len(edge.ranks) - 1, 1)
                weights[rank, rank] = edge.weight
        ranks.x += options.adaptive_factor * (weights.T @ ranks.x - ranks.x)
        ranks.update()
        yield


def gradient_tracking(ranks: Ranks, options: GraphOptions) -> Iterator[None]:
    """Update: y <- W' y + g - last g, then x <- W' x - update(y); y estimates the mean of g."""
    weights = torch.as_tensor(matrix(graph(options.topology, len(ranks.x))))
    y = last = torch.zeros_like(ranks.x)
    while True:
        y, last = weights.T @ y + ranks.g - last, ranks.g
        ranks.x = weights.T @ ranks.x
        ranks.g = y
        ranks.update()
        yield


def exact_diffusion(ranks: Ranks, options: GraphOptions) -> Iterator[None]:
    """Update: psi = x - update(g), then x <- (W + 1)' / 2 (psi + x - last psi).

    If a script writes to x, `x - last psi` is still the change that averaging made.
    """
    weights = torch.as_tensor(matrix(graph(options.topology, len(ranks.x))))
    weights = (weights + torch.eye(len(ranks.x))) / 2
    change = torch.zeros_like(ranks.x)
    while True:
        ranks.update()
        psi = ranks.x
        ranks.x = weights.T @ (psi + change)
        change = ranks.x - psi
        yield


def push_diging(ranks: Ranks, options: GraphOptions) -> Iterator[None]:
    """Update: u <- C (v x - update(y)); v <- C v; x = u / v; y <- C y + g - last g.

    C splits a rank's values equally among itself and its targets, v is the rank's weight, and y its
    estimate of the mean of g. If a script writes to x, the new value counts.
    """
    size = len(ranks.x)
    shares = torch.as_tensor(matrix(splitting(graph(options.topology, size)))).T
    v = torch.ones(size, 1).double()
    y = last = torch.zeros_like(ranks.x)
    while True:
        y, last, u = y + ranks.g - last, ranks.g, (v - 1) * ranks.x
        ranks.g = y
        ranks.update()
        u, v, y = shares @ (u + ranks.x), shares @ v, shares @ y
        ranks.x = u / v
        yield


def _weights(options: Neighbor.Options, ranks: Ranks, step: int) -> torch.Tensor:
    """Returns `W[sender, receiver]` for round `step` of `neighbor`."""
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
    if options.hierarchical:  # the ranks of a machine share one average
        inside = torch.full((local_size,) * 2, 1 / local_size).double()
        weights = torch.kron(weights, inside)
    return weights


def win_put(ranks: Ranks, options: WindowOptions) -> Iterator[None]:
    """Update: x <- W' x - update(g(x)), with the values that each neighbour has put last."""
    weights = torch.as_tensor(matrix(graph(options.topology, len(ranks.x))))
    for step in count():
        if step % options.every == options.every - 1:
            ranks.x = weights.T @ ranks.x
        ranks.update()
        yield


pull_get = win_put
"""Same update, with the values that each neighbour publishes."""


def push_sum(ranks: Ranks, options: WindowOptions) -> Iterator[None]:
    """Update: u <- C (u - update(g)); p <- C p; x = u / p. C is explained at `push_diging`."""
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


def asyncddp(ranks: Ranks, options: GraphOptions) -> Iterator[None]:
    """Update, rank after rank: x_i <- w_i x_i + sum of w_j (last value put by j) - update(g_i)."""
    weights = torch.as_tensor(matrix(graph(options.topology, len(ranks.x))))
    while True:
        for rank in range(len(ranks.x)):
            x = ranks.x
            x[rank] = weights[:, rank] @ x
            ranks.x = x
            ranks.update(rank)
        yield
