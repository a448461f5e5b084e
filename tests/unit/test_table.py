"""A table on terminals of all widths: nothing is cut, and what matters most stays longest."""

from __future__ import annotations

from pathlib import Path

import pytest

from common.results.learning import summary, tables
from common.results.records import is_learning
from common.results.store import Comparison
from common.results.tables import table as table_module
from common.results.tables.cells import Cell, Column
from common.results.timed import rows
from dear.errors import UserError
from tests.unit.made_record import record

RECORDS = Path(__file__).parents[2] / "docs" / "records"
SWEEPS = [path.parent.name for path in sorted(RECORDS.glob("*/experiment.json"))]


@pytest.fixture
def printed(monkeypatch, capsys):
    """`printed(table, width)`: the lines on such a terminal, without colours."""

    def printed(table, width):
        monkeypatch.setenv("TTY_COMPATIBLE", "1")
        monkeypatch.setenv("FORCE_COLOR", "1")
        monkeypatch.setenv("NO_COLOR", "1")
        table.print("the title", width)
        text = capsys.readouterr().out
        for style in ("\x1b[1m", "\x1b[2m", "\x1b[0m"):
            text = text.replace(style, "")
        return text.splitlines()

    return printed


def table_of(sweep):
    comparison = Comparison.load(RECORDS / sweep)
    result = comparison.results(RECORDS / sweep)
    if is_learning(result):
        return tables.table(summary.make_rows(result, comparison.compare_to), comparison.compare_to)
    return rows.comparison(rows.make_rows(result, comparison.compare_to), comparison.compare_to)


@pytest.mark.parametrize("width", [60, 80, 120, 200])
@pytest.mark.parametrize("sweep", SWEEPS)
def test_a_table_fits_and_no_word_is_cut(printed, sweep, width):
    table = table_of(sweep)
    lines = printed(table, width)
    assert max(map(len, lines)) <= width
    text = "\n".join(lines)
    for row, line in zip(table.rows, table.body, strict=True):
        assert row.algorithm in text and row.model in text
        if isinstance(row, rows.Row) and row.status == "ok":
            assert line[table.titles.index("throughput")] in text
    assert "…" not in text


def test_what_matters_comes_first_and_stays_longest(printed):
    sweep = [record("ddp"), record("dear", 0.05), record("wfbp", 0.07)]
    table = rows.comparison(rows.make_rows(sweep, "ddp"), "ddp")

    def titles(width):
        head = [line for line in printed(table, width) if "┃" in line][-1]
        return [text.strip() for text in head.strip("┃").split("┃")]

    assert titles(30) == ["algorithm", "throughput"]
    assert titles(60)[:4] == ["algorithm", "throughput", "(95 % CI)", "verdict"]
    assert titles(200)[:5] == ["algorithm", "throughput", "(95 % CI)", "verdict",
                               "run"]  # fmt: skip
    assert titles(200)[5:] == ["n"]


def test_whether_rows_are_correct_is_seen_at_any_width(printed):
    alike = [record("ddp"), record("dear", 0.05)]
    lines = printed(rows.comparison(rows.make_rows(alike, "ddp"), "ddp"), 60)
    assert lines[1].endswith("correct: yes")
    apart = [record("ddp"), record("dear", 0.05, correct=False)]
    lines = printed(rows.comparison(rows.make_rows(apart, "ddp"), "ddp"), 200)
    assert "correct:" not in lines[1]
    assert any("correct" in line and "┃" in line for line in lines), "what differs stays a column"


def test_what_all_rows_share_stands_above_them_a_block_for_each_model(printed):
    sweep = [
        record("ddp", model="resnet50", batch_size=64),
        record("dear", model="resnet50", batch_size=64),
        record("ddp", model="alexnet", world=4),
        record("ddp", model="alexnet", world=8),
    ]
    lines = printed(rows.comparison(rows.make_rows(sweep, "ddp"), "ddp"), 100)
    assert lines[:2] == ["the title", "resnet50, batch 64, 2 workers, correct: yes"]
    assert "alexnet, batch 8, correct: yes" in lines
    text = "\n".join(lines)
    assert text.count("resnet50") == text.count("alexnet") == 1
    assert "workers" in text.partition("alexnet")[2], "what differs stays a column"


def test_notes_that_have_no_room_stand_below(printed):
    failed = record("wfbp", status="failed")
    lines = printed(rows.comparison(rows.make_rows([record("ddp"), failed], "ddp"), "ddp"), 60)
    text = "\n".join(lines).partition("└")[2]
    assert "wfbp: it was a failed" in text
    wide = printed(rows.comparison(rows.make_rows([record("ddp"), failed], "ddp"), "ddp"), 200)
    assert any("it was a failed" in line and "│" in line for line in wide)


def test_in_a_file_every_title_has_one_line(capsys, monkeypatch):
    for name in ("TTY_COMPATIBLE", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    row = rows.make_rows([record("ddp")], "ddp")[0]
    columns = [
        Column(title="a title of words", cell=lambda row: Cell(row.algorithm), role="name"),
        Column(title="notes", cell=lambda row: Cell("-"), role="notes"),
    ]
    table_module.Table([row], columns).print("heading")
    assert "a title of words" in capsys.readouterr().out


def test_a_table_for_a_paper_is_a_tabular_of_booktabs():
    built = record("dear", label="dear_50% & {x}")
    text = rows.comparison(rows.make_rows([record("ddp"), built], "ddp"), "ddp").latex()
    lines = text.splitlines()
    assert lines[0] == r"\begin{tabular}{lrrlrrrlll}"
    rules = [lines[place] for place in (1, 3, 6, 7)]
    assert rules == [r"\toprule", r"\midrule", r"\bottomrule", r"\end{tabular}"]
    assert r"dear\_50\% \& \{x\}" in lines[5]
    assert all(line.count("&") - line.count(r"\&") == 9 for line in (lines[2], *lines[4:6]))


def test_notes_are_footnotes_of_a_table_for_a_paper():
    failed = [record(name, status="failed") for name in ("wfbp", "horovod")]
    built = rows.make_rows([record("ddp"), *failed, record("dear", status="oom")], "ddp")
    text = rows.comparison(built, "ddp").latex(["throughput", "algorithm"])
    body, _, notes = text.partition(r"\end{tabular}")
    lines = body.splitlines()
    assert lines[:2] == [r"\begin{threeparttable}", r"\begin{tabular}{rl}"]
    assert lines[3] == r"throughput & algorithm \\"
    names = [line.rpartition("& ")[2] for line in lines[5:9]]
    assert names == [
        f"{name} \\\\" for name in ("ddp", r"wfbp\tnote{a}", r"horovod\tnote{a}", r"dear\tnote{b}")
    ]
    items = [line for line in notes.splitlines() if line.startswith(r"\item")]
    assert [item[:8] for item in items] == [r"\item[a]", r"\item[b]"]
    assert notes.rstrip().endswith(r"\end{threeparttable}")


def test_a_column_that_is_not_there_is_named():
    table = rows.comparison(rows.make_rows([record("ddp")], "ddp"), "ddp")
    with pytest.raises(UserError, match="unknown column 'speed'"):
        table.latex(["speed"])
    with pytest.raises(UserError, match=r"column MFU: no row has a value .*: model, .*algorithm"):
        table.latex(["MFU"])


def test_footnotes_have_letters():
    assert [table_module._letters(number) for number in (0, 25, 26, 52)] == ["a", "z", "aa", "ba"]
