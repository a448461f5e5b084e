"""The comparison that a sweep is run for, as rows, Markdown, CSV, and the references' reports."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from common.emulation.config import Fault
from common.results import bounds
from common.results.records import Record
from common.results.stats import speedup, verdict


@dataclass(frozen=True, kw_only=True)
class Row:
    """One trial in a table; None where there is nothing to say."""

    model: str
    batch_size: int
    world_size: int
    algorithm: str
    status: str
    network: str | None = None
    """Of an emulated cluster."""
    fault: str | None = None
    """What was done to the emulated cluster meanwhile."""
    throughput: float | None = None
    unit: str | None = None
    ci_low: float | None = None
    ci_high: float | None = None
    n: int | None = None
    """Timed steps."""
    repeats: int | None = None
    speedup: float | None = None
    """Median step time of the algorithm compared to, over this one's."""
    speedup_low: float | None = None
    speedup_high: float | None = None
    verdict: str | None = None
    efficiency: float | None = None
    """Throughput over world size times the single worker's throughput."""
    of_bound: float | None = None
    """The least step time that the algorithm allows here, over the median step time."""
    correct: bool | None = None
    """Replicas agree, and the first steps match plain training."""
    reason: str | None = None
    """Why there is no number, or why to doubt it."""
    step_s: float | None = None
    """Median of the slowest rank."""
    forward_s: float | None = None
    """Of rank 0, as the next three, which add up to about `step_s`; without waiting."""
    backward_s: float | None = None
    update_s: float | None = None
    exposed_comm_s: float | None = None
    """Waiting for communication; None where an algorithm hides it in the other three."""
    bound: str | None = None
    """Which formula `bound_s` follows."""
    bound_s: float | None = None
    compute_limit_s: float | None = None
    wire_limit_s: float | None = None


def rows(records: Iterable[Record], compare_to: str) -> list[Row]:
    """One row per record; speed-ups are relative to `compare_to` in the same cell and world."""
    records = list(records)
    return [_row(record, records, compare_to) for record in records]


def _row(record: Record, records: list[Record], compare_to: str) -> Row:
    trial = record["trial"]
    known: dict[str, Any] = {
        "model": trial["model"],
        "batch_size": trial["batch_size"],
        "world_size": trial["world_size"],
        "algorithm": trial["label"],
        "status": record["status"],
        "network": trial.get("network"),
        "fault": Fault(**trial["fault"]).title if trial.get("fault") else None,
    }
    if record["status"] != "ok":
        error = record["error"] or {}
        return Row(**known, reason=error.get("message"))
    found = record["throughput"]
    check = record["check"]
    known |= {
        "throughput": found["value"],
        "unit": found["unit"],
        "ci_low": found["ci_low"],
        "ci_high": found["ci_high"],
        "n": found["n"],
        "repeats": len(record["repeats"]),
        "correct": check["replicas_agree"] and check["matches_reference"],
        "reason": "; ".join(record["notes"]) or None,
    }
    base = _peer(record, records, lambda t: _is_base(t, compare_to, trial["world_size"]))
    if base is not None and base is not record and trial["algorithm"] != "none":
        ratio = speedup(record["repeats"], base["repeats"])
        count = min(len(record["repeats"]), len(base["repeats"]))
        known |= {
            "speedup": ratio.value,
            "speedup_low": ratio.low,
            "speedup_high": ratio.high,
            "verdict": verdict(ratio, count),
        }
        if not _interleaved(record, base):
            note = f"not measured together with {compare_to}"
            known["reason"] = "; ".join(filter(None, [known["reason"], note]))
    known |= bounds.times(record)
    single = _peer(record, records, lambda t: t["algorithm"] == "none")
    if single is not None:
        known["efficiency"] = found["value"] / (trial["world_size"] * single["throughput"]["value"])
    return Row(**known)


def _is_base(trial: dict[str, Any], compare_to: str, world_size: int) -> bool:
    names = (trial["algorithm"], trial["label"])
    return compare_to in names and trial["world_size"] == world_size


def _peer(record: Record, records: list[Record], wanted: Any) -> Record | None:
    """The first good record of the same model and settings whose trial is `wanted`."""
    for other in records:
        same = _settings(other["trial"]) == _settings(record["trial"])
        if other["status"] == "ok" and same and wanted(other["trial"]):
            return other
    return None


def _settings(trial: dict[str, Any]) -> dict[str, Any]:
    own = ("algorithm", "options", "label", "world_size")
    return {key: value for key, value in trial.items() if key not in own}


def _interleaved(record: Record, base: Record) -> bool:
    return record["run"] == base["run"]


_HEADINGS = (
    "model",
    "batch",
    "workers",
    "network",
    "fault",
    "algorithm",
    "throughput",
    "95 % CI",
    "n",
    "speed-up (95 % CI)",
    "verdict",
    "efficiency",
    "of bound",
    "correct",
    "notes",
)
_SPARSE = ("network", "fault", "of bound")
"""Columns that are left out where no row has anything in them."""
NUMERIC = ("batch", "workers", "throughput", "95 % CI", "n", "efficiency", "of bound")


def headings(compare_to: str) -> list[str]:
    """Column titles; the speed-up says relative to what."""
    return [text.replace("speed-up", f"speed-up vs {compare_to}") for text in _HEADINGS]


def cells(row: Row) -> list[str]:
    """The row as text, in the order of `headings`."""
    return [" ".join(text.split()) for text in _texts(row)]


def place(row: Row) -> tuple[Any, ...]:
    """What rows that are compared with each other have in common."""
    return (row.model, row.batch_size, row.world_size, row.network, row.fault)


def fabric_words(records: Iterable[Record]) -> str:
    """What the numbers were measured on, for titles and captions."""
    records = list(records)
    if all(record["fabric"] == "real" for record in records):
        return "real processes"
    scales = sorted({record["time_scale"] for record in records})
    scale = " to ".join(f"{value:g}" for value in dict.fromkeys((scales[0], scales[-1])))
    hosts = max(_hosts(record["trial"]) for record in records)
    where = f"{hosts} virtual hosts" if hosts else "local processes, compute replayed"
    return f"emulated, {where}, time scale {scale}"


def _hosts(trial: dict[str, Any]) -> int:
    per_host = trial.get("ranks_per_host")
    return -(-trial["world_size"] // per_host) if per_host else 0


def remarks(records: Iterable[Record]) -> list[str]:
    """What is to be said of the network and of bounds, once for all rows."""
    records = list(records)
    found = [
        f"{record['trial']['network']}: {note}"
        for record in records
        for note in record["network"].get("notes", [])
    ]
    return [*dict.fromkeys(found), *bounds.remarks(records)]


def _texts(row: Row) -> list[str]:
    if row.status != "ok":
        blank = [""] * 7
        return [*_name(row), row.status, *blank, row.reason or ""]
    ratio = ""
    if row.speedup is not None:
        ratio = f"{row.speedup:.2f} ({row.speedup_low:.2f}-{row.speedup_high:.2f})"
    return [
        *_name(row),
        f"{significant(row.throughput)} {row.unit}",
        f"{significant(row.ci_low)}-{significant(row.ci_high)}",
        str(row.n),
        ratio,
        row.verdict or "",
        _percent(row.efficiency),
        _percent(row.of_bound),
        "yes" if row.correct else "NO",
        row.reason or "",
    ]


def _percent(value: float | None) -> str:
    return "" if value is None else f"{value:.0%}"


def _name(row: Row) -> list[str]:
    place = [row.network or "", row.fault or ""]
    return [row.model, str(row.batch_size), str(row.world_size), *place, row.algorithm]


def significant(value: float | None) -> str:
    """Three significant digits, without an exponent."""
    if value is None:
        return ""
    decimals = 2 - math.floor(math.log10(value)) if value > 0 else 0
    return f"{value:.{max(decimals, 0)}f}"


def summary(table: list[Row], compare_to: str) -> list[str]:
    """The answer in a sentence per model and world size."""
    lines = []
    for cell in dict.fromkeys(place(row) for row in table):
        rivals = [row for row in table if place(row) == cell and row.throughput and row.correct]
        if len(rivals) < 2:
            continue
        best = max(rivals, key=lambda row: row.throughput or 0.0)
        where = "".join(f", {name}" for name in (best.network, best.fault) if name)
        text = f"{best.model}, {best.world_size} workers{where}: "
        text += f"{best.algorithm} has the highest median"
        if best.speedup is None:
            others = [row for row in rivals if row.speedup is not None]
            text += "" if others else f" (no {compare_to} to compare with)"
        else:
            text += (
                f", {best.speedup:.2f}x {compare_to} "
                f"(95 % CI {best.speedup_low:.2f}-{best.speedup_high:.2f}: {best.verdict})"
            )
        lines.append(text)
    return lines


def markdown(table: list[Row], compare_to: str) -> str:
    """A table for a README or a pull request."""
    titles = headings(compare_to)
    body = [cells(row) for row in table]
    used = [i for i, name in enumerate(titles) if name not in _SPARSE or any(r[i] for r in body)]
    titles = [titles[i] for i in used]
    return markdown_lines(titles, [[line[i] for i in used] for line in body], NUMERIC)


def markdown_lines(
    titles: Sequence[str], body: Sequence[Sequence[str]], numeric: Sequence[str]
) -> str:
    """Any table as Markdown; columns whose titles are `numeric` are aligned to the right."""
    body = [[text.replace("|", r"\|") for text in line] for line in body]
    # A rule of one character is no rule: at least "-:".
    widths = [max(2, *(len(line[i]) for line in [titles, *body])) for i in range(len(titles))]
    right = [title in numeric for title in titles]

    def line(texts: list[str]) -> str:
        padded = [
            text.rjust(width) if aligned else text.ljust(width)
            for text, width, aligned in zip(texts, widths, right, strict=True)
        ]
        return "| " + " | ".join(padded) + " |"

    rule = ["-" * (width - 1) + (":" if r else "-") for width, r in zip(widths, right, strict=True)]
    return "\n".join([line(titles), line(rule), *(line(text) for text in body)]) + "\n"


def csv_text(table: list[Row]) -> str:
    """All fields of all rows, full precision; None is empty."""
    out = io.StringIO()
    names = list(Row.__dataclass_fields__)
    writer = csv.DictWriter(out, names, lineterminator="\n")
    writer.writeheader()
    writer.writerows(asdict(row) for row in table)
    return out.getvalue()


def reference_reports(records: Iterable[Record], rdma: int = 0) -> dict[str, Any]:
    """`reports.json` of the reference suites: {rdma: {MODEL_BS: {method: [samples/s, ...]}}}.

    One number per world size, ascending, as text with three decimals; mean rate as they take it.
    """
    speeds: dict[str, dict[str, dict[int, float]]] = {}
    for record in records:
        trial = record["trial"]
        if record["status"] != "ok" or trial["algorithm"] == "none":
            continue
        task = f"{trial['model']}_{trial['batch_size']}"
        rates = [
            trial["world_size"] * trial["batch_size"] * len(block) / sum(block)
            for repeat in record["iters"]
            for block in repeat
        ]
        by_world = speeds.setdefault(task, {}).setdefault(trial["label"], {})
        by_world[trial["world_size"]] = sum(rates) / len(rates)
    return {
        str(rdma): {
            task: {
                method: [f"{by_world[world]:.3f}" for world in sorted(by_world)]
                for method, by_world in methods.items()
            }
            for task, methods in speeds.items()
        }
    }
