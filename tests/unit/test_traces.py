"""Timelines of trials: what is in the file that Perfetto opens."""

from __future__ import annotations

import dataclasses
import gzip
import json

import pytest

from common.harness import cli
from common.harness.record import REAL, make_record
from common.launch.job import Outcome
from common.results import store, traces
from common.results.store import Comparison
from dear.errors import UserError
from tests.system.made import make_trial


def rank(offset, collectives):
    return {
        "marks_s": [100.0 + offset, 100.8 + offset, 101.6 + offset],
        "gradients": [
            [{"name": "fc.bias", "bytes": 40, "at_s": 100.4 + offset}],
            [{"name": "fc.bias", "bytes": 40, "at_s": 101.2 + offset}],
        ],
        "collectives": collectives,
        "transfers": [
            {
                **{"operation": "all_reduce", "group": 3, "nbytes": 8, "dtype": "float32"},
                **{"enqueued_s": 100.4, "started_s": 100.48, "finished_s": 100.56},
            }
        ],
    }


SENT = {
    **{"name": "reduce_scatter", "channel": 1, "bytes": 80},
    **{"enqueued_s": 100.4, "started_s": 100.48, "finished_s": 100.64},
}
TOLD = {"time_scale": 8.0, "traces": [rank(0.0, [SENT]), rank(0.08, [{"name": "x", "channel": 0}])]}


def test_a_timeline_holds_steps_gradients_and_collectives_of_all_ranks():
    found = traces.events(TOLD)["traceEvents"]
    steps = [one for one in found if one["ph"] == "X"]
    # Emulated microseconds, since the first rank began.
    assert [(one["pid"], one["name"], one["ts"], one["dur"]) for one in steps] == [
        (0, "step 1", 0.0, 100000.0),
        (0, "step 2", 100000.0, 100000.0),
        (1, "step 1", 10000.0, 100000.0),
        (1, "step 2", 110000.0, 100000.0),
    ]
    moments = [one for one in found if one["ph"] == "i"]
    assert [(one["pid"], one["name"], one["ts"]) for one in moments[:2]] == [
        (0, "fc.bias", 50000.0),
        (0, "fc.bias", 150000.0),
    ]
    begins = [one for one in found if one["ph"] == "b"]
    ends = [one for one in found if one["ph"] == "e"]
    assert [(one["name"], one["cat"], one["ts"]) for one in begins] == [
        ("reduce_scatter", "channel 1", 60000.0),
        ("all_reduce", "channel 3", 60000.0),  # of rank 1 the comm core alone can tell
    ]
    assert begins[0]["args"] == {"bytes": 80, "waited_us": 10000.0}
    assert [(one["id"], one["ts"]) for one in ends] == [("0.0", 80000.0), ("1.0", 70000.0)]
    names = {one["args"]["name"] for one in found if one["ph"] == "M"}
    assert names == {"rank 0", "rank 1", "steps", "gradients"}


@pytest.fixture
def sweep(tmp_path):
    """The folder of a sweep of one trial, with its evidence."""
    folder = tmp_path / "logs/tiny"
    made = make_record(
        make_trial("dear"), [], Outcome(status="failed", error={"message": "-"}), {"cores": 2},
        "now", 1.0, REAL,
    )  # fmt: skip
    made = dataclasses.replace(made, evidence=f"{made.id}/evidence.json.gz")
    (folder / made.id).mkdir(parents=True)
    store.append(folder / "records.jsonl", made)
    Comparison(compare_to="dear", trials=(made.hash,)).save(folder)
    with gzip.open(folder / made.evidence, "wt") as file:
        json.dump(TOLD, file)
    return folder


def test_show_writes_a_file_per_trial(sweep, tmp_path, capsys):
    into = tmp_path / "traces"
    command = ["show", "tiny", "--logs", str(sweep.parent), "--trace", str(into)]
    assert cli.main(command) == 0
    (path,) = into.iterdir()
    assert json.loads(path.read_text()) == traces.events(TOLD)
    assert "1 timelines in" in capsys.readouterr().out
    into.joinpath("file").touch()
    assert cli.main([*command[:-1], str(into / "file")]) == 2
    assert "cannot write to" in capsys.readouterr().err


def test_a_sweep_without_traces_says_so(sweep, tmp_path):
    record = store.load(sweep / "records.jsonl")[0]
    (sweep / record.evidence).unlink()
    with pytest.raises(UserError, match="no trial has a trace"):
        traces.write(sweep, [record], tmp_path / "traces")
    assert not (tmp_path / "traces").exists()
