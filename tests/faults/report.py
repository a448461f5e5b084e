"""Table of a campaign by kind of fault, and how to repeat what missed a bar."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tests.faults.drawing import Fault
from tests.faults.kinds import KINDS

Result = Mapping[str, Any]


def text(facts: Mapping[str, Any], results: Sequence[Result]) -> str:
    """The whole report, in Markdown."""
    lines = [
        f"{len(results)} faults, seed {facts['seed']}, {facts['seconds']:.0f} s on "
        f"{facts['lanes']} lanes, load {facts['load'][0]:.1f} before and {facts['load'][1]:.1f} "
        "after",
        "",
        "| kind | what | drawn | met | missed | slowest report in s |",
        "| ---- | ---- | ----: | --: | -----: | ------------------: |",
    ]
    for kind, how in KINDS.items():
        drawn = [result for result in results if result["fault"]["kind"] == kind]
        if drawn:
            lines.append(_row(kind, how.what, drawn))
    lines.append(_row("all", "", results))
    for key in ("family", "launcher", "fabric"):
        values = sorted({getattr(Fault(**result["fault"]), key) for result in results})
        counts = [
            f"{value} {sum(getattr(Fault(**r['fault']), key) == value for r in results)}"
            for value in values
        ]
        lines += ["", f"by {key}: {', '.join(counts)}"]
    for result in results:
        if result["missed"]:
            fault = Fault(**result["fault"])
            again = f"python -m tests.faults --only {fault.seed}:{fault.index}{facts['flags']}"
            lines += ["", f"`{again}` {fault.title}"]
            lines += [f"- {miss}" for miss in result["missed"]]
    return "\n".join(lines)


def line(result: Result, number: int, total: int) -> str:
    """Returns the line that the campaign prints after a fault."""
    fault = Fault(**result["fault"])
    word = f"MISSED {result['missed']}" if result["missed"] else "met"
    return (
        f"[{number}/{total}] {result.get('seconds', 0):.1f} s {fault.index} {fault.title}: {word}"
    )


def _row(kind: str, what: str, results: Sequence[Result]) -> str:
    missed = sum(bool(result["missed"]) for result in results)
    times = [result["report_s"] for result in results if result.get("report_s") is not None]
    slowest = f"{max(times):.1f}" if times else ""
    return f"| {kind} | {what} | {len(results)} | {len(results) - missed} | {missed} | {slowest} |"
