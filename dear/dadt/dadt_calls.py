"""DADT's collectives by number; the names of `dear.dadt`.

Calls of the same kind and number on all ranks belong together, whatever else the ranks ask for in
between.
"""

from __future__ import annotations

import torch

from dear.dadt.dadt_job import current
from dear.dadt.named_requests import ALL_REDUCE, BROADCAST, COO_ALL_REDUCE, check_tensor


def broad_cast(id: int, tensor: torch.Tensor) -> torch.Tensor:
    """Rank 0's tensor, as a new one; waits.

    Args:
        id: the same on all ranks, as are shape and dtype.
        tensor: dense, any shape; on other ranks than 0 its values do not matter.
    """
    check_tensor("broad_cast", id, tensor, sparse=False)
    return current().fetch(current().submit(BROADCAST, id, tensor))


def all_reduce(id: int, tensor: torch.Tensor) -> torch.Tensor:
    """The sum over all ranks, as a new tensor; waits. Arguments as of `broad_cast`."""
    check_tensor("all_reduce", id, tensor, sparse=False)
    return current().fetch(current().submit(ALL_REDUCE, id, tensor))


def all_reduce_async(id: int, tensor: torch.Tensor) -> torch.Tensor:
    """The sum of the tensors of the call of this `id` before; zeros like `tensor` in the first.

    Waits for that sum only, which has had all the time since. `flush(id)` fetches the last one.
    """
    check_tensor("all_reduce_async", id, tensor, sparse=False)
    before = current().exchange(ALL_REDUCE, id, tensor)
    return torch.zeros_like(tensor.detach()) if before is None else before


def coo_all_reduce(id: int, tensor: torch.Tensor) -> torch.Tensor:
    """The sum over all ranks of sparse COO tensors, coalesced; waits.

    Args:
        id: the same on all ranks, as are shape, dtype and the number of sparse dimensions.
        tensor: need not be coalesced; ranks may have any entries, and any number of them.
    """
    check_tensor("coo_all_reduce", id, tensor, sparse=True)
    return current().fetch(current().submit(COO_ALL_REDUCE, id, tensor))


def coo_all_reduce_async(id: int, tensor: torch.Tensor) -> torch.Tensor:
    """As `all_reduce_async`, for sparse tensors; the first result has `tensor`'s entries, zero."""
    check_tensor("coo_all_reduce_async", id, tensor, sparse=True)
    before = current().exchange(COO_ALL_REDUCE, id, tensor)
    if before is not None:
        return before
    own = tensor.detach().coalesce()
    zeros = torch.zeros_like(own.values())
    return torch.sparse_coo_tensor(own.indices().clone(), zeros, own.shape, is_coalesced=True)


def flush(id: int, *, coo: bool = False) -> torch.Tensor:
    """The sum of the tensors of the last asynchronous call of this `id`; waits.

    The next call of the `id` is a first one again.

    Args:
        coo: of `coo_all_reduce_async` instead of `all_reduce_async`.

    Raises:
        UserError: there was no such call since the last flush.
    """
    return current().last(COO_ALL_REDUCE if coo else ALL_REDUCE, id)
