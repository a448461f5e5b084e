"""What other tools make of our timelines, beside what we say ourselves."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest

from common.results import store, traces
from common.results.traces.spans import aligned, covered_us
from tests.system.sweeps import Driver
from tests.unit.test_traces import phased, told

analysis = pytest.importorskip(
    "hta.trace_analysis",
    reason="HolisticTraceAnalysis is not installed (examples/requirements.txt)",
)


def overlaps(folder: Path) -> list[float]:
    """By rank, in per cent, of all steps, as the tool finds it in the files of a trial."""
    logging.getLogger("hta").setLevel(logging.ERROR)
    files = {int(path.stem.removeprefix("rank")): str(path) for path in folder.glob("rank*.json")}
    found = analysis.TraceAnalysis(trace_files=files, include_last_profiler_step=True)
    table = found.get_comm_comp_overlap(visualize=False)
    return table.sort_values("rank")["comp_comm_overlap_pctg"].tolist()


@pytest.mark.parametrize("waits", [(), ((100.7, 100.9), (101.75, 101.9)), ((100.41, 100.9),)])
def test_the_overlap_is_what_we_say(tmp_path, waits):
    facts = told(phased(waits=waits), phased(0.01, waits=waits[:1]))
    for name, events in traces.files(facts).items():
        (tmp_path / name).write_text(json.dumps(events))
    ranks, _ = aligned(facts)
    assert overlaps(tmp_path) == pytest.approx([100 * rank.overlap for rank in ranks], abs=1.0)


@pytest.mark.full
@pytest.mark.timeout(200)
def test_the_overlap_of_a_real_sweep_is_that_of_its_breakdown(tmp_path):
    driver = Driver(tmp_path)
    done = driver.run(
        *("--set", "algorithms=[wfbp, dear]", "-k", "n=2", "--set", "measure.repeats=1"),
        *("--set", "models=[{name: resnet18, batch_size: 2}]", "--trace", str(tmp_path / "traces")),
    )
    assert done.returncode == 0, done.stderr
    for record in store.load(driver.sweep / "records.jsonl"):
        ranks, clocks = aligned(traces.evidence(driver.sweep, record))
        assert clocks.uncertainty_us == 0.0
        for rank in ranks:
            steps_us = covered_us(rank.steps)
            told_us = covered_us(rank.computes) + covered_us(rank.waits)
            assert told_us == pytest.approx(steps_us, rel=0.02), "all of a step is one or the other"
        ours = [100 * rank.overlap for rank in ranks]
        assert overlaps(tmp_path / "traces" / record.id) == pytest.approx(ours, abs=1.0)
