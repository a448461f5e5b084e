"""BlueFog's collective, neighbour and pairwise operations: reductions, gathers, weighted sums.

Each operation has a `_nonblocking` form, with the same arguments, that returns a handle for `poll`
and `synchronize`. Its tensors must not change until `synchronize` returns. The argument `name` is
accepted for compatibility with BlueFog; only timelines show it.

Neighbour operations use the topology's weights by default. A call may replace these by
`self_weight` and `src_weights` (rank -> factor of the tensor received from there). It may replace
the edges by `dst_weights` (rank -> factor of the tensor sent there, or a list of ranks):

    result = self_weight * x + sum over j of (j's dst_weight for this rank) * src_weight_j * x_j
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from dear import optimizer as plain
from dear.bluefog.job import blocking, job, started, synchronize
from dear.comm.neighbors import Exchange, Round
from dear.errors import UserError
from dear.lazy import np, torch
from dear.options import true_or_false
from dear.topology import from_matrix, matrix, uniform

Targets = Mapping[int, float] | Sequence[int]
Parameters = Mapping[str, Any] | Iterable[Any]
"""A state dict, or an iterable of parameters or of (name, parameter) pairs."""


T = TypeVar("T")


def barrier() -> None:
    """Returns once every rank has called it."""
    job().communicator.barrier()


def allreduce_nonblocking_(
    tensor: torch.Tensor,
    average: bool = True,
    is_hierarchical_local: bool = False,
    name: str | None = None,
) -> int:
    """Starts `allreduce`, in place."""
    ranks = job().local if is_hierarchical_local else job().communicator
    true_or_false("allreduce: average", average)
    work = ranks.all_reduce(tensor.detach(), op="mean" if average else "sum")
    return started("allreduce", name, work.done, work.wait, lambda: tensor)


def allreduce_nonblocking(
    tensor: torch.Tensor,
    average: bool = True,
    is_hierarchical_local: bool = False,
    name: str | None = None,
) -> int:
    """Computes the mean (or sum) of `tensor` over all ranks, or over the ranks of this machine."""
    return allreduce_nonblocking_(tensor.detach().clone(), average, is_hierarchical_local, name)


def allgather_nonblocking(tensor: torch.Tensor, name: str | None = None) -> int:
    """Concatenates the tensors of all ranks along dimension 0, whose size may differ.

    The call blocks until the sizes are exchanged.
    """
    others = [other for other in range(job().size) if other != job().rank]
    return _gathered(tensor, others, others, check=False, with_own=True, name=name)


def broadcast_nonblocking_(tensor: torch.Tensor, root_rank: int, name: str | None = None) -> int:
    """Copies the tensor of `root_rank` to all ranks, in place."""
    work = job().communicator.broadcast(tensor.detach(), root=root_rank)
    return started("broadcast", name, work.done, work.wait, lambda: tensor)


def broadcast_nonblocking(tensor: torch.Tensor, root_rank: int, name: str | None = None) -> int:
    """Returns the tensor of `root_rank` as a new tensor; `tensor` has the same shape and dtype."""
    return broadcast_nonblocking_(tensor.detach().clone(), root_rank, name)


def broadcast_object(value: Any, root_rank: int = 0, name: str | None = None) -> Any:
    """Returns the object of rank `root_rank` on every rank; the object is pickled."""
    return job().communicator.broadcast_object(value, root=root_rank)


def broadcast_parameters(params: Parameters, root_rank: int) -> None:
    """Copies the tensors of rank `root_rank` to all ranks, in place."""
    plain.broadcast_parameters(_named(params), root_rank)


broadcast_optimizer_state = plain.broadcast_optimizer_state


def allreduce_parameters(params: Parameters) -> None:
    """Replaces floating-point tensors by their means over all ranks, so that all ranks agree."""
    tensors = [value for _, value in _named(params) if value.is_floating_point()]
    for handle in [allreduce_nonblocking_(tensor.detach()) for tensor in tensors]:
        synchronize(handle)


def _named(params: Parameters) -> list[tuple[str, torch.Tensor]]:
    items = params.items() if isinstance(params, Mapping) else params
    return [
        item if isinstance(item, tuple) else (f"number {place}", item)
        for place, item in enumerate(items, start=1)
    ]


def neighbor_allreduce_nonblocking(
    tensor: torch.Tensor,
    *,
    self_weight: float | None = None,
    src_weights: Mapping[int, float] | None = None,
    dst_weights: Targets | None = None,
    neighbor_weights: Mapping[int, float] | None = None,
    send_neighbors: Targets | None = None,
    enable_topo_check: bool = True,
    name: str | None = None,
) -> int:
    """Computes the weighted sum of this rank's and its in-neighbours' tensors as a new tensor.

    Args:
        tensor: floating-point, of any shape; all ranks give the same shape.
        neighbor_weights, send_neighbors: older names of `src_weights` and `dst_weights`.
        enable_topo_check: if `dst_weights` are given, first compare the ranks' lists; this costs
            one small blocking all-gather.

    Raises:
        UserError: incomplete weights, unknown ranks, contradictory lists, or an integer tensor.
    """
    what = "neighbor_allreduce"
    src_weights = either(src_weights, neighbor_weights, "src_weights", "neighbor_weights")
    # mypy joins the union's members to their common base.
    targets: Targets | None = either(  # type: ignore[assignment]
        dst_weights, send_neighbors, "dst_weights", "send_neighbors"
    )
    part = chosen_part(job().part, self_weight, src_weights, targets, what)
    mixed = torch.empty_like(tensor, memory_format=torch.contiguous_format)
    handle = _checked(
        job().exchange.core.neighbor_all_reduce,
        tensor.detach(),
        part.sources,
        part.destinations,
        self_weight=part.self_weight,
        out=mixed,
        check=targets is not None and enable_topo_check and not job().skip_checks,
    )
    pending = job().exchange.pending(handle, tensor.nbytes * len(part.destinations))
    return started(what, name, pending.done, pending.wait, lambda: mixed)


def neighbor_allgather_nonblocking(
    tensor: torch.Tensor,
    *,
    src_ranks: Sequence[int] | None = None,
    dst_ranks: Sequence[int] | None = None,
    enable_topo_check: bool = True,
    name: str | None = None,
) -> int:
    """Concatenates the in-neighbours' tensors (not this rank's own) along dimension 0.

    The order is that of `src_ranks`, by default ascending. The sizes of dimension 0 may differ. The
    call blocks until the sizes are exchanged.
    """
    if (src_ranks is None) != (dst_ranks is None):
        raise UserError("neighbor_allgather: give src_ranks and dst_ranks together, or neither")
    part = job().part()
    sources = sorted(part.sources) if src_ranks is None else list(src_ranks)
    targets = sorted(part.destinations) if dst_ranks is None else list(dst_ranks)
    check = src_ranks is not None and enable_topo_check and not job().skip_checks
    return _gathered(tensor, sources, targets, check=check, with_own=False, name=name)


def hierarchical_neighbor_allreduce_nonblocking(
    tensor: torch.Tensor,
    *,
    self_weight: float | None = None,
    src_machine_weights: Mapping[int, float] | None = None,
    dst_machine_weights: Targets | None = None,
    neighbor_machine_weights: Mapping[int, float] | None = None,
    send_neighbor_machines: Targets | None = None,
    enable_topo_check: bool = False,
    name: str | None = None,
) -> int:
    """Computes the mean in each machine, then the weighted sum over neighbouring machines.

    Keys of weights are numbers of machines. All ranks of a machine get bitwise equal results.

    Args:
        neighbor_machine_weights, send_neighbor_machines: older names of `src_machine_weights` and
            `dst_machine_weights`.
    """
    what = "hierarchical_neighbor_allreduce"
    names = ("src_machine_weights", "neighbor_machine_weights")
    sources = either(src_machine_weights, neighbor_machine_weights, *names)
    names = ("dst_machine_weights", "send_neighbor_machines")
    targets: Targets | None = either(  # type: ignore[assignment]
        dst_machine_weights, send_neighbor_machines, *names
    )
    part = chosen_part(job().machine_part, self_weight, sources, targets, what)
    if enable_topo_check:
        _check_machines(part)
    mixed = tensor.detach().clone(memory_format=torch.contiguous_format)
    flat = mixed.view(-1)
    pending = job().machines.start(flat, part)
    return started(what, name, pending.done, lambda: pending.finish(flat), lambda: mixed)


def pair_gossip_nonblocking(
    tensor: torch.Tensor,
    target_rank: int,
    self_weight: float | None = None,
    pair_weight: float | None = None,
    name: str | None = None,
) -> int:
    """Computes the weighted sum of two ranks' tensors, by default their mean.

    Only these two ranks take part; each gives the other rank as `target_rank`.
    """
    if (self_weight is None) != (pair_weight is None):
        raise UserError("pair_gossip: give self_weight and pair_weight together, or neither")
    if target_rank == job().rank:
        raise UserError(f"pair_gossip: target_rank {target_rank} is this rank; give another rank")
    mine = 0.5 if self_weight is None else self_weight
    other = 0.5 if pair_weight is None else pair_weight
    received = torch.empty_like(tensor)
    handle = _checked(job().pairs.core.sendrecv, tensor.detach(), received, target_rank)
    pending = job().pairs.pending(handle, tensor.nbytes)

    def mixed() -> torch.Tensor:
        return tensor.detach() * mine + received * other

    return started("pair_gossip", name, pending.done, pending.wait, mixed)


allreduce = blocking(allreduce_nonblocking)
allreduce_ = blocking(allreduce_nonblocking_)
allgather = blocking(allgather_nonblocking)
broadcast = blocking(broadcast_nonblocking)
broadcast_ = blocking(broadcast_nonblocking_)
neighbor_allreduce = blocking(neighbor_allreduce_nonblocking)
neighbor_allgather = blocking(neighbor_allgather_nonblocking)
hierarchical_neighbor_allreduce = blocking(hierarchical_neighbor_allreduce_nonblocking)
pair_gossip = blocking(pair_gossip_nonblocking)


def either(given: T | None, older: T | None, name: str, older_name: str) -> T | None:
    """Returns the value given under either name; raises `UserError` if both names are used."""
    if given is not None and older is not None:
        raise UserError(f"{older_name} is the older name of {name}; give only one of them")
    return older if given is None else given


def chosen_part(
    default: Callable[[], Round],
    self_weight: float | None,
    sources: Mapping[int, float] | None,
    destinations: Targets | None,
    what: str,
) -> Round:
    """Returns the round with the weights of a call; `default` gives those that are missing.

    Raises:
        UserError: incomplete weights. If no destinations are given, also: a source does not send to
            this rank in the topology.
    """
    check_weights(self_weight, sources, destinations, what)
    if sources is None:
        return default()
    assert self_weight is not None
    if destinations is None:
        usual = default()
        unknown = sorted(set(sources) - set(usual.sources))
        if unknown:
            raise UserError(
                f"{what}: rank {unknown[0]} in src_weights does not send to this rank in the "
                "current topology; to use other edges, give dst_weights, too"
            )
        # A source without a weight sends nevertheless, so its message must be received.
        sources = {source: sources.get(source, 0.0) for source in usual.sources}
        destinations = usual.destinations
    weights = {"sources": dict(sources), "destinations": factors(destinations)}
    return Round(self_weight=float(self_weight), **weights)


class WeightsError(UserError, ValueError):
    """Incomplete weights; also a ValueError, since BlueFog raises one."""


def check_weights(
    self_weight: float | None, sources: object, destinations: object, what: str
) -> None:
    """Checks that `self_weight` and `sources` are both given or both missing.

    Raises:
        WeightsError: only one is given, or `destinations` without both.
    """
    if (self_weight is None) != (sources is None):
        both = ("self_weight", "src_weights")
        given, missing = both if sources is None else both[::-1]
        raise WeightsError(f"{what}: {given} is given without {missing}; give both or neither")
    if destinations is not None and sources is None:
        raise WeightsError(
            f"{what}: dst_weights are given without self_weight and src_weights; give these, too, "
            "because this rank must know its sources"
        )


def factors(ranks: Targets) -> dict[int, float]:
    """Returns rank -> factor; ranks that are given as a list get the factor 1."""
    return dict(ranks) if isinstance(ranks, Mapping) else dict.fromkeys(ranks, 1.0)


def check_neighbors(exchange: Exchange, part: Round) -> None:
    """Compares the lists of all ranks; collective and blocking.

    Raises:
        UserError: on every rank, if the lists contradict each other.
    """
    _checked(exchange.core.check_neighbors, list(part.sources), list(part.destinations))


def _gathered(
    tensor: torch.Tensor,
    sources: Sequence[int],
    targets: Sequence[int],
    *,
    check: bool,
    with_own: bool,
    name: str | None,
) -> int:
    """Returns a handle for the concatenation of the tensors of `sources`.

    Args:
        with_own: insert this rank's own tensor, in rank order.
    """
    exchange = job().exchange
    local = tensor.detach().reshape(1) if tensor.dim() == 0 else tensor.detach()
    size = torch.tensor([local.shape[0]], device=local.device)
    sizes = size.new_empty(len(sources), 1)
    gather = exchange.core.neighbor_all_gather
    exchange.pending(
        _checked(gather, size, list(sizes), sources, targets, check=check), size.nbytes
    ).wait()
    pieces = [local.new_empty((int(rows), *local.shape[1:])) for rows in sizes.flatten().tolist()]
    handle = _checked(gather, local.contiguous(), pieces, sources, targets, check=False)
    pending = exchange.pending(handle, local.nbytes * len(targets))

    def joined() -> torch.Tensor:
        parts: list[Any] = list(pieces)
        if with_own:
            parts.insert(job().rank, local)
        return torch.cat(parts) if parts else local.new_empty((0, *local.shape[1:]))

    return started("allgather", name, pending.done, pending.wait, joined)


def _checked(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    try:
        return call(*args, **kwargs)
    except (ValueError, TypeError) as error:
        raise UserError(str(error)) from error


def _check_machines(part: Round) -> None:
    parts = job().communicator.gather_objects((sorted(part.sources), sorted(part.destinations)))
    by_machine = parts[:: job().local_size]
    for rank, lists in enumerate(parts):
        if lists != by_machine[rank // job().local_size]:
            raise UserError(
                f"rank {rank} gives other neighbour machines than the first rank of its machine; "
                "all ranks of a machine must give the same machines"
            )
    sent = _edges([targets for _, targets in by_machine])
    expected = {(source, to) for to, source in _edges([sources for sources, _ in by_machine])}
    for source, to in sorted(sent ^ expected):
        if (source, to) in sent:
            problem = f"machine {source} sends to machine {to}, which does not expect it"
        else:
            problem = f"machine {to} expects data from machine {source}, which does not send it"
        raise UserError(f"contradictory machine lists: {problem}")


def InferSourceFromDestinationRanks(  # noqa: N802 (BlueFog's name)
    dst_ranks: list[int], construct_adjacency_matrix: bool = False
) -> list[int] | tuple[list[int], np.ndarray]:
    """Returns the ranks whose `dst_ranks` contain this rank, ascending; collective and blocking.

    Args:
        construct_adjacency_matrix: also return weights `[n, n]` (row: sender, column: receiver),
            by which every rank gives itself and its sources equal weights.
    """
    edges = _edges(_peers(dst_ranks))
    sources = sorted(source for source, to in edges if to == job().rank)
    return (sources, _weights(edges)) if construct_adjacency_matrix else sources


def InferDestinationFromSourceRanks(  # noqa: N802 (BlueFog's name)
    src_ranks: list[int], construct_adjacency_matrix: bool = False
) -> list[int] | tuple[list[int], np.ndarray]:
    """Returns the ranks whose `src_ranks` contain this rank; see the function above."""
    edges = {(source, to) for to, source in _edges(_peers(src_ranks))}
    targets = sorted(to for source, to in edges if source == job().rank)
    return (targets, _weights(edges)) if construct_adjacency_matrix else targets


def _peers(ranks: list[int]) -> list[list[int]]:
    """Returns the lists of all ranks; raises `UserError` if this rank's list is wrong."""
    size, rank = job().size, job().rank
    wrong = [other for other in ranks if not 0 <= other < size or other == rank]
    lists = job().communicator.gather_objects([] if wrong else list(ranks))
    if wrong:
        raise UserError(
            f"rank {wrong[0]} cannot be a neighbour: give another rank than this one, from 0 to "
            f"{size - 1}"
        )
    return lists


def _edges(lists: Iterable[Iterable[int]]) -> set[tuple[int, int]]:
    """Returns the pair (i, j) for each j in the list with index i."""
    return {(number, other) for number, others in enumerate(lists) for other in others}


def _weights(edges: set[tuple[int, int]]) -> np.ndarray:
    ones = np.eye(job().size)
    for source, to in edges:
        ones[source, to] = 1
    return matrix(uniform(from_matrix(ones)))
