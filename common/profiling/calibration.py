"""Network files with the costs of collectives, fitted to measured times."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path

import yaml

from common.emulation.links.profile import network_file
from common.profiling import nccl_tests
from common.results.tables.cells import significant
from dear.cost.calibrated import NetworkCosts, OperationCost, OperationCosts
from dear.cost.measurement import Measurement, Operation, carried
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
    """Writes a network file. Its rate and latency of links are estimates from the costs."""
    gbps, latency_us, how = _link(costs)
    values = {
        "gbps": gbps,
        "latency_us": latency_us,
        "stands_for": describe(costs),
        "source": how,
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


def _link(costs: NetworkCosts) -> tuple[float, float, str]:
    """Returns rate in Gb/s and latency in microseconds of the links, and how they were estimated.

    The rate is the bus bandwidth (bytes on each link per second) of the largest message. The
    latency is the start-up of the smallest messages, divided by the steps of a ring.
    """
    known = costs.by_operation()
    size = costs.world_size
    name = next(n for n in _BY_LINK if n in known)
    cost = known[name]
    largest_s = cost.cost()(cost.largest_bytes)
    gbps = 8e-9 * carried(name, size) * cost.largest_bytes / largest_s
    steps = {"all_reduce": 2 * (size - 1), "all_gather": size - 1, "reduce_scatter": size - 1}
    latency_us = cost.regimes[0].alpha_us / steps.get(name, 1)
    how = (
        f"estimates from the times of {name}: the rate is the bus bandwidth of "
        f"{_size(cost.largest_bytes)}, the latency the start-up of the smallest messages, divided "
        "by the steps of a ring"
    )
    return float(f"{gbps:.4g}"), float(f"{latency_us:.3g}"), how


def _given(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """Returns the values that are not None, whole numbers as such."""
    return {
        key: int(value) if isinstance(value, float) and value.is_integer() else value
        for key, value in pairs
        if value is not None
    }
