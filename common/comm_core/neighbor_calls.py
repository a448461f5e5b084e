"""The calls of a `Communicator` that go along the edges of a directed graph of ranks."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from . import collectives, neighbors
from .lane_calls import LaneCalls
from .neighbors import Neighbors, Ranks
from .operands import check_pair


class NeighborCalls(LaneCalls):
    """Weighted sums and gathers over each rank's neighbours."""

    def neighbor_all_reduce(
        self,
        tensor: torch.Tensor,
        sources: Ranks,
        destinations: Ranks,
        *,
        self_weight: float | None = None,
        out: torch.Tensor | None = None,
        check: bool = True,
    ) -> int:
        """`out = self_weight * tensor + sum over the sources j of weight_j * tensor_j`.

        Every rank calls it, with its own neighbours in a directed graph; the lists may be empty.
        Terms are added in the order of the ranks, so the result does not depend on timing.

        Args:
            tensor: floating-point or complex; the same numel and dtype on all ranks.
            sources: ranks to receive from; as `{rank: weight}` together with `self_weight`, else
                all weights are 1 / (number of sources + 1).
            destinations: ranks to send to; as `{rank: factor}` they get `factor * tensor`.
            self_weight: weight of this rank's own tensor.
            out: like `tensor`; default `tensor` itself.
            check: compare all ranks' lists, sizes and dtypes first. This is one small blocking
                all-gather in each call (a cache could not know whether the *other* ranks' lists
                are new); for a graph that is used again, call `check_neighbors` once and pass
                False, on all ranks.

        Raises:
            ValueError: lists that are wrong or (on every rank) contradict each other.
            TypeError: an integer tensor.
        """
        name = "neighbor_all_reduce"
        near = Neighbors.of(self.rank, self.size, sources, destinations, self_weight)
        tensor = self._checked(name, tensor, written=out is None)
        if not (tensor.is_floating_point() or tensor.is_complex()):
            raise TypeError(f"{name}: weights need a floating-point tensor, got {tensor.dtype}")
        target = tensor if out is None else self._checked(name, out)
        check_pair(name, tensor, target)
        if target.shape != tensor.shape:
            raise ValueError(
                f"{name}: out is {tuple(target.shape)}, must be {tuple(tensor.shape)} like tensor"
            )
        if check:
            self._check_graph(near, tensor, [tensor.numel()] * len(near.sources))
        body = neighbors.all_reduce
        return self._in_turn(
            name, lambda c: body(c, tensor, target, near), [tensor, target], lone=False
        )

    def neighbor_all_gather(
        self,
        tensor: torch.Tensor,
        outputs: Sequence[torch.Tensor],
        sources: Ranks,
        destinations: Ranks,
        *,
        check: bool = True,
    ) -> int:
        """Receives `tensor` of each source into `outputs`, in the order of `sources`.

        Args:
            tensor: what every destination gets; ranks may differ in size.
            outputs: one per source, as large as what that sends; views of one tensor will do.
            sources, destinations, check: as in `neighbor_all_reduce`, without weights.
        """
        name = "neighbor_all_gather"
        near = Neighbors.of(self.rank, self.size, list(sources), list(destinations), None)
        tensor = self._checked(name, tensor, written=False)
        if len(outputs) != len(near.sources):
            raise ValueError(f"{name}: {len(near.sources)} sources but {len(outputs)} outputs")
        outputs = [self._checked(name, output) for output in outputs]
        for output in outputs:
            check_pair(name, tensor, output)
        if check:
            self._check_graph(near, tensor, [output.numel() for output in outputs])
        body = neighbors.all_gather
        return self._in_turn(
            name, lambda c: body(c, tensor, outputs, near), [tensor, *outputs], lone=False
        )

    def check_neighbors(self, sources: Ranks, destinations: Ranks) -> None:
        """Compares all ranks' neighbour lists; a blocking collective call.

        Raises:
            ValueError: on every rank, naming two ranks that contradict each other.
        """
        near = Neighbors.of(self.rank, self.size, list(sources), list(destinations), None)
        self._check_graph(near, None, [0] * len(near.sources))

    def _check_graph(
        self, near: Neighbors, tensor: torch.Tensor | None, wanted: Sequence[int]
    ) -> None:
        self._check_open()
        dtype, sent = (None, 0) if tensor is None else (tensor.dtype, tensor.numel())
        row = neighbors.description(near, self.size, dtype, sent, wanted)
        if "cpu" not in self._lanes[0].backends:
            row = row.cuda()
        rows = row.new_empty(self.size, row.numel())
        body = collectives.all_gather
        self.sync_stream(
            self._in_turn("allGather", lambda c: body(c, row, rows), [row, rows], lone=True)
        )
        if problem := neighbors.disagreement(rows.cpu()):
            raise ValueError(f"neighbours contradict each other: {problem}")
