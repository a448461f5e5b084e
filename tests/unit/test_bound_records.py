"""The bound beside a result: in the record, in the table, and in the breakdown."""

from __future__ import annotations

import csv
import io

import pytest

from common.harness.record import REAL, FabricFacts, Result, make_record
from common.harness.worker.training import step_parts, typical
from common.launch.job import Outcome
from common.results import rows
from common.results.records import Breakdown, Network, Record, typed
from common.results.table import csv_text
from dear.training.algorithm import algorithm_class
from tests.system.made_trials import make_trial

COMPUTE = {"forward_s": 0.1, "backward_s": 0.2, "update_s": 0.04}
COSTS = {
    name: {"alpha_s": 0.01, "beta_s_per_byte": beta}
    for name, beta in (
        ("all_reduce", 4e-7),
        ("reduce_scatter", 2.5e-7),
        ("all_gather", 1.5e-7),
        ("exchange", 5e-7),
    )
}
NBYTES = 1_000_000
CHECK = {
    "reference_error": 0.0,
    "matches_reference": True,
    "replica_spread": 0.0,
    "replicas_agree": True,
}
PARTS = {"forward_s": 0.15, "backward_s": 0.2, "update_s": 0.02, "exposed_comm_s": 0.03}


def links(gbps):
    network = Network(requested={"gbps": gbps}, measured=[])
    return FabricFacts(fabric="emulated", time_scale=2.0, network=network)


LINKS = links(0.04)


def record(algorithm="dear", step_s=0.5, world=4, *, fabric=REAL, trial=None, **result):
    """A record of two repeats; `result` changes what the workers of the first one wrote."""
    first = {
        "iters": [[step_s, step_s * 1.01, step_s * 0.99]],
        "loss": 1.0,
        "check": CHECK,
        "cpu_s_per_s": 1.0,
        "foreign_cpu_s_per_s": 0.0,
        "breakdown": {**PARTS, "step_s": 0.4},
        "gradient_bytes": NBYTES,
        "compute": COMPUTE,
        "costs": None if world == 1 else COSTS,
        **result,
    }
    later = {key: first[key] for key in first if key not in ("compute", "costs")}
    trial = make_trial(algorithm, world, **(trial or {}))
    repeats = [typed(Result, each) for each in (first, later)]
    return make_record(trial, repeats, Outcome(status="ok"), {"cores": 64}, "now", 1.0, fabric)


# all-reduce 0.41 s, reduce-scatter 0.26 s, all-gather 0.16 s
@pytest.mark.parametrize(
    ("algorithm", "wanted"),
    [
        ("wfbp", 0.1 + 0.41 + 0.04),
        ("bytescheduler", 0.41),
        ("dear", 0.16 + 0.26),
    ],
)
def test_the_bound_is_that_of_the_algorithms_idea(algorithm, wanted):
    made = record(algorithm, step_s=0.6)
    bound = made.bound
    assert bound.kind == algorithm_class(algorithm).bound
    assert bound.step_s == pytest.approx(wanted)
    assert bound.reached == pytest.approx(wanted / 0.6)
    assert bound.compute_limit_s == pytest.approx(0.3 + 0.04 / 4)
    assert bound.wire_limit_s is None
    found = made.to_json()
    assert found["compute"] == COMPUTE and found["costs"] == COSTS
    assert found["bytes"]["gradients"] == NBYTES


# all-reduce 0.41 s, one exchange 0.51 s, of two neighbours at once 1.01 s; compute 0.34 s
@pytest.mark.parametrize(
    ("algorithm", "options", "kind", "wanted", "wire_s"),
    [
        ("decentralized", {"topology": "one-peer-exp"}, "decentralized", 0.51, 0.2),
        ("decentralized", {"topology": "alternating-exp-ring"}, "decentralized", 0.34, 0.1),
        ("decentralized", {"topology": "complete"}, "decentralized", 0.41, 0.3),
        ("neighbor", {"topology": "ring"}, "beside_passes", 1.01 + 0.04, 0.4),
        ("neighbor", {"topology": "ring", "combine": "atc"}, "after_update", 1.01 + 0.2, 0.4),
        ("gradient-tracking", {"topology": "ring-left"}, "beside_passes", 1.05, 0.4),
        ("exact-diffusion", {"topology": "star"}, "after_update", 1.51 + 0.2, 0.6),
        ("push-sum", {"topology": "ring-left", "barrier": True}, "sequential", 0.85, 0.2),
        ("pull-get", {"topology": "ring-left"}, "beside_passes", 0.51 + 0.04, 0.2),
        ("win-put", {}, "asynchronous", 0.34, None),
        ("asyncddp", {}, "asynchronous", 0.34, None),
        ("asyncddp", {"max_staleness": 4, "topology": "ring"}, "decentralized", 1.01, 0.4),
    ],
)
def test_what_exchanges_with_a_few_is_bounded_by_its_own_links(
    algorithm, options, kind, wanted, wire_s
):
    trial = {"network": "40mbit", "ranks_per_host": 1, "options": options}
    made = record(algorithm, step_s=2.0, fabric=LINKS, trial=trial, local_size=1)
    bound = made.bound
    assert bound.kind == kind
    assert bound.step_s == pytest.approx(wanted)
    assert bound.reached == pytest.approx(wanted / 2)
    assert bound.wire_limit_s == (None if wire_s is None else pytest.approx(wire_s))


def test_no_bound_is_below_what_the_wire_carries():
    bound = record("dear", step_s=2.0, fabric=links(0.01), trial={"ranks_per_host": 1}).bound
    assert bound.wire_limit_s == bound.step_s == pytest.approx(1.2)
    assert bound.reached == pytest.approx(0.6)


def test_ranks_of_one_host_share_its_link_and_need_none_among_themselves():
    options = {"topology": "one-peer-exp"}
    trial = {"network": "40mbit", "ranks_per_host": 2, "options": options}
    bound = record("decentralized", fabric=LINKS, trial=trial, local_size=2).bound
    # Inside the hosts, then between them: both ranks' megabyte over one link, every other step.
    assert bound.step_s == pytest.approx(0.34)
    assert bound.wire_limit_s == pytest.approx(2 * 0.2 / 2)
    # Without virtual hosts, ranks of one machine have a way of their own each.
    real = record("decentralized", trial={"options": options}, local_size=4).bound
    assert real.step_s == pytest.approx(0.51) and real.wire_limit_s is None


@pytest.mark.parametrize("algorithm", ["none", "dear"])
def test_one_worker_can_reach_what_it_computes(algorithm):
    bound = record(algorithm, step_s=0.4, world=1, fabric=LINKS).bound
    assert bound.kind == "compute"
    assert bound.step_s == bound.compute_limit_s == pytest.approx(0.34)
    assert bound.reached == pytest.approx(0.34 / 0.4)
    assert bound.wire_limit_s is None


def test_an_algorithm_without_a_formula_has_limits_only(monkeypatch):
    monkeypatch.setattr(algorithm_class("wfbp"), "bound", None)
    bound = record("wfbp").bound
    assert (bound.kind, bound.step_s, bound.reached) == (None, None, None)
    assert bound.compute_limit_s > 0


@pytest.mark.parametrize(("per_host", "hosts"), [(1, 4), (2, 2)])
def test_the_wire_limit_is_that_of_the_hosts_links(per_host, hosts):
    place = {"network": "40mbit", "ranks_per_host": per_host}
    bound = record(fabric=LINKS, trial=place).bound
    assert bound.wire_limit_s == pytest.approx(2 * (hosts - 1) / hosts * NBYTES / 5e6)


def test_nothing_is_bounded_where_nothing_was_measured():
    assert record(compute=None).bound is None
    bound = record(costs=None).bound
    assert bound.step_s is None and bound.compute_limit_s > 0


def test_the_table_says_how_much_of_the_bound_is_reached():
    table = rows.make_rows([record("wfbp", 0.6), record("dear", 0.5)], "wfbp")
    lines = rows.comparison(table, "wfbp").markdown().splitlines()
    assert "| of bound |" in lines[0]
    assert "|      92% |" in lines[2] and "|      84% |" in lines[3]
    assert rows.remarks([record("dear", 0.5)]) == []


def test_what_is_better_than_its_bound_is_shown_as_it_is_and_named():
    quick = record("dear", 0.3)
    (row,) = rows.make_rows([quick], "dear")
    assert row.of_bound == pytest.approx(1.4)
    assert "|     140% |" in rows.comparison([row], "dear").markdown()
    (line,) = rows.remarks([quick, record("wfbp", 1.0)])
    assert line.startswith("beyond its bound: dear;")


def test_csv_holds_all_times():
    table = rows.make_rows([record("dear", 0.5)], "dear")
    (found,) = csv.DictReader(io.StringIO(csv_text(rows.Row, table)))
    assert found["bound"] == "dear" and float(found["bound_s"]) == pytest.approx(0.42)
    assert float(found["step_s"]) == pytest.approx(0.5)
    assert {name: float(found[name]) for name in PARTS} == PARTS


def broken_down(row):
    table = rows.breakdown([row])
    return dict(zip(table.titles, *table.body, strict=True))


def test_the_breakdown_is_in_milliseconds():
    place = {"network": "40mbit", "ranks_per_host": 1}
    (row,) = rows.make_rows([record("dear", 0.5, fabric=LINKS, trial=place)], "dear")
    shown = broken_down(row)
    assert shown["step"] == "500" and shown["of bound"] == "84%"
    assert [shown[key] for key in ("forward", "backward", "update")] == ["150", "200", "20.0"]
    assert (shown["exposed comm"], shown["bound"]) == ("30.0", "420")
    assert (shown["compute limit"], shown["wire limit"]) == ("310", "300")
    hidden = {**PARTS, "exposed_comm_s": None, "step_s": 0.4}
    (row,) = rows.make_rows([record(breakdown=hidden, compute=None)], "dear")
    shown = broken_down(row)
    assert shown["forward"] == "150"
    assert [shown[key] for key in ("exposed comm", "bound", "wire limit", "of bound")] == ["-"] * 4


def test_a_record_from_before_there_were_bounds_is_still_shown():
    values = record("dear", 0.5).to_json()
    for key in ("compute", "costs", "bound"):
        del values[key]
    values["breakdown"] = PARTS  # they contained the waiting, and did not add up
    (row,) = rows.make_rows([Record.from_json(values)], "dear")
    assert row.of_bound is None and row.forward_s is None and row.step_s == pytest.approx(0.5)
    assert "of bound" not in rows.comparison([row], "dear").markdown()
    assert list(broken_down(row).values())[7:] == ["-"] * 8


def test_the_recorded_breakdown_is_that_of_the_repeat_in_the_middle():
    facts = {"iters": [[0.5]], "loss": 1.0, "check": CHECK}
    facts |= {"cpu_s_per_s": 1.0, "foreign_cpu_s_per_s": 0.0}
    results = [
        typed(Result, {**facts, "breakdown": {**PARTS, "step_s": step_s}})
        for step_s in (0.9, 0.4, 0.5)
    ]
    outcome = Outcome(status="ok")
    made = make_record(make_trial("dear"), results, outcome, {"cores": 64}, "now", 1.0)
    assert made.breakdown.step_s == 0.5


def step(forward, backward, update, waiting):
    parts = {"forward_s": forward, "backward_s": backward, "update_s": update}
    total = forward + backward + update + (waiting or 0.0)
    return Breakdown(**parts, exposed_comm_s=waiting, step_s=total)


def test_waiting_is_taken_out_of_the_part_that_it_happened_in():
    # 1 s of waiting in the forward pass, none in the backward pass, 2 s in the update.
    parts = step_parts((10.0, 5.0), (13.0, 6.0), (17.0, 6.0), (20.0, 8.0))
    assert parts == step(2.0, 4.0, 1.0, 3.0)
    assert parts.step_s == 10.0


def test_a_straggler_does_not_count_and_the_parts_add_up():
    steps = [step(1.0, 2.0, 0.5, 0.5), step(1.0, 2.2, 0.5, 0.3), step(9.0, 9.0, 9.0, 9.0)]
    steps.append(step(0.1, 0.1, 0.1, 0.1))
    found = typical(steps, 2.0, waits_seen=True)
    assert vars(found) == pytest.approx(vars(step(0.5, 1.05, 0.25, 0.2)))
    assert typical(steps[:1], 1.0, waits_seen=True) == steps[0]


def test_waits_that_an_algorithm_hides_are_unknown_and_stay_in_the_other_parts():
    found = typical([step(1.0, 2.0, 0.5, 0.0)], 1.0, waits_seen=False)
    assert found == step(1.0, 2.0, 0.5, None)
