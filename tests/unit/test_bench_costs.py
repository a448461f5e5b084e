"""`bench/costs.py` on the times that a sweep has recorded."""

from __future__ import annotations

import dataclasses
import gzip
import json

import pytest

from bench import costs
from common.results import store
from common.results.store import Comparison
from dear.errors import UserError
from tests.unit.made_record import record, with_first
from tests.unit.test_measured_costs import WIRE, sampled, zigzag


@pytest.fixture
def sweep(tmp_path):
    """Returns a function that writes a sweep whose only trial has this measurement."""

    def write(measured):
        folder = tmp_path / "tiny"
        built = with_first(record("dear", 0.1, 4), evidence="evidence.json.gz")
        (folder / built.id).mkdir(parents=True)
        store.append(folder / "records.jsonl", built)
        Comparison(compare_to="dear", trials=(built.hash,)).save(folder)
        values = {**dataclasses.asdict(measured), "time_scale": 2.0}
        evidence = {
            "traces": [{}],
            "collectives": [{**values, "when": when} for when in ("begin", "end")],
        }
        with gzip.open(folder / built.evidence, "wt") as file:
            json.dump(evidence, file)
        return folder

    return write


def test_a_fit_of_the_right_shape_meets_the_bars(sweep, tmp_path, capsys):
    folder, out = sweep(sampled(noise=0.02)), tmp_path / "costs.json"
    assert costs.main([str(folder), "--json", str(out)]) == 0
    (case,) = json.loads(out.read_text())["cases"]
    assert case["met"] and case["operation"] == "all_reduce" and case["world_size"] == 4
    assert case["fit"]["beta_s_per_byte"] == WIRE / 2, "emulated seconds"
    assert 0 < case["small"]["error"] <= max(costs.CHANCE * case["small"]["noise"], costs.ROUNDING)
    assert "yes" in capsys.readouterr().out


def test_a_fit_of_the_wrong_shape_does_not(sweep, capsys):
    assert costs.main([str(sweep(zigzag()))]) == 1
    assert "NO" in capsys.readouterr().out


def test_a_sweep_without_such_times_is_refused(sweep):
    with pytest.raises(UserError, match="no trial of these sweeps has timed collectives"):
        costs.main([str(sweep(sampled(sizes=[4096, 8192])))])
