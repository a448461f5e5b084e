"""The GPU check's one-page summary, for people (Markdown) and programs (JSON)."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from common.harness.budget import Budget, Result

NAME = "summary"


def write(
    out: Path,
    facts: Mapping[str, Any],
    machine: Mapping[str, Any],
    results: Sequence[Result],
    budget: Budget,
) -> None:
    """Writes `summary.json` and `summary.md`; called after every step, so that nothing is lost."""
    summary = {
        "gpus": facts["gpus"],
        "torch": facts["torch"],
        "cuda": facts["cuda"],
        "nccl": facts["nccl"],
        "missing": facts["missing"],
        "machine": machine,
        "budget_s": budget.seconds,
        "spent_s": round(budget.spent_s, 1),
        "steps": [dataclasses.asdict(result) for result in results],
    }
    (out / f"{NAME}.json").write_text(json.dumps(summary, indent=2) + "\n")
    (out / f"{NAME}.md").write_text(_markdown(summary, sorted(out.glob("sweeps/*/table.md"))))


def counts(results: Sequence[Result]) -> str:
    """How many steps ended in which way."""
    number = Counter(result.status for result in results)
    return ", ".join(f"{number[status]} {status}" for status in ("ok", "failed", "skipped"))


def _markdown(summary: Mapping[str, Any], tables: Sequence[Path]) -> str:
    machine = summary["machine"]
    gpus = ", ".join(f"{n} x {name}" for name, n in Counter(summary["gpus"]).items())
    lines = [
        f"# GPU check: {gpus}",
        "",
        f"torch {summary['torch']}, CUDA {summary['cuda']}, NCCL {summary['nccl']}, Python "
        f"{machine['python']}; {machine['cores']} x {machine['cpu']}; commit {machine['commit']}; "
        f"{summary['spent_s']:.0f} s of {summary['budget_s']:.0f} s used.",
        "",
        "| step | outcome | seconds | |",
        "|---|---|---:|---|",
    ]
    for step in summary["steps"]:
        cells = (step["name"], step["status"], f"{step['seconds']:.0f}", step["reason"])
        lines.append("| " + " | ".join(cell.replace("|", "/") for cell in cells) + " |")
    if summary["missing"]:
        how = "; ".join(f"{name} ({how})" for name, how in summary["missing"].items())
        lines += ["", f"Not installed here: {how}."]
    for table in tables:
        lines += ["", f"## {table.parent.name}", "", table.read_text().strip()]
    return "\n".join(lines) + "\n"
