"""`Communicator(nstreams)`: the multi-stream interface of the systems this project is based on.

    comm = Communicator(2)
    handle = comm.allReduce(gradient)      # returns at once
    ...
    comm.syncStream(handle)                # now `gradient` is the sum over the ranks

It works with any torch.distributed backend: comm_core or Gloo for CPU tensors, NCCL for CUDA.
"""

# ruff: noqa: N815 - the original method names, kept as aliases of the snake_case ones

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from ..job import barriar, barrier, init, rank, size
from . import collectives
from .collectives import Neighbors, Ranks, check_pair, check_rank
from .lanes import Streams
from .operations import Operation

__all__ = ["Communicator", "barriar", "barrier", "init", "rank", "size"]

MULTI_BCAST_NUMEL = 512 * 512
"""Number of elements from which `multiBcast` assigns a tensor to a single rank."""


class Communicator(Streams):
    """Collectives on `nstreams` streams, each with its own process group.

    Calls go to the streams in turn. The operations of one stream run one after another in the order
    of the calls; those of different streams run at the same time. All ranks must make the same
    calls in the same order. `sendrecv` is counted per pair of ranks: only these two call it.

    Every operation returns a handle at once. Do not touch its tensors until `syncStream(handle)` or
    `synchronize()` has returned. For CPU tensors these two block the caller. For CUDA tensors they
    make the *current CUDA stream* wait and do not block. An operation on CUDA tensors starts after
    the work that the current CUDA stream has queued before the call.

    Tensors may be empty and have any shape, any strides (non-contiguous ones are copied in and out)
    and any dtype that the backend supports. A sum of bools is their logical or. Rank numbers are
    those of `group`.

    Every thread may wait. Calls of several threads need an order that all ranks share.

    Invalid arguments raise TypeError or ValueError in the call. Errors of the backend (unsupported
    dtype, dead peer, timeout) are raised as RuntimeError by the call or by `syncStream` and
    `synchronize`; none is lost.

    Args:
        nstreams: number of streams, at least 1.
        group: process group that gives the ranks and the backend; default: all ranks of the job.
            The constructor is a collective call of these ranks.
        timeout_s: time limit of one operation in seconds; default: that of the backend.
    """

    def reduce(self, tensor: torch.Tensor, root: int) -> int:
        """Sums `tensor` over the ranks into that of rank `root`; on other ranks it is undefined."""
        tensor = self._checked("reduce", tensor)
        check_rank("reduce: root", root, self.size)
        return self._in_turn("reduce", collectives.reduce, tensor, root)

    def bcast(self, tensor: torch.Tensor, root: int) -> int:
        """Copies rank `root`'s `tensor` into that of every rank."""
        tensor = self._checked("bcast", tensor)
        check_rank("bcast: root", root, self.size)
        return self._in_turn("bcast", collectives.broadcast, tensor, root)

    def all_reduce(self, tensor: torch.Tensor) -> int:
        """Sums `tensor` over the ranks, in place on every rank."""
        return self._in_turn(
            "allReduce", collectives.all_reduce, self._checked("allReduce", tensor)
        )

    def reduce_scatter(self, send: torch.Tensor, recv: torch.Tensor) -> int:
        """Sums `send` `[size * n]` over the ranks; rank r's `recv` `[n]` gets part r of the sum."""
        send, recv = self._checked_pair("reduceScatter", send, recv)
        if send.numel() != recv.numel() * self.size:
            raise ValueError(
                f"reduceScatter: send has {send.numel()} elements, but must have {self.size} ranks "
                f"x {recv.numel()} of recv"
            )
        return self._in_turn("reduceScatter", collectives.reduce_scatter, send, recv)

    def all_gather(self, send: torch.Tensor, recv: torch.Tensor) -> int:
        """Concatenates the `send` `[n]` of all ranks into `recv` `[size * n]`, in rank order."""
        send, recv = self._checked_pair("allGather", send, recv)
        if recv.numel() != send.numel() * self.size:
            raise ValueError(
                f"allGather: recv has {recv.numel()} elements, but must have {self.size} ranks x "
                f"{send.numel()} of send"
            )
        return self._in_turn("allGather", collectives.all_gather, send, recv)

    def all_reduce_rsag(self, tensor: torch.Tensor) -> int:
        """All-reduce as a reduce-scatter and an all-gather.

        The tensor is padded with zeros to a multiple of the number of ranks, which costs a copy in
        and a copy out. A tensor with fewer elements than ranks goes to `allReduce`.
        """
        tensor = self._checked("allReduceRSAG", tensor)
        if tensor.numel() < self.size:
            return self.all_reduce(tensor)
        lone = not self._must_wait(tensor) and tensor.numel() % self.size == 0
        return self._in_turn("allReduceRSAG", collectives.all_reduce_rsag, tensor, lone=lone)

    def all_reduce_rb(self, tensor: torch.Tensor) -> int:
        """All-reduce as a reduce to rank 0 and a broadcast from it."""
        tensor = self._checked("allReduceRB", tensor)
        lone = not self._must_wait(tensor)
        return self._in_turn("allReduceRB", collectives.all_reduce_rb, tensor, lone=lone)

    def multi_bcast(
        self,
        tensors: Sequence[torch.Tensor],
        outs: Sequence[torch.Tensor],
        op: Callable[[torch.Tensor, torch.Tensor], object],
    ) -> int:
        """Fills `outs[i]` with `op(tensors[i], outs[i])` and divides large tensors among the ranks.

        Tensors of at least `MULTI_BCAST_NUMEL` elements go to the ranks in turn: `op` runs on one
        rank only, in this call, and the result is broadcast. For smaller tensors `op` runs on every
        rank. Shapes must be the same on all ranks. One handle covers all the broadcasts. If `op`
        raises on the only rank that runs it, the other ranks wait until their group times out.

        Raises:
            ValueError: `tensors` and `outs` differ in length.
        """
        self._check_open()
        if len(tensors) != len(outs):
            raise ValueError(f"multiBcast: {len(tensors)} tensors but {len(outs)} outs")
        checked = [self._checked("multiBcast", out) for out in outs]
        operations: list[Operation] = []
        owner = 0
        for tensor, out, target in zip(tensors, outs, checked, strict=True):
            if tensor.numel() < MULTI_BCAST_NUMEL:
                op(tensor, out)
                continue
            if owner == self.rank:
                op(tensor, out)
            lane = self._next_lane()
            body = collectives.broadcast(lane.channel, target, owner)
            stream, lone = lane.stream(target.device), collectives.plain(target)
            operations.append(stream.submit("multiBcast", body, tensors=[target], lone=lone))
            owner = (owner + 1) % self.size
        return self._handles.new(*operations)

    def sendrecv(self, send: torch.Tensor, recv: torch.Tensor, peer: int) -> int:
        """Exchanges tensors with rank `peer`, which makes the same call with this rank as peer.

        The peer's `recv` gets this rank's `send`, and the other way round. The two directions may
        differ in size. Only the two ranks take part; `peer` may be this rank. Exchanges among three
        or more ranks on one stream must not wait for each other in a cycle.
        """
        send, recv = self._checked_pair("sendrecv", send, recv)
        check_rank("sendrecv: peer", peer, self.size)
        if peer == self.rank and send.numel() != recv.numel():
            raise ValueError(
                f"sendrecv with oneself: send has {send.numel()} elements, but recv {recv.numel()}"
            )
        turn = self._pair_turns.get(peer, 0)
        self._pair_turns[peer] = turn + 1
        lane = self._lanes[turn % self.nstreams]
        if peer == self.rank:
            body = collectives.copy(send, recv)
        else:
            body = collectives.sendrecv(lane.channel, send, recv, peer)
        stream = lane.stream(send.device)
        return self._handles.new(stream.submit("sendrecv", body, tensors=[send, recv], lone=False))

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
        """Computes `out = self_weight * tensor + sum over the sources j of weight_j * tensor_j`.

        Every rank calls it with its own neighbours in a directed graph; the lists may be empty.
        Terms are added in rank order, so the result does not depend on timing.

        Args:
            tensor: floating-point or complex; the same numel and dtype on all ranks.
            sources: ranks to receive from. Give `{rank: weight}` together with `self_weight`; for
                plain ranks all weights are 1 / (number of sources + 1).
            destinations: ranks to send to. With `{rank: factor}`, each gets `factor * tensor`.
            self_weight: weight of this rank's own tensor.
            out: result, same shape and dtype as `tensor`; default: `tensor` itself.
            check: compare all ranks' lists, sizes and dtypes first. This costs one small blocking
                all-gather in each call; a cache could not detect that *another* rank's lists have
                changed. For a graph that is used again, call `check_neighbors` once and pass False
                on all ranks.

        Raises:
            ValueError: a list is invalid, or the lists contradict each other (on every rank).
            TypeError: `tensor` has an integer dtype.
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
        body = collectives.neighbor_all_reduce
        return self._in_turn(name, body, tensor, target, near, lone=False)

    def neighbor_all_gather(
        self,
        tensor: torch.Tensor,
        outputs: Sequence[torch.Tensor],
        sources: Ranks,
        destinations: Ranks,
        *,
        check: bool = True,
    ) -> int:
        """Receives the `tensor` of each source into `outputs`, in the order of `sources`.

        Args:
            tensor: sent to every destination; its size may differ between ranks.
            outputs: one tensor per source, of the size that the source sends. They may be views of
                one tensor.
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
        body = collectives.neighbor_all_gather
        return self._in_turn(name, body, tensor, near, *outputs, lone=False)

    def check_neighbors(self, sources: Ranks, destinations: Ranks) -> None:
        """Compares all ranks' neighbour lists. A blocking collective call.

        Raises:
            ValueError: two ranks contradict each other; raised on every rank, and names the two.
        """
        near = Neighbors.of(self.rank, self.size, list(sources), list(destinations), None)
        self._check_graph(near, None, [0] * len(near.sources))

    def _check_graph(
        self, near: Neighbors, tensor: torch.Tensor | None, wanted: Sequence[int]
    ) -> None:
        self._check_open()
        dtype, sent = (None, 0) if tensor is None else (tensor.dtype, tensor.numel())
        row = collectives.description(near, self.size, dtype, sent, wanted)
        if "cpu" not in self._lanes[0].backends:
            row = row.cuda()
        rows = row.new_empty(self.size, row.numel())
        self.sync_stream(self._in_turn("allGather", collectives.all_gather, row, rows))
        if problem := collectives.disagreement(rows.cpu()):
            raise ValueError(f"neighbours contradict each other: {problem}")

    syncStream = Streams.sync_stream
    getNumOfFreeStreams = Streams.num_free_streams
    allReduce = all_reduce
    reduceScatter = reduce_scatter
    allGather = all_gather
    allReduceRSAG = all_reduce_rsag
    allReduceRB = all_reduce_rb
    multiBcast = multi_bcast
