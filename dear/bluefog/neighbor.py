"""Calls along a topology: weighted sums and gathers of neighbours' tensors.

Without weights the current topology decides. With `src_weights` (rank -> factor of what comes from
it) and `self_weight` this call has weights of its own, and with `dst_weights` (rank -> factor of
what goes to it, or a list of ranks) edges of its own:

    result = self_weight * x + sum over j of (j's dst_weight for me) * src_weight_j * x_j
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from dear.bluefog import handles
from dear.bluefog.job import job
from dear.bluefog.timeline import noted
from dear.comm.neighbors import Round, check_weights
from dear.errors import UserError

Targets = Mapping[int, float] | Sequence[int]


def chosen_part(
    default: Callable[[], Round],
    self_weight: float | None,
    sources: Mapping[int, float] | None,
    destinations: Targets | None,
    what: str,
) -> Round:
    """The round that a call's weights ask for; those left out are of `default`.

    Raises:
        UserError: weights given by halves, or a source that the topology does not have while
            no destinations are given.
    """
    check_weights(self_weight, sources, destinations, what)
    if sources is None:
        return default()
    assert self_weight is not None
    if destinations is not None:
        return Round(
            self_weight=float(self_weight),
            sources=dict(sources),
            destinations=factors(destinations),
        )
    known = default()
    strangers = sorted(set(sources) - set(known.sources))
    if strangers:
        raise UserError(
            f"{what}: rank {strangers[0]} in src_weights does not send to this one in the current "
            "topology; give dst_weights too for edges of another"
        )
    # A source that is left out sends all the same.
    weights = {source: sources.get(source, 0.0) for source in known.sources}
    return Round(self_weight=float(self_weight), sources=weights, destinations=known.destinations)


def factors(ranks: Targets) -> dict[int, float]:
    """Rank -> factor; ranks of a list have factor 1."""
    return dict(ranks) if isinstance(ranks, Mapping) else dict.fromkeys(ranks, 1.0)


@handles.queueable
def neighbor_allreduce_nonblocking(
    tensor: torch.Tensor,
    *,
    self_weight: float | None = None,
    src_weights: Mapping[int, float] | None = None,
    dst_weights: Targets | None = None,
    enable_topo_check: bool = True,
    name: str | None = None,
) -> int:
    """Starts `neighbor_allreduce`."""
    what = "neighbor_allreduce"
    part = chosen_part(job().part, self_weight, src_weights, dst_weights, what)
    mixed = torch.empty_like(tensor, memory_format=torch.contiguous_format)
    handle = _started(
        job().exchange.core.neighbor_all_reduce,
        tensor.detach(),
        part.sources,
        part.destinations,
        self_weight=part.self_weight,
        out=mixed,
        check=dst_weights is not None and enable_topo_check and not job().skip_checks,
    )
    pending = job().exchange.pending(handle, tensor.nbytes * len(part.destinations))
    return handles.new(pending.done, noted(what, name, lambda: (pending.wait(), mixed)[1]))


@handles.not_suspended
def neighbor_allreduce(
    tensor: torch.Tensor,
    *,
    self_weight: float | None = None,
    src_weights: Mapping[int, float] | None = None,
    dst_weights: Targets | None = None,
    enable_topo_check: bool = True,
    name: str | None = None,
) -> torch.Tensor:
    """The weighted sum of this rank's tensor and its in-neighbours', as a new tensor.

    Args:
        tensor: floating-point, of any shape; the same on all ranks.
        enable_topo_check: compare all ranks' lists first, if `dst_weights` are given; one small
            blocking all-gather.

    Raises:
        UserError: weights given by halves, unknown ranks, contradicting lists, whole numbers.
    """
    return handles.wait(
        neighbor_allreduce_nonblocking(
            tensor,
            self_weight=self_weight,
            src_weights=src_weights,
            dst_weights=dst_weights,
            enable_topo_check=enable_topo_check,
            name=name,
        )
    )


@handles.queueable
def neighbor_allgather_nonblocking(
    tensor: torch.Tensor,
    *,
    src_ranks: Sequence[int] | None = None,
    dst_ranks: Sequence[int] | None = None,
    enable_topo_check: bool = True,
    name: str | None = None,
) -> int:
    """Starts `neighbor_allgather`; blocks for the exchange of the sizes."""
    if (src_ranks is None) != (dst_ranks is None):
        raise UserError("neighbor_allgather: give src_ranks and dst_ranks together, or neither")
    part = job().part()
    sources = sorted(part.sources) if src_ranks is None else list(src_ranks)
    targets = sorted(part.destinations) if dst_ranks is None else list(dst_ranks)
    check = src_ranks is not None and enable_topo_check and not job().skip_checks
    return gathered(tensor, sources, targets, check=check, with_own=False, name=name)


@handles.not_suspended
def neighbor_allgather(
    tensor: torch.Tensor,
    *,
    src_ranks: Sequence[int] | None = None,
    dst_ranks: Sequence[int] | None = None,
    enable_topo_check: bool = True,
    name: str | None = None,
) -> torch.Tensor:
    """The in-neighbours' tensors, without this rank's, joined along the first dimension.

    They come in ascending order, or that of `src_ranks`; sizes of the first dimension may differ.
    """
    return handles.wait(
        neighbor_allgather_nonblocking(
            tensor,
            src_ranks=src_ranks,
            dst_ranks=dst_ranks,
            enable_topo_check=enable_topo_check,
            name=name,
        )
    )


def gathered(
    tensor: torch.Tensor,
    sources: Sequence[int],
    targets: Sequence[int],
    *,
    check: bool,
    with_own: bool,
    name: str | None,
) -> int:
    """A handle for the tensors of `sources` joined (in rank order with this rank's, `with_own`)."""
    exchange = job().exchange
    local = tensor.detach().reshape(1) if tensor.dim() == 0 else tensor.detach()
    size = torch.tensor([local.shape[0]], device=local.device)
    sizes = size.new_empty(len(sources), 1)
    gather = exchange.core.neighbor_all_gather
    exchange.pending(
        _started(gather, size, list(sizes), sources, targets, check=check), size.nbytes
    ).wait()
    pieces = [local.new_empty((int(n), *local.shape[1:])) for n in sizes.flatten().tolist()]
    handle = _started(gather, local.contiguous(), pieces, sources, targets, check=False)
    pending = exchange.pending(handle, local.nbytes * len(targets))

    def result() -> torch.Tensor:
        pending.wait()
        parts: list[Any] = list(pieces)
        if with_own:
            parts.insert(job().rank, local)
        return torch.cat(parts) if parts else local.new_empty((0, *local.shape[1:]))

    return handles.new(pending.done, noted("allgather", name, result))


@handles.queueable
def hierarchical_neighbor_allreduce_nonblocking(
    tensor: torch.Tensor,
    *,
    self_weight: float | None = None,
    src_machine_weights: Mapping[int, float] | None = None,
    dst_machine_weights: Targets | None = None,
    enable_topo_check: bool = False,
    name: str | None = None,
) -> int:
    """Starts `hierarchical_neighbor_allreduce`."""
    what = "hierarchical_neighbor_allreduce"
    part = chosen_part(
        job().machine_part, self_weight, src_machine_weights, dst_machine_weights, what
    )
    if enable_topo_check:
        _check_machines(part)
    mixed = tensor.detach().clone(memory_format=torch.contiguous_format)
    pending = job().machines.start(mixed.view(-1), part)

    def result() -> torch.Tensor:
        pending.finish(mixed.view(-1))
        return mixed

    return handles.new(pending.done, noted(what, name, result))


@handles.not_suspended
def hierarchical_neighbor_allreduce(
    tensor: torch.Tensor,
    *,
    self_weight: float | None = None,
    src_machine_weights: Mapping[int, float] | None = None,
    dst_machine_weights: Targets | None = None,
    enable_topo_check: bool = False,
    name: str | None = None,
) -> torch.Tensor:
    """The mean over this machine, then the weighted sum over neighbouring machines.

    Weights are of machine numbers. Every rank of a machine gets the same bits.
    """
    return handles.wait(
        hierarchical_neighbor_allreduce_nonblocking(
            tensor,
            self_weight=self_weight,
            src_machine_weights=src_machine_weights,
            dst_machine_weights=dst_machine_weights,
            enable_topo_check=enable_topo_check,
            name=name,
        )
    )


@handles.queueable
def pair_gossip_nonblocking(
    tensor: torch.Tensor,
    target_rank: int,
    self_weight: float | None = None,
    pair_weight: float | None = None,
    name: str | None = None,
) -> int:
    """Starts `pair_gossip`."""
    if (self_weight is None) != (pair_weight is None):
        raise UserError("pair_gossip: give self_weight and pair_weight together, or neither")
    if target_rank == job().rank:
        raise UserError(f"pair_gossip: rank {target_rank} is this rank itself")
    own = 0.5 if self_weight is None else self_weight
    other = 0.5 if pair_weight is None else pair_weight
    received = torch.empty_like(tensor)
    core = job().pairs.core
    handle = _started(core.sendrecv, tensor.detach(), received, target_rank)
    pending = job().pairs.pending(handle, tensor.nbytes)

    def result() -> torch.Tensor:
        pending.wait()
        return tensor.detach() * own + received * other

    return handles.new(pending.done, noted("pair_gossip", name, result))


@handles.not_suspended
def pair_gossip(
    tensor: torch.Tensor,
    target_rank: int,
    self_weight: float | None = None,
    pair_weight: float | None = None,
    name: str | None = None,
) -> torch.Tensor:
    """The weighted sum of two ranks' tensors, by default their mean; both name each other.

    Only the two ranks take part.
    """
    return handles.wait(
        pair_gossip_nonblocking(tensor, target_rank, self_weight, pair_weight, name)
    )


def _started(call: Callable[..., int], *args: Any, **kwargs: Any) -> int:
    try:
        return call(*args, **kwargs)
    except (ValueError, TypeError) as error:
        raise UserError(str(error)) from error


def _check_machines(part: Round) -> None:
    parts = job().communicator.gather_objects((sorted(part.sources), sorted(part.destinations)))
    each = parts[:: job().local_size]
    for index, here in enumerate(parts):
        if here != each[index // job().local_size]:
            raise UserError(f"rank {index} names other machines than the first of its machine")
    problem = _contradiction(each)
    if problem:
        raise UserError(f"machines contradict each other: {problem}")


def _contradiction(parts: Iterable[tuple[list[int], list[int]]]) -> str | None:
    listed = list(parts)
    sent = {(source, to) for source, (_, targets) in enumerate(listed) for to in targets}
    wanted = {(source, to) for to, (sources, _) in enumerate(listed) for source in sources}
    for source, to in sorted(sent ^ wanted):
        if (source, to) in sent:
            return f"machine {source} sends to machine {to}, which does not expect it"
        return f"machine {to} expects something of machine {source}, which does not send it"
    return None
