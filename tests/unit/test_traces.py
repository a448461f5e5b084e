"""Timelines of trials: what is in the file that Perfetto opens."""

from __future__ import annotations

import dataclasses
import gzip
import json
import os
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from common.harness import cli
from common.harness.running.record import make_record
from common.launch.job import Outcome
from common.results import store
from common.results.exports import traces
from common.results.exports.spans import aligned
from common.results.records import REAL, Result
from common.results.records.trust import Check
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


def test_all_ranks_are_in_one_file_with_steps_gradients_and_transfers():
    result = traces.timeline(TOLD)["traceEvents"]
    steps = [item for item in result if item["ph"] == "X" and item["name"].startswith("step")]
    # Emulated microseconds, since the first rank began.
    assert [(item["pid"], item["name"], item["ts"], item["dur"]) for item in steps] == [
        (0, "step 1", 0.0, 100000.0),
        (0, "step 2", 100000.0, 100000.0),
        (1, "step 1", 10000.0, 100000.0),
        (1, "step 2", 110000.0, 100000.0),
    ]
    moments = [item for item in result if item["ph"] == "i"]
    assert [(item["pid"], item["name"], item["ts"]) for item in moments[:2]] == [
        (0, "fc.bias", 50000.0),
        (0, "fc.bias", 150000.0),
    ]
    sent = [item for item in result if item["ph"] == "X" and item["tid"] >= 10]
    assert [(item["pid"], item["name"], item["ts"], item["dur"]) for item in sent] == [
        (0, "reduce_scatter", 60000.0, 20000.0),
        (1, "all_reduce", 60000.0, 10000.0),  # of rank 1 the comm core alone can tell
    ]
    times = {"enqueued_us": 50000.0, "waited_us": 10000.0}
    assert sent[0]["args"] == {"bytes": 80, "channel": 1, **times}


def phased(offset: float = 0.0, waits: Any = ((100.7, 100.9), (101.75, 101.9))) -> dict[str, Any]:
    """Two steps of 1 s, each with a transfer of 0.489 s for which the training waits in its end."""

    def sent(begin: float, end: float) -> dict[str, Any]:
        times = {"enqueued_s": begin - 0.01, "started_s": begin, "finished_s": end}
        moved = {key: value + offset for key, value in times.items()}
        return {"name": "all_reduce", "channel": 0, "bytes": 8, **moved}

    return {
        "marks_s": [100 + offset, 101 + offset, 102 + offset],
        "phases_s": [
            [100 + offset, 100.3 + offset, 100.9 + offset, 101 + offset],
            [101 + offset, 101.3 + offset, 101.9 + offset, 102 + offset],
        ],
        "waits_s": [[start + offset, end + offset] for start, end in waits],
        "gradients": [
            [{"name": "a", "bytes": 4, "at_s": 100.399 + offset}],
            [{"name": "a", "bytes": 4, "at_s": 101.399 + offset}],
        ],
        "collectives": [sent(100.41, 100.899), sent(101.41, 101.899)],
        "transfers": [],
    }


def told(*ranks: dict[str, Any], machines: str = "") -> dict[str, Any]:
    pressure = [{"machine": name} for name in machines or "a" * len(ranks)]
    return {"time_scale": 2.0, "traces": list(ranks), "pressure": pressure}


def test_what_the_training_waited_for_is_no_computation():
    (rank,), _ = aligned(told(phased()))
    backward = [item for item in rank.computes if item.name == "backward"]
    assert [(item.start_us, item.end_us) for item in backward] == [
        (150000.0, 350000.0),
        (650000.0, 875000.0),
    ]


def test_kernels_are_those_of_all_steps_but_the_first():
    """A transfer that both steps share is cut at their border, and at the end of the last one."""
    trace = phased()
    late = [{**trace["collectives"][0], "finished_s": end} for end in (101.2, 104.0)]
    (rank,), _ = aligned(told({**trace, "collectives": late}))
    content = traces.kernels(rank, 4)
    assert content["distributedInfo"] == {"rank": 0, "world_size": 4}
    listed = [
        (item["name"], item["args"]["stream"], item["ts"], item["ts"] + item["dur"])
        for item in content["traceEvents"]
    ]
    assert listed == [
        ("forward", 0, 500000, 650000),
        ("backward", 0, 650000, 875000),
        ("update", 0, 950000, 1000000),
        ("ncclDevKernel_all_reduce", 10, 500000, 600000),
        ("ncclDevKernel_all_reduce", 11, 500000, 1000000),
    ]
    assert {item["cat"] for item in content["traceEvents"]} == {"kernel"}


def slices(events: Iterable[dict[str, Any]]) -> dict[Any, list[tuple[float, float]]]:
    """Events by track."""
    result: dict[Any, list[tuple[float, float]]] = {}
    for item in events:
        if item["ph"] == "X":
            result.setdefault((item["pid"], item["tid"]), []).append(
                (item["ts"], item["ts"] + item["dur"])
            )
    return result


def test_every_arrow_begins_and_ends_in_a_slice_and_slices_of_a_track_do_not_overlap():
    late = phased(0.02)
    late["collectives"].append({**late["collectives"][1], "channel": 1})  # two at a time
    events = traces.timeline(told(phased(), late))["traceEvents"]
    tracks = slices(events)
    for spans in tracks.values():
        for (_, end), (start, _) in pairwise(sorted(spans)):
            assert start >= end - 0.002
    arrows: dict[int, list[dict[str, Any]]] = {}
    for item in events:
        if item["ph"] in "stf":
            arrows.setdefault(item["id"], []).append(item)
    for item in arrows.values():
        assert [step["ph"] for step in item] == ["s", *["t"] * (len(item) - 2), "f"]
        assert [step["ts"] for step in item] == sorted(step["ts"] for step in item)
        for step in item:
            inside = tracks[step["pid"], step["tid"]]
            assert any(start <= step["ts"] <= end for start, end in inside), step
    names = Counter(item[0]["name"] for item in arrows.values())
    assert names == {"sends": 5, "waited for": 5, "same collective": 2}


def test_clocks_of_several_machines_are_made_one_by_the_ends_of_collectives():
    ranks, clocks = aligned(told(phased(), phased(3600.0), machines="ab"))
    assert clocks.aligned_by == "the ends of 2 collectives"
    assert clocks.uncertainty_us == pytest.approx(0.0, abs=0.01)
    assert [item.start_us for item in ranks[0].steps] == pytest.approx(
        [item.start_us for item in ranks[1].steps], abs=0.01
    )
    apart = phased(3600.0)
    apart["collectives"][1]["finished_s"] += 0.01
    _, clocks = aligned(told(phased(), apart, machines="ab"))
    assert clocks.uncertainty_us == pytest.approx(2500.0, rel=0.05), "half of 10 ms at 1/2"
    silent = {**phased(), "collectives": []}
    _, clocks = aligned(told(silent, silent, machines="ab"))
    assert clocks.uncertainty_us is None
    assert "null" in json.dumps(traces.timeline(told(silent, silent, machines="ab")))


@pytest.fixture
def sweep(tmp_path):
    """The folder of a sweep of one trial, with its evidence."""
    folder = tmp_path / "logs/tiny"
    built = make_record(
        make_trial("dear"), [], Outcome(status="failed", error={"message": "-"}), {"cores": 2},
        "now", 1.0, REAL,
    )  # fmt: skip
    first = Result(cpu_s_per_s=1.0, check=Check(), evidence="evidence.json.gz")
    built = dataclasses.replace(built, results=[first])
    (folder / built.id).mkdir(parents=True)
    store.append(folder / "records.jsonl", built)
    Comparison(compare_to="dear", trials=(built.hash,)).save(folder)
    with gzip.open(folder / built.evidence, "wt") as file:
        json.dump(TOLD, file)
    return folder


def test_show_writes_a_file_per_trial(sweep, tmp_path, capsys):
    into = tmp_path / "traces"
    command = ["show", "tiny", "--logs", str(sweep.parent), "--trace", str(into)]
    record = store.load(sweep / "records.jsonl")[0]
    # Without waits, the phases are not known to be computation: there are no kernels.
    for raw in (told(phased(waits=())), TOLD):
        with gzip.open(sweep / record.evidence, "wt") as file:
            json.dump(raw, file)
        assert cli.main(command) == 0
        (place,) = into.iterdir()
        result = {path.name: json.loads(path.read_text()) for path in place.iterdir()}
        assert result == {"merged.json": traces.timeline(raw)}
        assert "1 timeline in" in capsys.readouterr().out
    # On a GPU, the waits of streams are not traced, so that phases are no computation.
    on_gpu = dataclasses.replace(record, trial={**record.trial, "device": "cuda"})
    with gzip.open(sweep / record.evidence, "wt") as file:
        json.dump(told(phased()), file)
    for each, folders in ((record, ["hta", "merged.json"]), (on_gpu, ["merged.json"])):
        (place,) = traces.write(sweep, [each], tmp_path / each.trial["device"])
        assert sorted(path.name for path in place.iterdir()) == folders
    into.joinpath("file").touch()
    assert cli.main([*command[:-1], str(into / "file")]) == 2
    assert "is not a folder" in capsys.readouterr().err
    (sweep / record.evidence).unlink()
    with pytest.raises(UserError, match="the folders of the trials, with their traces, are"):
        traces.write(sweep, [record], tmp_path / "none")
    assert not (tmp_path / "none").exists()


ANALYSIS = """
import json, sys
from hta.trace_analysis import TraceAnalysis
trace = TraceAnalysis(trace_dir=sys.argv[1])
parts = trace.get_temporal_breakdown(visualize=False)
shared = trace.get_comm_comp_overlap(visualize=False)
print("\\n" + parts.merge(shared, on="rank").to_json(orient="records"))
"""


def analysed(folder: Path) -> list[dict[str, float]]:
    """Returns the table by rank of Holistic Trace Analysis, run as a process of its own, because it
    sets up logging and starts processes."""
    pytest.importorskip("hta", reason="pip install -r tests/unit/requirements.txt")
    command = [sys.executable, "-c", ANALYSIS, folder / "hta"]
    output = subprocess.run(command, check=True, timeout=120, stdout=subprocess.PIPE, text=True)
    table: list[dict[str, float]] = json.loads(output.stdout.splitlines()[-1])
    return table


@pytest.fixture
def shown(sweep, tmp_path):
    """The folder that `show --trace` writes of a trial with two ranks."""
    record = store.load(sweep / "records.jsonl")[0]
    waits = [(100.7, 100.9), (101.65, 101.9)]
    with gzip.open(sweep / record.evidence, "wt") as file:
        json.dump(told(phased(), phased(0.02, waits)), file)
    into = tmp_path / "shown"
    assert cli.main(["show", "tiny", "--logs", str(sweep.parent), "--trace", str(into)]) == 0
    return into / record.id


@pytest.mark.full  # only `make test-all` installs the package
def test_holistic_trace_analysis_reads_each_rank(shown):
    table = analysed(shown)
    assert [row["rank"] for row in table] == [0, 1]
    # The times of this emulated cluster are half of the real ones.
    for row, waited_s in zip(table, (0.15, 0.25), strict=True):
        assert row["compute_time(us)"] == pytest.approx(5e5 * (1 - waited_s), abs=2)
        assert row["non_compute_time(us)"] == pytest.approx(5e5 * (waited_s - 0.001), abs=2)
        hidden = 1 - (waited_s - 0.001) / 0.489
        assert row["comp_comm_overlap_pctg"] == pytest.approx(100 * hidden, abs=0.02)


SHELL = os.environ.get("TRACE_PROCESSOR_SHELL") or shutil.which("trace_processor_shell")


@pytest.mark.full  # only `make test-all` installs the package
@pytest.mark.skipif(SHELL is None, reason="no trace_processor_shell in PATH: see perfetto.dev")
@pytest.mark.parametrize("name", ["merged.json", "hta/rank1.json"])
def test_the_trace_processor_of_perfetto_reads_every_slice_and_arrow(shown, name):
    perfetto = pytest.importorskip(
        "perfetto.trace_processor", reason="pip install -r tests/unit/requirements.txt"
    )
    config = perfetto.TraceProcessorConfig(bin_path=SHELL)
    events = json.loads((shown / name).read_text())["traceEvents"]
    with perfetto.TraceProcessor(trace=str(shown / name), config=config) as processor:
        slices = Counter((row.name, row.dur) for row in processor.query("select * from slice"))
        arrows = len(list(processor.query("select * from flow")))
        wrong = "value > 0 and (severity = 'error' or name like 'flow%')"
        errors = [row.name for row in processor.query(f"select name from stats where {wrong}")]
    shown_ns = [(e["name"], round(1000 * e.get("dur", 0))) for e in events if e["ph"] in "Xi"]
    assert slices == Counter(shown_ns)
    assert arrows == sum(item["ph"] in "tf" for item in events)
    assert not errors
