"""Tables: which numbers are compared with which, and that every format says the same."""

from __future__ import annotations

import csv
import dataclasses
import io
import re

import pytest

from common.harness.record import Result, make_record
from common.launch.job import Outcome
from common.results import rows
from common.results.records import Check
from common.results.table import csv_text, significant
from tests.system.made_trials import make_trial


def record(algorithm="ddp", step_s=0.1, world=2, *, status="ok", correct=True, run="A", **trial):
    """A record as a sweep makes it: three repeats of four steps of about `step_s` seconds."""
    trial = make_trial(algorithm, world, **trial)
    steps = [step_s * factor for factor in (0.999, 1.001, 1.0, 1.0)]
    result = Result(
        iters=[steps[:2], steps[2:]],
        loss=1.0,
        check=Check(replicas_agree=True, matches_reference=correct, reference_error=0.0),
        cpu_s_per_s=1.0,
        foreign_cpu_s_per_s=0.0,
    )
    error = None if status == "ok" else {"message": f"it was a {status} | and\nmore, much more"}
    repeats = [result] * 3 if status == "ok" else []
    outcome = Outcome(status=status, error=error)
    return make_record(trial, repeats, outcome, {"cores": 64}, "now", 1.0, run=run)


SWEEP = [record("none", 0.08, 1), record("ddp", 0.1), record("dear", 0.05)]


def last_row(records, compare_to="ddp"):
    return rows.make_rows(records, compare_to)[-1]


def test_speedup_is_relative_to_the_compared_algorithm():
    none, ddp, dear = rows.make_rows(SWEEP, "ddp")
    assert dear.speedup == pytest.approx(2.0)
    assert dear.speedup_low <= dear.speedup <= dear.speedup_high
    assert dear.verdict == "FASTER"
    assert dear.reason is None
    assert (ddp.speedup, ddp.verdict) == (None, None)
    assert (none.speedup, none.verdict) == (None, None)
    assert rows.make_rows(SWEEP, "dear")[1].verdict == "SLOWER"


def test_the_plain_single_worker_is_in_no_race():
    assert last_row([record("ddp", world=1), record("none", world=1)]).speedup is None


def test_a_row_says_what_was_measured():
    row = last_row(SWEEP)
    assert (row.model, row.batch_size, row.world_size, row.algorithm) == ("mnist_cnn", 8, 2, "dear")
    assert (row.status, row.n, row.repeats, row.correct) == ("ok", 12, 3, True)
    assert row.throughput == pytest.approx(16 / 0.05)
    assert row.ci_low <= row.throughput <= row.ci_high
    assert row.unit == "img/s"


@pytest.mark.parametrize(
    "other",
    [{"world": 4}, {"batch_size": 9}, {"model": "alexnet"}, {"seed": 2}, {"dtype": "float64"}],
    ids=str,
)
def test_no_speedup_across_worlds_or_settings(other):
    assert last_row([record("ddp", **other), record("dear")]).speedup is None


def test_a_label_can_be_compared_to():
    own = record("dear", 0.1, label="dear(fusion=none)", options={"fusion": "none"})
    assert last_row([own, record("dear", 0.05)], "dear(fusion=none)").verdict == "FASTER"


def test_efficiency_is_relative_to_the_single_worker_of_the_same_settings():
    none, ddp, _ = rows.make_rows(SWEEP, "ddp")
    assert none.efficiency == 1
    assert ddp.efficiency == pytest.approx(0.8)
    assert last_row([record("none", 0.08, 1, seed=2), record("ddp")]).efficiency is None
    assert last_row([record("none", world=1, status="failed"), record("ddp")]).efficiency is None


@pytest.mark.parametrize("status", ["failed", "timeout", "oom", "unsupported", "interrupted"])
def test_a_trial_without_a_number_says_why(status):
    row = last_row([*SWEEP, record("wfbp", status=status)])
    assert row.status == status
    assert row.reason.startswith(f"it was a {status}")
    assert (row.throughput, row.speedup, row.correct) == (None, None, None)


def test_nothing_is_compared_with_a_failed_trial():
    assert last_row([record("ddp", status="failed"), record("dear")]).speedup is None


def test_wrong_training_is_marked():
    row = last_row([*SWEEP, record("wfbp", 0.01, correct=False)])
    assert row.correct is False
    assert row.throughput > 0
    assert "| NO " in rows.comparison([row], "ddp").markdown()


def test_trials_of_different_runs_are_marked():
    row = last_row([record("ddp", run="A"), record("dear", run="B")])
    assert row.reason == "not measured together with ddp"
    assert row.speedup is not None
    noted = dataclasses.replace(record("dear", run="B"), notes=["disturbed"])
    assert last_row([record(), noted]).reason == "disturbed; not measured together with ddp"


def test_network_and_fault_are_columns_where_something_is_emulated():
    fault = {"kind": "link_down", "host": 1, "at_s": 2.0}
    emulated = [record("ddp", network="1gbe", fault=fault), record("dear", network="1gbe")]
    table = rows.make_rows(emulated, "ddp")
    lines = rows.comparison(table, "ddp").markdown().splitlines()
    assert "| network |" in lines[0] and "| 1gbe " in lines[2]
    assert "link_down h1 at 2 s" in lines[2] and "link_down" not in lines[3]
    # What was disturbed is no measure of what was not.
    assert table[1].speedup is None


def test_markdown_is_one_aligned_line_per_row():
    table = rows.make_rows([*SWEEP, record("wfbp", status="failed")], "ddp")
    lines = rows.comparison(table, "ddp").markdown().splitlines()
    assert len(lines) == 2 + len(table)
    assert len({len(line) for line in lines}) == 1
    # A bar within a cell must be escaped, or it would open another column.
    assert {len(re.findall(r"(?<!\\)\|", line)) for line in lines} == {13}
    unused = ("network", "fault", "of bound")
    shown = [name for name in rows.comparison(table, "ddp").titles if name not in unused]
    assert [cell.strip() for cell in lines[0].split("|")[1:-1]] == shown
    assert "speed-up vs ddp (95 % CI)" in lines[0]
    assert re.search(r"\| dear +\| +320 img/s \| .*\| 2\.00 \(.*\| FASTER ", lines[4])


def test_csv_holds_all_fields_at_full_precision():
    failed = record("wfbp", status="failed")
    table = rows.make_rows([record("ddp", 0.7), failed, record("dear", 0.3)], "ddp")
    parsed = list(csv.DictReader(io.StringIO(csv_text(rows.Row, table))))
    assert len(parsed) == len(table)
    for found, row in zip(parsed, table, strict=True):
        assert found == {
            key: "" if value is None else str(value) for key, value in vars(row).items()
        }
    assert float(parsed[2]["speedup"]) == table[2].speedup
    assert float(parsed[2]["ci_low"]) == table[2].ci_low


def test_reference_reports_have_the_references_structure():
    step_s = 64 * 64 / 7897.6
    one = record("mgwfbp", step_s, 64, model="resnet50", batch_size=64)
    assert rows.reference_reports([one]) == {"0": {"resnet50_64": {"mgwfbp": ["7897.600"]}}}
    assert list(rows.reference_reports([one], rdma=1)) == ["1"]


def test_reference_reports_list_worlds_ascending_and_leave_out_the_rest():
    failed, single = record("wfbp", status="failed"), record("none", world=1)
    found = rows.reference_reports([record("ddp", 0.2, 4), failed, single, record("ddp", 0.1, 2)])
    assert found == {"0": {"mnist_cnn_8": {"ddp": ["160.000", "160.000"]}}}
    found = rows.reference_reports([record("ddp", 0.1, 4), record("ddp", 0.1, 2)])
    assert found == {"0": {"mnist_cnn_8": {"ddp": ["160.000", "320.000"]}}}


def test_summary_names_the_best_and_its_lead():
    (line,) = rows.summary(rows.make_rows(SWEEP, "ddp"), "ddp")
    assert line.startswith("mnist_cnn, 2 workers: dear has the highest median, 2.00x ddp (95 % CI ")
    assert line.endswith(": FASTER)")


def test_summary_without_a_ratio_says_why_unless_the_compared_one_wins():
    (line,) = rows.summary(rows.make_rows(SWEEP, "dear"), "dear")
    assert line == "mnist_cnn, 2 workers: dear has the highest median"
    (line,) = rows.summary(rows.make_rows(SWEEP, "wfbp"), "wfbp")
    assert line == "mnist_cnn, 2 workers: dear has the highest median (no wfbp to compare with)"


def test_summary_passes_over_wrong_and_failed_trials():
    bad = [record("wfbp", 0.01, correct=False), record("horovod", status="failed")]
    (line,) = rows.summary(rows.make_rows([*SWEEP, *bad], "ddp"), "ddp")
    assert ": dear has" in line
    assert rows.summary(rows.make_rows([record("dear"), *bad], "ddp"), "ddp") == []


def test_summary_has_a_sentence_per_model_and_world():
    cells = [{"world": 2}, {"world": 4}, {"world": 2, "model": "alexnet"}]
    table = rows.make_rows(
        [record(name, **cell) for cell in cells for name in ("ddp", "dear")], "ddp"
    )
    assert [line.partition(":")[0] for line in rows.summary(table, "ddp")] == [
        "mnist_cnn, 2 workers",
        "mnist_cnn, 4 workers",
        "alexnet, 2 workers",
    ]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (123456.7, "123457"),
        (123.4, "123"),
        (12.34, "12.3"),
        (1.234, "1.23"),
        (0.1234, "0.123"),
        (0.00001234, "0.0000123"),
        (None, ""),
    ],
)
def test_three_significant_digits_without_an_exponent(value, text):
    assert significant(value) == text
