"""Average consensus: ranks compute the mean of their numbers, by exchanges with neighbours only.

    torchrun --standalone --nproc-per-node 8 examples/decentralized/consensus.py --out logs/curves

In each iteration, a rank replaces its numbers by the weighted sum of its own numbers and those of
its neighbours. The distance of the ranks from the mean shrinks by the topology's mixing rate, which
is 1 minus its spectral gap.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator

import numpy as np
import torch
from curves import arguments, run, save, table

import dear.bluefog as bf
from dear.errors import UserError
from dear.topology import circulant, matrix, mixing_rate, powers

T = bf.topology_util

NUMBERS = 10
WANTED = 1e-6
NOISE = 1e-13
"""Largest distance that may be only a rounding error."""

STATIC = {
    "ring": T.RingGraph,
    "star": T.StarGraph,
    "2-D mesh": T.MeshGrid2DGraph,
    "exponential": T.ExponentialTwoGraph,
    "fully connected": T.FullyConnectedGraph,
}
ONE_PEER = "one-peer exponential"


def iterates(x: torch.Tensor, weights: Iterator[dict], iterations: int) -> list[torch.Tensor]:
    """Returns the values before and after each iteration.

    Args:
        weights: keyword arguments with the weights of each iteration; empty: the topology's.
    """
    history = [x]
    for kwargs in itertools.islice(weights, iterations):
        history.append(bf.neighbor_allreduce(history[-1], **kwargs))
    return history


def one_peer() -> Iterator[dict]:
    """Yields the weights of iterations in which a rank sends to rank + 1, + 2, + 4, ... in turn."""
    peers = T.GetDynamicOnePeerSendRecvRanks(T.ExponentialTwoGraph(bf.size()), bf.rank())
    for to, sources in peers:
        theirs = dict.fromkeys(sources, 0.5)
        yield {"self_weight": 0.5, "src_weights": theirs, "dst_weights": to}


def distances(history: list[torch.Tensor]) -> list[float]:
    """Returns the distance of all ranks from the mean by iteration, relative to the start."""
    mean = bf.allreduce(history[0])
    squared = torch.stack([(x - mean).square().sum() for x in history])
    distance = bf.allreduce(squared, average=False).sqrt()
    return (distance / distance[0]).tolist()


def one_peer_rate(size: int) -> float:
    """Returns the mixing rate of `one_peer` per iteration; 0 if `size` is a power of 2."""
    matrices = [matrix(circulant(size, [distance])) for distance in powers(2, size)]
    remainder = functools.reduce(np.matmul, matrices) - 1 / size
    return rounded(np.linalg.norm(remainder, 2)) ** (1 / len(matrices))


def rounded(rate: float) -> float:
    """Returns the rate, or 0 if it is only a rounding error."""
    return float(rate) if rate > NOISE else 0.0


def measured_rate(curve: list[float]) -> float:
    """Returns the rate per iteration in the second half of the curve, without rounding errors."""
    last = max(k for k, distance in enumerate(curve) if distance > NOISE)
    first = last // 2
    return (curve[last] / curve[first]) ** (1 / max(1, last - first))


def row(name: str, curve: list[float], rate: float) -> list[str]:
    """Returns a row of the table: the spectral gap, and the predicted and the measured rate."""
    if rate:
        needed = math.ceil(math.log(WANTED) / math.log(rate))
        measured = f"{measured_rate(curve):.3f}"
    else:  # exact after all distances, or in one step
        needed = len(powers(2, bf.size())) if name == ONE_PEER else 1
        measured = "-"
    steps = next((str(k) for k, distance in enumerate(curve) if distance <= WANTED), "-")
    predicted = [f"{1 - rate:.3f}", f"{rate:.3f}", measured, str(needed)]
    return [name, *predicted, steps, f"{curve[-1]:.0e}"]


def main() -> None:
    options = arguments(__doc__.splitlines()[0], iterations=120).parse_args()
    bf.init()
    if bf.size() == 1:
        raise UserError("consensus needs at least 2 ranks, got 1: torchrun --nproc-per-node 8 ...")
    generator = torch.Generator().manual_seed(options.seed * bf.size() + bf.rank())
    start = torch.randn(NUMBERS, generator=generator, dtype=torch.float64)

    curves, rates = {}, {}
    for name, graph in STATIC.items():
        bf.set_topology(graph(bf.size()), is_weighted=True)
        curves[name] = distances(iterates(start, itertools.repeat({}), options.iterations))
        rates[name] = rounded(mixing_rate(graph(bf.size())))
    curves[ONE_PEER] = distances(iterates(start, one_peer(), options.iterations))
    rates[ONE_PEER] = one_peer_rate(bf.size())

    if bf.rank() == 0:
        print(f"{bf.size()} ranks, {NUMBERS} numbers each; iterations until {WANTED:g} is left")
        header = ["topology", "gap", "rate", "measured", "iterations", "measured", "at the end"]
        table(header, [row(name, curve, rates[name]) for name, curve in curves.items()])
        if options.out:
            steps = range(options.iterations + 1)
            predicted = {n: [rate**k for k in steps] for n, rate in rates.items() if rate}
            save(options.out, "Consensus", "distance to the mean", curves, predicted)
    bf.shutdown()


if __name__ == "__main__":
    run(main)
