"""`reports.json` and the report lines of the references, from our records."""

from __future__ import annotations

import json
import re
from functools import partial

import pytest

from common.harness import cli
from common.harness.trial import options_of
from common.results import store
from common.results.exports.reference_reports import (
    link_logs,
    load_reports,
    log_name,
    report_lines,
    reports,
    side_by_side,
    variables,
)
from dear.algorithms import aliases
from dear.errors import UserError
from dear.training.algorithm import algorithm_options
from tests.unit.made_record import record


def test_reference_reports_have_the_references_structure():
    item = record("mgwfbp", 64 * 64 / 7897.6, 64, model="resnet50", batch_size=64)
    assert reports([item]) == {"0": {"resnet50_64": {"mgwfbp": ["7897.600"]}}}
    assert list(reports([record(launcher="ssh", launcher_options={"rdma": 1})])) == ["1"]


@pytest.mark.parametrize("lost", [{"status": "failed"}, {"correct": False}, None])
def test_what_has_no_valid_number_keeps_its_place_in_the_list_of_worlds(lost):
    records = [record("ddp", 0.1, 8), record("none", world=1), record("ddp", 0.1, 2)]
    records += [record("wfbp", status="failed"), record("dear", 0.1, 4)]
    if lost is not None:
        records.append(record("ddp", 0.1, 4, **lost))
    rates = {
        "ddp": ["160.000", "nan", "640.000", "nan"],
        "wfbp": ["nan"] * 4,
        "dear": ["nan", "320.000", "nan", "nan"],
    }
    assert reports(records, worlds=[16, 8]) == {"0": {"mnist_cnn_8": rates}}
    assert report_lines(records, [16])[-3:] == [
        f"rdma:0,{m},{','.join(r)}" for m, r in rates.items()
    ]
    table = side_by_side(
        {"old": reports([record("ddp", 0.2, n) for n in (2, 4, 8)]), "new": reports(records)}
    )
    assert [(r.place, r.rates, r.ratio) for r in table.rows if r.algorithm == "ddp"] == [
        (1, (80, 160), 2),
        (2, (160, None), None),
        (3, (320, 640), 2),
    ]


def test_reference_reports_have_a_place_for_every_axis():
    """An axis besides model, method and world must overwrite nothing."""
    fault = {"kind": "link_down", "host": 1, "at_s": 2.0}
    same = {"model": "bert_base", "batch_size": 8}
    result = reports(
        [
            record("ddp", 0.1, network="1gbe"),
            record("ddp", 0.2, network="1gbe", fault=fault),
            record("ddp", 0.4, network="10gbe"),
            record("ddp", 0.8, network="10gbe", **same, sentence_len=64),
            record("ddp", 1.6, network="10gbe", **same, sentence_len=128),
        ]
    )
    assert result == {
        "1gbe": {"mnist_cnn_8": {"ddp": ["160.000"], "ddp, link_down h1 at 2 s": ["80.000"]}},
        "10gbe": {
            "mnist_cnn_8": {"ddp": ["40.000"]},
            "bert_base_8_len64": {"ddp": ["20.000"]},
            "bert_base_8_len128": {"ddp": ["10.000"]},
        },
    }
    with pytest.raises(ValueError, match="two results for 0 mnist_cnn_8 ddp on 2"):
        reports([record(), record()])


def test_the_lines_of_the_references_report():
    result = report_lines([record("mgwfbp", 64 * 64 / 7897.6, 64, model="resnet50", batch_size=64)])
    assert re.fullmatch(r"Speed:  \(7897\.[0-9]{3}, [0-9.]+\)", result[0])
    assert result[1:] == ["==== All Reports ======", "rdma:0,mgwfbp,7897.600"]


def test_h5_the_name_of_a_log_and_the_variables_that_make_it():
    merging = {"merge": "greedy"}
    item = record("mgwfbp", 0.5, 64, model="resnet50", batch_size=64, options=merging)
    assert log_name(item) == (
        "rdma-0-method-mgwfbp-dnn-resnet50-bs-64-nworker-64-compressor-none-thres-0.log"
    )
    assert " ".join(f"{key}={value}" for key, value in variables(item.trial).items()) == (
        "rdma=0 dnn=resnet50 bs=64 nworkers=64 method=mgwfbp "
        "compressor=none threshold=0 mgwfbp=1 asc=0 nstreams=1"
    )


@pytest.mark.parametrize(
    ("algorithm", "options"),
    [
        ("wfbp", {}),
        ("wfbp", {"channels": 2}),
        ("mgwfbp", {"merge": "greedy"}),
        ("mgwfbp", {"merge": "asc", "channels": 2}),
        ("mgwfbp", {"merge": "threshold", "threshold_mb": 25.0}),
        ("mgwfbp", {"merge": "threshold", "threshold_mb": 2.0, "compression": "signum"}),
        ("dear", {"threshold_mb": 10.0}),
        ("dear", {"fusion": "none"}),
        ("ddp", {}),
        ("ddp", {"zero": True}),
    ],
)
def test_a_trial_is_made_again_by_its_variables(algorithm, options):
    output = variables(record(algorithm, options=options).trial)
    given = {key: text for key, text in output.items() if key in aliases.VARIABLES}
    name, again = aliases.method(output["method"], given)
    assert (name, algorithm_options(name, again)) == (algorithm, options_of(algorithm, options))


def test_logs_have_the_suites_names_beside_the_trials(tmp_path):
    built = [record("dear"), record("wfbp"), record("none", world=1), record("ddp")]
    built.insert(2, record("dear", options={"fusion": "none"}, label="dear-notf"))
    built.insert(3, record("dear", options={"small_kb": 7}, label="dear-too"))
    for item in built[:5]:
        (tmp_path / item.id).mkdir()
        (tmp_path / item.id / "log-0-rank0.txt").write_text(f"of {item.label}")
    link = partial(link_logs, tmp_path, built, lambda item: f"makes {item.id}")
    links = link()
    assert links == link(), "again is no mistake"
    labels = ["dear", "wfbp", "dear-notf", "dear-too"]
    assert [link.read_text() for link in links] == [f"of {label}" for label in labels]
    lines = (tmp_path / "reference_logs" / "commands.txt").read_text().splitlines()
    assert len(lines) == 4 and lines[0] == f"{links[0].name}: makes {built[0].id}"


def test_reports_of_several_runs_stand_side_by_side(tmp_path):
    theirs = {"0": {"resnet50_64": {"ddp": ["100.000", "180.000"], "dear": ["120.000"]}}}
    path = tmp_path / "reports.json"
    path.write_text(json.dumps(theirs))
    ours = reports([record("ddp", 64 * 2 / 150, 2, model="resnet50", batch_size=64)])
    table = side_by_side({"theirs": load_reports(path), "ours": ours, "again": ours})
    assert table.titles[3:] == ["place", "theirs", "ours", "again", "last / first"]
    assert table.body == [
        ["resnet50_64", "0", "ddp", "1", "100", "150", "150", "1.500"],
        ["resnet50_64", "0", "ddp", "2", "180", "", "", ""],
        ["resnet50_64", "0", "dear", "1", "120", "", "", ""],
    ]


def test_the_command_reads_reports_beside_a_sweep(tmp_path, capsys):
    sweep = tmp_path / "logs" / "mine"
    sweep.mkdir(parents=True)
    item = record("ddp", 64 * 2 / 150, 2, model="resnet50", batch_size=64)
    store.append(sweep / "records.jsonl", item)
    store.Comparison(compare_to="ddp", trials=(item.hash,), worlds=(1, 2)).save(sweep)
    path = tmp_path / "reports.json"
    path.write_text(json.dumps({"0": {"resnet50_64": {"ddp": ["nan", "100.000"]}}}))
    command = ["compare", str(path), "mine", "--logs", str(tmp_path / "logs")]
    assert cli.main(command) == 0
    assert "1.500" in capsys.readouterr().out
    assert cli.main([*command, "--json"]) == 0
    first, second = json.loads(capsys.readouterr().out)
    assert (first["rates"], first["place"]) == ([None, None], 1)
    assert (second["rates"], second["place"]) == ([100.0, 150.0], 2)
    assert cli.main([*command, "--fail-on", "regression:5%"]) == 2
    assert "reports have only mean rates" in capsys.readouterr().err


def test_the_command_reads_logs_of_a_suite(tmp_path, capsys):
    total = "Total {} on {} {}PU(s): {} +-1.2\n"
    logs = {
        ("0", "dear", 8, "none"): total.format("img/sec", 8, "G", "100.0") + "x: 5\n",
        ("0", "dear", 64, "none"): total.format("img/sec", 64, "G", 7897.6),
        ("0", "wfbp", 64, "none"): "#CMD: x\nTraceback: Total chaos\n",
        ("0", "wfbp", 64, "topk"): total.format("sen/sec", 64, "C", "787.2"),
        ("1", "dear", 64, "none"): total.format("img/sec", 64, "G", "1e4"),
    }
    logs["0", "dear", 8, "none"] += total.format("img/sec", 8, "G", "110.0")
    for (rdma, method, world, compressor), text in logs.items():
        name = f"rdma-{rdma}-method-{method}-dnn-resnet50-bs-64-nworker-{world}"
        (tmp_path / f"{name}-compressor-{compressor}-thres-0.log").write_text(text)
    (tmp_path / "exp.log").write_text("cd dear\n")
    rates = {
        "dear": ["105.000", "7897.600"],
        "wfbp-compressor-none-thres-0": ["nan", "nan"],
        "wfbp-compressor-topk-thres-0": ["nan", "787.200"],
    }
    assert load_reports(tmp_path) == {
        "0": {"resnet50_64": rates},
        "1": {"resnet50_64": {"dear": ["nan", "10000.000"]}},
    }
    (tmp_path / "r.json").write_text(json.dumps({"0": {"resnet50_64": {"dear": ["1", "2"]}}}))
    assert cli.main(["compare", str(tmp_path), f"{tmp_path}/r.json", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)[1]["rates"] == [7897.6, 2]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, "No such file"),
        ("[1]", "not a reports.json"),
        ('{"0": {"x": {"ddp": ["fast"]}}}', "not a reports.json"),
        ("{", "not a reports.json"),
    ],
)
def test_what_is_no_report_is_one_line(tmp_path, text, words):
    path = tmp_path / "reports.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(UserError, match=words) as caught:
        load_reports(path)
    assert "\n" not in str(caught.value)
