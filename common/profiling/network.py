"""Times of collectives, measured by a job's ranks, or by processes here or on virtual hosts."""

from __future__ import annotations

import dataclasses
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

from common.emulation.cluster import EmulatedCluster, VirtualHost
from common.emulation.config import ClusterConfig
from common.emulation.links.profile import network_profile
from common.launch.hosts import NetworkOptions, network_env
from common.launch.ranks import RankLost, Ranks, gather, rank_env
from common.machine.processes import preload_in_fork_server
from common.profiling.calibration import fitted
from dear.comm.environment import rank_facts
from dear.cost.calibrated import NetworkCosts
from dear.cost.collectives import measure_collective
from dear.cost.measurement import MEASURABLE
from dear.errors import Unavailable, UserError

SMALLEST = 4 << 10
"""Bytes of the smallest buffer."""
START_S = 180.0
"""Time limit of the start of the ranks and of each collective, in seconds."""
TIME_SCALE = 10.0
"""Time scale of virtual hosts, if none is given."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Settings of a measurement, and what the ranks must know about their links."""

    backend: str | None = None
    """Backend as for `dear.init`."""
    largest: int = 256 << 20
    """Bytes of the largest buffer."""
    seconds: float = 50.0
    """Longest time of all collectives; the largest sizes are left out when it ends."""
    time_scale: float = 1.0
    """Real seconds per second of the network."""
    burst_bytes: int = 0
    wire_bytes_per_s: float | None = None
    """Same as in `Communicator`, like the previous field."""
    where: str = ""
    """Place of the measurement, for the `source` of the costs."""


def in_job() -> bool:
    """Returns True if a launcher started this process as a rank."""
    return rank_facts().launcher != "none"


def measure(plan: Plan, ranks: int | None = None) -> NetworkCosts | None:
    """Measures all collectives as one rank of a job; returns None on other ranks than 0.

    Args:
        ranks: expected number of ranks; None: any.

    Raises:
        UserError: the job has one rank, or not the expected number; or the backend is missing.
    """
    import torch

    import dear
    from dear.comm import runtime
    from dear.comm.backends import backend_for

    facts = rank_facts()
    if facts.world_size == 1 or ranks not in (None, facts.world_size):
        wanted = "at least 2" if ranks is None else f"--ranks {ranks}"
        raise UserError(f"{facts.launcher} started {facts.world_size} rank(s), not {wanted}")
    torch.set_num_threads(1)
    try:
        dear.init(backend=plan.backend, timeout_s=START_S)
    except Unavailable as error:
        raise UserError(f"backend {plan.backend}: {error}") from None
    communicator = runtime.communicator()
    communicator.time_scale = plan.time_scale
    communicator.burst_bytes = plan.burst_bytes
    communicator.wire_bytes_per_s = plan.wire_bytes_per_s
    device = dear.device() if "nccl" in communicator.backend else torch.device("cpu")
    sizes = [1 << power for power in range(SMALLEST.bit_length() - 1, plan.largest.bit_length())]
    budget_s = plan.seconds / len(MEASURABLE) / plan.time_scale  # `seconds` are real ones
    results = [
        measure_collective(communicator, name, device, sizes=sizes, budget_s=budget_s)
        for name in MEASURABLE
    ]
    per_host = set(communicator.gather_objects(runtime.local_size()))
    costs = fitted(
        results,
        engine=backend_for(communicator.backend, device.type),
        world_size=communicator.size,
        ranks_per_host=per_host.pop() if len(per_host) == 1 else None,
        time_scale=plan.time_scale,
        source=f"calibrate, {plan.where or 'this job'}, {time.strftime('%Y-%m-%d', time.gmtime())}",
    )
    rank = communicator.rank
    dear.shutdown()
    return costs if rank == 0 else None


def measure_here(plan: Plan, ranks: int) -> NetworkCosts:
    """Measures in `ranks` processes on this machine; raises `UserError` like `measure`."""
    return _together(plan, [None] * ranks, ranks)


def measure_emulated(plan: Plan, config: ClusterConfig) -> NetworkCosts:
    """Measures on virtual hosts, which need a sandbox; raises `UserError` like `measure`."""
    time_scale, profile = config.time_scale or TIME_SCALE, network_profile(config.network)
    with EmulatedCluster(
        hosts=config.hosts,
        profile=profile,
        time_scale=time_scale,
        congestion=config.congestion,
        links=config.links,
    ) as cluster:
        plan = dataclasses.replace(
            plan,
            time_scale=time_scale,
            burst_bytes=cluster.burst_bytes,
            wire_bytes_per_s=cluster.wire_bytes_per_s if config.ranks_per_host == 1 else None,
            where=f"{config.hosts} virtual hosts, {profile.name}, time scale {time_scale:g}",
        )
        hosts = [host for host in cluster.hosts for _ in range(config.ranks_per_host)]
        return _together(plan, hosts, config.ranks_per_host)


def _together(plan: Plan, hosts: Sequence[VirtualHost | None], ranks_per_host: int) -> NetworkCosts:
    """Starts one rank for each of `hosts` (None: this machine) and returns what rank 0 sends."""
    costs: NetworkCosts | None = None
    # Once for all ranks, if this process has not started a fork server yet.
    preload_in_fork_server(["torch", "torch.distributed", "dear.comm.runtime"])
    with tempfile.TemporaryDirectory() as folder, Ranks() as started:
        store = Path(folder, "store")
        for rank, host in enumerate(hosts):
            first = rank - rank % ranks_per_host
            env = rank_env(rank, len(hosts), store=store, first=first, local_size=ranks_per_host)
            if host is not None:
                env |= {"COMM_CORE_HOST_ID": host.name}
                env |= network_env(NetworkOptions(), host.ifname)
            enter = None if host is None else host.enter
            started.function(_rank, plan, env=env, before=enter, piped=True)
        try:
            for _, answer in gather(started.pipes, START_S + 2 * plan.seconds):
                if isinstance(answer, str):
                    raise UserError(answer)
                costs = costs or answer
        except RankLost as lost:
            raise UserError(f"{lost}; a smaller --largest needs less memory and time") from None
    assert costs is not None  # rank 0 has answered
    return costs


def _rank(pipe: Connection, plan: Plan) -> int:
    try:
        pipe.send(measure(plan))
    except UserError as error:
        pipe.send(str(error))
    return 0
