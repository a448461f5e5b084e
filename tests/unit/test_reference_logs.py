"""Logs of the reference suites: what is read of them, and as which records."""

from __future__ import annotations

import pytest

from common.harness import cli
from common.results import reference_logs, rows, store
from common.results.faith import doubt
from common.results.reference_reports import report_lines, reports
from dear.errors import UserError

LOG = """#Date: Mar 03 2022 10:20:30
#CMD: cd mgwfbp;rdma=0 dnn=resnet50 bs=64 nworkers=64 compressor=none threshold=0 mgwfbp=1 asc=0 nst
Model: resnet50
Batch size: 64
Number of GPUs: 64
Running benchmark...
Iter #0: 123.0 img/sec per GPU
Iter #1: 123.8 img/sec per GPU
Img/sec per GPU: 123.4 +-0.8
Total img/sec on 64 GPU(s): 7897.6 +-51.2
"""
NAME = "rdma-{}-method-{}-dnn-resnet50-bs-64-nworker-64-compressor-none-thres-0.log"


def write(folder, text=LOG, rdma=0, method="mgwfbp"):
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / NAME.format(rdma, method)
    path.write_text(text)
    return path


def test_a_log_tells_its_settings_and_its_rates(tmp_path):
    log = reference_logs.parse(write(tmp_path))
    assert log.settings.items() >= {
        "method": "mgwfbp", "dnn": "resnet50", "bs": "64", "nworkers": "64", "rdma": "0"
    }.items()  # fmt: skip
    assert log.totals == [7897.6] and log.iterations == [[123.0, 123.8]]
    assert (log.unit, log.device, log.started) == ("img", "GPU", "2022-03-03T10:20:30")
    assert log.command.startswith("cd mgwfbp;rdma=0 dnn=resnet50")


def test_several_tries_in_one_log(tmp_path):
    """Mean and population standard deviation of all `Total` lines."""
    text = "Total img/sec on 4 GPU(s): 100.0 +-1\nTotal img/sec on 4 GPU(s): 110.0 +-1\n"
    log = reference_logs.parse(write(tmp_path, text))
    assert log.speed == (105.0, 5.0)
    assert reference_logs.record_of(log).throughput.value == pytest.approx(104.8, abs=0.1)


@pytest.mark.parametrize(
    ("line", "unit", "device"),
    [
        ("Total sen/sec on 4 GPU(s): 787.2 +-25.6", "sen", "GPU"),
        ("Total img/sec on 4 CPU(s): 787.2 +-25.6", "img", "CPU"),
    ],
)
def test_totals_of_sentences_and_of_cpus_are_read_too(tmp_path, line, unit, device):
    log = reference_logs.parse(write(tmp_path, line + "\n"))
    assert (log.totals, log.unit, log.device) == ([787.2], unit, device)
    assert log.settings["nworkers"] == "4", "the line knows better than the name"


def test_a_log_of_another_name_is_read_by_its_lines(tmp_path):
    path = tmp_path / "mine.log"
    path.write_text(LOG)
    log = reference_logs.parse(path)
    assert (log.settings["method"], log.settings["bs"]) == ("mgwfbp", "64")
    path.write_text("Total img/sec on 4 GPU(s): 100.0 +-1\n")
    with pytest.raises(UserError, match="neither its name nor its lines tell method, dnn, bs"):
        reference_logs.parse(path)


def test_imported_records_stand_in_the_same_tables(tmp_path):
    write(tmp_path)
    write(tmp_path, LOG.replace("12", "24").replace("7897.6", "15000.0"), method="dear")
    write(tmp_path / "rdma", LOG, rdma=1)
    records, refused = reference_logs.read(tmp_path)
    assert refused == [] and {one.fabric for one in records} == {"imported"}
    assert all(doubt(one) is None and one.check.verdict == "unchecked" for one in records)
    assert all(one.notes[0].startswith("imported: cd mgwfbp;") for one in records)
    table = rows.make_rows(records, "mgwfbp")
    (dear,) = [row for row in table if row.algorithm == "dear"]
    assert dear.speedup == pytest.approx(2, rel=0.05)
    assert reports(records)["0"]["resnet50_64"]["mgwfbp"] == ["7897.600"]
    assert reports(records)["1"].keys() == {"resnet50_64"}
    assert "rdma:1,mgwfbp,7897.600" in report_lines(records)


def test_a_folder_of_logs_becomes_a_sweep(tmp_path, capsys):
    write(tmp_path / "logs")
    (tmp_path / "logs/broken.log").write_text("Traceback\n")
    into = tmp_path / "sweeps/imported"
    assert reference_logs.main([str(tmp_path / "logs"), "--into", str(into)]) == 0
    told = capsys.readouterr()
    assert "1 records in" in told.out and "broken.log is no log of a run" in told.err
    assert len(store.load(into / "records.jsonl")) == 1
    assert cli.main(["show", "imported", "--logs", str(into.parent)]) == 0
    shown = capsys.readouterr().out
    assert "imported from logs" in shown and "7898 img/s" in shown.replace(",", "")
    assert reference_logs.main([str(tmp_path / "logs"), "--into", str(into)]) == 2


@pytest.mark.parametrize("text", ["", "Traceback (most recent call last):\n"])
def test_a_log_that_is_none_is_one_clear_line(tmp_path, text, capsys):
    write(tmp_path, text)
    assert reference_logs.main([str(tmp_path), "--into", str(tmp_path / "x")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "is no log of a run that ended" in line
    assert reference_logs.main([str(tmp_path / "none"), "--into", str(tmp_path / "x")]) == 2
    assert not (tmp_path / "x").exists()
