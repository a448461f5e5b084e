"""Making process groups with the ranks and the backend of another."""

from __future__ import annotations

from collections import Counter
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import distributed_c10d

_copies: Counter[str] = Counter()


def backends_of(group: dist.ProcessGroup) -> dict[str, str]:
    """Device type -> name of the backend that serves it."""
    return dict(part.split(":") for part in str(dist.get_backend_config(group)).split(","))


def copy_of(group: dist.ProcessGroup, timeout: timedelta | None) -> dist.ProcessGroup:
    """A new process group; a collective call of the ranks of `group`, and of no others."""
    if group is dist.group.WORLD:
        return dist.new_group(timeout=timeout)
    # new_group names a group either by counting the calls of all ranks of the job, which do not all
    # come here, or (use_local_synchronization) by the number of groups that this process has, which
    # differs between ranks and comes back after a group is destroyed: both meet at the wrong keys
    # of the Store. So the name is made here. These are private functions of torch.
    name = f"comm_core-{group.group_name}-{_copies[group.group_name]}"
    _copies[group.group_name] += 1
    ranks = dist.get_process_group_ranks(group)
    copy, _ = distributed_c10d._new_process_group_helper(
        len(ranks),
        dist.get_rank(group),
        ranks,
        str(dist.get_backend_config(group)),
        distributed_c10d._get_default_store(),
        name,
        timeout=timeout or distributed_c10d.default_pg_timeout,
    )
    own_ranks = {job_rank: rank for rank, job_rank in enumerate(ranks)}
    distributed_c10d._world.pg_group_ranks[copy] = own_ranks
    return copy
