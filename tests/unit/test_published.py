"""Published throughputs beside predicted ones: files, fitted links, roles of rows, docs."""

import csv
import dataclasses
import json
from types import SimpleNamespace

import pytest

from common.harness.cli import main
from common.results.committed.pages import with_block
from common.virtual.published import comparison
from common.virtual.published.links import Line, fitted, scaled, step_s
from common.virtual.published.study import COLUMNS, TABLE, declared, read
from dear.errors import UserError

LINES = {
    "inside": Line(start_up_s=5e-6, bytes_per_s=6e9),
    "between": Line(start_up_s=20e-6, bytes_per_s=1.2e9),
}


def lines_of(path):
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def written(path, lines, columns=COLUMNS):
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, columns, extrasaction="ignore")
        writer.writeheader()
        writer.writerows(lines)
    return path


def rows_of(**wanted):
    return [row for row in read(TABLE) if all(getattr(row, key) == wanted[key] for key in wanted)]


def test_the_committed_table_is_whole():
    rows = read(TABLE)
    assert len(rows) == 48
    assert {row.method for row in rows} == declared().methods.keys()
    assert rows[1].step_s == pytest.approx(0.39929, abs=1e-5)
    assert all(line["source"] for line in lines_of(TABLE))


def test_a_single_gpu_takes_the_published_time():
    (row,) = rows_of(model="BERT-Base", network="10GbE", method="MG-WFBP", gpus=16)
    alone = dataclasses.replace(row, gpus=1)
    assert step_s(alone, declared(), LINES) == pytest.approx(64 / 212.8, rel=1e-3)


def test_bsp_is_compute_and_one_message_by_hand():
    (row,) = rows_of(model="ResNet-50", network="10GbE", method="BSP-A2A", gpus=8)
    nbytes = scaled(row, declared()).parameter_bytes
    by_hand = row.single_step_s + 14 * 20e-6 + 2 * 7 / 8 * nbytes / 1.2e9
    # The copies of gradients into the message, and out of it, come on top.
    assert by_hand < step_s(row, declared(), LINES) < by_hand * 1.01


def test_a_fit_gives_back_the_link_that_made_the_times():
    made = Line(start_up_s=17e-6, bytes_per_s=1.17e9)

    def seconds(row, line, messages):
        steps = 2 * (row.gpus - 1)
        return 0.1 + messages * steps * line.start_up_s + steps / row.gpus * 1e8 / line.bytes_per_s

    messages = {"BSP-A2A": 1, "WFBP-A2A": 161}
    rows = [
        dataclasses.replace(row, samples_per_s=row.gpus * row.batch / seconds(row, made, count))
        for method, count in messages.items()
        for row in rows_of(model="ResNet-50", network="10GbE", method=method)
        if row.gpus > 4
    ]

    def steps(pairs):
        return [seconds(row, lines["between"], messages[row.method]) for row, lines in pairs]

    line = fitted(rows, "between", LINES, steps)
    assert line.start_up_s == pytest.approx(made.start_up_s, rel=1e-3)
    assert line.bytes_per_s == pytest.approx(made.bytes_per_s, rel=1e-3)


def test_no_step_is_predicted_twice():
    asked = []

    def mapped(call, rows, studies, lines):
        asked.extend(zip(rows, lines, strict=True))
        return range(len(rows))

    steps = comparison._steps(SimpleNamespace(map=mapped), declared())
    row, other = rows_of(model="ResNet-50", network="10GbE", method="BSP-A2A")[:2]
    assert steps([(row, LINES), (other, LINES), (row, dict(LINES))]) == [0, 1, 0]
    assert steps([(other, LINES)]) == [1] and asked == [(row, LINES), (other, LINES)]


@pytest.mark.full
def test_rows_are_fitted_predicted_apart_or_left_out(tmp_path, capsys):
    known = [
        line
        for line in lines_of(TABLE)
        if line["model"] == "ResNet-50" and line["network"] == "10GbE"
    ]
    odd = [
        {**known[0], "model": "ResNet-51"},
        {**known[0], "method": "PS"},
        {**known[0], "gpus": "6"},
        {**known[0], "batch_per_gpu": "63"},
    ]
    file = written(tmp_path / "rows.csv", [*known, *odd])
    assert main(["validate", "--json", "--published", str(file)]) == 0
    result = json.loads(capsys.readouterr().out)
    roles = {(row["method"], row["role"]) for row in result["rows"]}
    assert roles == {
        ("BSP-A2A", "fitted"),
        ("WFBP-A2A", "fitted"),
        ("MG-WFBP", "predicted"),
        ("ByteScheduler-A2A", "apart"),
    }
    assert len(result["rows"]) == 12 and len(result["skipped"]) == 4
    for text, line in zip(("ResNet-51", "PS", "6 GPUs do", "63"), result["skipped"], strict=True):
        assert text in line
    (errors,) = result["errors"]
    assert errors["rows"] == 3 and errors["mean"] < 0.05 < errors["mean_with_apart"]
    line = result["links"]["10GbE"]
    assert 1.1e9 < line["bytes_per_s"] < 1.3e9  # of 1.25 GB/s on the wire


def test_links_of_the_table_serve_a_file_without_rows_to_fit(tmp_path, capsys, monkeypatch):
    def no_fit(rows, kind, *_):
        if not rows:
            raise UserError("two parameters need two rows or more, but there are 0")
        assert {row.model for row in rows} == {"ResNet-50"} and len(rows) == 4
        return LINES[kind]

    monkeypatch.setattr(comparison, "fitted", no_fit)
    only = [
        line
        for line in lines_of(TABLE)
        if (line["model"], line["network"], line["method"]) == ("BERT-Base", "10GbE", "MG-WFBP")
    ]
    elsewhere = {**only[0], "network": "25GbE"}
    on_one_host = next(
        line
        for line in lines_of(TABLE)
        if (line["model"], line["method"], line["gpus"]) == ("ResNet-50", "BSP-A2A", "4")
    )  # one row is too few for a fit
    file = written(tmp_path / "rows.csv", [*only, elsewhere, on_one_host])
    assert main(["validate", "--published", str(file)]) == 0
    out = capsys.readouterr().out
    assert out.count("fitted to BSP-A2A and WFBP-A2A of ResNet-50 in configs/published/ddl_") == 2
    assert "25GbE, MG-WFBP, 4 GPUs: two parameters need two rows" in out


GOOD = dict.fromkeys(COLUMNS, "1") | {"model": "ResNet-50"}


@pytest.mark.parametrize(
    ("lines", "columns", "message"),
    [
        ([GOOD], COLUMNS[1:], "no column model"),
        ([], COLUMNS, "no row"),
        ([{**GOOD, "gpus": "4.5"}], COLUMNS, "line 2: gpus must be a whole number"),
        ([GOOD, {**GOOD, "samples_per_s_total": "-3"}], COLUMNS, "line 3: samples_per_s_total"),
        ([{**GOOD, "single_gpu_samples_per_s": ""}], COLUMNS, "single_gpu_samples_per_s"),
        ([{**GOOD, "samples_per_s_total": "nan"}], COLUMNS, "got 'nan'"),
    ],
)
def test_a_bad_file_is_one_line(lines, columns, message, tmp_path, capsys):
    file = written(tmp_path / "rows.csv", lines, columns)
    assert main(["validate", "--published", str(file)]) == 2
    text = capsys.readouterr().err
    assert text.startswith("error: ") and text.count("\n") == 1 and message in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "either sweeps, or --published"),
        (["a", "--published", "b"], "either sweeps, or --published"),
        (["--published", "no.csv"], "cannot read no.csv"),
        (["--published", "."], "cannot read"),
    ],
)
def test_bad_arguments_are_one_line(arguments, message, capsys):
    assert main(["validate", *arguments]) == 2
    text = capsys.readouterr().err
    assert text.startswith("error: ") and text.count("\n") == 1 and message in text


def test_a_file_that_is_no_text_is_one_line(tmp_path, capsys):
    file = tmp_path / "rows.csv"
    file.write_bytes(b"\xff\xfe\x00model")
    assert main(["validate", "--published", str(file)]) == 2
    assert "not a CSV file" in capsys.readouterr().err


def test_a_page_without_the_place_is_no_page():
    text = with_block("<!-- a -->\nold\n<!-- end -->", "a", "n\\1")
    assert text == "<!-- a -->\nn\\1\n<!-- end -->"
    for text in ("", "<!-- a -->\n<!-- end -->" * 2):
        with pytest.raises(ValueError, match="once, not"):
            with_block(text, "a", "")
