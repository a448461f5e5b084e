"""Network files with the costs of collectives, fitted to measured times."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import yaml

from common.emulation.links.profile import network_file
from common.profiling import nccl_tests
from common.results.tables.cells import significant
from common.virtual.costs.engines import costs_of
from common.virtual.costs.networks import CORE_GB_PER_S, payload_rate, wire_inside
from common.virtual.costs.parts import Kind, Medium, Platform, Shape, Wire
from common.virtual.over import turn
from dear.cost.calibrated import NetworkCosts, OperationCost, OperationCosts
from dear.cost.measurement import Measurement, Operation
from dear.errors import UserError

LEAST_SIZES = 3
"""Least number of sizes of a fit; with two, a line has no residual."""
HEADER = ("operation", "from", "to", "alpha us", "us per MB", "GB/s", "off by", "at most")
_SMALL = 64 << 10
"""Size in bytes below which a measurement should begin."""
_BY_LINK: tuple[Operation, ...] = (
    *("all_reduce", "all_gather", "reduce_scatter"),
    *("broadcast", "exchange", "sendrecv"),
)
"""Operations in the order in which the links are estimated from them."""
_HARDWARE = ("rdma", "overhead_us", "core_gb_per_s")
"""Keys of a network file that a measurement does not tell."""
_GBPS = (1e-3, 1e5)
"""Slowest and fastest link that a network file may have."""
_INSIDE = ("pcie4", "nvlink3", "nvlink4")
"""Links inside a host that are tried for NCCL, in this order; predictions use the first if the user
names none."""
_NEAREST_S = 1e-9
"""Shortest latency above 0 that is tried."""
_PRECISE = 1e-3
"""Relative precision of a link that is searched."""
_TURNS = 8
"""Searches of the rate, and of the latency, each with the last result of the other one."""
_Host: TypeAlias = tuple[str | None, float]
"""Links inside a host, and the bytes per second of a core."""


def from_nccl_tests(files: Sequence[str], ranks: int | None = None) -> NetworkCosts:
    """Fits the times in files of nccl-tests (see `nccl_tests.tables`).

    Args:
        ranks: number of ranks, for files that do not have it.

    Raises:
        UserError: a file is invalid, a collective has too few sizes, or the number of ranks is
            unknown or differs between files.
    """
    tables = [table for file in files for table in nccl_tests.tables(file)]
    sizes = {table.world_size: table.file for table in tables if table.world_size is not None}
    if ranks is not None:
        sizes.setdefault(ranks, "--ranks")
    if not sizes:
        raise UserError(f"{tables[0].file}: does not say how many ranks took part; add --ranks N")
    if len(sizes) > 1:
        listed = ", ".join(f"{size} ({file})" for size, file in sorted(sizes.items()))
        raise UserError(f"all files must have the same number of ranks, got {listed}")
    (world_size,) = sizes
    hosts = {table.hosts for table in tables if table.hosts is not None}
    if len(hosts) > 1:
        raise UserError(f"all files must have the same number of hosts, got {sorted(hosts)}")
    even = len(hosts) == 1 and world_size % min(hosts) == 0
    seconds: dict[Operation, dict[int, list[float]]] = {}
    for table in tables:
        merged = seconds.setdefault(table.operation, {})
        for size, times in table.seconds.items():
            merged.setdefault(size, []).extend(times)
    return fitted(
        [
            Measurement(operation=name, nbytes=sorted(of), seconds=[of[n] for n in sorted(of)])
            for name, of in seconds.items()
        ],
        engine="nccl",
        world_size=world_size,
        ranks_per_host=world_size // min(hosts) if even else None,
        source="; ".join(f"{t.file} ({t.versions}, {t.date})" for t in tables),
    )


def fitted(
    measurements: Sequence[Measurement],
    *,
    engine: str,
    world_size: int,
    ranks_per_host: int | None,
    source: str,
    time_scale: float = 1.0,
) -> NetworkCosts:
    """Fits the times of collectives by regime; the unit of time is `time_scale` seconds."""
    for measurement in measurements:
        if len(measurement.nbytes) < LEAST_SIZES:
            raise UserError(
                f"{measurement.operation}: {len(measurement.nbytes)} sizes, but a fit needs "
                f"{LEAST_SIZES}; measure 4 KiB to 256 MiB (nccl-tests: -b 4K -e 256M -f 2)"
            )
    costs = {each.operation: OperationCost.of(each, time_scale) for each in measurements}
    return NetworkCosts(
        engine=engine,
        world_size=world_size,
        ranks_per_host=ranks_per_host,
        source=source,
        operations=OperationCosts(**costs),
    )


def write(path: Path, costs: NetworkCosts) -> None:
    """Writes a network file. Its rate and latency of links are estimates from the costs.

    If the file exists, its keys about the hardware (`_HARDWARE`) stay as they are.
    """
    older = network_file(path) if path.exists() else None
    kept = {key: getattr(older, key) for key in _HARDWARE if older and getattr(older, key)}
    values = {
        **_link(costs, kept),
        "stands_for": describe(costs),
        "costs": dataclasses.asdict(costs, dict_factory=_given),
    }
    text = yaml.safe_dump(values, sort_keys=False, default_flow_style=None, width=100)
    path.write_text(text, encoding="utf-8")


def check_output(path: Path) -> None:
    """Raises `UserError` unless a network file can be written there, or `calibrate` wrote it."""
    if path.suffix != ".yaml":
        raise UserError(f"--output {path}: the name of a network file must end in .yaml")
    if not path.parent.is_dir():
        raise UserError(f"--output {path}: there is no folder {path.parent}")
    if path.exists() and network_file(path).costs is None:
        raise UserError(f"--output {path}: exists, and `calibrate` did not write it")


def describe(costs: NetworkCosts) -> str:
    """Returns one phrase about the cluster."""
    each = costs.ranks_per_host
    where = "" if each is None else f", {each} on each host"
    return f"{costs.engine} with {costs.world_size} ranks{where}"


def table(costs: NetworkCosts) -> list[str]:
    """Returns lines with the regimes of each operation, and how far the times are from them."""
    rows = [HEADER, *_rows(costs)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [f"{describe(costs)} ({costs.source})"]
    for name, *cells in rows:
        pairs = zip(cells, widths[1:], strict=True)
        lines.append("  ".join([name.ljust(widths[0]), *(c.rjust(width) for c, width in pairs)]))
    for name, cost in costs.by_operation().items():
        if cost.smallest_bytes > _SMALL:
            smallest = _size(cost.smallest_bytes)
            lines.append(f"{name}: costs below {smallest} were not measured; they are extrapolated")
    return [line.rstrip() for line in lines]


def _rows(costs: NetworkCosts) -> Iterator[tuple[str, ...]]:
    for name, cost in costs.by_operation().items():
        start: float = cost.smallest_bytes
        off = (f"{cost.residual_rms:.1%}", f"{cost.residual_worst:.1%}")
        for regime in cost.regimes:
            end = regime.below_bytes or cost.largest_bytes
            beta = regime.beta_us_per_mb
            rate = significant(1e3 / beta) if beta else "-"
            line = (significant(regime.alpha_us), significant(beta), rate)
            yield name, _size(start), _size(end), *line, *off
            name, start, off = "", end, ("", "")


def _size(nbytes: float) -> str:
    for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if nbytes >= unit:
            return f"{nbytes / unit:.4g} {name}"
    return f"{nbytes:.0f} B"


def _link(costs: NetworkCosts, kept: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the keys of a network file about a link between hosts, and how they were found.

    The costs composed of this link are those of the smallest and the largest measured message.
    Predictions compose costs where nothing was measured: for other numbers of ranks, for groups,
    and for missing operations.

    Args:
        kept: keys of the network that are known (`_HARDWARE`).
    """
    name = next(n for n in _BY_LINK if n in costs.by_operation())
    known, local = costs.by_operation()[name], costs.ranks_per_host or 1
    shape, engine = Shape(hosts=costs.world_size // local, ranks_per_host=local), costs.engine
    core = 1e9 * kept.get("core_gb_per_s", CORE_GB_PER_S)
    where = f"as {describe(costs)}"
    if shape.hosts == 1:  # no bytes were sent between hosts
        shape, engine, core = Shape(hosts=costs.world_size), "ring", math.inf
        where = "as a ring of ranks with hosts of their own, though only one host took part"
    elif name == "sendrecv":  # of the ranks of a host, one sends to another host
        shape = Shape(hosts=shape.hosts)
    composed = _Composed(
        operation="exchange" if name == "sendrecv" else name,
        engine=engine,
        shape=shape,
        medium="rdma" if kept.get("rdma") else "tcp",
        overhead_s=1e-6 * kept.get("overhead_us", 0.0),
    )
    wanted = {size: known.cost()(size) for size in (known.smallest_bytes, known.largest_bytes)}
    host = composed.host(core, *list(wanted.items())[-1])
    rate, latency_s = composed.link(host, wanted)
    off = [
        f"{abs(composed.seconds(size, rate, latency_s, host) / seconds - 1):.1%} for {_size(size)}"
        for size, seconds in wanted.items()
    ]
    inside, fast_core = host
    result: dict[str, Any] = {
        "gbps": float(f"{rate / payload_rate(1.0, composed.medium):.4g}"),
        "latency_us": float(f"{1e6 * latency_s:.4g}"),
    }
    if fast_core != core:
        result["core_gb_per_s"] = fast_core / 1e9
    result["source"] = (
        f"estimates from the times of {name}: the costs that predictions compose of them, {where}"
        f"{f', inside {inside}' if inside else ''}, differ by {' and '.join(off)}"
    )
    return {**kept, **result}


@dataclass(frozen=True, kw_only=True)
class _Composed:
    """Costs of an operation that are composed of links."""

    operation: str
    engine: str
    shape: Shape
    medium: Medium
    overhead_s: float

    def seconds(self, nbytes: float, rate: float, latency_s: float, host: _Host) -> float:
        """Returns the cost of a message over links with a rate in payload bytes per second."""
        inside, core = host
        between = Wire(
            kind="between",
            medium=self.medium,
            latency_s=latency_s,
            bytes_per_s=rate,
            overhead_s=self.overhead_s,
        )
        wires: dict[Kind, Wire] = {"inside": wire_inside(inside), "between": between}
        platform = Platform(wires=wires, core_bytes_per_s=core)
        return costs_of(self.engine, platform, self.shape)[self.operation](nbytes)

    def host(self, core: float, nbytes: float, seconds: float) -> _Host:
        """Returns the first host with which some link gives the measured cost. A slow core, or slow
        links in a host, may take longer, however fast the link between hosts is."""
        hosts: list[_Host] = [(None, core * 2**power) for power in range(10)]
        if self.engine == "nccl":
            hosts = [(name, core) for name in _INSIDE]
        fastest = payload_rate(_GBPS[1], self.medium)
        fit = (h for h in hosts if self.seconds(nbytes, fastest, 0.0, h) <= seconds)
        return next(fit, hosts[0])

    def link(self, host: _Host, wanted: Mapping[float, float]) -> tuple[float, float]:
        """Returns the rate and the latency in seconds that give both wanted costs, by size."""
        (few, few_s), (many, many_s) = wanted.items()
        slowest, fastest = (payload_rate(gbps, self.medium) for gbps in _GBPS)
        rate, latency_s = fastest, 0.0
        # The latency hardly matters for many bytes, nor the rate for few.
        for _ in range(_TURNS):

            def is_fast(rate: float, latency_s: float = latency_s) -> bool:
                return self.seconds(many, rate, latency_s, host) <= many_s

            rate = turn(is_fast, slowest, fastest, precise=_PRECISE)

            def is_near(latency_s: float, rate: float = rate) -> bool:
                return self.seconds(few, rate, latency_s, host) <= few_s

            latency_s = turn(is_near, few_s, _NEAREST_S, precise=_PRECISE)
            latency_s = latency_s if is_near(latency_s) else 0.0
        return rate, latency_s


def _given(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """Returns the values that are not None, whole numbers as such."""
    return {
        key: int(value) if isinstance(value, float) and value.is_integer() else value
        for key, value in pairs
        if value is not None
    }
