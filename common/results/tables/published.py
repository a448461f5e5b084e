"""Text and JSON of a comparison with published throughputs."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from common.results.tables.table import markdown
from common.virtual.published.comparison import INSIDE, Compared, Comparison, Errors
from common.virtual.published.links import Line
from common.virtual.published.study import TABLE, declared

TITLES = ("model", "batch", "network", "method", "GPUs", "published/s", "predicted/s", "error", "")


def text(comparison: Comparison) -> str:
    """Returns the table of all rows, the fitted links, and the mean errors by network."""
    study = declared()
    lines = [TITLES, *map(_line, comparison.compared)]
    right = [title in ("batch", "GPUs", "published/s", "predicted/s", "error") for title in TITLES]
    parts = [markdown(lines, right)]
    methods = " and ".join(study.fit.methods)
    for place, line in _links(comparison).items():
        rows = f"{methods} of {study.fit.model}"
        rows += f" in configs/published/{TABLE.name}" if place in comparison.foreign else ""
        parts.append(
            f"{place}: start-up {1e6 * line.start_up_s:.1f} us per step of a ring, "
            f"{line.bytes_per_s / 1e9:.2f} GB/s, fitted to {rows}"
        )
    parts += map(_summary, comparison.errors())
    if comparison.slower_s:
        slower = [f"{name} {1e3 * s:+.1f} ms" for name, s in comparison.slower_s.items()]
        parts.append(
            f"the same, if compute on a full host takes as long as {study.alone} on one host "
            f"implies ({', '.join(slower)} per step)"
        )
        parts += map(_summary, comparison.slowed_errors())
    if any(c.role == "apart" for c in comparison.compared):
        parts.append(f"apart: {study.apart.method} of {study.apart.model}: {study.apart.why}")
    parts += [f"not compared: {line}" for line in comparison.skipped]
    return "\n".join(parts)


def _summary(row: Errors) -> str:
    return (
        f"{row.network}: {row.rows} predicted rows, mean error {row.mean:.1%}, signed mean "
        f"{row.signed_mean:+.1%}, worst {row.worst:+.1%}; with the rows listed apart, mean error "
        f"{row.mean_with_apart:.1%}"
    )


def _line(compared: Compared) -> tuple[str, ...]:
    row = compared.row
    return (
        row.model,
        str(row.batch),
        row.network,
        row.method,
        str(row.gpus),
        f"{row.samples_per_s:.0f}",
        f"{row.gpus * row.batch / compared.predicted_s:.0f}",
        f"{compared.error:+.1%}",
        "" if compared.role == "predicted" else compared.role,
    )


def _links(comparison: Comparison) -> dict[str, Line]:
    between = {name: lines["between"] for name, lines in comparison.lines.items()}
    inside = [lines["inside"] for lines in comparison.lines.values()]
    return ({INSIDE: inside[0]} if inside else {}) | between


def as_json(comparison: Comparison) -> dict[str, Any]:
    """Returns the rows, links and errors for `json.dumps`."""
    rows = [
        {**asdict(c.row), "predicted_step_s": c.predicted_s, "role": c.role, "error": c.error}
        for c in comparison.compared
    ]
    return {
        "rows": rows,
        "links": {name: asdict(line) for name, line in _links(comparison).items()},
        "errors": [asdict(errors) for errors in comparison.errors()],
        "slower_s": comparison.slower_s,
        "slowed_errors": [asdict(errors) for errors in comparison.slowed_errors()],
        "skipped": comparison.skipped,
    }
