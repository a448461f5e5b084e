"""`reports.json` and the report lines of the references, from our records."""

from __future__ import annotations

import re

import pytest

from common.results.reference_reports import report_lines, reports
from tests.unit.made_record import record


def test_reference_reports_have_the_references_structure():
    one = record("mgwfbp", 64 * 64 / 7897.6, 64, model="resnet50", batch_size=64)
    assert reports([one]) == {"0": {"resnet50_64": {"mgwfbp": ["7897.600"]}}}
    assert list(reports([record(launcher="ssh", launcher_options={"rdma": 1})])) == ["1"]
    # Worlds ascending, and the rest left out.
    failed, single = record("wfbp", status="failed"), record("none", world=1)
    found = reports([record("ddp", 0.1, 4), failed, single, record("ddp", 0.1, 2)])
    assert found == {"0": {"mnist_cnn_8": {"ddp": ["160.000", "320.000"]}}}


def test_reference_reports_have_a_place_for_every_axis():
    """What an experiment varies besides model, method and world must overwrite nothing."""
    fault = {"kind": "link_down", "host": 1, "at_s": 2.0}
    same = {"model": "bert_base", "batch_size": 8}
    found = reports(
        [
            record("ddp", 0.1, network="1gbe"),
            record("ddp", 0.2, network="1gbe", fault=fault),
            record("ddp", 0.4, network="10gbe"),
            record("ddp", 0.8, network="10gbe", **same, sentence_len=64),
            record("ddp", 1.6, network="10gbe", **same, sentence_len=128),
        ]
    )
    assert found == {
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
    found = report_lines([record("mgwfbp", 64 * 64 / 7897.6, 64, model="resnet50", batch_size=64)])
    assert re.fullmatch(r"Speed:  \(7897\.[0-9]{3}, [0-9.]+\)", found[0])
    assert found[1:] == ["==== All Reports ======", "rdma:0,mgwfbp,7897.600"]
