"""Where the time of each result goes, and how little it could be, as a table in milliseconds."""

from __future__ import annotations

from common.results.tables import Row, significant

HEADINGS = (
    "model",
    "batch",
    "workers",
    "network",
    "fault",
    "algorithm",
    "step",
    "forward",
    "backward",
    "update",
    "exposed comm",
    "bound",
    "compute limit",
    "wire limit",
    "of bound",
)
NUMERIC = ("batch", "workers", *HEADINGS[6:])
UNKNOWN = "-"
LEGEND = (
    "milliseconds per step; forward, backward, update and exposed comm are rank 0's and add up to "
    "its step; exposed comm -: contained in the others (docs/measurement.md)"
)


def cells(row: Row) -> list[str]:
    """The row of a trial that has a result, as text, in the order of `HEADINGS`."""
    times = (
        row.step_s,
        row.forward_s,
        row.backward_s,
        row.update_s,
        row.exposed_comm_s,
        row.bound_s,
        row.compute_limit_s,
        row.wire_limit_s,
    )
    return [
        row.model,
        str(row.batch_size),
        str(row.world_size),
        row.network or "",
        row.fault or "",
        row.algorithm,
        *(_milliseconds(seconds) for seconds in times),
        UNKNOWN if row.of_bound is None else f"{row.of_bound:.0%}",
    ]


def _milliseconds(seconds: float | None) -> str:
    if seconds is None:
        return UNKNOWN
    return significant(seconds * 1000) if seconds else "0"
