"""What a record says about where its time went and how little it could be."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from common.results.records import Record

PARTS = ("forward_s", "backward_s", "update_s", "exposed_comm_s")
# A bound comes from a short measurement: only more than this beyond it is worth a remark.
_BEYOND = 1.02


def times(record: Record) -> dict[str, Any]:
    """The fields of a table's row that are times of a step; None where an older record has none.

    Args:
        record: of a trial that has a result.
    """
    trial, bound = record["trial"], record.get("bound") or {}
    parts = record.get("breakdown") or {}
    if "step_s" not in parts:  # of an older record: forward, backward and update include waiting
        parts = {}
    samples = trial["batch_size"] * trial["world_size"]
    return {
        "step_s": samples / record["throughput"]["value"],
        **{name: parts.get(name) for name in PARTS},
        "bound": bound.get("kind"),
        "bound_s": bound.get("step_s"),
        "compute_limit_s": bound.get("compute_limit_s"),
        "wire_limit_s": bound.get("wire_limit_s"),
        "of_bound": bound.get("reached"),
    }


def remarks(records: Iterable[Record]) -> list[str]:
    """A sentence on results that are better than their bound, if there are any."""
    beyond = [
        record["trial"]["label"]
        for record in records
        if ((record.get("bound") or {}).get("reached") or 0.0) > _BEYOND
    ]
    if not beyond:
        return []
    return [
        f"beyond its bound: {', '.join(dict.fromkeys(beyond))}; a bound comes from a short "
        "measurement, and does not know of compression"
    ]
