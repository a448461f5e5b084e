"""The fault campaign: a short one, what it draws, and that it notices what it should notice."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import SimpleNamespace

import pytest

from common.emulation import sandbox
from common.launch.job import Outcome
from tests.faults import rank, report
from tests.faults.__main__ import run
from tests.faults.drawing import Fault, draw, trained
from tests.faults.jobs import LIMITS_S, Seen
from tests.faults.judge import misses, slowest_report_s
from tests.faults.kinds import KINDS

FAULT = Fault(
    seed=1,
    index=7,
    kind="killed",
    program="dear",
    world=3,
    launcher="bare",
    fabric="local",
    transport="tcp",
    backend="comm_core",
    victim=1,
    step=2,
    moment="before",
    delay_ms=5,
)
HEARD = "all_reduce #7 (float32, sum, 12 bytes) on rank 0: lost rank 1 (host here, 127.0.0.1:9)"
SEEN = Seen(
    outcome=Outcome.of("failed", "rank 1 was killed by signal 9", 1),
    elapsed_s=4.0,
    after_s=1.0,
    reports={0: (0.3, HEARD), 2: (0.4, HEARD)},
    collective_s=50.0,
    timeout_s=90.0,
    hosts=("here",) * 3,
)


@pytest.mark.timeout(400)
def test_a_short_campaign_meets_its_bars(tmp_path):
    kinds = ("killed", "another shape", "leaves")
    faults = [draw(5, k, kinds, launcher="bare", fabric="local") for k in range(4)]
    faults.append(draw(5, 8, ("killed driver",), launcher="local", fabric="local"))
    if sandbox.unable() is None:
        faults.append(draw(5, 9, ("cut link",), launcher="local", fabric="emulated"))
    results = run(faults, lanes=1, scratch=tmp_path)  # each starts a fork server of its own
    assert len(results) == len(faults)
    facts = {"seed": 5, "flags": "", "seconds": 0.0, "lanes": 1, "load": (0.0, 0.0)}
    assert not any(result["missed"] for result in results), report.text(facts, results)


def test_a_seed_and_a_number_are_a_fault_and_together_they_are_every_kind():
    faults = [draw(1, index) for index in range(300)]
    assert faults[41] == draw(1, 41) != draw(2, 41)
    assert {fault.kind for fault in faults} == KINDS.keys()
    assert {fault.family for fault in faults} == {
        *("collectives", "synchronous", "delayed", "decentralized", "asynchronous")
    }
    assert {fault.program for fault in faults} >= {*trained()}
    assert draw(1, 3, ("killed",), backend="gloo").backend == "gloo"


def test_who_meets_all_bars_misses_none():
    assert list(misses(FAULT, SEEN)) == []
    assert slowest_report_s(FAULT, SEEN) == 0.4


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"elapsed_s": 101.0}, "took 101 s with a limit of 90 s"),
        ({"after_s": None}, "the fault did not happen"),
        ({"reports": {0: (0.3, HEARD)}}, "rank 2 reported nothing"),
        ({"reports": {0: (0.3, HEARD), 2: (5.5, HEARD)}}, "rank 2 reported after 5.5 s"),
        ({"hosts": ("here", "there", "here")}, "does not name a rank and its host"),
        ({"outcome": Outcome.of("failed", "something", 0)}, "does not name rank 1: something"),
        ({"outcome": Outcome.of("failed", "rank 1 ended", 1)}, "does not name the cause"),
        ({"outcome": Outcome(status="ok", result={})}, "ended as ok, expected failed"),
    ],
)
def test_each_missed_bar_is_a_sentence(changes, words):
    assert any(words in miss for miss in misses(FAULT, dataclasses.replace(SEEN, **changes)))


def test_algorithms_that_promise_to_go_on_must_do_so():
    fault = dataclasses.replace(FAULT, program="asyncddp")
    went_on = Outcome(status="ok", result={"lost_ranks": [1]})
    seen = dataclasses.replace(SEEN, outcome=went_on, may_lose_ranks=True, reports={})
    assert list(misses(fault, seen)) == []
    alone = dataclasses.replace(seen, outcome=Outcome(status="ok", result={}))
    assert any("does not name the lost rank" in miss for miss in misses(fault, alone))
    stopped = dataclasses.replace(fault, kind="stopped")
    assert list(misses(stopped, seen)) == []
    cut = dataclasses.replace(fault, kind="cut link", launcher="local")
    for lost_peers, named in ([1], True), ([], False), ([0], False):
        outcome = Outcome(status="ok", result={"lost_peers": lost_peers})
        assert (list(misses(cut, dataclasses.replace(seen, outcome=outcome))) == []) is named
    without_rank_0 = dataclasses.replace(stopped, victim=0)
    assert any("ended as ok, expected failed" in miss for miss in misses(without_rank_0, seen))
    lost = dataclasses.replace(seen, outcome=Outcome.of("failed", "rank 0 was killed", 0))
    assert list(misses(without_rank_0, lost)) == []


@pytest.mark.parametrize("kind", ["endless", "stopped"])
def test_ranks_at_their_own_pace_outlast_the_job_only_where_it_is_endless(
    kind, tmp_path, monkeypatch
):
    communicator, budgets = SimpleNamespace(barrier=int), []

    def run_for(budget_s, step, given):
        budgets.append(budget_s)
        return SimpleNamespace(steps=3)

    monkeypatch.setattr(rank, "run_for", run_for)
    monkeypatch.setattr(rank.worker, "join", lambda *_: None)
    monkeypatch.setattr(rank.runtime, "communicator", lambda: communicator)
    monkeypatch.setattr(rank, "_steps", lambda *_: (int, lambda: {"lost": []}, int))
    fault = dataclasses.replace(FAULT, kind=kind, program="asyncddp")
    fault.save(tmp_path)
    trial, briefing = SimpleNamespace(own_pace=True), SimpleNamespace(folder=tmp_path)
    assert rank._body(trial, briefing, 0, print) == rank.Trained(3, [])
    job_s = LIMITS_S["endless"][1]
    assert [budget_s > job_s for budget_s in budgets] == [kind == "endless"]


def test_somebody_names_a_rank_that_answers_no_more():
    fault = dataclasses.replace(FAULT, kind="cut link", launcher="ssh", fabric="emulated")
    hosts = ("node0", "node1", "node2")
    quiet = dataclasses.replace(SEEN, hosts=hosts, reports={}, outcome=Outcome.of("failed", "", 0))
    assert list(misses(fault, quiet)) == ["nobody names rank 1: ['']"]
    outcome = Outcome.of("failed", "ssh to node1 ended with status 255", 0)
    assert list(misses(fault, dataclasses.replace(quiet, outcome=outcome))) == []


def test_a_miss_is_printed_with_the_command_that_repeats_it():
    result = {"fault": dataclasses.asdict(FAULT), "missed": ["late"], "report_s": 7.0}
    facts = {"seed": 1, "flags": " --backend gloo", "seconds": 3.0, "lanes": 2, "load": (0, 1)}
    text = report.text(facts, [result, {**result, "missed": [], "report_s": None}])
    assert "`python -m tests.faults --only 1:7 --backend gloo`" in text and "- late" in text
    assert "| killed | kill -9 of a rank | 2 | 1 | 1 | 7.0 |" in text


def test_what_is_left_behind_is_seen(tmp_path, monkeypatch):
    from tests.faults import traces

    monkeypatch.setattr(traces.tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(traces, "SOON_S", 0.0)
    before = traces.Traces()
    assert before.left() == []
    (tmp_path / "stray").touch()
    assert before.left() == [f"file {Path(tmp_path, 'stray')}"]
