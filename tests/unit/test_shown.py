"""Tests that committed records are shown the same, byte by byte: every status, fabric and age.

`tests/unit/shown/records.jsonl` is never made again: its last lines are of older versions. After a
change that is meant, `python -m tests.unit.test_shown` writes the rest, and the diff shows it.
"""

from __future__ import annotations

import csv
import io
from pathlib import Path

import pytest

from common.harness import cli
from common.results import store
from common.results.report.overview import overview
from common.results.tables.table import csv_text
from common.results.timed import rows

FOLDER = Path(__file__).parent / "shown"


def shown() -> dict[str, str]:
    """Digests by file."""
    lines = overview(store.load(FOLDER / "records.jsonl"), "ddp")
    return {
        "table.md": lines.table.markdown(),
        "table.tex": lines.table.latex(),
        "table.csv": csv_text(lines.kind, lines.rows),
        "breakdown.md": rows.breakdown(lines.rows).markdown(),
        "lines.txt": "\n".join(lines.lines) + "\n",
    }


def test_there_is_every_status_and_fabric():
    result = store.load(FOLDER / "records.jsonl")
    assert {record.status for record in result} == {
        *("ok", "failed", "timeout", "oom", "unsupported", "interrupted")
    }
    assert {record.fabric.kind for record in result} == {"real", "emulated"}


@pytest.mark.parametrize("name", ["table.md", "table.tex", "breakdown.md", "lines.txt"])
def test_texts_are_the_same_byte_by_byte(name):
    assert shown()[name] == (FOLDER / name).read_text()


def test_numbers_in_the_csv_are_the_same():
    """Rounds to nine digits: the last ones depend on a library's version."""
    pair = [
        list(csv.reader(io.StringIO(text)))
        for text in (shown()["table.csv"], (FOLDER / "table.csv").read_text())
    ]
    for result, wanted in zip(*pair, strict=True):
        for item, other in zip(result, wanted, strict=True):
            try:
                assert float(item) == pytest.approx(float(other), rel=1e-9)
            except ValueError:
                assert item == other


def test_a_paper_chooses_columns(capsys):
    folder = FOLDER.parents[2] / "docs" / "records" / "emulated-quick"
    show = ["show", str(folder), "--columns", "algorithm, throughput"]
    assert cli.main([*show, "--latex"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert r"\begin{tabular}{lr}" in lines and r"algorithm & throughput \\" in lines
    assert cli.main(show) == 2
    assert "--columns needs --latex" in capsys.readouterr().err


if __name__ == "__main__":
    for file, text in shown().items():
        (FOLDER / file).write_text(text)
